"""`grassy export`: a trained model as one ONNX or .pt2 file."""

import argparse
from pathlib import Path

from grassy.cli.parser import Commands, add_command, add_run, run_of


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "export",
        "write a trained model as one ONNX or .pt2 file, or for the Hugging Face hub",
        "grassy export runs/finetune --output model.onnx",
    )
    add_run(parser)
    parser.add_argument(
        "--output",
        type=Path,
        help=".onnx, .pt2 for torch.export, or a folder for the Hugging Face hub (default: model.onnx in RUN)",
    )
    parser.add_argument(
        "--batch-size", default="dynamic", help="dynamic (any number of images, the default) or a number"
    )
    parser.add_argument("--opset", type=int, help="of ONNX (default: torch's choice)")
    parser.set_defaults(run=run, extra="export")


def run(args: argparse.Namespace) -> None:
    from grassy.inference.export import export

    batch = int(args.batch_size) if args.batch_size.isdecimal() else args.batch_size
    run = run_of(args)
    output = args.output or (run if run.is_dir() else run.parent) / "model.onnx"
    export(run, output, batch, args.opset)
