"""What spectral steps do to classes whose gradient has become tiny. See README.md beside this file.

    python -m studies.spectral.run

Digits, a small network, plain and spectral steps, with a constant rate of the subspaces and with one that goes to 0. A
minute or two on a CPU.
"""

import argparse
import json
import math
import statistics
from collections.abc import Iterator
from datetime import date
from pathlib import Path

import torch
from torch import Tensor, nn

import grassy
from grassy import geometry

HERE = Path(__file__).parent
SEEDS, EPOCHS, BATCH, K = 5, 60, 64, 4
RARE, FEW = 9, 8  # in half of the runs this class has so few training images
LR = {"gradient": 0.1, "spectral": 0.02}
SCHEDULES = ("constant", "cosine")


def images(rare: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from grassy.data.images import digits

    (x, y), (x_test, y_test) = (
        (torch.from_numpy(part.images[..., 0]).flatten(1) / 255.0, torch.from_numpy(part.labels()))
        for part in (digits("train"), digits("val"))
    )
    kept = (y != RARE) | ((y == RARE).cumsum(0) <= FEW) if rare else torch.ones_like(y, dtype=torch.bool)
    return x[kept], y[kept], x_test, y_test


def batches(count: int, generator: torch.Generator) -> Iterator[Tensor]:
    return iter(torch.randperm(count, generator=generator).split(BATCH))


def angle(before: Tensor, after: Tensor) -> Tensor:
    """The largest principal angle of each class, in degrees."""
    return geometry.principal_angles(before, after).amax(-1).rad2deg()


def train(direction: str, schedule: str, rare: bool, seed: int) -> dict[str, float]:
    """One run; what the last epoch was like, and what came of it."""
    torch.manual_seed(seed)
    x, y, x_test, y_test = images(rare)
    head = grassy.GrassmannHead(64, 10, k=K, gamma="auto")
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), head)
    optimizer = grassy.make_optimizer(model, "sgd", lr=0.1, head_lr=LR[direction], direction=direction)
    generator = torch.Generator().manual_seed(seed)
    for epoch in range(EPOCHS):
        start, path, lengths = head.weight.detach().clone(), torch.zeros(10), []
        share = epoch / EPOCHS
        for group in optimizer.param_groups:  # the network always comes to rest, the subspaces if they are to
            rest = schedule == "cosine" or group["manifold"] == "euclidean"
            base = LR[direction] if group["manifold"] == "grassmann" else 0.1
            group["lr"] = base * (0.5 * (1 + math.cos(math.pi * share)) if rest else 1.0)
        for chosen in batches(len(x), generator):
            optimizer.zero_grad()
            grassy.classification_loss(model, x[chosen], y[chosen]).backward()
            gradient = geometry.project(head.weight.detach(), head.weight.grad)
            lengths.append(torch.linalg.matrix_norm(gradient))
            before = head.weight.detach().clone()
            optimizer.step()
            path += angle(before.double(), head.weight.detach().double()).float()
    model.eval()
    with torch.no_grad():
        logits = model(x_test)
        right = logits.argmax(-1) == y_test
        loss = nn.functional.cross_entropy(logits, y_test)
    return {
        "gradient": float(torch.stack(lengths).mean(0).median()),
        "path": float(path.median()),
        "net": float(angle(start.double(), head.weight.detach().double()).median()),
        "accuracy": 100 * float(right.double().mean()),
        "rare_accuracy": 100 * float(right[y_test == RARE].double().mean()),
        "loss": float(loss),
        "effective_rank": effective_rank(model[:-1](x), y, head),
    }


@torch.no_grad()
def effective_rank(features: Tensor, labels: Tensor, head: grassy.GrassmannHead) -> float:
    """Of the own-class coordinates, the mean over classes: in how many directions of its subspace a class lies."""
    ranks = []
    for number in range(10):
        own = nn.functional.normalize(features[labels == number], dim=-1) @ head.weight[number].T
        shares = torch.linalg.eigvalsh(own.T @ own).clamp_min(0)
        ranks.append(float(shares.sum() ** 2 / shares.square().sum()))
    return statistics.mean(ranks)


def table(results: list[dict[str, object]]) -> str:
    names = {"gradient": 5, "path": 1, "net": 1, "accuracy": 2, "rare_accuracy": 1, "loss": 3, "effective_rank": 2}
    heads = ["‖gradient‖", "path, °", "net, °", "accuracy", "of the 9", "loss", "effective rank"]
    lines = [["9s", "steps", "rate", *heads], ["---"] * (len(heads) + 3)]
    for rare in (False, True):
        for direction in LR:
            for schedule in SCHEDULES:
                own = [r for r in results if (r["direction"], r["schedule"], r["rare"]) == (direction, schedule, rare)]
                cells = [spread([float(str(run[name])) for run in own], digits) for name, digits in names.items()]
                lines.append([f"{FEW}" if rare else "all", direction, schedule, *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def spread(values: list[float], digits: int) -> str:
    if len(values) < 2:
        return f"{values[0]:.{digits}f}"
    error = statistics.stdev(values) / math.sqrt(len(values))
    return f"{statistics.mean(values):.{digits}f} ± {error:.{digits}f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=HERE / "results.json")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    args = parser.parse_args()
    results: list[dict[str, object]] = []
    for rare in (False, True):
        for direction in LR:
            for schedule in SCHEDULES:
                for seed in range(args.seeds):
                    facts = {"direction": direction, "schedule": schedule, "rare": rare, "seed": seed}
                    results.append({**facts, **train(direction, schedule, rare, seed)})
                print(f"{direction}, {schedule}, {'few' if rare else 'all'} 9s: {results[-1]}", flush=True)
    about = {"date": str(date.today()), "torch": torch.__version__, "grassy": grassy.__version__}
    args.output.write_text(json.dumps({**about, "runs": results}, indent=1) + "\n")
    print(table(results))


if __name__ == "__main__":
    main()
