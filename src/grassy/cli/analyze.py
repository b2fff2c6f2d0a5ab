"""`grassy analyze`: measure the classes and features of a run."""

import argparse
import sys
from pathlib import Path

from grassy.cli.parser import Commands, add_command, add_device, add_run, chosen_run


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "analyze",
        "measure the classes and features of a run, and write RUN/analysis.json",
        "grassy analyze runs/finetune",
        run,
        extra="report",
    )
    add_run(parser)
    parser.add_argument(
        "--data-dir", type=Path, metavar="FOLDER", help="images, laid out as for train (default: the run's)"
    )
    parser.add_argument("--split", help="split to measure on (default: the recipe's val_split; the paper uses train)")
    parser.add_argument("--dataset", help="dataset, as in a recipe (default: the recipe's)")
    parser.add_argument("--cache", type=Path, metavar="FOLDER", help="where to keep features (default: RUN/features)")
    parser.add_argument("--batch-size", type=int, default=256, metavar="N", help="images per batch (default: 256)")
    parser.add_argument("--workers", type=int, metavar="N", help="processes that load images (default: the recipe's)")
    add_device(parser)


def run(args: argparse.Namespace) -> None:
    from grassy.report.analyze import analyze, gone_folder, render
    from grassy.runs.records import data_is_gone

    run = chosen_run(args)
    result = analyze(
        run,
        args.data_dir,
        args.split,
        args.device,
        dataset=args.dataset,
        batch_size=args.batch_size,
        workers=args.workers,
        cache=args.cache,
    )
    if result["data"] is None and (gone := gone_folder(run)) is not None:
        print(data_is_gone(gone, so=", so only the weights are measured"), file=sys.stderr)
    print(render(result))
