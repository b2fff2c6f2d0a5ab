"""Transfer results as a table: one column per dataset, one row per model or group of seeds."""

import csv
import io
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grassy.atomic import write_text_atomically
from grassy.terminal import spreadsheet_safe
from grassy.transfer.protocol import Report, Result

COLUMNS = (
    "model",
    "dataset",
    "method",
    "accuracy",
    "metric",
    "parameter",
    "chosen",
    "fold_mean",
    "fold_std",
    "fold_accuracies",
    "train_images",
    "test_images",
    "classes",
    "seed",
    "recipe_seed",
    "unreadable",
    "paper",
    "paper_chosen",
    "seconds",
)


def save(report: Report, folder: Path, facts: dict[str, Any]) -> None:
    """Write transfer.csv with one line per result, and transfer.json, which also lists what was missing or failed."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for result in report.results:
        folds = result.fold_accuracies
        spread = {
            "fold_mean": statistics.mean(folds),
            "fold_std": statistics.stdev(folds) if len(folds) > 1 else 0.0,
            "fold_accuracies": ";".join(map(str, folds)),
        }
        names = {name: spreadsheet_safe(getattr(result, name)) for name in ("model", "dataset")}
        writer.writerow({**result.to_dict(), **spread, **names})
    write_text_atomically(folder / "transfer.csv", text.getvalue())
    results = [result.to_dict() for result in report.results]
    whole = {**facts, "finished": report.finished, "results": results}
    whole |= {"missing": report.missing, "failed": report.failed}
    write_text_atomically(folder / "transfer.json", json.dumps(whole, indent=1))


def render(report: Report, groups: dict[str, str]) -> str:
    """Aligned lines: the mean accuracy of each group on each dataset, ± the standard deviation of several models.

    groups: maps the name of a model to the name of its group.
    """
    datasets = list(dict.fromkeys(result.dataset for result in report.results))
    lines: list[list[str]] = [["model", "method", *datasets, "mean"]]
    for method in dict.fromkeys(result.method for result in report.results):
        for group in dict.fromkeys(groups.values()):
            chosen = [r for r in report.results if r.method == method and groups[r.model] == group]
            if not chosen:
                continue
            cells = [_cell([r.accuracy for r in chosen if r.dataset == dataset]) for dataset in datasets]
            lines.append([_title(group, groups), method, *cells, _cell(_means(chosen, len(datasets)))])
            reference = {r.dataset: r.paper for r in chosen if r.paper is not None}
            if reference:
                figures = [f"{reference[d]:.2f}" if d in reference else "-" for d in datasets]
                complete = all(dataset in reference for dataset in datasets)
                mean = f"{statistics.mean(reference.values()):.2f}" if complete else "-"
                lines.append(["  (the paper)", method, *figures, mean])
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    text = [
        "  ".join(
            cell.ljust(width) if i < 2 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ]
    return "\n".join(line.rstrip() for line in text)


def group_by_recipe(models: Sequence[Any]) -> dict[str, str]:
    """Map each model's name to its group: the first of the runs that differ only in the seed.

    Runs are not grouped if two of them have the same seed.
    """
    alike: dict[str, list[Any]] = {}
    for model in {model.name: model for model in reversed(models)}.values():
        settings = {key: value for key, value in model.recipe.items() if key != "seed"}
        alike.setdefault(json.dumps(settings, sort_keys=True) if settings else model.name, []).insert(0, model)
    first: dict[str, str] = {}
    for group in alike.values():
        seeds = {model.recipe.get("seed") for model in group}
        for model in group:
            first[model.name] = group[0].name if len(seeds) == len(group) else model.name
    return {model.name: first[model.name] for model in models}


def _means(results: Sequence[Result], datasets: int) -> list[float]:
    """The mean over datasets, for each model with a result on all of them; other means would not be comparable."""
    models = dict.fromkeys(result.model for result in results)
    accuracies = [[r.accuracy for r in results if r.model == model] for model in models]
    return [statistics.mean(values) for values in accuracies if len(values) == datasets]


def _cell(values: Sequence[float]) -> str:
    if not values:
        return "-"
    mean = f"{statistics.mean(values):.2f}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):.2f}"


def _title(group: str, groups: dict[str, str]) -> str:
    members = sum(other == group for other in groups.values())
    return group if members == 1 else f"{group} and {members - 1} more seed{'s' if members > 2 else ''}"
