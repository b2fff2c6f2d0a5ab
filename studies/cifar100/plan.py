"""The jobs of the study, in the order in which they run: settings are data, and what was found decides what follows.

`tune`: eight trials of 20 epochs per head, and 16 trials of 60 epochs per side of the contest. They train on 45,000
images of the training set and are judged on the other 5,000.
`final`: 60 epochs on all 50,000 images with the chosen settings and fresh seeds, measured on the test set.
"""

import functools
import hashlib
import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grassy.recipes.changes import with_changes
from grassy.recipes.files import load_recipe
from grassy.recipes.recipe import Recipe

TUNE, FINAL = "tune", "final"
EPOCHS = {TUNE: 20, FINAL: 60}
TUNE_SEED, HELD_OUT_SEED = 0, 0
SEEDS, MORE_SEEDS = range(100, 103), range(100, 105)
#: Of the contestants: for some of their settings the figures of the others were known when the trials were laid out.
CONTEST_SEEDS = range(200, 205)
HELD_OUT = 0.1  # of the training images
SETS = ("cifar10", "flowers", "pets")
KS = (1, 4, 8, 16, 32)
#: The goal: so much more than the best softmax head.
GOAL = {"top1": 0.5, "transfer": 3.0}
#: Changes when lines of results.jsonl no longer mean what they meant.
VERSION = 1

#: All pairs of three learning rates and three weight decays but the most violent one: the trials of a head without a
#: scale. Others have four trials of their scale with one pair, and with the best of them four more pairs.
FIRST = (0.1, 1e-3)
PAIRS = tuple((lr, decay) for lr in (0.05, 0.1, 0.2) for decay in (1e-3, 2e-3, 4e-3) if (lr, decay) != (0.2, 4e-3))
MORE = ((0.2, 1e-3), (0.1, 2e-3), (0.2, 2e-3), (0.1, 4e-3))


def _options(*names: str, values: Iterable[Sequence[float]]) -> tuple[dict[str, float], ...]:
    return tuple(dict(zip(names, each, strict=True)) for each in values)


@dataclass(frozen=True)
class Tuned:
    """A head that gets its trials: a recipe, what differs from it, and the values of its own scale to try.

    trials: these themselves, instead of the usual ones.
    """

    recipe: str
    changes: dict[str, Any] = field(default_factory=dict)
    scales: tuple[dict[str, float], ...] = ()
    trials: tuple[dict[str, Any], ...] = ()
    epochs: int = EPOCHS[TUNE]


