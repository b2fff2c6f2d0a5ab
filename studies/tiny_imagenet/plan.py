"""The runs of the study as data, in the order in which they run. README.md beside this file is the plan in words.

A run is an `Entry`: a name, a part, a recipe and what is changed in it, a seed, and the data that it trains on and is
judged by. Runs of later parts have no recipe until the results of the earlier parts decide it.
"""

import functools
import hashlib
import itertools
import json
import math
import random
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import studies.tiny_imagenet.heads as own_heads
from grassy.recipes.recipe import Recipe
from studies.cifar100 import plan as cifar100
from studies.cifar100.plan import Job, Lines, parsed, read, to_do

AUDIT, TRIALS, SPLITS, FINAL, GENERALISE, GENERALISE_FINAL, COARSE, OPEN, GAMMA = PARTS = (
    "audit",
    "trials",
    "splits",
    "final",
    "generalise",
    "generalise-final",
    "coarse",
    "open",
    "gamma",
)
#: Data to train on.
TINY, CIFAR100, SUPERCLASSES = "tiny32", "cifar100", "cifar100-superclasses"
#: Sets that transfer is measured on, by what was trained on.
SETS = {
    TINY: ("cifar10", "cifar100", "flowers", "pets"),
    CIFAR100: cifar100.SETS,
    SUPERCLASSES: cifar100.SETS,
}
#: Probes whose lead counts, and those that are reported beside them.
LINEAR_PROBES, OTHER_PROBES = ("svm", "svm-standardised"), ("knn", "logistic")
#: The goal, which is also the exchange rate of the score: half a point of top-1 is worth three of transfer.
GOAL = {"top1": 0.5, "transfer": 3.0}
#: Each split holds out another tenth of the training images of each class.
NUMBER_OF_SPLITS, HELD_OUT, HELD_OUT_SEED = 3, 0.1, 0
TRIAL_SEED, FINAL_SEEDS, GENERALISE_SEEDS, COARSE_SEEDS = 0, range(300, 305), range(400, 403), range(500, 503)
RERUN = 3  # the best of each arm, on the other splits
EPOCHS = 60
DRAW_SEED = 23
#: Changes when lines of results.jsonl no longer mean what they meant.
VERSION = 1
CIFAR100_RESULTS = Path(cifar100.__file__).parent / "results.jsonl"

BASE = "cifar100-resnet18-linear"
#: Mean and standard deviation of the training images at 32 pixels.
TINY_CHANGES = {"mean": [0.4819, 0.4497, 0.3991], "std": [0.2621, 0.2539, 0.2677], "epochs": EPOCHS}
#: Standardised features of a ResNet-18 have about this length.
LENGTH = math.sqrt(512)
FULL = "full"  # the classifier decays as all weights do

# ------------------------------------------------------------------------------------------------ the settings


def _log(low: float, high: float) -> Callable[[float], float]:
    return lambda u: float(f"{low * (high / low) ** u:.3g}")


def _one_of(*values: Any) -> Callable[[float], Any]:
    return lambda u: values[min(int(u * len(values)), len(values) - 1)]


#: Knobs that all arms share: the learning rate, its product with the weight decay, and label smoothing.
SHARED_KNOBS: dict[str, Callable[[float], Any]] = {
    "lr": _log(0.03, 0.2),
    "lr x decay": _log(1e-4, 3e-4),
    "smoothing": _one_of(0.0, 0.05, 0.1, 0.2),
}
_DECAYS = _one_of(0.0, 1e-4, FULL)
#: Knobs of each arm. `scale` is what unit features are multiplied by; for features that keep their length it is divided
#: by √512, the length of standardised features.
KNOBS: dict[str, dict[str, Callable[[float], Any]]] = {
    "softmax": {
        **SHARED_KNOBS,
        "beta": _log(0.1, 3),
        "classifier decay": _DECAYS,
        "standardise": _one_of(False, True),
    },
    "subspaces": {
        **SHARED_KNOBS,
        "scale": _log(14, 36),
        "k": _one_of(8, 16, 32, 48),
        "normalise": _one_of(False, True),
    },
    "cosine": {
        **SHARED_KNOBS,
        "scale": _log(10, 40),
        "classifier decay": _DECAYS,
        "standardise": _one_of(False, True),
    },
    "signed": {**SHARED_KNOBS, "scale": _log(10, 40), "normalise": _one_of(False, True)},
}
ARMS = tuple(KNOBS)
NUMBER_OF_TRIALS = {"softmax": 12, "subspaces": 12, "cosine": 6, "signed": 6}

