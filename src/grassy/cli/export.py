"""`grassy export`: write a trained model as one ONNX or .pt2 file, or as a Hugging Face folder."""

import argparse
from pathlib import Path

from grassy.cli.parser import Commands, add_command, add_run, chosen_run


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "export",
        "write a trained model as one ONNX or .pt2 file, or as a folder for the Hugging Face Hub",
        "grassy export runs/finetune --output model.onnx",
        run,
        extra="export",
    )
    add_run(parser)
    parser.add_argument(
        "--output",
        type=Path,
        metavar="PATH",
        help="an .onnx file, a .pt2 file (torch.export), or a folder for the Hub (default: RUN/model.onnx)",
    )
    parser.add_argument(
        "--batch-size", default="dynamic", metavar="N", help="fixed batch size, or dynamic for any (default: dynamic)"
    )
    parser.add_argument("--opset", type=int, metavar="N", help="ONNX opset version (default: torch's)")


def run(args: argparse.Namespace) -> None:
    from grassy.inference.export import export

    batch = int(args.batch_size) if args.batch_size.isdecimal() else args.batch_size
    run = chosen_run(args)
    output = args.output or (run if run.is_dir() else run.parent) / "model.onnx"
    export(run, output, batch, args.opset)
