"""`grassy export`: a trained model as one ONNX or .pt2 file."""

import argparse
from pathlib import Path

from grassy.cli.parser import Commands, add_checkpoint, add_command


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "export",
        "write a trained model as one ONNX or .pt2 file",
        "grassy export --checkpoint runs/resnet50-grassmann --output model.onnx",
    )
    add_checkpoint(parser)
    parser.add_argument("--output", type=Path, required=True, help="the file to write: .onnx, or .pt2 for torch.export")
    parser.add_argument(
        "--batch-size", default="dynamic", help="dynamic (any number of images, the default) or a number"
    )
    parser.add_argument("--opset", type=int, help="of ONNX (default: torch's choice)")
    parser.set_defaults(run=run, extra="export")


def run(args: argparse.Namespace) -> None:
    from grassy.inference.export import export

    batch = int(args.batch_size) if args.batch_size.isdecimal() else args.batch_size
    export(args.checkpoint, args.output, batch, args.opset)