_SOFTMAX_LONG = {"lr": 0.1, "decay": 0.002, "smoothing": 0.0, "beta": 1.0, "classifier decay": FULL}
_LONG = {"lr": 0.05, "decay": 0.004, "smoothing": 0.0}
_SUBSPACES_LONG = {**_LONG, "scale": 0.9 * LENGTH, "k": 32, "normalise": False}
#: Carried over from the CIFAR-100 study and its first look at Tiny-ImageNet; the other trials are drawn.
CARRIED_OVER: dict[str, tuple[dict[str, Any], ...]] = {
    "softmax": (
        {**_SOFTMAX_LONG, "standardise": False},
        {**_SOFTMAX_LONG, "standardise": False, "smoothing": 0.1},
        {**_SOFTMAX_LONG, **_LONG, "standardise": True},
    ),
    "subspaces": (
        _SUBSPACES_LONG,
        {**_SUBSPACES_LONG, "smoothing": 0.1},
        # What gamma="auto" was for 200 classes, k = 8 and 512 features in the quick start: not standardised.
        {"lr": 0.1, "decay": 0.002, "smoothing": 0.0, "scale": 22.04, "k": 8, "normalise": True, "standardise": False},
    ),
    "cosine": (
        {"lr": 0.2, "decay": 0.002, "smoothing": 0.0, "scale": 25.0, "classifier decay": FULL, "standardise": False},
        {**_LONG, "scale": 20.36, "classifier decay": 0.0, "standardise": True},
    ),
    "signed": (
        {**_LONG, "scale": 0.9 * LENGTH, "normalise": False},
        {**_LONG, "smoothing": 0.1, "scale": 0.9 * LENGTH, "normalise": False},
    ),
}


def drawn(arm: str) -> list[dict[str, Any]]:
    """The trials of an arm that are not carried over: a Latin hypercube over its knobs.

    The range of each knob is cut into as many parts as there are trials, and each part is used once. Of 500 such
    designs from a seeded generator, the one whose closest two trials are farthest apart is taken.
    """
    knobs, count = KNOBS[arm], NUMBER_OF_TRIALS[arm] - len(CARRIED_OVER[arm])
    rng = random.Random(f"{DRAW_SEED} {arm}")

    def design() -> list[tuple[float, ...]]:
        columns = [[(part + rng.random()) / count for part in rng.sample(range(count), count)] for _ in knobs]
        return list(zip(*columns, strict=True))

    def closest(points: list[tuple[float, ...]]) -> float:
        return min(math.dist(one, other) for one, other in itertools.combinations(points, 2))

    trials = []
    for point in max((design() for _ in range(500)), key=closest):
        values = {name: knob(place) for (name, knob), place in zip(knobs.items(), point, strict=True)}
        values["decay"] = float(f"{values.pop('lr x decay') / values['lr']:.3g}")
        trials.append(values)
    return trials


@functools.cache
def settings_of_trials(arm: str) -> list[dict[str, Any]]:
    """All trials of an arm, in order, by their knobs."""
    return [*CARRIED_OVER[arm], *drawn(arm)]


def changes_of(arm: str, knobs: Mapping[str, Any]) -> dict[str, Any]:
    """What a recipe has to change for a trial."""
    standardise = bool(
        knobs.get("standardise", True)
    )  # of subspaces and signed vectors always, but for the quick start
    head: dict[str, Any] = {"standardize": standardise}
    if "classifier decay" in knobs and arm in ("softmax", "cosine") and knobs["classifier decay"] != FULL:
        head["decay"] = knobs["classifier decay"]
    if arm == "softmax":
        head |= {"name": own_heads.SOFTMAX, "beta": knobs["beta"]}
    elif arm == "cosine":
        head |= {"name": own_heads.COSINE, "scale": knobs["scale"]}
    else:
        normalise = knobs["normalise"]
        gamma = knobs["scale"] if normalise else float(f"{knobs['scale'] / LENGTH:.4g}")
        name = "grassmann" if arm == "subspaces" else own_heads.SIGNED
        head |= {"name": name, "gamma": gamma, "normalize": normalise}
        if arm == "subspaces":
            head["k"] = knobs["k"]
    return {"head": head, "lr": knobs["lr"], "weight_decay": knobs["decay"], "smoothing": knobs["smoothing"]}


