"""Gradient clipping with the Riemannian norm on subspaces."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from grassy import geometry, shards
from grassy.kernels.collectives import gathered
from grassy.kernels.sampling import gradient_of_some
from grassy.subspaces import named_subspaces

_BLOCK_BYTES = 2**24


@torch.no_grad()
def clip_grad_norm_(model: nn.Module, max_norm: float, error_if_nonfinite: bool = False) -> Tensor:
    """Scale all gradients of the model so that their global norm is at most `max_norm`.

    Use it in place of `torch.nn.utils.clip_grad_norm_`. Subspaces contribute the norm of their Riemannian gradient,
    because the gradient component within a class subspace has no effect. Classes with a non-finite gradient contribute
    nothing, since the optimizer skips them.

    Args:
        model: The model, not its parameters: it knows which of them are subspaces.
        max_norm: Largest global 2-norm.
        error_if_nonfinite: Raise if any gradient is non-finite. This synchronises with the GPU.

    Returns:
        The norm before clipping, a scalar tensor.

    Raises:
        TypeError: If `model` is not an `nn.Module`.
        ValueError: If `max_norm` is negative or not a number.
        RuntimeError: If `error_if_nonfinite` is set and a gradient holds a NaN or an Inf.

    Examples:
        >>> import torch, grassy
        >>> model = grassy.GrassmannHead(64, 10, k=4)
        >>> model(torch.randn(8, 64)).sum().backward()
        >>> norm = grassy.clip_grad_norm_(model, max_norm=1.0)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"clip_grad_norm_ takes the model, which knows its subspaces, got {type(model).__name__}")
    if not isinstance(max_norm, int | float | Tensor) or not max_norm >= 0:
        raise ValueError(f"max_norm must be a number >= 0, got {max_norm!r}")
    subspaces = {id(weight) for _, weight in named_subspaces(model)}
    with_grad = [p for p in model.parameters() if p.grad is not None or gradient_of_some(p) is not None]
    if not with_grad:
        return torch.zeros(())
    # Parameters are grouped by the processes that shard them: torch cannot mix DTensors and plain tensors in a norm.
    together: dict[tuple[Any, ...], list[nn.Parameter]] = {}
    for p in with_grad:
        together.setdefault(tuple(shards.groups_of(p)), []).append(p)
    if error_if_nonfinite:
        # A list, so that all processes communicate about every group, whatever each finds in the first.
        found = [_holds_nonfinite(params, groups) for groups, params in together.items()]
        if any(found):
            raise RuntimeError("a gradient holds a NaN or an Inf, so the norm cannot be clipped")
    parts = [_norms_of_all(params, subspaces, groups) for groups, params in together.items()]
    total = _norm(torch.cat([part.to(parts[0]) for part in parts]))
    plain = [p for p in with_grad if not shards.is_dtensor(p) and p.grad is not None]
    torch.nn.utils.clip_grads_with_norm_(plain, max_norm, total)
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for p in with_grad:
        if shards.is_dtensor(p) or p.grad is None:
            _, grad = _here(p)
            grad.mul_(factor.to(grad.device))
    return total


def _here(p: nn.Parameter) -> tuple[Tensor, Tensor]:
    """Return the local weight and gradient: of all classes, or of the sampled classes that have a gradient."""
    weight = shards.local(p.detach())
    if p.grad is not None:
        return weight, shards.local(p.grad)
    places, grad = gradient_of_some(p)  # type: ignore[misc]
    return weight[places], grad


def _holds_nonfinite(params: list[nn.Parameter], groups: tuple[Any, ...]) -> bool:
    """Whether any of the parameters, sharded over the same groups, has a non-finite gradient in any process."""
    grads = [_here(p)[1] for p in params]
    bad = torch.stack([(~grad.isfinite()).any().to(grads[0].device) for grad in grads]).any().to(torch.uint8).reshape(1)
    for group in groups:
        bad = gathered(bad, group)
    return bool(bad.any())


def _norms_of_all(params: list[nn.Parameter], subspaces: set[int], groups: tuple[Any, ...]) -> Tensor:
    """Return the norm of the gradients in each process, for parameters that are sharded over the same groups.

    It returns a vector of norms and not a sum of squares, which may overflow.
    """
    pairs = [(p, *_here(p)) for p in params]
    norms = [riemannian_norm(w, grad) for p, w, grad in pairs if id(p) in subspaces]
    if rest := [grad for p, _, grad in pairs if id(p) not in subspaces]:
        norms.append(torch.nn.utils.get_total_norm(rest))
    norm = _norm(torch.stack([norm.to(norms[0]) for norm in norms])).reshape(1)
    for group in groups:
        norm = gathered(norm, group)
    return norm


def blocks_of_classes(weight: Tensor) -> Iterator[slice]:
    """Yield ranges of classes whose weights take about 16 MiB. A large weight has no room for a copy beside it."""
    size = max(1, _BLOCK_BYTES * weight.shape[0] // max(1, weight.nbytes))
    for start in range(0, weight.shape[0], size):
        yield slice(start, start + size)


def riemannian_norm(weight: Tensor, grad: Tensor) -> Tensor:
    """Return ‖D − (D Wᵀ) W‖ over the classes with a finite gradient. A difference of squares would cancel.

    It scales each class by its largest element first, so that the square of a finite gradient cannot overflow.
    """
    if not weight.numel():  # a process without classes
        return weight.new_zeros(())
    norms = []
    for block in blocks_of_classes(weight):
        d = grad[block].to(weight.dtype)
        largest = d.abs().amax((-2, -1), keepdim=True).clamp_min(torch.finfo(d.dtype).tiny)
        lengths = largest.flatten() * torch.linalg.matrix_norm(geometry.project(weight[block], d / largest))
        norms.append(torch.where(largest.flatten().isfinite(), lengths, 0))
    return _norm(torch.cat(norms))


def _norm(values: Tensor) -> Tensor:
    """Return the 2-norm of a vector whose squares may overflow. It is non-finite if an element is."""
    largest = values.max().clamp_min(torch.finfo(values.dtype).tiny)
    return torch.where(largest.isfinite(), largest * torch.linalg.vector_norm(values / largest), largest)
