"""`grassy transfer`: measure how well a model's features work on other datasets."""

import argparse
import sys
from pathlib import Path

from grassy.cli.parser import Commands, add_command, add_device, add_runs, runs_of


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "transfer",
        "measure how well a model's features work on other datasets",
        "grassy transfer runs/a runs/b --datasets cifar10 flowers --data-dir data",
        run,
        extra="transfer",
    )
    add_runs(parser, "runs, files of weights, timm/NAME or torchvision/NAME")
    known = "cifar10, cifar100, food101, pets, cars, flowers, digits, torch/NAME, hfds/NAME, or NAME=PATH"
    parser.add_argument("--datasets", nargs="+", metavar="DATASET", help=f"{known} (default: those of the runs)")
    parser.add_argument("--data-dir", type=Path, metavar="FOLDER", help="folder that holds the datasets")
    parser.add_argument(
        "--methods",
        nargs="+",
        default=["svm", "knn"],
        metavar="METHOD",
        help="svm (linear), knn, probe (logistic regression) (default: svm knn)",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("runs/transfer"),
        metavar="FOLDER",
        help="folder for transfer.csv and transfer.json (default: runs/transfer)",
    )
    parser.add_argument(
        "--cache", type=Path, metavar="FOLDER", help="where to keep features (default: features in --output)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed of the cross-validation folds (default: 0)"
    )
    parser.add_argument(
        "--backend", default="torch", choices=["torch", "sklearn"], help="implementation of the SVM (default: torch)"
    )
    parser.add_argument(
        "--amp",
        default="auto",
        choices=["auto", "off", "bfloat16"],
        help="auto is bfloat16 on a GPU and off on a CPU (default: auto)",
    )
    parser.add_argument("--batch-size", type=int, default=256, metavar="N", help="images per batch (default: 256)")
    parser.add_argument("--workers", type=int, default=4, metavar="N", help="processes that load images (default: 4)")
    add_device(parser)


def run(args: argparse.Namespace) -> None:
    from grassy.atomic import remove_torn_files
    from grassy.distributed.processes import find_device
    from grassy.inference.feature_models import open_model
    from grassy.precision import amp_dtype
    from grassy.runs.folder import RunFolder
    from grassy.runs.records import environment
    from grassy.transfer import datasets, protocol, table

    protocol.check_methods(args.methods)
    runs = runs_of(args)
    device = find_device(args.device)
    dtype = amp_dtype(args.amp, device)
    models = [open_model(source, device) for source in runs]
    facts = environment(device)
    folder = RunFolder(args.output)
    folder.claim()  # no other process writes here now, so temporary files are left over from a killed one
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