def listing() -> str:
    """All trials as a table, as README.md has it."""
    rows = ["| arm | trial | lr | weight decay | smoothing | settings of the head |", "|---|---|---|---|---|---|"]
    for arm in ARMS:
        for number, knobs in enumerate(settings_of_trials(arm), 1):
            head = changes_of(arm, knobs)["head"]
            own = ", ".join(f"{name} {value}" for name, value in head.items() if name != "name")
            rows.append(f"| {arm} | {number} | {knobs['lr']} | {knobs['decay']} | {knobs['smoothing']} | {own} |")
    return "\n".join(rows)


# ------------------------------------------------------------------------------------------------ the entries


@dataclass(frozen=True)
class Entry(Job):
    """One run. `stage` is the part, `row` the arm, `number` the trial or the seed.

    data: what it trains on. split: which tenth of the training images is held out and judges it; None trains on all of
    them and is judged by the validation images.
    """

    data: str = TINY
    split: int | None = None

    @property
    def name(self) -> str:
        return f"{super().name}" + ("" if self.split is None else f"/split{self.split}")

    @functools.cached_property
    def key(self) -> str:
        """Of the data, all settings and the seed: rows that agree in these share one run."""
        assert self.recipe is not None
        facts = [VERSION, self.data, self.split, HELD_OUT, HELD_OUT_SEED, self.settings, self.recipe.seed]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def sets(self) -> tuple[str, ...]:
        """Sets that transfer is measured on; after training on superclasses also that of the fine classes."""
        return ("cifar100",) if self.stage == COARSE else SETS[self.data]

    @property
    def judged_by_held_out(self) -> bool:
        return self.split is not None


def _entry(
    part: str,
    row: str,
    number: int,
    changes: dict[str, Any],
    seed: int,
    split: int | None,
    overrides: Mapping[str, Any],
    base: str = BASE,
    data: str = TINY,
) -> Entry:
    changes = {**changes, "seed": seed, **overrides}
    epochs = changes.get("epochs", EPOCHS)
    changes |= {"val_interval": epochs, "checkpoint_interval": 1e6}  # looked at once, at the end
    return Entry(part, row, number, base, changes, None, data, split)


def audit(overrides: Mapping[str, Any]) -> list[Entry]:
    """The two contestants of the CIFAR-100 study, with its settings, seeds and data; seeds alternate between them."""
    return [
        _entry(AUDIT, job.row, job.number, job.changes, job.number, None, overrides, job.base, CIFAR100)
        for job in _contestants()
    ]


@functools.cache
def _contestants() -> list[Job]:
    jobs = cifar100.plan(read(CIFAR100_RESULTS))
    found = [job for job in jobs if job.stage == cifar100.FINAL and job.row in cifar100.CONTESTANTS]
    return sorted(found, key=lambda job: job.number)


def trials(overrides: Mapping[str, Any]) -> dict[str, list[Entry]]:
    """All trials by arm."""
    return {
        arm: [
            _entry(TRIALS, arm, number, {**TINY_CHANGES, **changes_of(arm, knobs)}, TRIAL_SEED, 0, overrides)
            for number, knobs in enumerate(settings_of_trials(arm), 1)
        ]
        for arm in ARMS
    }


def in_turn(columns: Iterable[Sequence[Entry]]) -> Iterator[Entry]:
    """The first of each, the second of each, ...: if time ends early, arms have had alike many runs."""
    columns = list(columns)
    for place in range(max(map(len, columns), default=0)):
        for column in columns:
            if place < len(column):
                yield column[place]


def transfer(line: Mapping[str, Any], probes: Sequence[str] = LINEAR_PROBES, kind: str = "transfer_cv") -> float:
    """The mean over data sets and probes, in percent."""
    return statistics.mean(value for probe in probes for value in line[kind][probe].values())


def score(line: Mapping[str, Any]) -> float:
    """The one score that trials are chosen by, on either side: held-out top-1 and transfer, in units of the goal."""
    return line["top1"] / GOAL["top1"] + transfer(line) / GOAL["transfer"]


CRITERIA: dict[str, Callable[[Mapping[str, Any]], float]] = {
    "score": score,
    "top1": lambda line: line["top1"],
    "transfer": transfer,
}


