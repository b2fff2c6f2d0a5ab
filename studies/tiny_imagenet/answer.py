"""Tables and one figure from results.jsonl: tables.md and front.png beside this file.

    python -m studies.tiny_imagenet.answer

No verdict is written by hand. What has not been run yet is said to be so.
"""

import argparse
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from studies.cifar100.answer import table
from studies.cifar100.claims import NOT_YET, Interval, difference
from studies.cifar100.pictures import best_of_both
from studies.tiny_imagenet.plan import (
    ARMS,
    AUDIT,
    COARSE,
    FINAL,
    FINAL_ROWS,
    FINAL_SEEDS,
    GAMMA,
    GENERALISE_FINAL,
    GOAL,
    LINEAR_PROBES,
    MULTIPLES,
    NETWORKS,
    OPEN,
    OPEN_TRIALS,
    OTHER_PROBES,
    RULE,
    SPLITS,
    TRIALS,
    Entry,
    Lines,
    plan,
    read,
    score,
    sources,
    transfer,
)

HERE = Path(__file__).parent
PROBES = (*LINEAR_PROBES, *OTHER_PROBES)
FEWEST = 2  # runs of which an interval can be told
COLORS = dict(zip(ARMS, ("C1", "C0", "C2", "C3"), strict=True))

Line = Mapping[str, Any]
Figure = Callable[[Line], float]


class Study:
    """The results, by part and row of the plan."""

    def __init__(self, lines: Lines, overrides: Mapping[str, Any] | None = None) -> None:
        self.lines, self.overrides = lines, overrides or {}
        self.entries = plan(lines, self.overrides)
        self.sources = sources(lines, self.overrides)

    def of(self, part: str, row: str | None = None) -> list[tuple[Entry, Line]]:
        """Entries of a part, and of a row of it, that have figures."""
        found = [entry for entry in self.entries if entry.stage == part and row in (None, entry.row) and entry.base]
        pairs = [(entry, self.lines[entry.key]) for entry in found if entry.key in self.lines]
        return [(entry, line) for entry, line in pairs if "error" not in line]

    def values(self, part: str, row: str, figure: Figure) -> list[float]:
        return [figure(line) for _, line in self.of(part, row)]

    def lead(self, part: str, row: str, other: str, figure: Figure) -> Interval | None:
        """Of one row over another, with its 95 % interval; None with fewer than two runs of either."""
        a, b = self.values(part, row, figure), self.values(part, other, figure)
        return difference(a, b) if min(len(a), len(b)) >= FEWEST else None

    def missing(self, part: str) -> str:
        """What to say of runs that are not made, or failed."""
        own = {entry.key if entry.base else entry.name: entry for entry in self.entries if entry.stage == part}
        left = [entry for entry in own.values() if not entry.base or entry.key not in self.lines]
        bad = [e.name for e in own.values() if e.base and "error" in self.lines.get(e.key, {})]
        said = [f"{len(left)} of {len(own)} runs are {NOT_YET}."] if left else []
        said += [f"Failed or diverged: {', '.join(bad)}."] if bad else []
        return "\n\n" + " ".join(said) if said else ""


def top1(line: Line) -> float:
    return line["top1"]


def by(probe: str, kind: str = "transfer") -> Figure:
    """The mean over data sets by one probe."""
    return lambda line: statistics.mean(line[kind][probe].values())


def mean(values: Sequence[float], digits: int = 2) -> str:
    """A mean and its standard error."""
    if not values:
        return "–"
    error = f" ± {statistics.stdev(values) / math.sqrt(len(values)):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{error}"


def shown(interval: Interval | None) -> str:
    return NOT_YET if interval is None else str(interval)


# ------------------------------------------------------------------------------------------------ the verdict


def verdict(study: Study) -> str:
    """Whether subspaces are ahead of softmax in both, by the rule of README.md."""
    figures: dict[str, tuple[Figure, float]] = {"top-1": (top1, GOAL["top1"])}
    figures |= {f"transfer by {probe}": (by(probe), GOAL["transfer"]) for probe in LINEAR_PROBES}
    leads = {name: study.lead(FINAL, "subspaces", "softmax", figure) for name, (figure, _) in figures.items()}
    said = "; ".join(f"{name} {shown(lead)}" for name, lead in leads.items())
    counts = [len(study.of(FINAL, row)) for row in ("softmax", "subspaces")]
    if min(counts) < len(FINAL_SEEDS) or None in leads.values():
        return f"**{NOT_YET}**. {said}"
    known = {name: lead for name, lead in leads.items() if lead is not None}
    below = [name for name, lead in known.items() if lead.low <= 0]
    if below:
        return f"**not shown**, since the interval of {', '.join(below)} is not above zero. {said}."
    small = [name for name, lead in known.items() if lead.mean < figures[name][1]]
    if small:
        return f"**holds in direction**, but the lead in {', '.join(small)} is smaller than the goal. {said}."
    return f"**reached**. {said}."


