"""`grassy predict`: classify images without labels."""

import argparse
from pathlib import Path

from grassy.cli.parser import RUN, Commands, add_checkpoint, add_command, add_device
from grassy.cli.which_run import check_run, is_run


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "predict",
        "classify images without labels",
        "grassy predict runs/finetune holiday/ --output classes.csv",
        run,
        extra="train",
    )
    parser.add_argument(
        "images", nargs="*", metavar="RUN IMAGE_OR_FOLDER", help=f"{RUN}; then images, or folders of images"
    )
    add_checkpoint(parser)
    parser.add_argument("--topk", type=int, default=5, metavar="N", help="classes per image (default: 5)")
    parser.add_argument(
        "--outlier-threshold",
        type=float,
        metavar="SCORE",
        help="flag images with a higher outlier score, from 0 to 1 (default: the model's threshold)",
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="a .csv or .jsonl file (default: print one line per image)"
    )
    parser.add_argument("--batch-size", type=int, default=64, metavar="N", help="images per batch (default: 64)")
    add_device(parser)
    parser.set_defaults(words="images")


def run(args: argparse.Namespace) -> int:
    from grassy.inference.predict import check_output, find_images, predict_files, write_predictions

    check_output(args.output)
    run, images = _run_and_images(args)
    files = find_images(images)
    predictions = predict_files(run, files, args.topk, args.batch_size, args.device, args.outlier_threshold)
    unread = write_predictions(predictions, args.output, total=len(files))
    if unread == len(files):
        raise ValueError("none of the images could be read")
    return int(unread > 0)  # a script can tell that some are missing


def _run_and_images(args: argparse.Namespace) -> tuple[str, list[str]]:
    """The run and the images. The run is the first word unless --checkpoint names it."""
    from grassy.data.image_files import image_suffixes

    words = args.images if args.checkpoint is None else [args.checkpoint, *args.images]
    if not words:
        raise ValueError("which run, and which images? give both, as in: grassy predict runs/finetune holiday/")
    run, *images = words
    first = Path(run)
    if is_run(first):
        if not images:
            raise ValueError(f"which images? give them after the run, as in: grassy predict {run} holiday/")
        return run, images
    if swapped := next((image for image in images if is_run(Path(image))), None):
        others = " ".join(word for word in words if word != swapped)
        raise ValueError(f"{run} is no run, but {swapped} is: give it first, as in: grassy predict {swapped} {others}")
    if not images and (first.is_file() or first.suffix.lower() in image_suffixes()):
        raise ValueError(f"which run? give it before the images, as in: grassy predict RUN {run}")
    check_run(first)
    if not images:
        raise ValueError(f"{run} is no run: give a run and images, as in: grassy predict runs/finetune {run}")
    return run, images