_MARGINS = _options("head.scale", "head.margin", values=[(64, 0.5), (32, 0.1), (25, 0.1), (16, 0.1)])
_GAMMAS = _options("head.gamma", values=[(12,), (16,), (20,), (25,)])
_LARGER_GAMMAS = _options("head.gamma", values=[(16,), (20,), (25,), (32,)])
_SPECTRAL = _options("head.gamma", "head_lr", values=[(16, 0.02), (20, 0.02), (25, 0.02), (20, 0.04)])
_STANDARD = {"head.standardize": True}
#: Of the usual trials, two heads were best at the largest weight decay: softmax-std with (0.05, 0.004), grassmann-8
#: with (0.1, 0.004) and gamma 20. What lies around and beyond that.
_SOFTMAX_BEYOND = _options(
    *("lr", "weight_decay"),
    values=[(lr, wd) for lr in (0.0125, 0.025, 0.05) for wd in (0.004, 0.008, 0.016) if (lr, wd) != (0.05, 0.004)],
)
_GRASSMANN_BEYOND = _options(
    *("head.gamma", "lr", "weight_decay"),
    values=[(20, 0.05, 0.004), (20, 0.05, 0.008), (20, 0.1, 0.008), (25, 0.05, 0.004), (25, 0.05, 0.008),
            (25, 0.1, 0.006), (25, 0.1, 0.008), (32, 0.1, 0.008)],
)  # fmt: skip
#: What is best after 20 epochs is not after 60: the contestants have trials as long as the final runs. Of the first
#: eight of a side the best had smaller learning rates and larger weight decays: eight more, around and beyond that.
_SOFTMAX_LONG = (
    *_options("lr", "weight_decay", values=[(0.2, 5e-4), (0.2, 1e-3), (0.1, 1e-3), (0.1, 2e-3)]),
    *({**_STANDARD, **pair} for pair in _options(
        "lr", "weight_decay", values=[(0.1, 1e-3), (0.1, 2e-3), (0.05, 2e-3), (0.05, 4e-3)])),
    *_options("lr", "weight_decay", values=[(0.05, 4e-3), (0.05, 3e-3), (0.1, 3e-3), (0.2, 2e-3)]),
    *({**_STANDARD, **pair} for pair in _options(
        "lr", "weight_decay", values=[(0.025, 8e-3), (0.05, 3e-3), (0.05, 6e-3), (0.1, 4e-3)])),
)  # fmt: skip
_GRASSMANN_LONG = (
    *_options("head.gamma", "lr", "weight_decay", values=[(20, 0.1, 2e-3), (25, 0.05, 4e-3)]),
    *({**_STANDARD, **each} for each in _options(
        "head.k", "head.gamma", "lr", "weight_decay",
        values=[(16, 16, 0.1, 1e-3), (16, 16, 0.1, 2e-3), (16, 16, 0.05, 4e-3), (16, 20, 0.1, 1e-3),
                (32, 20, 0.1, 2e-3)])),
    {**_STANDARD, "direction": "spectral", "head.gamma": 20, "head_lr": 0.02, "lr": 0.1, "weight_decay": 2e-3},
    *({**_STANDARD, **each} for each in _options(
        "head.k", "head.gamma", "lr", "weight_decay",
        values=[(16, 20, 0.05, 4e-3), (32, 16, 0.05, 4e-3), (32, 20, 0.05, 4e-3), (32, 20, 0.1, 3e-3)])),
    *({**_STANDARD, "head.k": 32, "head.gamma": 20, "lr": 0.05, "weight_decay": 4e-3, "head_lr": rate}
      for rate in (0.015, 0.15)),
    # Standardised features have a length of about 22.6, the root of their number, and keep what differs from that.
    *({**_STANDARD, "head.normalize": False, "head.k": k, "head.gamma": gamma, "lr": 0.05, "weight_decay": 4e-3}
      for k, gamma in ((16, 0.7), (32, 0.9))),
)  # fmt: skip
_PREFIX = "cifar100-resnet18-"
HEADS = {
    "softmax": Tuned(f"{_PREFIX}linear"),
    "softmax-std": Tuned(f"{_PREFIX}linear", _STANDARD),
    "cosine": Tuned(f"{_PREFIX}cosine", {}, _options("head.scale", values=[(10,), (16,), (25,), (40,)])),
    "arcface": Tuned(f"{_PREFIX}arcface", {}, _MARGINS),
    "multi": Tuned(f"{_PREFIX}multi"),
    "softtriple": Tuned(f"{_PREFIX}softtriple", {}, _options("head.scale", values=[(10,), (16,), (20,), (30,)])),
    "subcenter-arcface": Tuned(f"{_PREFIX}subcenter-arcface", {}, _MARGINS),
    "grassmann-8": Tuned(f"{_PREFIX}grassmann", {}, _GAMMAS),
    "grassmann-8-std": Tuned(f"{_PREFIX}grassmann", _STANDARD, _LARGER_GAMMAS),
    "grassmann-16-std": Tuned(f"{_PREFIX}grassmann-k16", _STANDARD, _LARGER_GAMMAS),
    "grassmann-8-std-spectral": Tuned(f"{_PREFIX}grassmann", {**_STANDARD, "direction": "spectral"}, _SPECTRAL),
    "softmax-std-beyond": Tuned(f"{_PREFIX}linear", _STANDARD, trials=_SOFTMAX_BEYOND),
    "grassmann-8-beyond": Tuned(f"{_PREFIX}grassmann", trials=_GRASSMANN_BEYOND),
    "softmax-long": Tuned(f"{_PREFIX}linear", trials=_SOFTMAX_LONG, epochs=EPOCHS[FINAL]),
    "grassmann-long": Tuned(f"{_PREFIX}grassmann", trials=_GRASSMANN_LONG, epochs=EPOCHS[FINAL]),
}
#: Those that the goal is about, and those that it was about at first.
CONTESTANTS, FIRST_CONTESTANTS = ("softmax-long", "grassmann-long"), ("softmax-std-beyond", "grassmann-8-beyond")