def final_table(study: Study) -> str:
    rows = []
    for row in FINAL_ROWS:
        runs = study.of(FINAL, row)
        if runs:
            source = study.sources[row]
            trial = "–" if source is None else str(source.number)
            figures = [mean(study.values(FINAL, row, figure)) for figure in (top1, *(by(probe) for probe in PROBES))]
            rows.append([row, trial, str(len(runs)), *figures])
    return table(["", "trial", "seeds", "top-1", *PROBES], rows) + study.missing(FINAL)


def sets_table(study: Study) -> str:
    """Transfer by data set, by the two linear probes."""
    sets = sorted({name for _, line in study.of(FINAL) for name in line["transfer"]["svm"]})
    rows = [
        [row, probe, *(mean([line["transfer"][probe][name] for _, line in study.of(FINAL, row)]) for name in sets)]
        for row in FINAL_ROWS
        for probe in LINEAR_PROBES
        if study.of(FINAL, row)
    ]
    return table(["", "probe", *sets], rows)


def leads_table(study: Study) -> str:
    """Of subspaces over each other row of the final runs."""
    figures = (top1, *(by(probe) for probe in PROBES))
    rows = [
        [f"subspaces - {row}", *(shown(study.lead(FINAL, "subspaces", row, figure)) for figure in figures)]
        for row in FINAL_ROWS
        if row != "subspaces" and study.of(FINAL, row)
    ]
    return table(["", "top-1", *PROBES], rows)


def at_equal_transfer(study: Study) -> str:
    """The best top-1 of one side among trials with at least as much transfer as the chosen trial of the other."""
    rows = []
    for side, other in (("subspaces", "softmax"), ("softmax", "subspaces")):
        source = study.sources[side]
        if source is None:
            continue
        own = study.lines[source.key]
        rivals = [line for _, line in study.of(TRIALS, other) if transfer(line) >= transfer(own)]
        best = max(rivals, key=top1, default=None)
        found = "none has as much" if best is None else f"{top1(best):.2f} at {transfer(best):.2f}"
        rows.append([f"{side}, trial {source.number}", f"{top1(own):.2f} at {transfer(own):.2f}", other, found])
    return table(["", "held-out top-1 at transfer", "against", "its best trial with at least as much transfer"], rows)


# ------------------------------------------------------------------------------------------------ the parts


def audit_table(study: Study) -> str:
    softmax, grassmann = "softmax-long", "grassmann-long"
    rows = [["top-1", *_sides(study, AUDIT, softmax, grassmann, top1), "–"]]
    for probe in PROBES:
        ends = [end for _, line in study.of(AUDIT) for end in line["transfer_at_end"][probe].values()]
        share = f"{sum(ends)} of {len(ends)}"
        rows.append([f"transfer by {probe}", *_sides(study, AUDIT, softmax, grassmann, by(probe)), share])
    for probe in PROBES:
        chosen: dict[str, list[str]] = {
            row: [f"{value:g}" for _, line in study.of(AUDIT, row) for value in line["transfer_chosen"][probe].values()]
            for row in (softmax, grassmann)
        }
        ranges = [f"{min(c, key=float)} to {max(c, key=float)}" if c else "–" for c in chosen.values()]
        rows.append([f"chosen by {probe}", *ranges, "–", "–"])
    return table(["CIFAR-100", softmax, grassmann, "lead", "at an end of the grid"], rows) + study.missing(AUDIT)


def _sides(study: Study, part: str, row: str, other: str, figure: Figure) -> list[str]:
    """Two rows, and the lead of the second."""
    sides = [mean(study.values(part, each, figure)) for each in (row, other)]
    return [*sides, shown(study.lead(part, other, row, figure))]


