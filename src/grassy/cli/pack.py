"""`grassy pack`: decode images once, so that training does not have to."""

import argparse
import sys
from pathlib import Path

from grassy.cli.parser import Commands, add_command


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "pack",
        "decode images once, for runs that wait for their input",
        "grassy pack imagenet imagenet-packed && grassy train finetune --data-dir imagenet-packed",
        run,
        extra="train",
    )
    parser.add_argument("source", type=Path, metavar="IMAGES", help="a folder of images, as for grassy train")
    parser.add_argument("target", type=Path, metavar="PACK", help="the folder to create, a --data-dir like the other")
    parser.add_argument(
        "--size",
        type=int,
        metavar="PIXELS",
        help="reduce larger images to this short side; 0 keeps their size (default: 512)",
    )


def run(args: argparse.Namespace) -> int:
    from grassy.data.pack import in_gigabytes, pack
    from grassy.terminal import printable

    options = {} if args.size is None else {"short_side": args.size or None}
    written = pack(args.source, args.target, **options)
    for split in written:
        print(f"{split.path}: {split.images:,} images of {split.classes:,} classes, {in_gigabytes(split.bytes)}")
        for failure in split.failures:
            print(f"left out {printable(failure.name)}: {failure.reason}", file=sys.stderr)
    return int(any(split.failures for split in written))  # a script can tell that some are missing
