"""FSDP2 shards the backbone; the classes of the head are divided over the processes, each of them whole.

torchrun --nproc-per-node 2 fsdp2_digits.py
"""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn

import grassy

dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
mesh = grassy.distributed.mesh()
torch.manual_seed(0)  # the same weights in all processes
x, y = load_digits(return_X_y=True)
x, y = torch.tensor(x).float() / 16, torch.tensor(y)
x_train, y_train = (part[: len(part) // 4 * 3] for part in (x, y))

model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
grassy.replace_head(model, "grassmann", k=4, gamma="auto")
grassy.distributed.shard_head(model, mesh)
model = grassy.distributed.wrap(model, mesh, fsdp=True)
optimizer = grassy.make_optimizer(model, "adamw", lr=3e-3, head_lr=0.1)

for _ in range(200):
    rows = torch.randperm(len(x_train))[:128].chunk(mesh.size())[mesh.get_local_rank()]  # a part of one batch
    optimizer.zero_grad()
    grassy.classification_loss(model, x_train[rows], y_train[rows]).backward()
    grassy.clip_grad_norm_(model, 1.0)
    optimizer.step()

weights = {name: grassy.distributed.whole(tensor) for name, tensor in model.state_dict().items()}
plain = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))  # as a single process has it
grassy.replace_head(plain, "grassmann", k=4, gamma="auto")
plain.load_state_dict(weights)
plain.eval()
accuracy = float((plain(x[len(x_train) :]).argmax(-1) == y[len(x_train) :]).float().mean())
error = float(grassy.geometry.orthonormality_error(plain[-1].weight.detach()))
if dist.get_rank() == 0:
    print(f"accuracy {accuracy:.3f}, bases are orthonormal to {error:.1e}")
dist.destroy_process_group()
