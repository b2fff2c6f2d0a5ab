"""A user's program, for a type checker that sees the installed wheel: its annotations are found, and hold."""

from typing import assert_type

import torch
from torch import nn

import grassy

model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 5))
head = grassy.replace_head(model)
optimizer: torch.optim.Optimizer = grassy.make_optimizer(model, "sgd", lr=0.1)
loss = grassy.classification_loss(model, torch.randn(4, 8), torch.arange(4))
assert_type(head, grassy.Head)
assert_type(loss, torch.Tensor)
assert_type(grassy.geometry.random_subspace(3, 2, 8), torch.Tensor)
assert_type(grassy.__version__, str)
assert_type(grassy.distributed.is_sharded(model), bool)
