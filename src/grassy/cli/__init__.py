"""The command `grassy`: parses, calls, prints.

Each command has a file with two functions: `add` adds its parser, and `run` calls the code, importing it only then. Bad
input is one line on stderr and exit code 2; with `--debug` the traceback comes before that line.
"""

import argparse
import os
import signal
import sys
from collections.abc import Sequence

from grassy._version import __version__
from grassy.cli import analyze, demo, export, import_, predict, recipes, report, train, transfer, validate
from grassy.cli.parser import Parser, add_debug, fail
from grassy.extras import is_missing, sentence

#: In the order in which `grassy --help` lists them.
COMMANDS = (demo, train, validate, predict, export, transfer, analyze, report, recipes, import_)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    args = argparse.Namespace(command=None, debug=False)
    try:
        args = _parse(argv, args)
        if args.command is None:
            make_parser().print_help()
            return 0
        return args.run(args) or 0
    except ModuleNotFoundError as error:
        if not is_missing(error):
            raise
        return fail(sentence(f"grassy {args.command}", error.name or "", args.extra), args)
    except (ValueError, TypeError) as error:
        return fail(str(error), args)
    except BrokenPipeError:  # the reader of our output, such as head, has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # 128 + SIGPIPE
    except OSError as error:
        return fail(f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error), args)
    except KeyboardInterrupt:
        if argv is None:  # the process ends: another one is to end it at once, and not by an exception
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        print("grassy: interrupted", file=sys.stderr)
        return 130  # 128 + SIGINT, as shells have it


def make_parser() -> Parser:
    parser = Parser(prog="grassy", description="Classifiers whose classes are subspaces.")
    parser.add_argument("--version", action="version", version=f"grassy {__version__}")
    add_debug(parser)
    commands = parser.add_subparsers(dest="command", metavar="command")
    for command in COMMANDS:
        command.add(commands)
    return parser


def _parse(argv: Sequence[str] | None, defaults: argparse.Namespace) -> argparse.Namespace:
    """Parsed arguments. argparse takes key=value only right after the recipe: those further on are collected here."""
    parser = make_parser()
    args, rest = parser.parse_known_args(argv, defaults)
    late = [word for word in rest if "=" in word and not word.startswith("-")] if hasattr(args, "settings") else []
    unknown = [word for word in rest if word not in late]
    if hasattr(args, "settings") and not any(word.startswith("-") for word in unknown):
        late, unknown = rest, []  # what is no setting is named with the others
    if unknown:
        getattr(args, "parser", parser).refuse(unknown)
    if late:
        args.settings = [*args.settings, *late]
    return args