def trials_table(study: Study, part: str = TRIALS) -> str:
    rows = []
    for arm in ARMS:
        source = study.sources[arm]
        for entry, line in study.of(part, arm):
            mark = "**" if source is not None and source.number == entry.number else ""
            recipe, head = line["settings"], line["settings"]["head"]
            own = ", ".join(f"{name} {value}" for name, value in head.items() if name != "name")
            knobs = [f"{recipe['lr']:g}", f"{recipe['weight_decay']:g}", f"{recipe.get('smoothing', 0):g}", own]
            where = f"{mark}{arm} {entry.number}{mark}" + (f", split {entry.split}" if part == SPLITS else "")
            figures = [top1(line), *(by(probe, "transfer_cv")(line) for probe in (*LINEAR_PROBES, "knn")), score(line)]
            rows.append([where, *knobs, *(f"{value:.2f}" for value in figures)])
    head_row = ["", "lr", "weight decay", "smoothing", "head", "top-1", *LINEAR_PROBES, "knn", "score"]
    return table(head_row, rows) + study.missing(part)


def users_table(study: Study) -> str:
    """What users get, the mean over seeds; of outlier scores the best usual one by AUROC, and the head's own."""
    rows = []
    for row in ARMS:
        found = [line["users"] for _, line in study.of(FINAL, row)]
        if found:
            means = [
                mean([statistics.mean(each[name].values()) for each in found])
                for name in ("recall_at_1", "1_shot", "5_shot")
            ]
            outliers = []
            for usual in (True, False):
                kinds = [kind for kind in found[0]["outliers"]["flowers"] if (kind != "outlier_score") is usual]
                outliers.append(_outliers(found, kinds))
            names = ("ece", "ece_scaled", "loss", "loss_scaled")
            calibration = [mean([each["calibration"][name] for each in found], 3) for name in names]
            rows.append([row, *means, *outliers, *calibration])
    scores = ["usual outlier scores: AUROC, FPR95", "outlier_score: AUROC, FPR95"]
    error = ["ECE", "ECE, scaled", "loss", "loss, scaled"]
    return table(["", "R@1", "1-shot", "5-shot", *scores, *error], rows)


def _outliers(found: Sequence[Mapping[str, Any]], kinds: Sequence[str]) -> str:
    if not kinds:
        return "–"

    def average(kind: str, figure: str) -> float:
        return statistics.mean(sets[kind][figure] for each in found for sets in each["outliers"].values())

    best = max(kinds, key=lambda kind: average(kind, "auroc"))
    return f"{average(best, 'auroc'):.1f}, {average(best, 'fpr95'):.1f} ({best})"


def pruning_table(study: Study) -> str:
    found = [line["users"]["pruning"] for _, line in study.of(FINAL, "subspaces") if "pruning" in line["users"]]
    bounds = [name.removeprefix("k at ") for name in (found[0] if found else {}) if name.startswith("k at ")]
    rows = [["none", *(mean([each[name] for each in found]) for name in ("k", "top1")), "–"]] if found else []
    for bound in bounds:
        names = (f"k at {bound}", f"top1 at {bound}", f"largest change of a logit at {bound}")
        rows.append([bound, *(mean([each[name] for each in found]) for name in names)])
    return table(["directions dropped below this share", "mean k", "top-1", "largest change of a logit"], rows)


def generalise_table(study: Study) -> str:
    rows = []
    for network in NETWORKS:
        for name, figure in (("top-1", top1), *((f"transfer by {probe}", by(probe)) for probe in PROBES)):
            sides = (f"{network}, softmax", f"{network}, subspaces")
            rows.append([f"{network}, {name}", *_sides(study, GENERALISE_FINAL, *sides, figure)])
    return table(["", "softmax", "subspaces", "lead"], rows) + study.missing(GENERALISE_FINAL)


def coarse_table(study: Study) -> str:
    figures: dict[str, Figure] = {"top-1, 20 superclasses": top1}
    for probe in LINEAR_PROBES:
        figures[f"fine classes by {probe}, features"] = by(probe)
        for part in ("inside", "residual"):
            figures[f"fine classes by {probe}, {part}"] = lambda line, part=part, probe=probe: line["fine_classes"][
                part
            ][probe]
    sides = ("softmax-long", "grassmann-long")
    rows = [[name, *_sides(study, COARSE, *sides, figure)] for name, figure in figures.items()]
    return table(["", *sides, "lead"], rows) + study.missing(COARSE)


def open_table(study: Study) -> str:
    """The lead of each open problem over the chosen setting, split by split."""
    source = study.sources["subspaces"]
    rows = []
    for row in OPEN_TRIALS if source is not None else ():
        for entry, line in study.of(OPEN, row):
            same = [(e, other) for e, other in study.of(SPLITS, "subspaces") if e.number == source.number]
            bases = {0: study.lines[source.key], **{e.split: other for e, other in same}}
            base = bases.get(entry.split)
            leads = ["–"] * 3 if base is None else [
                f"{figure(line) - figure(base):+.2f}" for figure in (top1, transfer, score)
            ]  # fmt: skip
            rows.append([row, str(entry.split), f"{top1(line):.2f}", f"{transfer(line):.2f}", *leads])
    head = ["", "split", "top-1", "transfer", "lead in top-1", "in transfer", "in score"]
    return table(head, rows) + study.missing(OPEN)


