"""`grassy train`: train a recipe."""

import argparse
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grassy.cli.parser import Commands, add_command, add_device, fail

if TYPE_CHECKING:
    from grassy.train.run import Position

#: The learning rate of the recipe `finetune` from random weights, that of torchvision's ConvNeXt with AdamW.
LR_FROM_SCRATCH = 1e-3


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "train",
        "train a recipe on a CPU, one GPU, or several GPUs (torchrun)",
        "grassy train finetune --data-dir photos",
        run,
        extra="train",
    )
    parser.add_argument(
        "recipe", nargs="?", metavar="RECIPE", help="name of a recipe (`grassy recipes` lists them), or a YAML file"
    )
    parser.add_argument(
        "settings", nargs="*", default=[], metavar="KEY=VALUE", help="recipe fields to change, as in lr=0.05 head.k=4"
    )
    parser.add_argument(
        "--data-dir",
        type=Path,
        metavar="FOLDER",
        help="one folder per class; or train and val, each a folder of class folders, a .tar or an .npz",
    )
    parser.add_argument(
        "--val-fraction",
        type=float,
        metavar="SHARE",
        help="share of each class to hold out for validation, if the data has no split (default: the recipe's)",
    )
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="folder of the run (default: runs/RECIPE)")
    parser.add_argument(
        "--resume", default="", metavar="auto|RUN", help="resume the run in --output (auto), or the run RUN"
    )
    parser.add_argument(
        "--initial-checkpoint", metavar="PATH", help="weights to start from: a run or a file of weights"
    )
    parser.add_argument(
        "--from-scratch",
        action="store_true",
        help="start from random instead of pretrained weights (finetune then takes lr=1e-3 unless you give one)",
    )
    for flag, kind, what in (
        ("--epochs", int, "number of epochs"),
        ("--batch-size", int, "images per update, over all processes"),
        ("--lr", float, "peak learning rate"),
        ("--seed", int, "random seed"),
        ("--workers", int, "processes that load images"),
    ):
        parser.add_argument(
            flag, type=kind, metavar="LR" if kind is float else "N", help=f"{what} (default: the recipe's)"
        )
    parser.add_argument(
        "--timeout",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="longest wait for the other processes under torchrun, in seconds (default: 600)",
    )
    add_device(parser)
    parser.set_defaults(words="settings")


def run(args: argparse.Namespace) -> int:
    from grassy.models import check_name
    from grassy.recipes.files import load_recipe, run_name
    from grassy.runs.records import data_is_gone, remembered_data_dir
    from grassy.train.loop import TrainingStopped, train
    from grassy.train.pretrained import preparation_of_weights

    resumed = _folder_to_resume(args)
    flags = ("seed", "epochs", "batch_size", "lr", "workers", "initial_checkpoint", "val_fraction")
    given = {name: getattr(args, name) for name in flags if getattr(args, name) is not None}
    for word in args.settings:
        if "=" not in word and Path(word).exists():
            raise ValueError(f"{word} is no setting key=value: for the images in it, give --data-dir {word}")
    for flag in given:
        if any(setting.startswith(f"{flag}=") for setting in args.settings):
            raise ValueError(f"{flag} is given twice, as --{flag.replace('_', '-')} and as {flag}=")
    name = str(resumed) if args.recipe is None else args.recipe
    if args.from_scratch:
        given |= _settings_from_scratch(name, [*given, *(word.partition("=")[0].strip() for word in args.settings)])
    recipe = load_recipe(name, args.settings, given, preparation_of_weights, goes_on=args.recipe is None)
    output = args.output or resumed or Path("runs") / run_name(name)
    data_dir = args.data_dir
    if data_dir is None and args.resume and recipe.dataset != "digits":
        data_dir = remembered_data_dir(resumed or output)
        if data_dir is not None and recipe.reads_files and not data_dir.exists():
            raise ValueError(data_is_gone(data_dir))
    check_name(recipe.model)  # before an --output that exists is refused: another folder would not fix a wrong name
    if recipe.reads_files:
        if data_dir is None:
            raise ValueError("where are the images? give --data-dir")
        # Of several processes, those that see it wait for the others, and say which one does not.
        if not data_dir.exists() and os.environ.get("WORLD_SIZE", "1") == "1":
            raise ValueError(f"--data-dir {data_dir} does not exist")
    try:
        state = train(recipe, data_dir, output, args.resume, args.device, timeout=args.timeout)
    except TrainingStopped as error:
        return fail(str(error), args, code=1)
    if state.stopped_by is None and int(os.environ.get("RANK", 0)) == 0 and output.exists():
        best = (
            f"best top-1 {state.best:.2f}{_after_epoch(state)}"
            if math.isfinite(state.best)
            else "no top-1 was measured"
        )
        print(f"{best}; weights, records and curves are in {output} (summary.csv counts epochs from 0)")
    return 0 if state.stopped_by is None else 128 + state.stopped_by  # as in a shell


def _settings_from_scratch(name: str, given: Sequence[str]) -> dict[str, Any]:
    """Settings for random weights. The rate of our recipe `finetune` is too low for them, unless the user gave one."""
    if name != "finetune" or {"lr", "opt", "initial_checkpoint"} & set(given):
        return {"pretrained": False}
    return {"pretrained": False, "lr": LR_FROM_SCRATCH}


def _after_epoch(state: "Position") -> str:
    """A phrase that names the epoch of the best weights, counted from 1 as in the lines of training."""
    best = {"eval_top1": state.best, "eval_loss": state.best_loss}
    found = [row["epoch"] for row in state.rows if all(row.get(name) == value for name, value in best.items())]
    return f" after epoch {found[0] + 1}" if found else ""


def _folder_to_resume(args: argparse.Namespace) -> Path | None:
    """The folder of the run that --resume names; None if it names none. Its recipe and data need not be repeated."""
    from grassy.recipes.files import ARGS

    if args.recipe is not None and "=" in args.recipe:  # a setting: with --resume RUN the recipe may be left out
        args.recipe, args.settings = None, [args.recipe, *args.settings]
    if args.resume in ("", "auto"):
        if args.recipe is None:
            raise ValueError(
                "which recipe? `grassy train finetune --data-dir photos` trains on your own photos, `grassy recipes` "
                "lists the others, and --resume RUN resumes a run"
            )
        return None
    source = Path(args.resume)
    folder = source if source.is_dir() else source.parent
    if args.recipe is None and not source.exists():
        raise ValueError(f"there is no run {source} to resume")
    if args.recipe is None and not (folder / ARGS).is_file():
        raise ValueError(f"{folder} is no run, for it holds no {ARGS}: --resume takes the folder of a run")
    return folder
