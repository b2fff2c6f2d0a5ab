"""Open-set recognition: train on seven digits and tell the other three apart by `outlier_score`.

    python examples/open_set.py [--seeds 5]

Scores are compared by AUROC, the chance that an image of an unknown class scores higher than one of a known class.
Those of a softmax layer are one minus its largest probability and the energy score (Liu et al. 2020). All models share
data, backbone and budget. Which digits are unknown changes with the seed.
"""

import argparse
import statistics

import torch
from sklearn.datasets import load_digits
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import train_test_split
from torch import nn

import grassy

HEADS = {
    "subspaces": ("subspaces", {"k": 8}),
    "softmax": ("linear", {}),
    "standardised softmax": ("linear", {"standardize": True}),
}


def train(name, options, x, y):
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.Linear(64, 7))
    grassy.replace_head(model, name, **options)
    optimizer = grassy.make_optimizer(model, "adamw", lr=3e-3, weight_decay=0.05)
    for _ in range(20):
        for rows in torch.randperm(len(x)).split(128):
            optimizer.zero_grad()
            grassy.classification_loss(model, x[rows], y[rows]).backward()
            optimizer.step()
    return model.eval()


@torch.no_grad()
def scores(label, model, x):
    """Each score of a model by name: the higher, the stranger the image."""
    features, head = model[:-1](x), model[-1]
    if label == "subspaces":
        return {label: head.outlier_score(features)}  # the share of the energy outside the best class subspace
    return {
        f"{label}, probability": head.outlier_score(features),  # one minus the largest
        f"{label}, energy": -head(features).logsumexp(-1),
    }


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--seeds", type=int, default=5, help="number of times to train each model")
args = parser.parse_args()
x, y = load_digits(return_X_y=True)
x, y = torch.tensor(x).float() / 16, torch.tensor(y)
found: dict[str, list[float]] = {}
flagged = []
for seed in range(args.seeds):
    unknown = torch.tensor([(3 * seed + i) % 10 for i in range(3)])
    known = torch.tensor([digit for digit in range(10) if digit not in unknown])
    is_known = torch.isin(y, known)
    labels = torch.searchsorted(known, y[is_known])
    x_train, x_test, y_train, _ = train_test_split(x[is_known], labels, stratify=labels, random_state=seed)
    strange = torch.cat([torch.zeros(len(x_test)), torch.ones(int((~is_known).sum()))])
    for label, (name, options) in HEADS.items():
        torch.manual_seed(seed)
        model = train(name, options, x_train, y_train)
        for score, values in scores(label, model, torch.cat([x_test, x[~is_known]])).items():
            found.setdefault(score, []).append(float(roc_auc_score(strange, values)))
            if label == "subspaces":  # one in twenty known images may be flagged
                threshold = values[: len(x_test)].quantile(0.95)
                flagged.append(float((values[len(x_test) :] > threshold).float().mean()))

for score, values in found.items():
    ahead = sum(ours > other for ours, other in zip(found["subspaces"], values, strict=True))
    note = "" if score == "subspaces" else f", subspaces ahead in {ahead} of {args.seeds} seeds"
    print(f"{score:34} AUROC {statistics.fmean(values):.3f} ({min(values):.3f} to {max(values):.3f}){note}")
print(f"with 5 % of known digits flagged, subspaces flag {statistics.fmean(flagged):.0%} of the unknown ones")
