"""`grassy train`: run a recipe."""

import argparse
import math
import os
from pathlib import Path

from grassy.cli.parser import Commands, add_command, add_device, fail


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "train",
        "train what a recipe says, on one GPU, on many (torchrun), or on a CPU",
        "grassy train resnet50-grassmann head.k=4 --data-dir photos --epochs 30",
    )
    parser.add_argument("recipe", help="name of a recipe (`grassy recipes` lists them) or a YAML file")
    parser.add_argument(
        "settings", nargs="*", default=[], metavar="key=value", help="fields of the recipe to change: lr=0.05 head.k=4"
    )
    parser.add_argument("--data-dir", type=Path, help="class folders in train and val, tars, or train.npz and test.npz")
    parser.add_argument("--output", type=Path, help="folder of the run (default: runs/RECIPE)")
    parser.add_argument("--resume", default="", metavar="auto|PATH", help="go on with the run in --output, or another")
    parser.add_argument("--initial-checkpoint", metavar="PATH", help="weights to begin with")
    for flag, kind in (("--seed", int), ("--epochs", int), ("--batch-size", int), ("--lr", float), ("--workers", int)):
        parser.add_argument(flag, type=kind, help=f"the recipe's {flag[2:].replace('-', '_')}")
    parser.add_argument(
        "--timeout",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="how long a process of many waits for the others",
    )
    add_device(parser)
    parser.set_defaults(run=run, extra="train")


def run(args: argparse.Namespace) -> int:
    from grassy.runs.recipe import load_recipe, run_name
    from grassy.train.loop import TrainingStopped, train

    flags = ("seed", "epochs", "batch_size", "lr", "workers", "initial_checkpoint")
    given = {name: getattr(args, name) for name in flags if getattr(args, name) is not None}
    for name in given:
        if any(setting.startswith(f"{name}=") for setting in args.settings):
            raise ValueError(f"{name} is given twice, as --{name.replace('_', '-')} and as {name}=")
    recipe = load_recipe(args.recipe, args.settings, given)
    output = args.output or Path("runs") / run_name(args.recipe)
    try:
        state = train(recipe, args.data_dir, output, args.resume, args.device, timeout=args.timeout)
    except TrainingStopped as error:
        return fail(str(error), args, code=1)
    if state.stopped_by is None and int(os.environ.get("RANK", 0)) == 0 and output.exists():
        best = f"best top-1 {state.best:.2f}" if math.isfinite(state.best) else "no top-1 was measured"
        print(f"{best}; weights, records and curves are in {output}")
    return 0 if state.stopped_by is None else 128 + state.stopped_by  # as shells have it
