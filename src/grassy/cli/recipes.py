"""`grassy recipes`: list the recipes, or show one."""

import argparse

from grassy.cli.parser import Commands, add_command


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "recipes",
        "list the recipes with the paper's results, or print one in full",
        "grassy recipes 'resnet50d-*'",
        run,
        extra="train",
    )
    parser.add_argument(
        "pattern",
        nargs="?",
        default="",
        metavar="NAME",
        help="a part of a name, or a pattern such as 'resnet50d-*' (default: all)",
    )
    parser.add_argument("--show", action="store_true", help="print all fields of the recipe NAME as YAML")


def run(args: argparse.Namespace) -> None:
    from grassy.recipes import table as listing

    if args.show:
        print(listing.show(args.pattern))
    else:
        print(listing.table(args.pattern))
        print("The paper reports top-1, top-5 (ImageNet) and SVM (mean of six datasets). '-': not in the paper.")
