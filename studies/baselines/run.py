"""Does every class representation train with its published constants? See README.md beside this file.

    python -m studies.baselines.run                              # digits, a minute on a laptop
    python -m studies.baselines.run --data-dir DIR --jobs 4      # and CIFAR-100: DIR holds train.npz and test.npz

Each run appends one line to results.jsonl; runs that are there already are skipped. Then table.md is written from it.
"""

import argparse
import dataclasses
import json
import math
import multiprocessing
import statistics
import sys
import time
from datetime import date
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import grassy
from grassy.heads import HEADS

HERE = Path(__file__).parent
SEEDS = (0, 1, 2)
#: One set of constants for all heads of a data set: no head is tuned.
SETTINGS = {
    "digits": {"epochs": 40, "batch": 64, "lr": 0.05, "weight_decay": 5e-4},
    "cifar100-10k": {"epochs": 60, "batch": 128, "lr": 0.1, "weight_decay": 1e-3},
}


@dataclasses.dataclass(frozen=True)
class Contestant:
    """A head with its options, and what else differs from the settings of its data set."""

    head: str
    options: dict[str, float] = dataclasses.field(default_factory=dict)
    lr: float | None = None
    standardised: bool = False  # a batch normalisation without scale and shift before the head


#: The constants of the paper, which are the defaults of the heads; and variants that explain a result.
CONTESTANTS = {name: Contestant(name) for name in HEADS} | {
    "arcface, s=25": Contestant("arcface", {"scale": 25.0}),
    "arcface, s=25, m=0.1": Contestant("arcface", {"scale": 25.0, "margin": 0.1}),
    "subcenter-arcface, s=25, m=0.1": Contestant("subcenter-arcface", {"scale": 25.0, "margin": 0.1}),
    "subcenter-arcface, m=0.2": Contestant("subcenter-arcface", {"margin": 0.2}),
    "subcenter-arcface, K=2": Contestant("subcenter-arcface", {"centers": 2}),
    "grassmann, gamma=16": Contestant("grassmann", {"gamma": 16.0}),
    "linear, standardised features": Contestant("linear", standardised=True),
    "arcface, standardised features": Contestant("arcface", standardised=True),
    "subcenter-arcface, standardised features": Contestant("subcenter-arcface", standardised=True),
    "subcenter-arcface, lr=0.02": Contestant("subcenter-arcface", lr=0.02),
}
Data = tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]


def digits() -> Data:
    """scikit-learn's 8x8 digits, every fifth image for the test."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    images, labels = torch.tensor(x, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16, torch.tensor(y)
    test = torch.arange(len(labels)) % 5 == 0
    return (images[~test], labels[~test]), (images[test], labels[test])


def cifar100(folder: Path) -> Data:
    """The first 100 training images of each class, and the whole test set, as `{train,test}.npz` with x and y."""
    sets = []
    for split, per_class in (("train", 100), ("test", 100)):
        with np.load(folder / f"{split}.npz") as arrays:
            x, y = arrays["x"], arrays["y"]
        keep = np.sort(np.concatenate([np.flatnonzero(y == c)[:per_class] for c in range(100)]))
        images = torch.from_numpy(x[keep]).permute(0, 3, 1, 2).float() / 255
        sets.append(((images - 0.48) / 0.26, torch.from_numpy(y[keep])))
    return sets[0], sets[1]


def block(inputs: int, outputs: int, pool: bool = False) -> nn.Sequential:
    layers = [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, *([nn.MaxPool2d(2)] if pool else []))


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(block(channels, channels), block(channels, channels))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


def network(name: str, head: nn.Module, standardised: bool) -> nn.Sequential:
    """Two convolutions for the digits; a ResNet-9, 512 features wide, for CIFAR."""
    if name == "digits":
        body = [block(1, 32), block(32, 64, pool=True)]
    else:
        body = [
            block(3, 64),
            block(64, 128, True),
            Residual(128),
            block(128, 256, True),
            block(256, 512, True),
            Residual(512),
        ]
    features = [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    if standardised:
        features.append(nn.BatchNorm1d(64 if name == "digits" else 512, affine=False))
    return nn.Sequential(*body, *features, head)


def augment(images: Tensor, generator: torch.Generator) -> Tensor:
    """A random crop of the image padded by 4, and a random flip, for the whole batch on its device."""
    b, c, h, w = images.shape
    padded = F.pad(images, (4, 4, 4, 4))
    dy, dx = torch.randint(0, 9, (2, b, 1), generator=generator).to(images.device)
    flip = (torch.rand(b, 1, generator=generator) < 0.5).to(images.device)
    rows, columns = torch.arange(h, device=images.device) + dy, torch.arange(w, device=images.device)
    columns = torch.where(flip, columns.flip(0), columns) + dx
    index = torch.arange(b, device=images.device)[:, None, None, None]
    channel = torch.arange(c, device=images.device)[None, :, None, None]
    return padded[index, channel, rows[:, None, :, None], columns[:, None, None, :]]


def train(data_name: str, data: Data, contestant: str, seed: int) -> dict[str, object]:
    """Train one network and return what results.jsonl says of it."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    (images, labels), (test_images, test_labels) = ((x.to(device), y.to(device)) for x, y in data)
    settings, entry = dict(SETTINGS[data_name]), CONTESTANTS[contestant]
    if entry.lr is not None:
        settings["lr"] = entry.lr
    epochs, batch = int(settings["epochs"]), int(settings["batch"])
    width = 64 if data_name == "digits" else 512
    head = grassy.create_head(entry.head, width, int(labels.max()) + 1, **entry.options)
    model = network(data_name, head, entry.standardised).to(device)
    optimizer = grassy.make_optimizer(
        model, "sgd", lr=settings["lr"], momentum=0.9, nesterov=True, weight_decay=settings["weight_decay"]
    )
    steps_in_epoch = len(labels) // batch
    total, warm_up = epochs * steps_in_epoch, 2 * steps_in_epoch
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / warm_up) * 0.5 * (1 + math.cos(math.pi * step / total))
    )
    start, loss = time.perf_counter(), torch.zeros(())
    for _ in range(epochs):
        model.train()
        for index in torch.randperm(len(labels), generator=generator).split(batch)[:steps_in_epoch]:
            index = index.to(device)
            x = images[index] if data_name == "digits" else augment(images[index], generator)
            optimizer.zero_grad()
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                loss = grassy.classification_loss(model, x, labels[index])
            loss.backward()
            optimizer.step()
            scheduler.step()
    model.eval()
    with torch.no_grad(), torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        correct = sum(
            int((model(x).argmax(-1) == y).sum())
            for x, y in zip(test_images.split(1000), test_labels.split(1000), strict=True)
        )
    return {
        "data": data_name,
        "head": contestant,
        "options": entry.options,
        "seed": seed,
        "accuracy": 100 * correct / len(test_labels),
        "last_loss": loss.item(),
        "seconds": round(time.perf_counter() - start, 1),
        **settings,
        "device": torch.cuda.get_device_name() if device == "cuda" else "CPU",
        "torch": torch.__version__,
        "grassy": grassy.__version__,
        "date": date.today().isoformat(),
    }


