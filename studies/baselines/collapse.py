"""Why margin heads may fail to start: everything turns towards one direction. See README.md beside this file.

    python -m studies.baselines.collapse --data-dir DIR          # CIFAR-100 as for run.py; minutes on a laptop

The margin's penalty s (cos θ − cos(θ + m)) is largest at right angles, where training starts, and least at θ = 0. The
quickest way down is to turn all features and all class vectors to one direction, where the loss is
s (1 − cos m) + ln(C − 1). This prints, as training goes on, how near to that state it is.
"""

import argparse
import json
import math
from datetime import date
from pathlib import Path

import torch
from torch import nn

import grassy
from studies.baselines.run import HERE, block, cifar100

CONTESTANTS = {
    "cosine": ("cosine", {}),
    "arcface": ("arcface", {}),
    "subcenter-arcface": ("subcenter-arcface", {}),
    "subcenter-arcface, s=25, m=0.1": ("subcenter-arcface", {"scale": 25.0, "margin": 0.1}),
}


def mean_cosine(vectors: torch.Tensor) -> float:
    """The mean cosine of two different vectors: 1 if all point the same way."""
    unit = nn.functional.normalize(vectors.flatten(0, -2), dim=-1)
    count = len(unit)
    return float((unit.sum(0).square().sum() - count) / (count * (count - 1)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--output", type=Path, default=HERE / "collapse.json")
    args = parser.parse_args()
    (images, labels), _ = cifar100(args.data_dir)
    rows = []
    for label, (name, options) in CONTESTANTS.items():
        torch.manual_seed(0)
        backbone = nn.Sequential(block(3, 32, True), block(32, 64, True), block(64, 128, True), block(128, 256))
        backbone.extend([nn.AdaptiveAvgPool2d(1), nn.Flatten()])
        head = grassy.create_head(name, 256, 100, **options)
        model = nn.Sequential(backbone, head)
        optimizer = grassy.make_optimizer(model, "sgd", lr=0.05, momentum=0.9, weight_decay=5e-4)
        margin, scale = getattr(head, "margin", 0.0), head.scale
        collapsed = scale * (1 - math.cos(margin)) + math.log(99)
        for epoch in range(1, args.epochs + 1):
            total = 0.0
            batches = torch.randperm(len(labels)).split(128)
            for index in batches:
                loss = grassy.classification_loss(model, images[index], labels[index])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                total += loss.item() / len(batches)
            with torch.no_grad():
                features = backbone(images[:2000])
            row = {
                "head": label,
                "epoch": epoch,
                "loss": total,
                "loss_if_collapsed": collapsed,
                "mean_cosine_of_features": mean_cosine(features),
                "mean_cosine_of_class_vectors": mean_cosine(head.weight.detach()),
            }
            rows.append(row)
            print(
                f"{label:32s} epoch {epoch}  loss {total:6.2f} (collapsed: {collapsed:5.2f})  mean cosine of features "
                f"{row['mean_cosine_of_features']:.2f}, of class vectors {row['mean_cosine_of_class_vectors']:.2f}",
                flush=True,
            )
    result = {"date": date.today().isoformat(), "torch": torch.__version__, "grassy": grassy.__version__, "rows": rows}
    args.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
