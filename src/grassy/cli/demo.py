"""`grassy demo`: linear and Grassmann heads on handwritten digits."""

import argparse
import dataclasses
from pathlib import Path

from grassy.cli.parser import Commands, add_command


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "demo",
        "show what subspaces do to features, on handwritten digits, in about a minute",
        "grassy demo",
        run,
        extra="demo",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("runs/demo"),
        metavar="FOLDER",
        help="folder for the page and the numbers (default: runs/demo)",
    )
    parser.add_argument("--seeds", type=int, metavar="N", help="number of times to train each head (default: 10)")
    parser.add_argument("--quick", action="store_true", help="two seeds, two epochs: only to check that it runs")


def run(args: argparse.Namespace) -> None:
    from grassy.demo import experiment as demo

    settings = demo.QUICK if args.quick else demo.FULL
    if args.seeds is not None:
        settings = dataclasses.replace(settings, seeds=args.seeds)
    demo.run(args.output, settings)