def table(rows: list[dict]) -> str:
    """Mean and standard deviation over seeds, and the difference to the linear head."""
    lines = []
    for data_name in SETTINGS:
        accuracies: dict[str, list[float]] = {}
        for row in rows:
            if row["data"] == data_name:
                accuracies.setdefault(row["head"], []).append(row["accuracy"])
        if "linear" not in accuracies:
            continue
        one = next(row for row in rows if row["data"] == data_name)
        settings = ", ".join(f"{key} {value}" for key, value in SETTINGS[data_name].items())
        lines += [
            f"**{data_name}**: {settings}; {one['device']}, torch {one['torch']}, {one['date']}",
            "",
            "| head | top-1, mean ± standard deviation | seeds | against linear |",
            "|---|---|---|---|",
        ]
        linear = statistics.mean(accuracies["linear"])
        for name in CONTESTANTS:
            if values := accuracies.get(name):
                spread = statistics.stdev(values) if len(values) > 1 else math.nan
                mean = statistics.mean(values)
                lines.append(f"| {name} | {mean:.2f} ± {spread:.2f} | {len(values)} | {mean - linear:+.2f} |")
        lines.append("")
    return "\n".join(lines)


def worker(job: tuple[str, Data, str, int]) -> dict[str, object]:
    return train(*job)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, help="folder with CIFAR-100 as train.npz and test.npz")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--output", type=Path, default=HERE, help="folder of results.jsonl and table.md")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    results = args.output / "results.jsonl"
    rows = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    done = {(row["data"], row["head"], row["seed"]) for row in rows}
    data = {"digits": digits()}
    if args.data_dir:
        data["cifar100-10k"] = cifar100(args.data_dir)
    jobs = [
        (name, data[name], contestant, seed)
        for name in data
        for seed in SEEDS
        for contestant in CONTESTANTS
        if (name, contestant, seed) not in done
    ]
    with multiprocessing.get_context("spawn").Pool(args.jobs) as pool, results.open("a") as file:
        for number, row in enumerate(pool.imap_unordered(worker, jobs), 1):
            rows.append(row)
            file.write(json.dumps(row) + "\n")
            file.flush()
            progress = f"{number}/{len(jobs)}  {row['data']}  {row['head']}  seed {row['seed']}"
            print(f"{progress}  {row['accuracy']:.2f} %  {row['seconds']} s", file=sys.stderr, flush=True)
    (args.output / "table.md").write_text(table(rows))
    print(table(rows))


if __name__ == "__main__":
    main()
