"""Gradient clipping with the Riemannian norm on subspaces."""

import torch
from torch import Tensor, nn

from grassy import geometry
from grassy.subspaces import named_subspaces

_BLOCK_BYTES = 2**24


@torch.no_grad()
def clip_grad_norm_(model: nn.Module, max_norm: float, error_if_nonfinite: bool = False) -> Tensor:
    """Scale all gradients of the model so that their global norm is at most `max_norm`; returns the norm before.

    For subspaces the norm is that of the Riemannian gradient, since the part of the gradient within a class subspace
    moves nothing. Classes with a non-finite gradient, which the optimizer skips, do not count; with
    `error_if_nonfinite` any such gradient is a RuntimeError, for which a GPU has to be waited for.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"clip_grad_norm_ takes the model, which knows its subspaces, got {type(model).__name__}")
    if not isinstance(max_norm, int | float | Tensor) or not max_norm >= 0:
        raise ValueError(f"max_norm must be a number >= 0, got {max_norm!r}")
    subspaces = {id(weight) for _, weight in named_subspaces(model)}
    with_grad = [p for p in model.parameters() if p.grad is not None]
    if not with_grad:
        return torch.zeros(())
    if error_if_nonfinite and not all(bool(p.grad.isfinite().all()) for p in with_grad):  # type: ignore[union-attr]
        raise RuntimeError("a gradient holds a NaN or an Inf, so that its norm cannot be clipped")
    norms = [_riemannian_norm(p, p.grad) for p in with_grad if id(p) in subspaces]  # type: ignore[arg-type]
    rest: list[Tensor] = [p.grad for p in with_grad if id(p) not in subspaces]  # type: ignore[misc]
    if rest:
        norms.append(torch.nn.utils.get_total_norm(rest))
    total = _norm(torch.stack([norm.to(norms[0]) for norm in norms]))
    torch.nn.utils.clip_grads_with_norm_(with_grad, max_norm, total)
    return total


def _riemannian_norm(weight: Tensor, grad: Tensor) -> Tensor:
    """‖D − (D Wᵀ) W‖ over the finite classes. A difference of squares would cancel.

    Each class is scaled by its largest element first: a gradient that is finite counts, even if its square overflows.
    """
    size = max(1, _BLOCK_BYTES * weight.shape[0] // weight.nbytes)
    norms = []
    for start in range(0, weight.shape[0], size):
        block = slice(start, start + size)
        d = grad[block].to(weight.dtype)
        largest = d.abs().amax((-2, -1), keepdim=True).clamp_min(torch.finfo(d.dtype).tiny)
        lengths = largest.flatten() * torch.linalg.matrix_norm(geometry.project(weight[block], d / largest))
        norms.append(torch.where(largest.flatten().isfinite(), lengths, 0))
    return _norm(torch.cat(norms))


def _norm(values: Tensor) -> Tensor:
    """The norm of a vector, whose squares may overflow; not finite if an element is not."""
    largest = values.max().clamp_min(torch.finfo(values.dtype).tiny)
    return torch.where(largest.isfinite(), largest * torch.linalg.vector_norm(values / largest), largest)