@dataclass(frozen=True)
class Variant:
    """A row without trials of its own: it has the settings of a tuned head, but for what it is about."""

    of: str
    changes: dict[str, Any]
    start: str = ""  # the row whose weights of the same seed it begins with


VARIANTS = {
    **{f"grassmann-{k}": Variant("grassmann-8", {"head.k": k}) for k in KS if k != 8},
    "grassmann-1-unnormalized": Variant("grassmann-8", {"head.k": 1, "head.normalize": False, "head.gamma": 1}),
    "grassmann-8-unnormalized": Variant("grassmann-8", {"head.normalize": False, "head.gamma": 1}),
    "grassmann-8-plain-sgd": Variant("grassmann-8", {"head.riemannian": False}),
    "grassmann-8-qf": Variant("grassmann-8", {"retraction": "qf"}),
    "finetune-head": Variant("grassmann-8", {"freeze": True}, start="softmax"),
    "finetune-all": Variant("grassmann-8", {}, start="softmax"),
    "finetune-softmax": Variant("softmax", {}, start="softmax"),
}
#: Rows that others begin with.
STARTS = {variant.start for variant in VARIANTS.values() if variant.start}
#: Rows that several claims or the first contest rest on.
FIVE_SEEDS = ("softmax", "grassmann-8", *FIRST_CONTESTANTS)
#: The rows of `final`, in order: if time ends early, what most rests on is there. Those that begin with the weights of
#: softmax come one after the other, while these are there.
ROWS = (
    *("softmax", "grassmann-8", "softmax-std", *FIRST_CONTESTANTS, *CONTESTANTS),
    *(f"grassmann-{k}" for k in (32, 1, 4, 16)),
    *("grassmann-8-plain-sgd", "grassmann-8-qf", "grassmann-8-unnormalized"),
    *("cosine", "arcface", "multi", "softtriple", "subcenter-arcface"),
    *("finetune-all", "finetune-head", "finetune-softmax"),
    *("grassmann-16-std", "grassmann-8-std-spectral", "grassmann-8-std", "grassmann-1-unnormalized"),
)

#: Settings that recipes no longer have: the runs with them are kept, and cannot be made again.
REMOVED = {"direction"}
#: Seconds an epoch, and beside the epochs, on an H200; so many times as much if the step is plain torch.
EPOCH_SECONDS, OTHER_SECONDS, SLOWER = 0.8, 12.0, 1.3

Lines = dict[str, dict[str, Any]]  # of results.jsonl, by key


@dataclass(frozen=True)
class Job:
    """One run: a recipe of grassy's and what is changed in it, or neither while that depends on trials to be made."""

    stage: str
    row: str
    number: int  # of the trial, or the seed
    base: str = ""
    changes: dict[str, Any] = field(default_factory=dict)
    start: "Job | None" = None

    @property
    def name(self) -> str:
        return f"{self.stage}/{self.row}/{self.number}"

    @property
    def recipe(self) -> Recipe | None:
        return _recipe(self.base, json.dumps(self.changes)) if self.base else None

    @property
    def settings(self) -> dict[str, Any]:
        """What the recipe says beyond the defaults of recipes, without what changes nothing about the result.

        The rest is left out so that a new field of recipes does not make all runs new ones.
        """
        assert self.recipe is not None
        skip = ("description", "paper", "seed", "val_interval", "checkpoint_interval")
        own, defaults = self.recipe.to_dict(), _defaults()
        changed = {name for name in own if own[name] != defaults[name]} | {"head", "lr", "weight_decay", "epochs"}
        removed = {name: self.changes[name] for name in REMOVED if name in self.changes}
        return {**{name: own[name] for name in own if name in changed and name not in skip}, **removed}

    @functools.cached_property
    def key(self) -> str:
        """Of the stage, the data it trains on, all settings, the seed, and the run it begins with."""
        assert self.recipe is not None
        start = self.start.key if self.start else None
        facts = [VERSION, self.stage, HELD_OUT, HELD_OUT_SEED, self.settings, self.recipe.seed, start]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def read(path: Path) -> Lines:
    """The lines of a file of results by key, of one key the last; a line cut short by a crash does not count."""
    lines: Lines = {}
    texts = path.read_text().splitlines() if path.exists() else []
    for text in texts:
        try:
            line = json.loads(text)
            lines[line["key"]] = line
        except (ValueError, TypeError, KeyError):
            continue
    if texts and not lines:
        raise ValueError(f"{path} holds no results: it is another file, or a damaged one")
    return lines


