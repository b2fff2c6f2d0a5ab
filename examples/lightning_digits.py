"""Lightning drives the optimizer as any other. Clipping and averaging need the norm and the mean of subspaces.

python examples/lightning_digits.py    # needs: pip install lightning
"""

import lightning
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import grassy


class Digits(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        grassy.replace_head(self.model)
        self.average = grassy.AveragedModel(self.model, decay=0.95).requires_grad_(False)

    def training_step(self, batch, _):
        return grassy.classification_loss(self.model, *batch)

    def validation_step(self, batch, _):
        images, labels = batch
        self.log("accuracy", (self.average(images).argmax(-1) == labels).float().mean())

    def configure_optimizers(self):
        optimizer = grassy.make_optimizer(self.model, "adamw", lr=3e-3, head_lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=self.trainer.max_epochs)]

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        if gradient_clip_val is not None:
            grassy.clip_grad_norm_(self.model, gradient_clip_val)

    def optimizer_step(self, *args, **kwargs):
        super().optimizer_step(*args, **kwargs)
        self.average.update_parameters(self.model)


lightning.seed_everything(0)
x, y = load_digits(return_X_y=True)
x, x_test, y, y_test = train_test_split(torch.tensor(x).float() / 16, torch.tensor(y), random_state=0)
module = Digits()
trainer = lightning.Trainer(
    max_epochs=8, gradient_clip_val=1.0, accelerator="cpu", logger=False, enable_progress_bar=False
)
trainer.fit(module, DataLoader(TensorDataset(x, y), 64, shuffle=True))
accuracy = trainer.validate(module, DataLoader(TensorDataset(x_test, y_test), 512), verbose=False)[0]["accuracy"]
error = float(grassy.geometry.orthonormality_error(module.average.module[-1].weight))
print(f"accuracy of the average {accuracy:.3f}, its bases are orthonormal to {error:.1e}")
