"""Accelerate prepares model, optimizer, data and schedule; only clipping asks grassy for the norm of subspaces.

python examples/accelerate_digits.py    # needs: pip install accelerate
"""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import grassy

set_seed(0)
x, y = load_digits(return_X_y=True)
x, x_test, y, y_test = train_test_split(torch.tensor(x).float() / 16, torch.tensor(y), random_state=0)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
grassy.replace_head(model)

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
optimizer = grassy.make_optimizer(model, "adamw", lr=3e-3, head_lr=0.1)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=150)
loader = DataLoader(TensorDataset(x, y), 64, shuffle=True)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)

for _ in range(10):
    for images, labels in loader:
        with accelerator.accumulate(model):
            loss = grassy.classification_loss(model, images, labels)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.unscale_gradients()
                grassy.clip_grad_norm_(model, 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()

trained = accelerator.unwrap_model(model).eval()
accuracy = float((trained(x_test).argmax(-1) == y_test).float().mean())
error = float(grassy.geometry.orthonormality_error(trained[-1].weight.detach()))
print(f"accuracy {accuracy:.3f}, bases are orthonormal to {error:.1e}")