def made(entries: Sequence[Entry], lines: Lines) -> list[Entry] | None:
    """Entries with figures, once each is made or has diverged; None before: another might be the best."""
    found = [lines.get(entry.key) for entry in entries]
    if any(line is None or ("error" in line and not line.get("diverged")) for line in found):
        return None
    return [entry for entry in entries if "error" not in lines[entry.key]]


def ranked(entries: Sequence[Entry], lines: Lines, criterion: str = "score") -> list[Entry] | None:
    """Trials, the best first, of equal ones the earlier; None before all are made."""
    whole = made(entries, lines)
    return None if whole is None else sorted(whole, key=lambda entry: -CRITERIA[criterion](lines[entry.key]))


def reruns(arm: str, own_trials: Sequence[Entry], lines: Lines, overrides: Mapping[str, Any]) -> list[Entry]:
    """The best three trials on the other splits; the same split for all three first."""
    best = (ranked(own_trials, lines) or [])[:RERUN]
    splits = range(1, NUMBER_OF_SPLITS)
    if not best:
        return [Entry(SPLITS, arm, 0, split=split) for split in splits for _ in range(RERUN)]
    return [
        _entry(SPLITS, arm, entry.number, entry.changes | {"seed": split}, split, split, overrides)
        for split in splits
        for entry in best
    ]


def chosen(own_trials: Sequence[Entry], own_reruns: Sequence[Entry], lines: Lines) -> Entry | None:
    """Of the best three, the one with the highest mean score over the three splits; None before all are made.

    One that diverged on a split is out.
    """
    best = (ranked(own_trials, lines) or [])[:RERUN]
    if not best or not all(entry.base for entry in own_reruns) or made(own_reruns, lines) is None:
        return None

    def mean_score(entry: Entry) -> float:
        again = [lines[other.key] for other in own_reruns if other.number == entry.number]
        if any("error" in line for line in again):
            return -math.inf
        return statistics.mean(score(line) for line in (lines[entry.key], *again))

    return max(best, key=mean_score)


#: Rows of the final part: an arm, and what its trial is chosen by.
FINAL_ROWS: dict[str, tuple[str, str]] = {
    **{arm: (arm, "score") for arm in ARMS},
    **{f"{arm}, best {name}": (arm, name) for name in ("top1", "transfer") for arm in ("softmax", "subspaces")},
}


def sources(lines: Lines, overrides: Mapping[str, Any]) -> dict[str, Entry | None]:
    """The trial that each final row repeats, None where it is not decided yet."""
    found: dict[str, Entry | None] = {}
    own_trials = trials(overrides)
    for row, (arm, criterion) in FINAL_ROWS.items():
        if criterion == "score":
            found[row] = chosen(own_trials[arm], reruns(arm, own_trials[arm], lines, overrides), lines)
        else:
            found[row] = next(iter(ranked(own_trials[arm], lines, criterion) or []), None)
    return found


def final(lines: Lines, overrides: Mapping[str, Any]) -> list[Entry]:
    """Five fresh seeds of each row on all training images: first the arms, seed by seed, then the rows beside them."""
    found = sources(lines, overrides)

    def runs(row: str) -> list[Entry]:
        source = found[row]
        if source is None:
            return [Entry(FINAL, row, seed) for seed in FINAL_SEEDS]
        return [
            _entry(FINAL, row, seed, source.changes | {"seed": seed}, seed, None, overrides) for seed in FINAL_SEEDS
        ]

    return [
        *in_turn(runs(row) for row in FINAL_ROWS if row in ARMS),
        *in_turn(runs(row) for row in FINAL_ROWS if row not in ARMS),
    ]


#: Networks of the part that asks whether it generalises; patches of 2 leave ConvNeXt 16, 8, 4 and 2 pixels.
NETWORKS: dict[str, dict[str, Any]] = {
    "convnext": {"model": "convnext_atto", "model_kwargs": {"patch_size": 2}},
    "vit": {"model": "vit_tiny_patch16_224", "model_kwargs": {"img_size": 32, "patch_size": 4}},
}
#: Of their features.
WIDTHS = {"convnext": 320, "vit": 192}
ADAMW = {
    "opt": "adamw",
    "decay_all": False,
    "mixup": 0.8,
    "cutmix": 1.0,
    "warmup_epochs": 5,
    "clip_grad": 1.0,
}
#: Learning rates and weight decays, the same four for each side and network.
ADAMW_PAIRS = ((1e-3, 0.05), (2e-3, 0.05), (1e-3, 0.2), (4e-3, 0.05))


