"""The page of the command line shows what `grassy COMMAND --help` prints."""

import argparse

from mkdocs.structure.pages import Page

HERE = "<!-- the help of all commands -->"


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    return markdown.replace(HERE, _help()) if HERE in markdown else markdown


def _help() -> str:
    from grassy.cli import make_parser

    parser = make_parser()
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    texts = {"grassy": parser, **{f"grassy {name}": command for name, command in commands.choices.items()}}
    return "\n".join(f"## {name}\n\n```text\n{command.format_help()}```\n" for name, command in texts.items())