def gamma_table(study: Study) -> str:
    """The score at each multiple of the rule, and what the mean over the cases says."""
    found: dict[str, dict[int, float]] = {}
    for entry, line in study.of(GAMMA):
        found.setdefault(entry.row, {})[entry.number] = score(line)
    numbers = range(1, len(MULTIPLES) + 1)
    rows = [[row, *(f"{scores[n]:.2f}" if n in scores else "–" for n in numbers)] for row, scores in found.items()]
    said = ""
    if len(found) == len(RULE) and all(len(scores) == len(MULTIPLES) for scores in found.values()):
        best = max(numbers, key=lambda n: statistics.mean(scores[n] for scores in found.values()))
        one = MULTIPLES.index(1.0) + 1
        wins = sum(scores[best] > scores[one] for scores in found.values())
        change = "the rule changes by that factor" if wins >= len(RULE) - 1 else "the rule stays"
        said = f"\n\nBest on average: {MULTIPLES[best - 1]:g}, ahead of 1 in {wins} of {len(RULE)} cases: {change}."
    return table(["score at", *(f"{m:g}" for m in MULTIPLES)], rows) + said + study.missing(GAMMA)


# ------------------------------------------------------------------------------------------------ the figure


def front(study: Study, path: Path) -> bool:
    """Top-1 against transfer of all trials and, filled, of the final runs; False if there is nothing to draw."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    panels = {
        "trials: held-out top-1, cross-validated transfer": (TRIALS, lambda line: transfer(line)),
        "final runs: validation images, test images": (FINAL, lambda line: transfer(line, kind="transfer")),
    }
    drawn = {title: which for title, which in panels.items() if study.of(which[0])}
    if not drawn:
        return False
    figure, axes = plt.subplots(1, len(drawn), figsize=(6 * len(drawn), 4.5), layout="constrained", squeeze=False)
    for axis, (title, (part, height)) in zip(axes[0], drawn.items(), strict=True):
        for arm in ARMS:
            points = [
                (top1(line), height(line))
                for entry, line in study.of(part)
                if entry.row == arm or entry.row.startswith(f"{arm},")
            ]
            if points:
                axis.scatter(*zip(*points, strict=True), s=24, color=COLORS[arm], label=arm)
                best = best_of_both(points)
                axis.plot(*zip(*best, strict=True), color=COLORS[arm], linestyle=":", zorder=0)
        axis.set(title=title, xlabel="top-1 on Tiny-ImageNet, %", ylabel="mean transfer by both linear probes, %")
        axis.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return True


def page(study: Study) -> str:
    """All tables as one page."""
    sections = {
        "Both at once": verdict(study),
        "Final runs": final_table(study),
        "Leads of subspaces, 95 % intervals": leads_table(study),
        "Transfer by data set": sets_table(study),
        "Top-1 at equal transfer": at_equal_transfer(study),
        "Audit on CIFAR-100": audit_table(study),
        "What else users get": users_table(study),
        "Pruning": pruning_table(study),
        "Other networks": generalise_table(study),
        "Superclasses": coarse_table(study),
        "Open problems": open_table(study),
        "The rule for gamma": gamma_table(study),
        "Trials": trials_table(study),
        "Other splits": trials_table(study, SPLITS),
    }
    versions = sorted({f"torch {line['torch']}, {line['device']}" for line in study.lines.values() if "torch" in line})
    commits = sorted({str(line["commit"])[:12] for line in study.lines.values() if "commit" in line})
    about = f"{len(study.lines)} runs; {'; '.join(versions)}; commits {', '.join(commits)}." if versions else NOT_YET
    top = f"# Tables of the Tiny-ImageNet study\n\nWritten by `python -m studies.tiny_imagenet.answer`. {about}\n"
    return top + "".join(f"\n## {title}\n\n{text}\n" for title, text in sections.items())


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=HERE / "results.jsonl")
    parser.add_argument("--page", type=Path, default=HERE / "tables.md")
    parser.add_argument("--figure", type=Path, default=HERE / "front.png")
    args = parser.parse_args(words)
    study = Study(read(args.results))
    args.page.write_text(page(study))
    print(f"wrote {args.page}" + (f" and {args.figure}" if front(study, args.figure) else ""))
    print(f"Both at once: {verdict(study)}")


if __name__ == "__main__":
    main()