def plan(lines: Lines, overrides: Sequence[str] = ()) -> list[Job]:
    """All jobs, as far as the results so far decide them. overrides: key=value, of every recipe."""
    trials = tune(lines, overrides)
    jobs = [job for each in trials.values() for job in each]
    sources = choose(trials, lines)
    done: dict[int, dict[str, Job]] = defaultdict(dict)
    for row in ROWS:  # its seeds one after the other: if time ends early, some rows are whole
        for seed in seeds(row):
            done[seed][row] = _final(row, seed, sources, done[seed], overrides)
            jobs.append(done[seed][row])
    return jobs


def seeds(row: str) -> range:
    """Of its final runs."""
    return CONTEST_SEEDS if row in CONTESTANTS else MORE_SEEDS if row in FIVE_SEEDS else SEEDS


def tune(lines: Lines, overrides: Sequence[str] = ()) -> dict[str, list[Job]]:
    """The trials of each head, as far as the results so far decide them."""
    return {name: _trials(name, lines, overrides) for name in HEADS}


def best(trials: Sequence[Job], lines: Lines) -> Job | None:
    """The trial with the best held-out top-1, of equal ones the first; None before all are made, or if all diverged."""
    return max(_made(trials, lines), key=lambda job: lines[job.key]["top1"], default=None)


def _made(trials: Sequence[Job], lines: Lines) -> list[Job]:
    """Those that did not diverge, once all are made. One that failed otherwise has to be made again first: it might
    have been the best.
    """
    found = [lines.get(job.key) if job.base else None for job in trials]
    if any(line is None or ("error" in line and not line.get("diverged")) for line in found):
        return []
    return [job for job in trials if lines[job.key].get("top1") is not None]


def choose(trials: Mapping[str, Sequence[Job]], lines: Lines) -> dict[str, Job | None]:
    """The trial that the final runs of each head repeat: the best one, except for the Grassmann contestant.

    For the latter it is the trial closest to the goal: a lead over the softmax contestant in both held-out top-1 and
    cross-validated transfer.
    """
    chosen = {name: best(each, lines) for name, each in trials.items()}
    softmax, grassmann = CONTESTANTS
    other = chosen[softmax]

    def lead(job: Job) -> float:
        assert other is not None
        return min(
            (score - low) / GOAL[name]
            for name, score, low in zip(GOAL, _scores(job, lines), _scores(other, lines), strict=True)
        )

    made = _made(trials[grassmann], lines) if other is not None else []
    return chosen | {grassmann: max(made, key=lead, default=None)}


def _scores(job: Job, lines: Lines) -> tuple[float, float]:
    """Held-out top-1, and the mean of the accuracies in cross-validation on the other data sets."""
    line = lines[job.key]
    return line["top1"], statistics.mean(line["transfer_cv"].values())


def _trials(name: str, lines: Lines, overrides: Sequence[str]) -> list[Job]:
    head = HEADS[name]

    def trial(number: int, settings: dict[str, float]) -> Job:
        changes = {**head.changes, **settings, "epochs": head.epochs}
        return _job(TUNE, name, number, head.recipe, changes, TUNE_SEED, overrides)

    def job(number: int, pair: tuple[float, float], scale: dict[str, float]) -> Job:
        return trial(number, {**scale, "lr": pair[0], "weight_decay": pair[1]})

    if head.trials:
        return [trial(number, settings) for number, settings in enumerate(head.trials, 1)]
    if not head.scales:
        return [job(number, pair, {}) for number, pair in enumerate(PAIRS, 1)]
    first = [job(number, FIRST, scale) for number, scale in enumerate(head.scales, 1)]
    winner = best(first, lines)
    numbers = range(len(first) + 1, len(first) + len(MORE) + 1)
    if winner is None:
        return first + [Job(TUNE, name, number) for number in numbers]
    scale = head.scales[winner.number - 1]
    return first + [job(number, pair, scale) for number, pair in zip(numbers, MORE, strict=True)]


