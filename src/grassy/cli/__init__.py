"""The command `grassy`: parses, calls, prints.

A command is two functions: one that adds its parser and one that calls the code, importing it only then. Bad input is
one line on stderr and exit code 2.
"""

import argparse
import dataclasses
import json
import math
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from grassy._version import __version__

#: Where the name of a package differs from that of its module.
PACKAGES = {"sklearn": "scikit-learn", "yaml": "pyyaml", "tensorflow_datasets": "tensorflow-datasets"}
#: Packages of some readers of timm, which no extra brings.
APART = ("datasets", "webdataset", "tensorflow-datasets", "tensorflow")


def _command(commands: "argparse._SubParsersAction[Parser]", name: str, what: str, example: str) -> "Parser":
    """A subcommand, described by the same words in the list of all and in its own help."""
    return commands.add_parser(
        name, help=what, description=f"{what[0].upper()}{what[1:]}.", epilog=f"example: {example}"
    )


def add_demo(commands: "argparse._SubParsersAction[Parser]") -> None:
    parser = _command(
        commands, "demo", "train a linear and some Grassmann heads on digits; a minute or two", "grassy demo"
    )
    parser.add_argument("--output", type=Path, default=Path("runs/demo"), help="folder for demo.png and demo.json")
    parser.add_argument("--seeds", type=int, help="how many times to train each head")
    parser.add_argument("--quick", action="store_true", help="two heads and two epochs: shows only that it runs")
    parser.set_defaults(run=run_demo, extra="demo")


def run_demo(args: argparse.Namespace) -> None:
    from grassy.demo import experiment as demo

    settings = demo.QUICK if args.quick else demo.FULL
    if args.seeds is not None:
        settings = dataclasses.replace(settings, seeds=args.seeds)
    demo.run(args.output, settings)


def add_train(commands: "argparse._SubParsersAction[Parser]") -> None:
    parser = _command(
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
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.set_defaults(run=run_train, extra="train")


def run_train(args: argparse.Namespace) -> int:
    from grassy.runs.recipe import load_recipe
    from grassy.train.loop import TrainingStopped, train

    flags = ("seed", "epochs", "batch_size", "lr", "workers", "initial_checkpoint")
    given = {name: getattr(args, name) for name in flags if getattr(args, name) is not None}
    for name in given:
        if any(setting.startswith(f"{name}=") for setting in args.settings):
            raise ValueError(f"{name} is given twice, as --{name.replace('_', '-')} and as {name}=")
    recipe = load_recipe(args.recipe, args.settings, given)
    output = args.output or Path("runs") / Path(args.recipe).stem
    try:
        state = train(recipe, args.data_dir, output, args.resume, args.device)
    except TrainingStopped as error:
        return _fail(str(error), code=1)
    if state.stopped_by is None and int(os.environ.get("RANK", 0)) == 0 and output.exists():
        best = f"best top-1 {state.best:.2f}" if math.isfinite(state.best) else "no top-1 was measured"
        print(f"{best}; weights, records and curves are in {output}")
    return 0 if state.stopped_by is None else 128 + state.stopped_by  # as shells have it


def add_validate(commands: "argparse._SubParsersAction[Parser]") -> None:
    parser = _command(
        commands,
        "validate",
        "accuracy of a trained model on labelled images",
        "grassy validate --checkpoint runs/resnet50-grassmann --data-dir photos",
    )
    parser.add_argument("--checkpoint", type=Path, required=True, help="the folder of a run, or its .safetensors file")
    parser.add_argument("--data-dir", type=Path, help="as for train")
    parser.add_argument("--split", help="of the data (default: the recipe's val_split)")
    parser.add_argument("--dataset", help="default: the recipe's")
    parser.add_argument("--batch-size", type=int, help="images at a time")
    parser.add_argument("--workers", type=int, help="processes that read images")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run_validate, extra="train")


def run_validate(args: argparse.Namespace) -> None:
    from grassy.inference.validate import validate

    result = validate(
        args.checkpoint, args.data_dir, args.split, args.dataset, args.batch_size, args.workers, args.device
    )
    if result is None:  # another process speaks
        return
    if args.json:
        print(json.dumps(result.to_dict()))
    else:
        print(f"top-1 {result.top1:.2f}, top-5 {result.top5:.2f}, loss {result.loss:.4f} ({result.images} images)")


def add_recipes(commands: "argparse._SubParsersAction[Parser]") -> None:
    parser = _command(
        commands,
        "recipes",
        "list the recipes, with the paper's figures, or show one in full",
        "grassy recipes 'resnet50d-*'",
    )
    parser.add_argument("pattern", nargs="?", default="", help="part of a name, or a pattern such as 'resnet50d-*'")
    parser.add_argument("--show", action="store_true", help="print the recipe of that name, all fields, as YAML")
    parser.set_defaults(run=run_recipes, extra="train")


def run_recipes(args: argparse.Namespace) -> None:
    from grassy.runs import recipe_table as listing

    if args.show:
        print(listing.show(args.pattern))
    else:
        print(listing.table(args.pattern))
        print("top-1, top-5 (ImageNet) and SVM (mean of six data sets) are the paper's; a run's own are in summary.csv")


