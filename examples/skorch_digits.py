"""skorch makes an estimator of the network. It builds the optimizer itself, so one method of it is ours.

python examples/skorch_digits.py    # needs: pip install skorch
"""

import skorch
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import cross_val_score, train_test_split
from torch import nn

import grassy


class Classifier(skorch.NeuralNetClassifier):
    def initialize_optimizer(self, *args, **kwargs):
        self.optimizer_ = grassy.make_optimizer(self.module_, "adamw", lr=self.lr, head_lr=0.1)
        return self


def network(k=4):
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    grassy.replace_head(model, k=k)
    return model


torch.manual_seed(0)
x, y = load_digits(return_X_y=True)
x, x_test, y, y_test = train_test_split(x.astype("float32") / 16, y, random_state=0)
# The head gives logits, and CrossEntropyLoss takes logits; skorch then knows that probabilities are their softmax.
net = Classifier(
    network, criterion=nn.CrossEntropyLoss, lr=3e-3, batch_size=64, max_epochs=8, train_split=None, verbose=0
)
net.fit(x, y)
accuracy = net.score(x_test, y_test)
error = float(grassy.geometry.orthonormality_error(net.module_[-1].weight.detach()))
print(f"accuracy {accuracy:.3f}, bases are orthonormal to {error:.1e}")
scores = {k: float(cross_val_score(net.set_params(module__k=k), x, y, cv=2).mean()) for k in (1, 4)}
print("cross-validated accuracy by k:", {k: round(score, 3) for k, score in scores.items()})