def _final(
    row: str, seed: int, sources: Mapping[str, Job | None], others: dict[str, Job], overrides: Sequence[str]
) -> Job:
    variant = VARIANTS.get(row, Variant(row, {}))
    source, start = sources.get(variant.of), others.get(variant.start)
    if source is None or (variant.start and (start is None or not start.base)):
        return Job(FINAL, row, seed)
    changes = {**source.changes, **variant.changes, "epochs": EPOCHS[FINAL]}
    if variant.start:
        changes["initial_checkpoint"] = "START"  # the place of the weights is known when the job runs
    return _job(FINAL, row, seed, source.base, changes, seed, overrides, start)


def _job(
    stage: str,
    row: str,
    number: int,
    base: str,
    changes: dict[str, Any],
    seed: int,
    overrides: Sequence[str],
    start: Job | None = None,
) -> Job:
    changes = {**changes, "seed": seed, **parsed(tuple(overrides))}
    # Looked at once, at the end: nothing is chosen by the epoch.
    changes |= {"val_interval": changes["epochs"], "checkpoint_interval": 1e6}
    return Job(stage, row, number, base, changes, start)


@functools.cache
def _recipe(base: str, changes: str) -> Recipe:
    kept = {name: value for name, value in json.loads(changes).items() if name not in REMOVED}
    return with_changes(load_recipe(base), kept)


@functools.cache
def parsed(overrides: tuple[str, ...]) -> dict[str, Any]:
    import yaml

    found = {}
    for override in overrides:
        key, _, value = override.partition("=")
        if key == "seed":
            raise ValueError(f"--set {override}: every run has a seed of its own, from the plan")
        try:
            found[key] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ValueError(f"--set {override} is not YAML: {' '.join(str(error).split())}") from None
    return found


@functools.cache
def _defaults() -> dict[str, Any]:
    return Recipe().to_dict()


def seconds(job: Job, lines: Lines, hardware: str | None = None, at_once: int = 1) -> float:
    """How long a job should take beside others: as its row did, or else guessed from other rows, or from an H200."""
    known = [line for line in lines.values() if "top1" in line and hardware in (None, line["device"])]
    known = [line for line in known if line.get("at_once", 1) == at_once]
    plain = _steps_in_plain_torch(job.changes)
    same = [line for line in known if (line["stage"], line["row"]) == (job.stage, job.row)]
    same = [line for line in same if _steps_in_plain_torch(line["settings"]) == plain]
    if same:
        return statistics.median(line["seconds"] for line in same)
    slower = SLOWER if plain else 1.0
    epochs = job.changes.get("epochs", EPOCHS[job.stage])
    alike = [line for line in known if line["settings"]["epochs"] == epochs]
    alike = [line for line in alike if not _steps_in_plain_torch(line["settings"])]
    if alike:
        return slower * statistics.median(line["seconds"] for line in alike)
    return slower * EPOCH_SECONDS * at_once * epochs + OTHER_SECONDS


def _steps_in_plain_torch(settings: Mapping[str, Any]) -> bool:
    return settings.get("direction") == "spectral" or settings.get("retraction") == "qf"


def to_do(jobs: Iterable[Job], lines: Lines, retry: bool = False) -> Iterator[Job]:
    """Jobs without a line, or, to retry, with one that tells of a failure; also those that cannot begin yet. Of rows
    with the same settings, those of the first. None with a setting that was removed.
    """
    seen = set()
    for job in jobs:
        if REMOVED & job.changes.keys():
            continue
        line = lines.get(job.key) if job.base else None
        if (line is None or (retry and "error" in line)) and not (job.base and job.key in seen):
            yield job
        seen.add(job.key if job.base else "")
