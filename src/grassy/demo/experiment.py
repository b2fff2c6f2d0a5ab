"""The demo: networks trained on scikit-learn's digits with several heads, and what their features are good for.

Seven of the ten digits are trained on; the other three show how well the features serve for classes never seen.
"""

import contextlib
import functools
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from sklearn.svm import LinearSVC
from torch import Tensor, nn

from grassy._version import __version__
from grassy.analysis import class_separation, variability
from grassy.atomic import write_atomically
from grassy.demo.page import page_run, write_demo_page
from grassy.heads import GrassmannHead, create_head
from grassy.loss import classification_loss
from grassy.optim import make_optimizer
from grassy.terminal import bar

#: What is measured: the key in demo.json, the title of its column and panel, and how many decimals are worth showing.
MEASURES = (
    ("accuracy", "Accuracy on trained classes (%)", 1),
    ("variability", "Variability within classes (°)", 1),
    ("class_separation", "Class separation R²", 3),
    ("held_out_accuracy", "Accuracy on held-out classes (%)", 1),
)
PANELS = ("accuracy", "variability", "held_out_accuracy")


@dataclass(frozen=True)
class Settings:
    """One budget for every head: the same data, epochs, batches, optimizer and schedule."""

    seeds: int = 8
    epochs: int = 20
    dimensions: tuple[int, ...] = (1, 2, 4, 8)
    # At best a feature lies in the subspace of its class and is orthogonal to the others; its loss is then about
    # (C − 1)exp(−γ). γ = 20 makes that as small for 7 classes as the paper's 25 does for 1,000: 25 − ln(999/6) = 19.9.
    # Variability depends on it: in trials before this value was set, it grew with γ, and at γ = 5 was below the linear
    # head's (26° to 31°), at 10, 15 and 25 above it.
    gamma: float = 20.0
    feature_width: int = 64
    batch_size: int = 128
    lr: float = 3e-3  # of AdamW, for all but the subspaces
    head_lr: float = 0.1  # of Riemannian SGD, for the subspaces
    weight_decay: float = 0.05

    def heads(self) -> dict[str, tuple[str, dict[str, Any]]]:
        """The name and the options of each head, by the label it has in the table."""
        grassmann = {f"grassmann k={k}": ("grassmann", {"k": k, "gamma": self.gamma}) for k in self.dimensions}
        return {"linear": ("linear", {}), **grassmann}


FULL = Settings()
QUICK = Settings(seeds=2, epochs=2, dimensions=(4,))  # shows that it runs; its numbers mean nothing


Labelled = tuple[Tensor, Tensor]


class Split(NamedTuple):
    """Digits of one seed: images (B, 1, 8, 8) and labels (B,) of the trained classes, and of those held out."""

    held_out: list[int]
    train: Labelled
    test: Labelled
    held_out_fit: Labelled
    held_out_score: Labelled


