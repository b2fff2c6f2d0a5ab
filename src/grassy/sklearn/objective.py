"""The full-batch loss and its gradient, computed in blocks of rows to bound the memory."""

from torch import Tensor

from grassy import kernels

#: Number of coordinates W_c x in memory at a time: 64 MiB in float32.
COORDINATES = 2**24


def rows_at_once(weight: Tensor) -> int:
    """Return the number of rows per block for subspaces (C, K, N)."""
    return max(1, COORDINATES // (weight.shape[0] * weight.shape[1]))


class CrossEntropy:
    """The weighted mean of the softmax cross-entropy of the logits γ‖W_c x‖ over unit vectors x."""

    def __init__(self, rows: Tensor, labels: Tensor, sample_weight: Tensor, gamma: float) -> None:
        self.rows, self.labels, self.gamma = rows, labels, gamma
        self.shares = (sample_weight / sample_weight.sum()).to(rows.dtype)

    def __call__(self, weight: Tensor) -> tuple[float, Tensor]:
        """Return the loss and its Euclidean gradient (C, K, N)."""
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