def add_predict(commands: "argparse._SubParsersAction[Parser]") -> None:
    parser = _command(
        commands,
        "predict",
        "classify images that have no labels",
        "grassy predict holiday/ --checkpoint runs/resnet50-grassmann --output classes.csv",
    )
    parser.add_argument(
        "images", nargs="+", type=Path, metavar="IMAGE_OR_FOLDER", help="folders are searched for images"
    )
    parser.add_argument("--checkpoint", type=Path, required=True, help="the folder of a run, or its .safetensors file")
    parser.add_argument("--topk", type=int, default=5, help="how many classes to give for an image (default: 5)")
    parser.add_argument("--output", type=Path, help="a .csv or .jsonl file; without it, lines on the terminal")
    parser.add_argument("--batch-size", type=int, default=64, help="images at a time (default: 64)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.set_defaults(run=run_predict, extra="train")


def run_predict(args: argparse.Namespace) -> None:
    from grassy.inference.predict import check_output, find_images, predict, write_predictions

    check_output(args.output)
    files = find_images(args.images)
    predictions = predict(args.checkpoint, files, args.topk, args.batch_size, args.device)
    if write_predictions(predictions, args.output, total=len(files)) == len(files):
        raise ValueError("none of the images could be read")


def add_export(commands: "argparse._SubParsersAction[Parser]") -> None:
    parser = _command(
        commands,
        "export",
        "write a trained model as one ONNX or .pt2 file",
        "grassy export --checkpoint runs/resnet50-grassmann --output model.onnx",
    )
    parser.add_argument("--checkpoint", type=Path, required=True, help="the folder of a run, or its .safetensors file")
    parser.add_argument("--output", type=Path, required=True, help="the file to write: .onnx, or .pt2 for torch.export")
    parser.add_argument(
        "--batch-size", default="dynamic", help="dynamic (any number of images, the default) or a number"
    )
    parser.add_argument("--opset", type=int, help="of ONNX (default: torch's choice)")
    parser.set_defaults(run=run_export, extra="export")


def run_export(args: argparse.Namespace) -> None:
    from grassy.inference.export import export

    batch = int(args.batch_size) if args.batch_size.isdecimal() else args.batch_size
    export(args.checkpoint, args.output, batch, args.opset)


def add_transfer(commands: "argparse._SubParsersAction[Parser]") -> None:
    parser = _command(
        commands,
        "transfer",
        "how good a model's features are on other data sets",
        "grassy transfer --checkpoint runs/a runs/b --datasets cifar10 flowers --data-dir data",
    )
    what = "runs, files of weights, timm/NAME or torchvision/NAME"
    parser.add_argument("--checkpoint", nargs="+", required=True, metavar="RUN", help=what)
    known = "cifar10, cifar100, food101, pets, cars, flowers, digits, torch/NAME, hfds/NAME, or NAME=PATH"
    parser.add_argument("--datasets", nargs="+", required=True, metavar="DATASET", help=known)
    parser.add_argument("--data-dir", type=Path, help="folder that holds the data sets")
    parser.add_argument("--methods", nargs="+", default=["svm", "knn"], metavar="METHOD", help="svm, knn, probe")
    parser.add_argument("--output", type=Path, default=Path("runs/transfer"), help="folder for transfer.csv and .json")
    parser.add_argument("--cache", type=Path, help="folder for features (default: features in --output)")
    parser.add_argument("--seed", type=int, default=0, help="of the folds")
    parser.add_argument("--backend", default="torch", choices=["torch", "sklearn"], help="of the SVM")
    parser.add_argument("--amp", default="auto", help="auto (bfloat16 on a GPU), off or bfloat16")
    parser.add_argument("--batch-size", type=int, default=256, help="images at a time")
    parser.add_argument("--workers", type=int, default=4, help="processes that read images")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.set_defaults(run=run_transfer, extra="transfer")


def run_transfer(args: argparse.Namespace) -> None:
    from grassy.distributed.processes import find_device
    from grassy.inference.feature_models import open_model
    from grassy.precision import amp_dtype
    from grassy.runs.recipe import Recipe
    from grassy.runs.records import environment
    from grassy.transfer import protocol, table

    protocol.check_methods(args.methods)
    device = find_device(args.device)
    dtype = amp_dtype(Recipe(amp=args.amp).amp, device)
    models = [open_model(source, device) for source in dict.fromkeys(args.checkpoint)]
    report = protocol.transfer(
        models,
        list(dict.fromkeys(args.datasets)),
        args.data_dir,
        args.cache or args.output / "features",
        device,
        methods=args.methods,
        seed=args.seed,
        backend=args.backend,
        say=lambda text: print(text, file=sys.stderr, flush=True),
        batch_size=args.batch_size,
        workers=args.workers,
        amp_dtype=dtype,
    )
    table.save(report, args.output, environment(device))
    print(table.render(report, table.group_by_recipe(models)))
    for what, reason in report.failed.items():
        print(f"not measured: {what}: {reason}")
    print(f"Saved {args.output / 'transfer.csv'} and transfer.json")


def add_analyze(commands: "argparse._SubParsersAction[Parser]") -> None:
    parser = _command(
        commands,
        "analyze",
        "measure the classes and features of a run: RUN/analysis.json",
        "grassy analyze runs/resnet50-grassmann --data-dir photos",
    )
    parser.add_argument("run_folder", type=Path, metavar="RUN", help="the folder of a run, or its .safetensors file")
    parser.add_argument("--data-dir", type=Path, help="as for train; without it the weights alone are measured")
    parser.add_argument("--split", help="of the data (default: the recipe's val_split; the paper measures on train)")
    parser.add_argument("--dataset", help="default: the recipe's")
    parser.add_argument("--cache", type=Path, help="folder for features (default: features in RUN)")
    parser.add_argument("--batch-size", type=int, default=256, help="images at a time")
    parser.add_argument("--workers", type=int, help="processes that read images")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.set_defaults(run=run_analyze, extra="report")


def run_analyze(args: argparse.Namespace) -> None:
    from grassy.report.analyze import analyze, render

    result = analyze(
        args.run_folder,
        args.data_dir,
        args.split,
        args.device,
        dataset=args.dataset,
        batch_size=args.batch_size,
        workers=args.workers,
        cache=args.cache,
    )
    print(render(result))


def add_report(commands: "argparse._SubParsersAction[Parser]") -> None:
    parser = _command(commands, "report", "one HTML page to explore runs with, offline", "grassy report runs/a runs/b")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folders of runs")
    parser.add_argument("-o", "--output", type=Path, default=Path("report.html"), help="default: report.html")
    parser.add_argument("--data-dir", type=Path, help="as for train; adds sample images, and what needs features")
    parser.add_argument("--split", help="of the data (default: that of the run's analysis, or the recipe's val_split)")
    parser.add_argument("--title", default="", help="of the page")
    parser.add_argument("--pictures", type=Path, metavar="FOLDER", help="write heatmaps as PDF there, too")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.set_defaults(run=run_report, extra="report")


def run_report(args: argparse.Namespace) -> None:
    from grassy.report.page import measured_on, report, run_names

    page = report(args.runs, args.output, args.data_dir, args.split, args.device, args.title)
    if different := measured_on(args.runs):
        print(f"Measured on different images, so compare with care: {'; '.join(different)}")
    if args.pictures is not None:
        from grassy.report.analyze import read_analysis
        from grassy.report.pictures import save_pictures

        runs = list(dict.fromkeys(args.runs))
        save_pictures(dict(zip(run_names(runs), map(read_analysis, runs), strict=True)), args.pictures)
        print(f"Saved pictures in {args.pictures}")
    print(f"Saved {page} ({page.stat().st_size / 1e6:.1f} MB); open it in a browser")


COMMANDS: tuple[Callable[["argparse._SubParsersAction[Parser]"], None], ...] = (
    add_demo,
    add_train,
    add_validate,
    add_predict,
    add_export,
    add_transfer,
    add_analyze,
    add_report,
    add_recipes,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    args = argparse.Namespace(command=None)
    try:
        args = _parse(argv)
        return args.run(args) or 0
    except ModuleNotFoundError as error:
        module = (error.name or "").split(".")[0]
        if module in ("", "grassy"):
            raise  # a mistake of ours, not a missing package
        package = PACKAGES.get(module, module)
        if package in APART:
            return _fail(f"grassy {args.command} needs {package}: pip install {package}")
        how = f"pip install -c constraints.txt -e '.[{args.extra}]' in the source of grassy"
        return _fail(f"grassy {args.command} needs {package}: {how}")
    except (ValueError, TypeError) as error:
        return _fail(str(error))
    except BrokenPipeError:  # the reader of our output, such as head, has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # 128 + SIGPIPE
    except OSError as error:
        return _fail(f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error))
    except KeyboardInterrupt:
        if argv is None:  # the process ends: another one is to end it at once, and not by an exception
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        print("grassy: interrupted", file=sys.stderr)
        return 130  # 128 + SIGINT, as shells have it


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parsed arguments. argparse takes key=value only right after the recipe: those further on are collected here."""
    parser = make_parser()
    args, rest = parser.parse_known_args(argv)
    late = [word for word in rest if "=" in word and not word.startswith("-")] if hasattr(args, "settings") else []
    unknown = [word for word in rest if word not in late]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if late:
        args.settings = [*args.settings, *late]
    return args


class Parser(argparse.ArgumentParser):
    """Reports errors as all other bad input is reported, by `main`."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message} (try {self.prog} --help)")


def make_parser() -> Parser:
    parser = Parser(prog="grassy", description="Classifiers whose classes are subspaces.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"grassy {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    for add in COMMANDS:
        add(commands)
    return parser


def _fail(message: str, code: int = 2) -> int:
    print("grassy: error:", " ".join(message.split()), file=sys.stderr)  # one line, whatever a library's message holds
    return code