def _for_width(head: Mapping[str, Any], width: int) -> dict[str, Any]:
    """The same head on features of another width: the scale stays, which for features that keep their length is γ√N."""
    keeps_length = head.get("standardize") and head.get("normalize") is False
    changed = {"gamma": float(f"{head['gamma'] * LENGTH / math.sqrt(width):.4g}")} if keeps_length else {}
    return {**head, **changed}


def generalise(lines: Lines, overrides: Mapping[str, Any]) -> dict[str, list[Entry]]:
    """Four trials per network and side, with the heads that the main contest chose."""
    found = sources(lines, overrides)
    rows: dict[str, list[Entry]] = {}
    for network, model in NETWORKS.items():
        for arm in ("softmax", "subspaces"):
            row, source = f"{network}, {arm}", found[arm]
            if source is None:
                rows[row] = [Entry(GENERALISE, row, number, split=0) for number in range(1, len(ADAMW_PAIRS) + 1)]
                continue
            kept = {name: source.changes[name] for name in ("smoothing", *TINY_CHANGES)}
            kept["head"] = _for_width(source.changes["head"], WIDTHS[network])
            rows[row] = [
                _entry(
                    *(GENERALISE, row, number),
                    {**kept, **model, **ADAMW, "lr": lr, "weight_decay": decay},
                    *(TRIAL_SEED, 0, overrides),
                )
                for number, (lr, decay) in enumerate(ADAMW_PAIRS, 1)
            ]
    return rows


def generalise_final(lines: Lines, overrides: Mapping[str, Any]) -> list[Entry]:
    """Three seeds of the best trial of each network and side, on all training images."""
    columns = []
    for row, own_trials in generalise(lines, overrides).items():
        decided = ranked(own_trials, lines) if all(entry.base for entry in own_trials) else None
        if not decided:
            columns.append([Entry(GENERALISE_FINAL, row, seed) for seed in GENERALISE_SEEDS])
            continue
        columns.append(
            [
                _entry(GENERALISE_FINAL, row, seed, decided[0].changes | {"seed": seed}, seed, None, overrides)
                for seed in GENERALISE_SEEDS
            ]
        )
    return list(in_turn(columns))


def coarse(overrides: Mapping[str, Any]) -> list[Entry]:
    """CIFAR-100 trained on its 20 superclasses, with the settings of the two contestants of the audit."""
    first = {entry.row: entry for entry in audit({})}
    return [
        _entry(COARSE, row, seed, entry.changes | {"seed": seed}, seed, None, overrides, entry.base, SUPERCLASSES)
        for seed in COARSE_SEEDS
        for row, entry in first.items()
    ]


#: The open problems of the paper: what is added to the chosen setting of the subspaces. `two-views` is the control of
#: the two runs that need two views of each image in a batch.
OPEN_TRIALS: dict[str, dict[str, Any]] = {
    "used-0.1": {"head.name": own_heads.VARIETY, "head.used": 0.1},
    "used-0.5": {"head.name": own_heads.VARIETY, "head.used": 0.5},
    "two-views": {"aug_repeats": 2},
    "contrast-0.1": {"aug_repeats": 2, "head.name": own_heads.VARIETY, "head.contrast": 0.1, "head.temperature": 0.3},
    "contrast-0.3": {"aug_repeats": 2, "head.name": own_heads.VARIETY, "head.contrast": 0.3, "head.temperature": 0.2},
    "mean-1": {"head.name": own_heads.MEAN, "head.beta": 1.0},
    "mean-0.3": {"head.name": own_heads.MEAN, "head.beta": 0.3},
}


def open_problems(lines: Lines, overrides: Mapping[str, Any]) -> list[Entry]:
    """One trial each on the first split; those with a better score than the chosen setting, on the other two."""
    source = sources(lines, overrides)["subspaces"]
    first = [Entry(OPEN, row, 1, split=0) for row in OPEN_TRIALS]
    if source is None:
        return first
    first, again = [], []
    for row, added in OPEN_TRIALS.items():
        head = {**source.changes["head"], **{_option(name): value for name, value in added.items() if "." in name}}
        changes = {**source.changes, **{name: value for name, value in added.items() if "." not in name}, "head": head}
        trial, *others = (
            _entry(OPEN, row, 1 + split, changes | {"seed": split}, split, split, overrides)
            for split in range(NUMBER_OF_SPLITS)
        )
        first.append(trial)
        line = lines.get(trial.key)
        if line and "error" not in line and score(line) > score(lines[source.key]):
            again += others
    return [*first, *again]


