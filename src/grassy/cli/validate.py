"""`grassy validate`: accuracy of a trained model on labelled images."""

import argparse
import json
from pathlib import Path

from grassy.cli.parser import Commands, add_command, add_device, add_run, run_of


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "validate",
        "accuracy of a trained model on labelled images",
        "grassy validate runs/finetune",
    )
    add_run(parser)
    parser.add_argument("--data-dir", type=Path, help="as for train (default: that of the run)")
    parser.add_argument("--split", help="of the data (default: the recipe's val_split)")
    parser.add_argument("--dataset", help="default: the recipe's")
    parser.add_argument("--batch-size", type=int, help="images at a time")
    parser.add_argument("--workers", type=int, help="processes that read images")
    add_device(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run, extra="train")


def run(args: argparse.Namespace) -> None:
    from grassy.inference.validate import paper_figures, validate

    result = validate(run_of(args), args.data_dir, args.split, args.dataset, args.batch_size, args.workers, args.device)
    if result is None:  # another process speaks
        return
    if args.json:
        print(json.dumps(result.to_dict()))
    else:
        print(f"top-1 {result.top1:.2f}, top-5 {result.top5:.2f}, loss {result.loss:.4f} ({result.images} images)")
        if figures := paper_figures(run_of(args)):
            shown = [
                f"{name} {figures[key]:.2f}" for name, key in (("top-1", "top1"), ("top-5", "top5")) if key in figures
            ]
            print(f"the paper: {', '.join(shown)} on the 50,000 validation images of ImageNet")
