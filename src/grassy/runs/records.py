"""The records of a run beside its weights: args.yaml, environment.json, summary.csv and TensorBoard's curves."""

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
from grassy.runs.atomic import write_atomically
from grassy.runs.recipe import Recipe

ARGS, ENVIRONMENT, SUMMARY, CURVES = "args.yaml", "environment.json", "summary.csv", "tensorboard"
COLUMNS: tuple[str, ...] = ("epoch", "train_loss", "eval_loss", "eval_top1", "eval_top5", "lr", "head_lr", "seconds")
COLUMNS += ("eval_effective_rank",)  # of subspaces
COLUMNS += ("input_share",)  # of the seconds: those in which the run waited for images


def save_settings(folder: Path, recipe: Recipe, data_dir: Path | None, world_size: int, device: torch.device) -> None:
    """The resolved recipe as args.yaml, which is a recipe itself, and what it runs on as environment.json.

    A run that is resumed keeps under `earlier` what it ran on before.
    """
    import yaml

    text = yaml.safe_dump(recipe.to_dict(), sort_keys=False, allow_unicode=True)
    write_atomically(folder / ARGS, lambda file: file.write(text.encode()))
    facts = {**environment(device), "data_dir": None if data_dir is None else str(data_dir), "processes": world_size}
    with contextlib.suppress(OSError, ValueError):  # none yet, or one that somebody has edited
        before = json.loads((folder / ENVIRONMENT).read_text())
        facts["earlier"] = [*before.pop("earlier", []), before]
    write_atomically(folder / ENVIRONMENT, lambda file: file.write(json.dumps(facts, indent=1).encode()))


def environment(device: torch.device) -> dict[str, Any]:
    """Versions, hardware, the commit of the code, and the time."""
    versions = {"grassy": __version__, "torch": torch.__version__, "python": platform.python_version()}
    with contextlib.suppress(metadata.PackageNotFoundError):
        versions["timm"] = metadata.version("timm")
    hardware = (
        torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    )
    started = datetime.now(UTC).isoformat(timespec="seconds")
    return {**versions, "commit": _commit(), "device": hardware, "started": started}


def _commit() -> str | None:
    """The commit of grassy's source, with a mark if it has been changed since; None for an installed package."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        if not git("ls-files", Path(__file__).name):
            return None  # a repository, but not that of grassy
        return git("rev-parse", "HEAD") + ("-changed" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def save_summary(folder: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """One row an epoch, under timm's names. Written anew each time: a resumed run must not repeat a row."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, restval="", extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_atomically(folder / SUMMARY, lambda file: file.write(text.getvalue().encode()))


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