def run(output: Path, settings: Settings = FULL) -> dict[str, Any]:
    """Train and measure every head with every seed, print the table, write numbers, picture and page into `output`."""
    if settings.seeds < 1 or settings.epochs < 1:
        raise ValueError(f"the demo needs at least 1 seed and 1 epoch, got {settings.seeds} and {settings.epochs}")
    _make_writable(output)  # now, rather than after all the work
    console, start = Console(markup=False, emoji=False, highlight=False), time.perf_counter()
    heads = settings.heads()
    console.print(f"{len(heads)} heads x {settings.seeds} seeds on 8x8 digits, 7 classes trained and 3 held out.")
    runs, pixels, pages = [], [], []
    with _single_thread(), bar("", len(heads) * settings.seeds * settings.epochs) as advance:
        for seed in range(settings.seeds):
            split = split_digits(seed)
            pixels.append(100 * svm_accuracy(nn.Flatten(), split, seed))
            for label, (name, options) in heads.items():
                what = f"seed {seed + 1} of {settings.seeds}, {label}"
                torch.manual_seed(seed)  # the same backbone for every head
                model = build(name, options, settings)
                torch.manual_seed(seed)  # and the same batches
                losses: list[float] = []
                loss = train(model, split.train, settings, functools.partial(_note, losses, advance, what))
                measured = {"train_loss": loss, **measure(model, split, seed)}
                if seed == 0:
                    names = [str(digit) for digit in range(10) if digit not in split.held_out]
                    pages.append(page_run(label, (name, options), model, split.test, names, losses))
                runs.append({"head": label, "seed": seed, "held_out": split.held_out, **measured})
                if not console.is_terminal:
                    shown = ", ".join(f"{key} {measured[key]:.{digits}f}" for key, _, digits in MEASURES)
                    console.print(f"{what}: {shown}", soft_wrap=True)
    result = {
        "settings": asdict(settings),
        "summary": summarize(runs),
        "runs": runs,
        "held_out_accuracy_of_pixels": pixels,
        "seconds": round(time.perf_counter() - start, 1),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"grassy": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "platform": f"{platform.system()} {platform.machine()}",
    }
    numbers, picture, page = output / "demo.json", output / "demo.png", output / "report.html"
    write_atomically(numbers, lambda file: file.write(json.dumps(result, indent=1, allow_nan=False).encode()))
    write_atomically(picture, lambda file: draw(result).savefig(file, format="png", dpi=160))
    write_demo_page(pages, page)
    console.print("", table(result), sep="\n")
    console.print(f"\n{caption(result)}", style="dim")
    console.print(f"\nSaved {picture} and {numbers}", soft_wrap=True)
    console.print(f"To explore the classes of the first seed, open {page} in a browser", soft_wrap=True)
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

    def split(chosen: Tensor, classes: list[int], train_size: float) -> list[Labelled]:
        y = torch.tensor([classes.index(int(label)) for label in labels[chosen]])
        parts = train_test_split(torch.arange(len(y)), train_size=train_size, stratify=y, random_state=seed)
        return [(images[chosen][part], y[part]) for part in parts]

    return Split(held_out, *split(is_trained, trained, 0.7), *split(~is_trained, held_out, 0.5))


def build(head: str, options: dict[str, Any], settings: Settings) -> nn.Sequential:
    """A small convolutional network (backbone, head)."""
    width = settings.feature_width
    backbone = nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, padding=1, stride=2), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(32 * 4 * 4, width)),
    )
    return nn.Sequential(backbone, create_head(head, width, 7, **options))


def train(model: nn.Sequential, data: Labelled, settings: Settings, report: Callable[[float], None]) -> float:
    """Train with a cosine schedule; `report` gets the mean loss of each epoch, the last of which is returned."""
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
    return mean_loss


# --- what is measured -------------------------------------------------------------------------------------------


@torch.no_grad()
def measure(model: nn.Sequential, split: Split, seed: int) -> dict[str, float]:
    model.eval()
    backbone = model[0]
    images, labels = split.test
    features, train_labels = backbone(split.train[0]), split.train[1]
    return {
        "accuracy": 100 * float((model(images).argmax(-1) == labels).double().mean()),
        "variability": variability(features, train_labels),
        "class_separation": class_separation(features, train_labels),
        "held_out_accuracy": 100 * svm_accuracy(backbone, split, seed),
    }


@torch.no_grad()
def svm_accuracy(backbone: nn.Module, split: Split, seed: int) -> float:
    """How well a linear SVM, fitted on half of the held-out classes' images, tells the other half apart, 0 to 1."""
    (images, labels), (test_images, test_labels) = split.held_out_fit, split.held_out_score
    features = backbone(images)
    scale = features.norm(dim=-1).mean()
    svm = LinearSVC(max_iter=10_000, random_state=seed).fit((features / scale).numpy(), labels.numpy())
    return float(svm.score((backbone(test_images) / scale).numpy(), test_labels.numpy()))


def summarize(runs: list[dict[str, Any]]) -> dict[str, dict[str, dict[str, float | None]]]:
    """Mean and standard deviation over seeds, of each measure, for each head; one seed has no deviation."""
    heads = dict.fromkeys(run["head"] for run in runs)
    return {
        head: {key: _mean_and_std([run[key] for run in runs if run["head"] == head]) for key, _, _ in MEASURES}
        for head in heads
    }


def _mean_and_std(values: list[float]) -> dict[str, float | None]:
    return {"mean": statistics.fmean(values), "std": statistics.stdev(values) if len(values) > 1 else None}


