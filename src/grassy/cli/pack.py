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
    parser.add_argument("target", type=Path, metavar="PACK", help="the folder to create: pass it to --data-dir later")
    parser.add_argument(
        "--size",
        type=int,
        metavar="PIXELS",
        help="reduce larger images to this short side; 0 keeps their size (default: 512)",
    )
    parser.add_argument(
        "--splits",
        nargs="+",
        metavar="NAME",
        help="folders or tars to pack, first the training set (default: train, val, test and the like)",
    )


def run(args: argparse.Namespace) -> int:
    from grassy.data.pack import SHORT_SIDE, pack
    from grassy.terminal import printable, readable_bytes

    size = SHORT_SIDE if args.size is None else args.size
    written = pack(args.source, args.target, size or None, args.splits)
    for split in written:
        reduced = f", {split.reduced:,} of them reduced to {size} pixels" if split.reduced else ""
        size_of_all = readable_bytes(split.bytes)
        print(f"{split.path}: {split.images:,} images of {len(split.classes):,} classes{reduced}, {size_of_all}")
        for failure in split.failures:
            print(f"left out {printable(failure.name)}: {failure.reason}", file=sys.stderr)
    return int(any(split.failures for split in written))  # a script can tell that some are missing
