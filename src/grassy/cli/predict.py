"""`grassy predict`: classify images without labels."""

import argparse
from pathlib import Path

from grassy.cli.parser import Commands, add_checkpoint, add_command, add_device


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "predict",
        "classify images that have no labels",
        "grassy predict holiday/ --checkpoint runs/resnet50-grassmann --output classes.csv",
    )
    parser.add_argument(
        "images", nargs="+", type=Path, metavar="IMAGE_OR_FOLDER", help="folders are searched for images"
    )
    add_checkpoint(parser)
    parser.add_argument("--topk", type=int, default=5, help="how many classes to give for an image (default: 5)")
    parser.add_argument("--output", type=Path, help="a .csv or .jsonl file; without it, lines on the terminal")
    parser.add_argument("--batch-size", type=int, default=64, help="images at a time (default: 64)")
    add_device(parser)
    parser.set_defaults(run=run, extra="train")


def run(args: argparse.Namespace) -> None:
    from grassy.inference.predict import check_output, find_images, predict_files, write_predictions

    check_output(args.output)
    files = find_images(args.images)
    predictions = predict_files(args.checkpoint, files, args.topk, args.batch_size, args.device)
    if write_predictions(predictions, args.output, total=len(files)) == len(files):
        raise ValueError("none of the images could be read")
