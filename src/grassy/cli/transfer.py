"""`grassy transfer`: how good a model's features are on other data sets."""

import argparse
import sys
from pathlib import Path

from grassy.cli.parser import Commands, add_command, add_device, add_runs, runs_of


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "transfer",
        "how good a model's features are on other data sets",
        "grassy transfer runs/a runs/b --datasets cifar10 flowers --data-dir data",
    )
    what = "runs, files of weights, timm/NAME or torchvision/NAME"
    add_runs(parser, what)
    known = "cifar10, cifar100, food101, pets, cars, flowers, digits, torch/NAME, hfds/NAME, or NAME=PATH"
    parser.add_argument("--datasets", nargs="+", metavar="DATASET", help=f"{known} (default: those of the runs)")
    parser.add_argument("--data-dir", type=Path, help="folder that holds the data sets")
    parser.add_argument("--methods", nargs="+", default=["svm", "knn"], metavar="METHOD", help="svm, knn, probe")
    parser.add_argument("--output", type=Path, default=Path("runs/transfer"), help="folder for transfer.csv and .json")
    parser.add_argument("--cache", type=Path, help="folder for features (default: features in --output)")
    parser.add_argument("--seed", type=int, default=0, help="of the folds")
    parser.add_argument("--backend", default="torch", choices=["torch", "sklearn"], help="of the SVM")
    parser.add_argument("--amp", default="auto", help="auto (bfloat16 on a GPU), off or bfloat16")
    parser.add_argument("--batch-size", type=int, default=256, help="images at a time")
    parser.add_argument("--workers", type=int, default=4, help="processes that read images")
    add_device(parser)
    parser.set_defaults(run=run, extra="transfer")


def run(args: argparse.Namespace) -> None:
    from grassy.atomic import remove_torn_files
    from grassy.distributed.processes import find_device
    from grassy.inference.feature_models import open_model
    from grassy.precision import amp_dtype
    from grassy.runs.folder import RunFolder
    from grassy.runs.recipe import Recipe
    from grassy.runs.records import environment
    from grassy.transfer import datasets, protocol, table

    protocol.check_methods(args.methods)
    runs = runs_of(args)
    device = find_device(args.device)
    dtype = amp_dtype(Recipe(amp=args.amp).amp, device)
    models = [open_model(source, device) for source in runs]
    facts = environment(device)
    folder = RunFolder(args.output)
    folder.claim()  # so that what earlier processes were writing is nobody's now
    remove_torn_files(args.output / "features")
    try:
        report = protocol.transfer(
            models,
            list(dict.fromkeys(args.datasets or datasets.of_runs(runs))),
            args.data_dir,
            args.cache or args.output / "features",
            device,
            methods=args.methods,
            seed=args.seed,
            backend=args.backend,
            say=lambda text: print(text, file=sys.stderr, flush=True),
            keep=lambda report: table.save(report, args.output, facts),
            batch_size=args.batch_size,
            workers=args.workers,
            amp_dtype=dtype,
        )
    finally:
        folder.release()
    print(table.render(report, table.group_by_recipe(models)))
    for what, reason in report.failed.items():
        print(f"not measured: {what}: {reason}")
    print(f"Saved {args.output / 'transfer.csv'} and transfer.json")
