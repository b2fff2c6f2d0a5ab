"""The demo: a network for seven of the ten digits, with a vector or a subspace per class, and what its features keep.

The other three digits show what the features are worth for classes that were never trained.
"""

import functools
import json
import platform
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

from grassy._version import __version__
from grassy.analysis import variability
from grassy.atomic import write_text_atomically
from grassy.data.worker_processes import one_thread
from grassy.demo.measures import Labelled, few_shot, kept, strongest_direction, style
from grassy.demo.page import page_run, write_demo_page
from grassy.demo.spread import Spread, spread_of
from grassy.demo.summary import (
    MEASURES,
    OURS,
    PIXELS,
    SMALL,
    SOFTMAX,
    STANDARDIZED,
    caption,
    full_table,
    sentences,
    summarize,
    table,
)
from grassy.heads import GrassmannHead, Head, create_head
from grassy.loss import classification_loss
from grassy.optim import make_optimizer
from grassy.terminal import bar

#: The setting that docs/results.md recommends, for any number of classes and any width of the features.
SUBSPACES = {"standardize": True, "normalize": False, "gamma": "auto"}
HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    SOFTMAX: ("linear", {}),
    STANDARDIZED: ("linear", {"standardize": True}),
    SMALL: ("grassmann", {"k": 2, **SUBSPACES}),
    OURS: ("grassmann", {"k": 8, **SUBSPACES}),
}


@dataclass(frozen=True)
class Settings:
    """One budget for every head: the same data, epochs, batches, optimizer and schedule. None was tuned for a head."""

    seeds: int = 10  # after ten of them, every digit was held out three times
    epochs: int = 20
    feature_width: int = 64
    batch_size: int = 128
    lr: float = 3e-3  # of AdamW, for all but the subspaces
    head_lr: float = 0.1  # of Riemannian SGD, for the subspaces
    weight_decay: float = 0.05


FULL = Settings()
QUICK = Settings(seeds=2, epochs=2)  # shows that it runs; its numbers mean nothing


Images = tuple[Tensor, Tensor]


class Split(NamedTuple):
    """Digits of one seed: images (B, 1, 8, 8) and labels (B,) of the trained classes, and of those never trained."""

    held_out: list[int]
    train: Images
    test: Images
    unseen: Images


def run(output: Path, settings: Settings = FULL) -> dict[str, Any]:
    """Train and measure every head with every seed, print what came out, write demo.json and the page into `output`."""
    if settings.seeds < 1 or settings.epochs < 1:
        raise ValueError(f"the demo needs at least 1 seed and 1 epoch, got {settings.seeds} and {settings.epochs}")
    _make_writable(output)  # now, rather than after all the work
    console, start = Console(markup=False, emoji=False, highlight=False), time.perf_counter()
    console.print(f"{len(HEADS)} heads x {settings.seeds} seeds on 8x8 digits, 7 classes trained and 3 never seen.")
    runs, pages, spreads = [], [], dict[str, list[Spread]]()
    with one_thread(), bar("", len(HEADS) * settings.seeds * settings.epochs) as advance:
        for seed in range(settings.seeds):
            split = split_digits(seed)
            names = [str(digit) for digit in range(10) if digit not in split.held_out]
            runs.append({"head": PIXELS, "seed": seed, "held_out": split.held_out, **measure(None, split, seed)})
            for label, (name, options) in HEADS.items():
                what = f"seed {seed + 1} of {settings.seeds}, {label}"
                torch.manual_seed(seed)  # the same backbone for every head
                model = build(name, options, settings)
                torch.manual_seed(seed)  # and the same batches
                losses: list[float] = []
                train(model, split.train, settings, functools.partial(_note, losses, advance, what))
                measured = measure(model, split, seed)
                runs.append({"head": label, "seed": seed, "held_out": split.held_out, **measured})
                if seed == 0:
                    pages.append(page_run(label, (name, options), model, split.test, names, losses))
                    spreads[label] = spread_of(_seen_features(model, split.test[0]), *split.test, names)
                if not console.is_terminal:
                    shown = ", ".join(
                        f"{key} {measured[key]:.{digits}f}" for key, _, digits in MEASURES if key in measured
                    )
                    console.print(f"{what}: {shown}", soft_wrap=True)
    result: dict[str, Any] = {
        "settings": asdict(settings),
        "summary": summarize(runs),
        "sentences": sentences(runs),
        "runs": runs,
        "seconds": round(time.perf_counter() - start, 1),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"grassy": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "platform": f"{platform.system()} {platform.machine()}",
    }
    numbers, page = output / "demo.json", output / "report.html"
    write_text_atomically(numbers, json.dumps(result, indent=1, allow_nan=False))
    said = [*result["sentences"], caption(result, STANDARDIZED)]
    write_demo_page(pages, spreads[SOFTMAX], spreads[OURS], full_table(result), said, page)
    console.print("", table(result), sep="\n")
    console.print(f"\n{caption(result, '+ std')}", style="dim")
    console.print(f"\nOpen {page} in a browser. The numbers of all seeds are in {numbers}.\n", soft_wrap=True)
    for sentence in result["sentences"]:
        console.print(sentence)
    return result


