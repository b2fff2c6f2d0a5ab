"""What the parsers of all commands share."""

import argparse
import sys
import traceback
from pathlib import Path
from typing import Any, NoReturn, TypeAlias


class Parser(argparse.ArgumentParser):
    """Takes flags in full only, and reports errors as all other bad input is reported, by `grassy.cli.main`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message} (try {self.prog} --help)")


Commands: TypeAlias = "argparse._SubParsersAction[Parser]"


def add_command(commands: Commands, name: str, what: str, example: str) -> Parser:
    """A subcommand, described by the same words in the list of all and in its own help."""
    parser = commands.add_parser(
        name, help=what, description=f"{what[0].upper()}{what[1:]}.", epilog=f"example: {example}"
    )
    add_debug(parser)
    return parser


def add_debug(parser: Parser) -> None:
    # Suppressed: the default of a command would replace what was given before the command.
    parser.add_argument(
        "--debug", action="store_true", default=argparse.SUPPRESS, help="print the full traceback of an error"
    )


def add_checkpoint(parser: Parser) -> None:
    parser.add_argument("--checkpoint", type=Path, required=True, help="the folder of a run, or its .safetensors file")


def add_device(parser: Parser) -> None:
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")


def fail(message: str, args: argparse.Namespace, code: int = 2) -> int:
    """Print an error in one line, whatever a library's message holds, and return the exit code.

    With --debug, the traceback of the exception that is being handled comes before it.
    """
    if args.debug:
        traceback.print_exc()
    print("grassy: error:", " ".join(message.split()), file=sys.stderr)
    return code
