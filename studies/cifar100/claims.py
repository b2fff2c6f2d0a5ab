"""The claims, the comparisons that decide them, and the rule by which they do.

The 95 % interval of a difference of means is Welch's. For the gain of a row over its initial weights it is Student's,
over the differences of single runs. For a trend it is that of the slope of a regression on log2 k, with one point per
run.

A part of a claim holds if its interval lies on the claimed side of 0, fails if it lies on the other side, and is
otherwise undecided. "Alike" means that the 90 % interval lies within 0.5 points (two one-sided tests at 5 %), "gains
little" that the 95 % interval lies below 0.5 points. If one of two rows has fewer than three runs left because others
diverged, that row is worse. A claim holds if all of its parts hold, and fails if one fails. With fewer than three seeds
it counts as not yet run.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from grassy import paper
from studies.cifar100.plan import KS, SETS, TUNE, Job, Lines, choose, plan, tune

FEWEST = 3
ALIKE = 0.5
NOT_YET = "not yet run"
UNITS = {"top1": "top-1", "transfer": "transfer", "variability": "variability", "r2": "R²"}
#: As the paper has them, on the training images.
NAMES = {"variability": "variability_train", "r2": "r2_train"}


class Interval(NamedTuple):
    """An estimate and its 95 % interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        if math.isinf(self.mean):
            return f"the {'second' if self.mean > 0 else 'first'} diverged"
        digits = 2 if max(map(abs, self)) >= 0.1 else 3
        return f"{self.mean:+.{digits}f} [{self.low:+.{digits}f}, {self.high:+.{digits}f}]"


def difference(a: Sequence[float], b: Sequence[float], level: float = 0.95) -> Interval:
    """Of the means of two samples, by Welch's t."""
    from scipy.stats import t

    parts = [statistics.variance(values) / len(values) for values in (a, b)]
    mean, error = statistics.mean(a) - statistics.mean(b), math.sqrt(sum(parts))
    if error == 0:
        return Interval(mean, mean, mean)
    freedom = sum(parts) ** 2 / sum(part**2 / (len(v) - 1) for part, v in zip(parts, (a, b), strict=True))
    half = float(t.ppf(0.5 + level / 2, freedom)) * error
    return Interval(mean, mean - half, mean + half)


def mean(values: Sequence[float]) -> Interval:
    """By Student's t."""
    from scipy.stats import t

    middle, error = statistics.mean(values), statistics.stdev(values) / math.sqrt(len(values))
    half = float(t.ppf(0.975, len(values) - 1)) * error
    return Interval(middle, middle - half, middle + half)


def slope(x: Sequence[float], y: Sequence[float]) -> Interval:
    """Of a straight line through the points."""
    from scipy.stats import linregress, t

    line = linregress(x, y)
    half = float(t.ppf(0.975, len(x) - 2) * line.stderr)
    return Interval(float(line.slope), float(line.slope) - half, float(line.slope) + half)


@dataclass(frozen=True)
class Part:
    """One comparison of a claim. side: what the claim says, "+" or "-", "=" for alike, "<" for a gain that is little at
    most; "" if it stands beside the claim.
    """

    text: str
    interval: Interval | None
    side: str

    def verdict(self) -> str:
        if self.interval is None:
            return NOT_YET
        _, low, high = self.interval
        if self.side == "=":
            inside, outside = low > -ALIKE and high < ALIKE, low > ALIKE or high < -ALIKE
            return "holds" if inside else "does not hold" if outside else "undecided"
        if self.side == "<":
            low, high = ALIKE - high, ALIKE - low
        if self.side == "-":
            low, high = -high, -low
        return "holds" if low > 0 else "does not hold" if high < 0 else "undecided"

    def __str__(self) -> str:
        beside = "" if self.side else " (beside the claim, added after the runs)"
        return f"{self.text}: {NOT_YET if self.interval is None else self.interval}{beside}"


def verdict(parts: Sequence[Part]) -> str:
    """Of a claim, by those of its parts."""
    found = [part.verdict() for part in parts if part.side]
    for word in ("does not hold", NOT_YET, "undecided"):
        if word in found:
            return word
    return "holds"


