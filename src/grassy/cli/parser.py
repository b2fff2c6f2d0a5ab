"""What the parsers of all commands share."""

import argparse
import contextlib
import difflib
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from grassy.cli.which_run import check_run
from grassy.spelling import nearest
from grassy.terminal import printable


class Parser(argparse.ArgumentParser):
    """Accepts no abbreviated flags, and raises errors as ValueErrors, which `grassy.cli.main` prints."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices:
            known = ", ".join(action.choices)
            raise ValueError(f"there is no command {value!r}{nearest(value, action.choices)}; the commands are {known}")
        super()._check_value(action, value)

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message} (try {self.prog} --help)")

    def refuse(self, unknown: Sequence[str]) -> NoReturn:
        """Raise a ValueError that names the unknown words and what the user may have meant."""
        meant = [hint for place, word in enumerate(unknown) if (hint := self._meant(word, unknown[place + 1 :]))]
        hint = f": did you mean {' and '.join(meant)}?" if meant else ""
        self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")

    def _meant(self, word: str, after: Sequence[str]) -> str | None:
        """The option or recipe field that resembles an unknown option; None if there is none."""
        if not word.startswith("--"):
            return None
        flag, _, value = word.partition("=")
        if not value and after and not after[0].startswith("--"):
            value = after[0]
        if "settings" in (action.dest for action in self._actions) and (field := _field(flag)) is not None:
            return f"{field}={value or '...'}"
        options = [option for action in self._actions for option in action.option_strings if option.startswith("--")]
        begun = [option for option in options if len(flag) > 3 and option.startswith(flag)]
        return next(iter(begun or difflib.get_close_matches(flag, options, n=1)), None)


def _field(flag: str) -> str | None:
    """The recipe field or head option that has the name of a flag."""
    from grassy.heads import HEADS, check_head_options
    from grassy.recipes.recipe import HINTS

    name = flag.removeprefix("--").removeprefix("head.").replace("-", "_")
    if name in HINTS:
        return name
    for head in HEADS:
        with contextlib.suppress(ValueError):
            check_head_options(head, [name])
            return f"head.{name}"
    return None


Commands: TypeAlias = "argparse._SubParsersAction[Parser]"


def add_command(
    commands: Commands, name: str, what: str, example: str, run: Callable[[argparse.Namespace], int | None], extra: str
) -> Parser:
    """Add a subcommand.

    what: describes it in the list of commands and in its own help.
    run: takes the arguments and returns the exit code; None counts as 0.
    extra: the extra of grassy that installs what the command imports, for the message if something is missing.
    """
    parser = commands.add_parser(
        name, help=what, description=f"{what[0].upper()}{what[1:]}.", epilog=f"example: {example}"
    )
    parser.set_defaults(parser=parser, run=run, extra=extra)
    return parser


def add_debug(parser: Parser) -> None:
    # Suppressed, because the default of a command would overwrite a --debug given before the command.
    parser.add_argument(
        "--debug", action="store_true", default=argparse.SUPPRESS, help="print the full traceback of an error"
    )


RUN = "the folder of a run, or its .safetensors file"


def add_run(parser: Parser) -> None:
    """Add the one run of a command, as an argument or as --checkpoint: `chosen_run` reads either."""
    parser.add_argument("run_folder", nargs="?", metavar="RUN", help=RUN)
    add_checkpoint(parser)
    parser.set_defaults(words="run_folder")


def add_runs(parser: Parser, what: str = f"{RUN}; one or several") -> None:
    """Add the runs of a command: `runs_of` reads them."""
    parser.add_argument("run_folder", nargs="*", metavar="RUN", help=what)
    add_checkpoint(parser, nargs="+")
    parser.set_defaults(words="run_folder")


def add_checkpoint(parser: Parser, **options: Any) -> None:
    parser.add_argument("--checkpoint", metavar="RUN", help="RUN, given as an option", **options)


def chosen_run(args: argparse.Namespace) -> Path:
    """The one run that was given."""
    given = dict.fromkeys([*listed(args.run_folder), *listed(args.checkpoint)])
    if len(given) > 1:
        raise ValueError(f"one run is expected, got {' and '.join(given)}")
    return Path(runs_of(args)[0])


def runs_of(args: argparse.Namespace) -> list[str]:
    """The runs that were given, as arguments or as --checkpoint, each once."""
    given = [*listed(args.run_folder), *listed(args.checkpoint)]
    if not given:
        raise ValueError(f"which run? give {RUN}, as in: grassy {args.command} runs/finetune")
    for run in given:
        check_run(Path(run))
    return list(dict.fromkeys(given))


def listed(value: str | list[str] | None) -> list[str]:
    return [] if value is None else [value] if isinstance(value, str) else value


def add_device(parser: Parser) -> None:
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: auto)")


def fail(message: str, args: argparse.Namespace, code: int = 2) -> int:
    """Print an error on one line, even if a library's message has several, and return the exit code.

    With --debug, print the traceback of the current exception first.
    """
    if args.debug:
        traceback.print_exc()
    print("grassy: error:", printable(" ".join(message.split())), file=sys.stderr)
    return code
