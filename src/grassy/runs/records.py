"""The records of a run: args.yaml, environment.json, summary.csv and TensorBoard curves."""

import contextlib
import csv
import io
import json
import platform
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from grassy._version import __version__
from grassy.atomic import write_text_atomically
from grassy.recipes.files import ARGS
from grassy.recipes.recipe import Recipe
from grassy.schema import MOST_ANALYSIS, MOST_CLASSES, MOST_DESCRIPTION, fail, list_of, parse_json, read_text, text

ENVIRONMENT, SUMMARY, CURVES = "environment.json", "summary.csv", "tensorboard"
#: The images that a run holds out, if it split the data itself.
SPLIT = "split.json"
COLUMNS: tuple[str, ...] = ("epoch", "train_loss", "eval_loss", "eval_top1", "eval_top5", "lr", "head_lr", "seconds")
COLUMNS += ("eval_effective_rank",)  # only with subspaces
COLUMNS += ("input_share",)  # share of the time spent waiting for images


def save_settings(
    folder: Path, recipe: Recipe, data_dir: Path | None, splits_data: bool, world_size: int, device: torch.device
) -> None:
    """Write the resolved recipe as args.yaml, which is itself a recipe, and the hardware and versions as
    environment.json.

    A resumed run keeps its earlier environments under `earlier`. splits_data: the run holds out images itself.
    """
    import yaml

    settings = yaml.safe_dump(recipe.to_dict(), sort_keys=False, allow_unicode=True)
    write_text_atomically(folder / ARGS, settings)
    place = None if data_dir is None else str(data_dir.absolute())  # where later commands find the images
    facts = {**environment(device), "data_dir": place, "splits_data": splits_data, "processes": world_size}
    if (folder / ENVIRONMENT).is_file() and (before := _remembered(folder)):
        earlier = before.pop("earlier", [])
        facts["earlier"] = [*(earlier if isinstance(earlier, list) else [earlier]), before]
    write_text_atomically(folder / ENVIRONMENT, json.dumps(facts, indent=1))


def remembered_data_dir(folder: Path) -> Path | None:
    """The data folder of a run; None if it had none or did not record it."""
    found = _remembered(folder).get("data_dir")
    return Path(found) if isinstance(found, str) else None


def took_given_parts(folder: Path) -> bool:
    """Whether a run recorded that it was given its training and validation images, and did not split a set itself."""
    return _remembered(folder).get("splits_data") is False


def _remembered(folder: Path) -> dict[str, Any]:
    """The facts in environment.json; none if it is missing or damaged."""
    with contextlib.suppress(OSError, ValueError):
        facts = parse_json(read_text(folder / ENVIRONMENT, MOST_DESCRIPTION))
        if isinstance(facts, dict):
            return facts
    return {}


def data_is_gone(data_dir: Path, so: str = "") -> str:
    """The message for a data folder that no longer exists; `so` states the consequence."""
    return f"the run's data folder {data_dir} is gone{so}; if it moved, give --data-dir"


def save_split(folder: Path, recipe: Recipe, held_out: Sequence[str]) -> None:
    """Record the held-out images by their paths in the data, so that later commands use exactly these."""
    content = {"val_fraction": recipe.val_fraction, "val_seed": recipe.val_seed, "validation": list(held_out)}
    write_text_atomically(folder / SPLIT, json.dumps(content, indent=0))


def read_split(folder: Path) -> list[str] | None:
    """The paths that `save_split` wrote; None if there is no such file."""
    if not (folder / SPLIT).is_file():
        return None
    try:
        content = parse_json(read_text(folder / SPLIT, MOST_ANALYSIS))
        if not isinstance(content, dict):
            raise fail("it", "a mapping", content)
        found: list[str] = list_of(text(10_000), 1, MOST_CLASSES)("validation", content.get("validation"))
    except ValueError as error:
        raise ValueError(f"{folder / SPLIT} is damaged: {error}") from None
    return found


def environment(device: torch.device) -> dict[str, Any]:
    """Versions, hardware, the commit of the code and the time."""
    versions = {"grassy": __version__, "torch": torch.__version__, "python": platform.python_version()}
    with contextlib.suppress(metadata.PackageNotFoundError):
        versions["timm"] = metadata.version("timm")
    hardware = (
        torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    )
    started = datetime.now(UTC).isoformat(timespec="seconds")
    return {**versions, "commit": _commit(), "device": hardware, "started": started}


def _commit() -> str | None:
    """The commit of grassy's source, marked if files have changed since; None for an installed package."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        if not git("ls-files", Path(__file__).name):
            return None  # another repository than grassy's
        return git("rev-parse", "HEAD") + ("-changed" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def save_summary(folder: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write one row per epoch, with timm's column names. `epoch` counts from 0, as in timm; training prints it from 1.

    The whole file is rewritten each time, so that a resumed run repeats no row.
    """
    table = io.StringIO()
    writer = csv.DictWriter(table, COLUMNS, restval="", extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text_atomically(folder / SUMMARY, table.getvalue())


class Curves:
    """TensorBoard's scalars."""

    def __init__(self, folder: Path, resumed_at: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / CURVES), purge_step=resumed_at or None)

    def add(self, scalars: Mapping[str, float], update: int) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, update)

    def close(self) -> None:
        self._writer.close()