# --- what is shown ----------------------------------------------------------------------------------------------


def table(result: dict[str, Any]) -> Table:
    shown = Table("head", *(title for _, title, _ in MEASURES), box=None, padding=(0, 2, 0, 0))
    for column in shown.columns[1:]:
        column.justify = "right"
    for head, measured in result["summary"].items():
        shown.add_row(head, *(_plus_minus(measured[key], digits) for key, _, digits in MEASURES))
    return shown


def _plus_minus(measured: dict[str, float | None], digits: int) -> str:
    mean, std = measured["mean"], measured["std"]
    return f"{mean:.{digits}f}" if std is None else f"{mean:.{digits}f} ± {std:.{digits}f}"


def caption(result: dict[str, Any]) -> str:
    seeds = result["settings"]["seeds"]
    pixels = _plus_minus(_mean_and_std(result["held_out_accuracy_of_pixels"]), 1)
    return (
        f"Mean ± standard deviation over {seeds} seeds; which three classes are held out changes with the seed. "
        "Accuracy on trained classes: on the 30% of their images not trained on. Variability (mean angle between two "
        "features of a class) and R²: on the training images. Accuracy on held-out classes: a linear SVM (C = 1, "
        "features divided by their mean length) on the frozen features, fitted on a random half of the images of the "
        f"three classes and scored on the other half. The same SVM on the pixels themselves: {pixels}."
    )


def draw(result: dict[str, Any]) -> Figure:
    """One panel a measure: the mean and deviation of each head, and thin lines that join the runs of one seed."""
    heads = list(result["summary"])
    titles = {key: title for key, title, _ in MEASURES}
    figure = Figure(figsize=(12, 4.8), layout=ConstrainedLayoutEngine(w_pad=0.15, h_pad=0.12, wspace=0.03))
    for axes, key in zip(figure.subplots(1, len(PANELS)), PANELS, strict=True):
        for seed in range(result["settings"]["seeds"]):
            by_head = {run["head"]: run[key] for run in result["runs"] if run["seed"] == seed}
            axes.plot(range(len(heads)), [by_head[head] for head in heads], color="0.8", linewidth=1)
        for position, head in enumerate(heads):
            mean, std = (result["summary"][head][key][part] for part in ("mean", "std"))
            # Orange and blue of Okabe and Ito, which all kinds of colour vision tell apart; the markers differ too.
            color, marker = ("#D55E00", "s") if head == "linear" else ("#0072B2", "o")
            axes.errorbar(position, mean, std or 0, color=color, marker=marker, markersize=8, capsize=4, linewidth=2)
        if key == "held_out_accuracy":
            axes.axhline(statistics.fmean(result["held_out_accuracy_of_pixels"]), color="0.35", linestyle=":")
        axes.set_title(titles[key], fontsize=13, loc="left", pad=10)
        axes.set_xticks(range(len(heads)), [head.removeprefix("grassmann ") for head in heads], fontsize=12)
        axes.set_xlim(-0.5, len(heads) - 0.5)
        axes.tick_params(axis="y", labelsize=11)
        axes.tick_params(length=0)
        axes.grid(axis="y", color="0.92")
        axes.set_axisbelow(True)
        axes.spines[["top", "right", "left"]].set_visible(False)
    figure.suptitle("A vector (linear) or a subspace of dimension k for each class: 8×8 digits", fontsize=15)
    note = "Mean and standard deviation over seeds; a thin line joins the runs of one seed. "
    note += "Seven classes are trained, three held out:\na linear SVM on the frozen features learns those from half of "
    note += "their images and is scored on the other half (dotted: from the pixels)."
    figure.supxlabel(note, fontsize=11, color="0.35")
    return figure


# --- progress and files -----------------------------------------------------------------------------------------


def _note(losses: list[float], advance: Callable[..., None], what: str, loss: float) -> None:
    losses.append(loss)
    advance(text=f"{what}, loss {loss:.3f}")


@contextlib.contextmanager
def _single_thread() -> Iterator[None]:
    """Layers this small gain nothing from a second thread, and on a busy machine they wait for it, often for long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _make_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OSError(f"cannot write into the folder {folder}: {error.strerror}") from error
