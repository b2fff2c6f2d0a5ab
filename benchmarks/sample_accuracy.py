"""What a sample of the classes costs in accuracy: `python -m benchmarks.sample_accuracy DATA...`.

DATA holds train.npz and test.npz (x: uint8 images, y: labels), such as CIFAR-100. The classes of several such folders
are put together, with images averaged down to 32 pixels. A small network, two layers on the first 256 principal
components of the pixels, learns with all classes and with samples of them, corrected and not, from the same seeds. The
batch is small, so that most classes of an update are not labels in it: with 16 rows and 100 classes about 85. It is no
state of the art: it asks for the difference between the rows of its table.
"""

import argparse
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import grassy
from benchmarks.gpu import machine, save
from benchmarks.markdown import table

WIDTH, SIZE = 256, 32
#: So many images are taken at a time.
CHUNK = 4096


def arms(rates: list[float]) -> dict[str, dict[str, Any]]:
    """Options of a head by the name of the row that they get."""
    found: dict[str, dict[str, Any]] = {"all classes": {}}
    for rate in rates:
        found |= {f"sample {rate:g}": {"sample": rate}}
        found |= {f"sample {rate:g}, corrected": {"sample": rate, "sample_correct": True}}
    return found


def images(folders: list[Path], split: str) -> tuple[Tensor, Tensor]:
    """The uint8 images (B, 32·32·3) of a split, and their labels; those of a folder come after those before it."""
    found, labels, classes = [], [], 0
    for folder in folders:
        with np.load(folder / f"{split}.npz") as file:
            x, y = torch.from_numpy(file["x"]), torch.from_numpy(file["y"]).long()
        if (factor := x.shape[1] // SIZE) > 1:
            x = torch.cat([_averaged(part, factor) for part in x.split(CHUNK)])
        found.append(x.flatten(1))
        labels.append(y + classes)
        with np.load(folder / "train.npz") as file:
            classes += int(file["y"].max()) + 1
    return torch.cat(found), torch.cat(labels)


def _averaged(x: Tensor, factor: int) -> Tensor:
    """Images (B, H, W, 3) with each square of pixels replaced by its mean."""
    small = nn.functional.avg_pool2d(x.movedim(-1, 1).float(), factor)
    return small.round().to(torch.uint8).movedim(1, -1).contiguous()


def features(folders: list[Path], rows: int | None, device: str) -> tuple[Tensor, ...]:
    """The first principal components of the training pixels, to unit variance, and labels: of training and test.

    rows: how many training images there are to be, drawn at random.
    """
    x, y = images(folders, "train")
    chosen = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))[:rows]
    x, y = x[chosen].to(device).float() / 255, y[chosen].to(device)
    other, labels = images(folders, "test")
    mean = x.mean(0)
    x, other = x - mean, other.to(device).float() / 255 - mean
    _, directions = torch.linalg.eigh(x.T @ x)
    x, other = x @ directions[:, -WIDTH:], other @ directions[:, -WIDTH:]
    scale = x.std(0)
    return x / scale, y, other / scale, labels.to(device)


def accuracy(arm: dict[str, Any], data: tuple[Tensor, ...], seed: int, epochs: int, batch: int) -> float:
    """Top-1 on the test set, in percent, after some epochs with a cosine schedule."""
    x, y, other, labels = data
    torch.manual_seed(seed)
    classes = int(y.max()) + 1
    head = grassy.create_head("grassmann", WIDTH, classes, k=4, sample_seed=seed, **arm)
    model = nn.Sequential(nn.Linear(WIDTH, 512), nn.GELU(), nn.Dropout(0.3), nn.Linear(512, WIDTH), head).to(x.device)
    optimizer = grassy.make_optimizer(model, "adamw", lr=1e-3, weight_decay=0.05, head_lr=0.02)
    updates = epochs * (len(x) // batch)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, updates)
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(batch)[: len(x) // batch]:
            optimizer.zero_grad()
            grassy.classification_loss(model, x[rows], y[rows]).backward()
            optimizer.step()
            schedule.step()
    model.eval()
    with torch.no_grad():
        return 100 * float((model(other).argmax(-1) == labels).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, nargs="+")
    parser.add_argument("--samples", type=float, nargs="+", default=[0.5, 0.1], help="shares of the classes")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rows", type=int, help="how many training images to use")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, help="where to write the results, as JSON")
    arguments = parser.parse_args()
    data = features(arguments.data, arguments.rows, arguments.device)
    found: dict[str, list[float]] = {name: [] for name in arms(arguments.samples)}
    for seed in range(arguments.seeds):
        for name, arm in arms(arguments.samples).items():
            found[name].append(accuracy(arm, data, seed, arguments.epochs, arguments.batch))
            print(f"seed {seed}, {name}: {found[name][-1]:.2f}", flush=True)
    whole = found["all classes"]
    rows = []
    for name, each in found.items():
        gaps = [a - b for a, b in zip(each, whole, strict=True)]
        spread = statistics.stdev(gaps) if len(gaps) > 1 and any(gaps) else 0.0
        rows.append([name, f"{statistics.mean(each):.2f}", f"{statistics.mean(gaps):+.2f}", f"{spread:.2f}"])
    print(table(["classes in an update", "top-1", "against all classes", "deviation over seeds"], rows))
    if arguments.output:
        facts = {name: getattr(arguments, name) for name in ("seeds", "epochs", "batch", "rows")}
        device = "cuda" if arguments.device.startswith("cuda") else "cpu"
        save(
            {**machine(device), "data": [each.name for each in arguments.data], **facts, "top-1": found},
            arguments.output,
        )


if __name__ == "__main__":
    main()
