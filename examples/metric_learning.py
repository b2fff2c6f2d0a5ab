"""A loss of pytorch-metric-learning on the features, beside the loss of the head, in one backward pass.

python examples/metric_learning.py    # needs: pip install pytorch-metric-learning
"""

import torch
from pytorch_metric_learning.losses import TripletMarginLoss
from pytorch_metric_learning.miners import MultiSimilarityMiner
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

import grassy

torch.manual_seed(0)
x, y = load_digits(return_X_y=True)
x, x_test, y, y_test = train_test_split(torch.tensor(x).float() / 16, torch.tensor(y), random_state=0)


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32))
        self.head = grassy.create_head("subspaces", 32, 10)

    def forward(self, images):
        return self.head(self.body(images))


model = Network()
optimizer = grassy.make_optimizer(model, "adamw", lr=3e-3, head_lr=0.1)
triplets, miner = TripletMarginLoss(), MultiSimilarityMiner()
for _ in range(8):
    for rows in torch.randperm(len(x)).split(64):
        features = model.body(x[rows])
        loss = nn.functional.cross_entropy(model.head(features), y[rows])
        loss = loss + 0.5 * triplets(features, y[rows], miner(features, y[rows]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

model.eval()
accuracy = float((model(x_test).argmax(-1) == y_test).float().mean())
error = float(grassy.geometry.orthonormality_error(model.head.weight.detach()))
print(f"accuracy {accuracy:.3f}, bases are orthonormal to {error:.1e}")
