"""`grassy report`: write an HTML page to explore runs with."""

import argparse
import sys
from pathlib import Path

from grassy.cli.parser import Commands, add_command, add_device, add_runs, runs_of


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "report",
        "write one HTML page to explore and compare runs, without a server or network",
        "grassy report runs/a runs/b",
        run,
        extra="report",
    )
    add_runs(parser)
    parser.add_argument(
        "--data-dir", type=Path, metavar="FOLDER", help="images, laid out as for train (default: each run's)"
    )
    parser.add_argument(
        "--split", help="split to measure on (default: that of RUN/analysis.json, else the recipe's val_split)"
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path("report.html"),
        metavar="FILE",
        help="HTML file to write (default: report.html)",
    )
    parser.add_argument("--title", default="", help="title of the page")
    parser.add_argument("--pictures", type=Path, metavar="FOLDER", help="also write heatmaps as PDF into FOLDER")
    add_device(parser)


def run(args: argparse.Namespace) -> None:
    from grassy.report.analyze import gone_folder
    from grassy.report.page import analyses_of, measured_on, report, top1_of
    from grassy.runs.records import data_is_gone

    runs = [Path(run) for run in runs_of(args)]
    page = report(runs, args.output, args.data_dir, args.split, args.device, args.title)
    analyses = analyses_of(runs)
    for name, run in zip(analyses, dict.fromkeys(runs), strict=True):
        if args.data_dir is None and (gone := gone_folder(run)) is not None:
            print(f"{name}: {data_is_gone(gone, so=', so the page shows none of its images')}", file=sys.stderr)
    if different := measured_on(analyses):
        print(f"Measured on different images, so compare with care: {'; '.join(different)}")
    if args.pictures is not None:
        from grassy.report.pictures import save_pictures

        save_pictures(analyses, args.pictures)
        print(f"Saved pictures in {args.pictures}")
    for line in top1_of(analyses):
        print(line)
    print(f"Saved {page} ({page.stat().st_size / 1e6:.1f} MB); open it in a browser")