def _option(name: str) -> str:
    return name.removeprefix("head.")


#: The rule for gamma is checked at these multiples of it, for these numbers of classes and dimensions.
MULTIPLES = (0.6, 0.8, 1.0, 1.25)
#: What the rule said of (classes, k) for 512 features when the study was planned; it may change by what is found.
RULE = {(20, 8): 15.13, (20, 32): 17.65, (100, 8): 19.98, (100, 32): 23.32, (200, 8): 22.04, (200, 32): 25.71}
CLASSES = {SUPERCLASSES: 20, CIFAR100: 100, TINY: 200}


def gamma(overrides: Mapping[str, Any]) -> list[Entry]:
    """Subspaces at multiples of the recommended gamma, otherwise with the carried-over settings, on split 0."""
    entries = []
    for data, classes in CLASSES.items():
        for k in (k for number, k in RULE if number == classes):
            for number, multiple in enumerate(MULTIPLES, 1):
                knobs = {**_SUBSPACES_LONG, "scale": multiple * RULE[classes, k], "k": k}
                changes = {**(TINY_CHANGES if data == TINY else {"epochs": EPOCHS}), **changes_of("subspaces", knobs)}
                row = f"{classes} classes, k = {k}"
                entries.append(_entry(GAMMA, row, number, changes, TRIAL_SEED, 0, overrides, data=data))
    return entries


def plan(lines: Lines, overrides: Mapping[str, Any] | None = None) -> list[Entry]:
    """All entries in the order of the queue, as far as the results so far decide them.

    overrides: changes of every recipe, for a study on small stand-ins.
    """
    own_heads.register()
    overrides = overrides or {}
    own_trials = trials(overrides)
    again = {arm: reruns(arm, each, lines, overrides) for arm, each in own_trials.items()}
    return [
        *audit(overrides),
        *in_turn(own_trials.values()),
        *in_turn(again.values()),
        *final(lines, overrides),
        *in_turn(generalise(lines, overrides).values()),
        *generalise_final(lines, overrides),
        *coarse(overrides),
        *open_problems(lines, overrides),
        *gamma(overrides),
    ]


# ------------------------------------------------------------------------------------------------ how long it takes

#: Seconds on an H200: per image, and to measure, by part. Networks with AdamW take longer per image.
SECONDS_PER_IMAGE, SLOWER_NETWORK = 1.5e-5, 2.0
BESIDE = 0.8  # how much longer a run takes for each other one that shares the GPU
IMAGES = {TINY: 100_000, CIFAR100: 50_000, SUPERCLASSES: 50_000}
MEASURING = {AUDIT: 25.0, TRIALS: 30.0, SPLITS: 30.0, FINAL: 60.0, GENERALISE: 30.0, GENERALISE_FINAL: 60.0}
MEASURING |= {COARSE: 25.0, OPEN: 30.0, GAMMA: 25.0}


def seconds(entry: Entry, lines: Lines, device: str | None = None, at_once: int = 1) -> float:
    """How long an entry should take: as its part and row did on this device, then its part, then a guess.

    at_once: how many runs share the GPU.
    """
    known = [line for line in lines.values() if "top1" in line and device in (None, line["device"])]
    known = [line for line in known if line["stage"] == entry.stage and line.get("at_once", 1) == at_once]
    for alike in ([line for line in known if line["row"] == entry.row], known):
        if alike:
            return statistics.median(line["seconds"] for line in alike)
    slower = SLOWER_NETWORK if entry.stage in (GENERALISE, GENERALISE_FINAL) else 1.0
    epochs = entry.changes.get("epochs", EPOCHS)
    guess = slower * SECONDS_PER_IMAGE * IMAGES[entry.data] * epochs + MEASURING[entry.stage]
    return guess * (1 + BESIDE * (at_once - 1))


def recipe_of(entry: Entry) -> Recipe:
    """The recipe of an entry that is decided."""
    assert entry.recipe is not None, f"{entry.name} waits for the results of an earlier part"
    return entry.recipe


__all__ = ["ARMS", "PARTS", "Entry", "Lines", "parsed", "plan", "read", "score", "seconds", "to_do", "transfer"]