@dataclass
class Study:
    """The lines of a file of results that belong to the plan."""

    lines: Lines
    overrides: Sequence[str] = ()
    runs: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # of the final stage, by row
    lost: dict[str, int] = field(default_factory=dict)  # how many of them diverged
    jobs: dict[str, Job] = field(default_factory=dict)  # one of each row
    trials: dict[str, list[Job]] = field(default_factory=dict)
    chosen: dict[str, Job | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.trials = tune(self.lines, self.overrides)
        self.chosen = choose(self.trials, self.lines)
        for job in plan(self.lines, self.overrides):
            if job.stage == TUNE:
                continue
            self.runs.setdefault(job.row, [])
            self.lost.setdefault(job.row, 0)
            self.jobs.setdefault(job.row, job)
            line = self.lines.get(job.key) if job.base else None
            if line is not None and "error" not in line:
                self.runs[job.row].append(line)
            self.lost[job.row] += line is not None and bool(line.get("diverged"))

    def values(self, row: str, metric: str) -> list[float]:
        found = []
        for line in self.runs.get(row, []):
            value = line["transfer"].get(metric) if metric in SETS else line.get(NAMES.get(metric, metric))
            if metric == "transfer":
                value = statistics.mean(line["transfer"].values())
            found += [] if value is None else [value]
        return found

    def gap(self, row: str, other: str, metric: str = "top1", side: str = "+") -> Part:
        a, b = self.values(row, metric), self.values(other, metric)
        level = 0.9 if side == "=" else 0.95
        interval = difference(a, b, level) if min(len(a), len(b)) >= FEWEST else None
        for worse, values, sign in ((row, a, -1), (other, b, 1)):
            if interval is None and len(values) < FEWEST <= len(values) + self.lost.get(worse, 0):
                interval = Interval(*[sign * math.inf] * 3)
        seeds = f" ({len(a)} and {len(b)} seeds{', 90 % interval' if side == '=' else ''})"
        return Part(f"{UNITS[metric]}, {row} − {other}{seeds if interval else ''}", interval, side)

    def gain(self, row: str, side: str = "+") -> Part:
        """Of a row that begins with other weights, in top-1, over these very weights, seed by seed."""
        runs = [line for line in self.runs.get(row, []) if line.get("start_top1") is not None]
        gains = [line["top1"] - line["start_top1"] for line in runs]
        interval = mean(gains) if len(gains) >= FEWEST else None
        return Part(f"top-1, {row} − its start{f' ({len(gains)} seeds)' if interval else ''}", interval, side)

    def trend(self, metric: str, ks: Sequence[int], side: str) -> Part:
        points = [(math.log2(k), value) for k in ks for value in self.values(f"grassmann-{k}", metric)]
        known = all(len(self.values(f"grassmann-{k}", metric)) >= FEWEST for k in ks)
        text = f"{UNITS[metric]} per doubling of k, {ks[0]} to {ks[-1]}"
        return Part(text, slope(*zip(*points, strict=True)) if known else None, side)

    def show(self, row: str, metric: str, digits: int = 2) -> str:
        values = self.values(row, metric)
        if len(values) < 2:
            return f"{values[0]:.{digits}f}" if values else "–"
        error = statistics.stdev(values) / math.sqrt(len(values))
        return f"{statistics.mean(values):.{digits}f} ± {error:.{digits}f}"


# ------------------------------------------------------------------------------------------------ claims


def claims(study: Study) -> list[tuple[str, str, list[Part]]]:
    """What is claimed, the paper's figures (ResNet50-D, ImageNet-1K), and the comparisons that decide it here."""
    others = ("cosine", "arcface", "multi", "softtriple", "subcenter-arcface")
    g, s, gap, trend = "grassmann-8", "softmax", study.gap, study.trend
    sweep = [f"grassmann{'' if k == 8 else f'-k{k}'}" for k in (1, 4, 8, 16, 32)]

    def figures(name: str, *rows: str) -> str:
        found = [paper.figures(f"resnet50d-{row}")[name] for row in rows]
        return ", ".join(str(value["average"] if isinstance(value, dict) else value) for value in found)

    return [
        ("k = 8 beats softmax in top-1", f"{figures('top1', 'grassmann', 'linear')}", [gap(g, s)]),
        (
            "k = 8 beats cosine, ArcFace, MultiFC, SoftTriple and sub-centre ArcFace",
            f"{figures('top1', 'grassmann')} against {figures('top1', *others)}",
            [gap(g, other) for other in others],
        ),
        (
            "top-1 rises and then falls with k",
            f"k = 1, 4, 8, 16, 32: {figures('top1', *sweep)}",
            [trend("top1", KS[:3], "+"), trend("top1", KS[2:], "-")],
        ),
        (
            "intra-class variability grows with k",
            f"k = 1, 4, 8, 16, 32: {figures('variability', *sweep)}; softmax {figures('variability', 'linear')}",
            [trend("variability", KS, "+"), trend("variability", KS[2:], "")],
        ),
        (
            "R² falls with k",
            f"k = 1, 4, 8, 16, 32: {figures('r2', *sweep)}; softmax {figures('r2', 'linear')}",
            [trend("r2", KS, "-"), trend("r2", KS[2:], "")],
        ),
        (
            "transfer grows with k and passes softmax",
            f"k = 1, 4, 8, 16, 32: {figures('svm', *sweep)}; softmax {figures('svm', 'linear')}",
            [trend("transfer", KS, "+"), gap("grassmann-32", s, "transfer"), trend("transfer", KS[2:], "")],
        ),
        (
            "normalising features matters",
            f"k = 1: {figures('top1', 'grassmann-k1', 'grassmann-k1-unnormalized')}; "
            f"k = 8: {figures('top1', 'grassmann', 'grassmann-unnormalized')}",
            [
                gap("grassmann-1", "grassmann-1-unnormalized"),
                gap(g, "grassmann-8-unnormalized"),
                gap(g, "grassmann-8-unnormalized", "transfer", side=""),
            ],
        ),
        (
            "Riemannian SGD beats plain SGD on the subspaces",
            figures("top1", "grassmann", "grassmann-plain-sgd"),
            [gap(g, "grassmann-8-plain-sgd"), gap(g, "grassmann-8-plain-sgd", "transfer", side="")],
        ),
        (
            "geodesic and qf retraction are alike",
            figures("top1", "grassmann", "grassmann-qf"),
            [gap(g, "grassmann-8-qf", side="="), gap(g, "grassmann-8-qf", "transfer", side="")],
        ),
        (
            "joint training is essential: on frozen softmax features a new head gains little, fine-tuning all gains",
            f"softmax, head, all: {figures('top1', 'linear', 'finetune-head-grassmann', 'finetune-all-grassmann')}",
            [
                study.gain("finetune-head", "<"),
                study.gain("finetune-all"),
                gap("finetune-all", "finetune-head"),
                gap("finetune-all", "finetune-softmax"),  # which more training alone would reach
                gap("finetune-all", "finetune-head", "transfer", side=""),
            ],
        ),
    ]
