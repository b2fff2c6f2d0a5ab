"""Tables from results.jsonl: tables.md beside this file.

    python -m studies.fine_tuning.answer

The verdict follows the rule of README.md. What has not been run yet is said to be so.
"""

import argparse
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from studies.cifar100.answer import table
from studies.cifar100.claims import NOT_YET, Interval, mean
from studies.fine_tuning.run import (
    CONTEST,
    CONTROLS,
    DRAWS,
    LINEAR_PROBES,
    PRETRAINED,
    RATES,
    SETS,
    TRIAL_DRAW,
    Entry,
    Lines,
    chosen,
    read,
    to_do,
)

HERE = Path(__file__).parent
FEWEST = 2  # draws of which an interval can be told
ARMS = (*CONTEST, *CONTROLS)
#: The measures of unseen classes that decide.
DECISIVE = (*LINEAR_PROBES, "recall_at_1")
MEASURES = ("top1", *DECISIVE, "1_shot", "5_shot")
TITLES = {
    "top1": "top-1, seen classes",
    "svm": "linear probe `svm`, unseen",
    "svm-standardised": "linear probe `svm-standardised`, unseen",
    "recall_at_1": "R@1, unseen",
    "1_shot": "5-way 1-shot, unseen",
    "5_shot": "5-way 5-shot, unseen",
}
Line = Mapping[str, Any]


def finals(lines: Lines, data: str, arm: str) -> dict[int, Line]:
    """The final runs of an arm, by draw."""
    rate = 0.0 if arm == PRETRAINED else chosen(lines, data, arm)
    found = {draw: lines.get(Entry(data, arm, draw, rate).name) for draw in DRAWS}
    return {draw: line for draw, line in found.items() if line is not None}


def lead(lines: Lines, data: str, measure: str, arm: str = "subspaces", other: str = "softmax") -> Interval | None:
    """Of one arm over another, with the 95 % interval of its paired differences; None with fewer than two pairs."""
    a, b = finals(lines, data, arm), finals(lines, data, other)
    pairs = [a[draw][measure] - b[draw][measure] for draw in DRAWS if draw in a and draw in b]
    return mean(pairs) if len(pairs) >= FEWEST else None


def verdict(lines: Lines, data: str) -> str:
    """Whether subspaces keep more for unseen classes, by the rule of README.md."""
    leads = [lead(lines, data, measure) for measure in DECISIVE]
    made = min(len(finals(lines, data, arm)) for arm in CONTEST)
    if None in leads or made < len(DRAWS):
        return f"**{NOT_YET}** ({made} of {len(DRAWS)} pairs)"
    known = [each for each in leads if each is not None]
    if all(each.low > 0 for each in known):
        return "**subspaces keep more** for unseen classes"
    return "**softmax keeps more** for unseen classes" if all(each.high < 0 for each in known) else "**undecided**"


def finals_table(lines: Lines, data: str) -> str:
    rows = []
    for measure in MEASURES:
        cells = []
        for arm in (PRETRAINED, *ARMS):
            values = [line[measure] for line in finals(lines, data, arm).values() if measure in line]
            cells.append(f"{statistics.mean(values):.1f} ({len(values)})" if values else "–")
        difference = lead(lines, data, measure)
        rows.append([TITLES[measure], *cells, NOT_YET if difference is None else str(difference)])
    return table(["mean (draws)", PRETRAINED, *ARMS, "subspaces - softmax, 95 % CI"], rows)


def outliers_table(lines: Lines, data: str) -> str:
    """AUROC of each score, the mean over draws."""
    rows = []
    for arm in ARMS:
        found = [line["outliers"] for line in finals(lines, data, arm).values()]
        for score in found[0]["near"] if found else ():
            means = [statistics.mean(each[where][score]["auroc"] for each in found) for where in ("near", "far")]
            rows.append([arm, score, *(f"{value:.1f}" for value in means)])
    return table(["AUROC, %", "by", "unseen classes", "the other data set"], rows)


def calibration_table(lines: Lines, data: str) -> str:
    rows = []
    for arm in ARMS:
        found = [line["calibration"] for line in finals(lines, data, arm).values()]
        if found:
            names = ("ece", "ece_scaled", "loss", "loss_scaled")
            rows.append([arm, *(f"{statistics.mean(each[name] for each in found):.2f}" for name in names)])
    return table(["", "ECE, %", "ECE with a fitted temperature", "loss", "loss with it"], rows)


def trials_table(lines: Lines) -> str:
    rows = []
    for data in SETS:
        for arm in ARMS:
            found = [lines.get(Entry(data, arm, TRIAL_DRAW, rate).name) for rate in RATES]
            cells = ["–" if line is None else f"{line['top1']:.1f}" for line in found]
            best = chosen(lines, data, arm)
            rows.append([data, arm, *cells, "–" if best is None else f"{best:g}"])
    return table(["data", "held-out top-1 at", *(f"{rate:g}" for rate in RATES), "chosen"], rows)


def page(lines: Lines) -> str:
    """All tables as one page."""
    versions = sorted({f"torch {line['torch']}, timm {line['timm']}" for line in lines.values()})
    commits = sorted({str(line["commit"])[:12] for line in lines.values()})
    about = f"{len(lines)} runs, {len(to_do(lines))} remain. {'; '.join(versions)}; commits {', '.join(commits)}."
    parts = [f"# Tables of the fine-tuning study\n\nWritten by `python -m studies.fine_tuning.answer`. {about}\n"]
    for data in SETS:
        parts.append(f"\n## {data}\n\nVerdict on features: {verdict(lines, data)}.\n\n{finals_table(lines, data)}\n")
        if any(finals(lines, data, arm) for arm in ARMS):
            parts.append(f"\n{outliers_table(lines, data)}\n\n{calibration_table(lines, data)}\n")
    return "".join(parts) + f"\n## Trials\n\n{trials_table(lines)}\n"


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=HERE / "results.jsonl")
    parser.add_argument("--page", type=Path, default=HERE / "tables.md")
    args = parser.parse_args(words)
    args.page.write_text(page(read(args.results)))
    print(f"wrote {args.page}")


if __name__ == "__main__":
    main()
