"""`grassy import`: convert a checkpoint that the paper's authors released into a folder that all commands open."""

import argparse
from pathlib import Path

from grassy.cli.parser import Commands, add_command


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "import",
        "convert a checkpoint that the paper's authors released",
        "grassy import resnet50d_gcr8.pth --recipe resnet50d-grassmann --output resnet50d-gcr8",
        run,
        extra="train",
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="a checkpoint in the format of mmpretrain")
    parser.add_argument(
        "--output", type=Path, required=True, metavar="FOLDER", help="folder to write, ready for the Hugging Face Hub"
    )
    parser.add_argument(
        "--recipe", help="the paper's row, such as resnet50d-rsb-a1-grassmann (needed if the weights fit several rows)"
    )


def run(args: argparse.Namespace) -> None:
    from grassy.inference.authors_checkpoints import import_checkpoint

    print(import_checkpoint(args.file, args.output, args.recipe))
