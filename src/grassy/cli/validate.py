"""`grassy validate`: measure the accuracy of a trained model on labelled images."""

import argparse
import json
from pathlib import Path

from grassy.cli.parser import Commands, add_command, add_device, add_run, chosen_run


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "validate",
        "measure the accuracy of a trained model on labelled images",
        "grassy validate runs/finetune",
        run,
        extra="train",
    )
    add_run(parser)
    parser.add_argument(
        "--data-dir", type=Path, metavar="FOLDER", help="images, laid out as for train (default: the run's)"
    )
    parser.add_argument("--split", help="split to measure on (default: the recipe's val_split)")
    parser.add_argument("--dataset", help="dataset, as in a recipe (default: the recipe's)")
    parser.add_argument("--json", action="store_true", help="print JSON, with the outlier threshold")
    parser.add_argument("--batch-size", type=int, metavar="N", help="images per batch (default: the recipe's)")
    parser.add_argument("--workers", type=int, metavar="N", help="processes that load images (default: the recipe's)")
    add_device(parser)


def run(args: argparse.Namespace) -> None:
    from grassy.inference.validate import paper_figures, validate

    result = validate(
        chosen_run(args), args.data_dir, args.split, args.dataset, args.batch_size, args.workers, args.device
    )
    if result is None:  # only the first process prints
        return
    if args.json:
        print(json.dumps(result.to_dict()))
    else:
        print(f"top-1 {result.top1:.2f}, top-5 {result.top5:.2f}, loss {result.loss:.4f} ({result.images} images)")
        if figures := paper_figures(chosen_run(args)):
            shown = [
                f"{name} {figures[key]:.2f}" for name, key in (("top-1", "top1"), ("top-5", "top5")) if key in figures
            ]
            print(f"the paper: {', '.join(shown)} on the 50,000 validation images of ImageNet")