# --- data, network, training: what a user of grassy writes ------------------------------------------------------


def split_digits(seed: int) -> Split:
    """Hold three classes out, others for each seed, and split the rest 70:30 into train and test, at random."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    held_out = [(3 * seed + i) % 10 for i in range(3)]
    trained = [digit for digit in range(10) if digit not in held_out]
    is_trained = torch.isin(labels, torch.tensor(trained))
    y = torch.tensor([trained.index(int(label)) for label in labels[is_trained]])
    parts = train_test_split(torch.arange(len(y)), train_size=0.7, stratify=y, random_state=seed)
    train, test = ((images[is_trained][part], y[part]) for part in parts)
    return Split(held_out, train, test, (images[~is_trained], labels[~is_trained]))


def build(head: str, options: dict[str, Any], settings: Settings) -> nn.Sequential:
    """A small convolutional network (backbone, head)."""
    width = settings.feature_width
    backbone = nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, padding=1, stride=2), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(32 * 4 * 4, width)),
    )
    return nn.Sequential(backbone, create_head(head, width, 7, **options))


def train(model: nn.Sequential, data: Images, settings: Settings, report: Callable[[float], None]) -> None:
    """Train with a cosine schedule; `report` gets the mean loss of each epoch."""
    images, labels = data
    head_lr = settings.head_lr if isinstance(model[-1], GrassmannHead) else None
    optimizer = make_optimizer(model, "adamw", settings.lr, head_lr, weight_decay=settings.weight_decay)
    batches = max(len(labels) // settings.batch_size, 1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, settings.epochs * batches)
    model.train()
    for _ in range(settings.epochs):
        mean_loss = 0.0
        for batch in torch.randperm(len(labels)).tensor_split(batches):
            loss = classification_loss(model, images[batch], labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            mean_loss += loss.item() / batches
        report(mean_loss)


# --- what is measured -------------------------------------------------------------------------------------------


@torch.no_grad()
def _seen_features(model: nn.Sequential | None, images: Tensor) -> Tensor:
    """Features (B, N) of length 1, as the head sees them; without a model, the pixels."""
    if model is None:
        return nn.functional.normalize(images.flatten(1), dim=-1)
    head = model.eval()[-1]
    assert isinstance(head, Head)
    return nn.functional.normalize(head.prepare(model[0](images)), dim=-1)


@torch.no_grad()
def measure(model: nn.Sequential | None, split: Split, seed: int) -> dict[str, float]:
    """All MEASURES of a model, or those that pixels have: what is there without any training."""
    train, test, unseen = (_seen_features(model, images) for images, _ in (split.train, split.test, split.unseen))
    known, asked = style(split.train[0]), style(split.test[0])
    found = {
        "angle": variability(test, split.test[1]),
        "strongest": 100 * strongest_direction(test, split.test[1]),
        "one_shot": 100 * few_shot(unseen, split.unseen[1], 1, seed),
        "five_shot": 100 * few_shot(unseen, split.unseen[1], 5, seed),
    }
    for name in known:
        found[name] = kept(Labelled(train, split.train[1], known[name]), Labelled(test, split.test[1], asked[name]))
    if model is not None:
        correct = model.eval()(split.test[0]).argmax(-1) == split.test[1]
        found["accuracy"] = 100 * float(correct.double().mean())
        if isinstance(head := model[-1], GrassmannHead):
            own = torch.einsum("bkn,bn->bk", head.weight[split.test[1]], test)
            found["inside"] = 100 * float(own.square().sum(-1).mean())
    return found


# --- progress and files -----------------------------------------------------------------------------------------


def _note(losses: list[float], advance: Callable[..., None], what: str, loss: float) -> None:
    losses.append(loss)
    advance(text=f"{what}, loss {loss:.3f}")


def _make_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OSError(f"cannot write into the folder {folder}: {error.strerror}") from error
