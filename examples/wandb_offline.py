"""What Weights & Biases may log of a head: plain numbers. In offline mode nothing leaves the machine.

python examples/wandb_offline.py    # needs: pip install wandb
"""

import torch
import wandb
from sklearn.datasets import load_digits
from torch import nn

import grassy

torch.manual_seed(0)
x, y = load_digits(return_X_y=True)
x, y = torch.tensor(x).float() / 16, torch.tensor(y)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
head = grassy.replace_head(model)
optimizer = grassy.make_optimizer(model, "adamw", lr=3e-3, head_lr=0.1)

with wandb.init(project="digits", mode="offline", config=grassy.heads.describe(head)) as run:
    for _ in range(5):
        for rows in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            loss = grassy.classification_loss(model, x[rows], y[rows])
            loss.backward()
            optimizer.step()
        angles = grassy.analysis.pairwise_principal_angles(head.weight.detach())
        nearest = angles[..., 0].fill_diagonal_(torch.pi / 2).amin().rad2deg()
        rates = {f"lr/{group['manifold']}": group["lr"] for group in optimizer.param_groups}
        run.log({"loss": loss.item(), "smallest angle between classes": float(nearest), **rates})
    summary = dict(run.summary)
print("logged:", sorted(name for name in summary if not name.startswith("_")))
