"""The command `grassy`: parse the arguments, call the code, print the result.

Each command is one file with two functions. `add` adds its parser; `run` imports the code and calls it. Bad input
prints one line on stderr and exits with code 2. With `--debug`, the traceback precedes that line.
"""

import argparse
import os
import signal
import sys
from collections.abc import Sequence

from grassy.cli import analyze, demo, export, import_, pack, predict, recipes, report, train, transfer, validate
from grassy.cli.parser import Parser, add_debug, fail, listed
from grassy.cli.versions import ShowVersions
from grassy.extras import is_missing, sentence

#: In the order in which `grassy --help` lists them.
COMMANDS = (demo, train, validate, predict, export, transfer, analyze, report, recipes, pack, import_)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    args = argparse.Namespace(command=None, debug=False)
    if argv is None:
        _exit_on_signals()
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
    except BrokenPipeError:  # the reader of our output, such as head, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # 128 + SIGPIPE
    except OSError as error:
        return fail(f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error), args)
    except KeyboardInterrupt:
        if argv is None:  # the process is ending: a second Ctrl-C must end it at once, without an exception
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        print("grassy: interrupted", file=sys.stderr)
        return 130  # 128 + SIGINT, as in a shell


def _exit_on_signals() -> None:
    """Let SIGTERM and SIGHUP raise SystemExit, so that a command removes its half-written files before it ends."""

    def end(number: int, _: object) -> None:
        sys.exit(128 + number)

    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) == signal.SIG_DFL:  # nohup ignores SIGHUP
            signal.signal(number, end)


def make_parser() -> Parser:
    parser = Parser(
        prog="grassy",
        description="Train, measure and export image classifiers that represent each class by a subspace.",
        epilog="`grassy COMMAND --help` lists the options of a command and shows an example.",
    )
    parser.add_argument("--version", action=ShowVersions, help="show the versions of grassy, Python, torch, and exit")
    add_debug(parser)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for command in COMMANDS:
        command.add(commands)
    for subparser in commands.choices.values():
        add_debug(subparser)  # last in each list of options
    return parser


def _parse(argv: Sequence[str] | None, defaults: argparse.Namespace) -> argparse.Namespace:
    """Parse, and append the words that follow an option to the command's argument `args.words`.

    argparse fills a list of words only once: in `predict RUN --topk 1 photos` it leaves `photos` over.
    """
    parser = make_parser()
    args, rest = parser.parse_known_args(argv, defaults)
    words: str = getattr(args, "words", "")
    settings = [word for word in rest if words == "settings" and "=" in word and not word.startswith("-")]
    unknown = [word for word in rest if word not in settings]
    if unknown and (not words or any(word.startswith("-") for word in unknown)):
        getattr(args, "parser", parser).refuse(unknown)
    if rest:
        setattr(args, words, [*listed(getattr(args, words)), *rest])
    return args
