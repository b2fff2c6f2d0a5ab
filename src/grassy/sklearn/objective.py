"""The loss of subspaces on all data, with its gradient: a block of rows at a time, so that memory stays bounded."""

from torch import Tensor

from grassy import kernels

#: So many coordinates, of rows in all class subspaces, are in memory at a time: 64 MiB in float32.
COORDINATES = 2**24


def rows_at_once(weight: Tensor) -> int:
    """How many rows a block has for subspaces (C, K, N)."""
    return max(1, COORDINATES // (weight.shape[0] * weight.shape[1]))


class CrossEntropy:
    """Σ w ℓ/Σ w, where ℓ is the softmax cross-entropy of the logits γ‖W_c x‖ of unit vectors x, and w their weights."""

    def __init__(self, rows: Tensor, labels: Tensor, sample_weight: Tensor, gamma: float) -> None:
        self.rows, self.labels, self.gamma = rows, labels, gamma
        self.shares = (sample_weight / sample_weight.sum()).to(rows.dtype)

    def __call__(self, weight: Tensor) -> tuple[float, Tensor]:
        """The loss, and its Euclidean gradient (C, K, N)."""
        leaf = weight.detach().requires_grad_()
        total = 0.0
        size = rows_at_once(weight)
        for start in range(0, len(self.rows), size):
            part = slice(start, start + size)
            losses = kernels.subspace_cross_entropy(
                self.rows[part], leaf, self.labels[part], self.gamma, normalize=False, reduction="none"
            )
            loss = (losses * self.shares[part]).sum()
            loss.backward()
            total += float(loss.detach())
        assert leaf.grad is not None
        return total, leaf.grad
