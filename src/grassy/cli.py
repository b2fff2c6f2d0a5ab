"""The command `grassy`: parses, calls, prints.

A command is two functions: one that adds its parser and one that calls the code, importing it only then. Bad input is
one line on stderr and exit code 2.
"""

import argparse
import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import grassy

#: Where the name of a package differs from that of its module.
PACKAGES = {"sklearn": "scikit-learn", "yaml": "pyyaml"}


def add_demo(commands: "argparse._SubParsersAction[Parser]") -> None:
    parser = commands.add_parser("demo", help="train a linear and some Grassmann heads on digits; under a minute")
    parser.add_argument("--output", type=Path, default=Path("runs/demo"), help="folder for demo.png and demo.json")
    parser.add_argument("--seeds", type=int, help="how many times to train each head")
    parser.add_argument("--quick", action="store_true", help="two heads and two epochs: shows only that it runs")
    parser.set_defaults(run=run_demo, extra="demo")


def run_demo(args: argparse.Namespace) -> None:
    from grassy import demo

    settings = demo.QUICK if args.quick else demo.FULL
    if args.seeds is not None:
        settings = dataclasses.replace(settings, seeds=args.seeds)
    demo.run(args.output, settings)


COMMANDS: tuple[Callable[["argparse._SubParsersAction[Parser]"], None], ...] = (add_demo,)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    args = argparse.Namespace(command=None)
    try:
        args = make_parser().parse_args(argv)
        args.run(args)
    except ModuleNotFoundError as error:
        module = (error.name or "").split(".")[0]
        if module in ("", "grassy"):
            raise  # a mistake of ours, not a missing package
        needs = f"grassy {args.command} needs {PACKAGES.get(module, module)}"
        return _fail(f"{needs}: pip install 'grassy[{args.extra}]'")
    except (ValueError, TypeError) as error:
        return _fail(str(error))
    except OSError as error:
        return _fail(f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error))
    except KeyboardInterrupt:
        print("grassy: interrupted", file=sys.stderr)
        return 130  # 128 + SIGINT, as shells have it
    return 0


class Parser(argparse.ArgumentParser):
    """Reports errors as all other bad input is reported, by `main`."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message} (try {self.prog} --help)")


def make_parser() -> Parser:
    parser = Parser(prog="grassy", description="Classifiers whose classes are subspaces.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"grassy {grassy.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    for add in COMMANDS:
        add(commands)
    return parser


def _fail(message: str) -> int:
    print("grassy: error:", " ".join(message.split()), file=sys.stderr)  # one line, whatever a library's message holds
    return 2
