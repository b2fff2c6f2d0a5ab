"""The fast version of the loss in `sharded` for subspaces, by the kernels and chunks of `cross_entropy`.

Each process runs the same loops as a single process, over its own classes and the features of all processes. They end
with the state of each row, which `sharded.losses` combines. Shapes: B batch, C_l classes here, K dimension, N features.
"""

import math
from typing import Any

import torch
from torch import Tensor

from grassy.kernels import collectives, dispatch
from grassy.kernels.cross_entropy import Terms, division, observe_chunks, pieces_of, pull_back_chunks
from grassy.kernels.fused_logits import as_given, no_second_derivative, wants_grad
from grassy.kernels.reference import subspace_logits
from grassy.kernels.sampling import Sampling, TakeClasses, drawn, places_of
from grassy.kernels.sharded import (
    Smoothing,
    applied,
    check,
    gathered_gradient,
    gathered_target,
    losses,
    losses_of_rows,
    own,
    reduced,
    scattered_gradient,
    target_mass,
)
from grassy.mixed_labels import MixedLabels
from grassy.shards import Shard


def sharded_subspace_cross_entropy(
    rows: Tensor,
    target: Tensor | MixedLabels,
    weight: Tensor,
    gamma: float,
    shard: Shard,
    label_smoothing: float = 0.0,
    *,
    reduction: str = "mean",
    ignore_index: int = -100,
    sampling: Sampling | None = None,
    impl: str = "auto",
) -> Tensor:
    """Return the cross-entropy of this process's rows over sharded subspaces, with logits l_c = γ‖W_c x‖.

    All processes must call it together.

    Args:
        rows: Rows (..., N) of this process, sent in their dtype and not normalised.
        target: Labels (...) of the rows, or mixtures of a few labels.
        weight: Subspaces (C_l, K, N) of this process.
        gamma: Scale γ of the logits.
        shard: Classes of this process.
        label_smoothing: As in `torch.nn.functional.cross_entropy`. With sampling, it spreads over the sampled classes.
        reduction: As in `torch.nn.functional.cross_entropy`.
        ignore_index: As in `torch.nn.functional.cross_entropy`.
        sampling: How to sample the classes. None uses all classes.
        impl: "auto", "triton", "chunks" or "reference", as in `subspace_cross_entropy`.

    Returns:
        The loss: a scalar, or (...) with `reduction="none"`.

    Raises:
        ValueError: If the target or an option is invalid.
        RuntimeError: If the named implementation cannot run.
    """
    check(rows, target, label_smoothing, reduction)
    terms = Smoothing(float(label_smoothing), shard.classes, ignore_index, sampling is not None)
    flat, dtype = rows.reshape(-1, rows.shape[-1]), torch.promote_types(rows.dtype, torch.float32)
    labels, weights = gathered_target(target, dtype, shard, ignore_index)
    places, sampled_from, shift = labels - shard.offset, weight.shape[0], 0.0
    if sampling is not None:
        sample = drawn(labels, shard, sampling)
        places, sampled_from = places_of(labels, shard, sample), sample.positives
        shift = -math.log(sampling.rate) if sampling.correct else 0.0
        # The parameter gets its gradient from TakeClasses. Through `to_local`, torch before 2.13 would add zeros to it.
        apart = weight.detach().requires_grad_(weight.requires_grad)
        weight = applied(TakeClasses, apart, sample.places, (sampling.parameter,))
    chosen = dispatch.choose_loss(impl, flat, weight, labels, 1.0)
    if chosen == "reference":
        shifts = weight.new_zeros(weight.shape[0])
        shifts[sampled_from:] = shift

        def logits(x: Tensor, _: Tensor, part: Tensor, shifts: Tensor) -> Tensor:
            return subspace_logits(x, part, gamma, False) + shifts

        how = "reference" if impl == "reference" else "auto"
        loss = losses_of_rows(flat, labels, places, weights, logits, [weight, shifts], shard, terms, how)
    else:
        settings = (float(gamma), sampled_from, shift, chosen == "triton")
        wanted = wants_grad(flat, weight)
        loss = applied(_Fused, flat, weight, labels, places, weights, settings, shard, terms, wanted)
    return reduced(loss, target, reduction, ignore_index)


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        labels: Tensor,
        places: Tensor,
        weights: Tensor | None,
        settings: tuple[float, int, float, bool],
        shard: Shard,
        terms: Smoothing,
        keeps: bool,
    ) -> Tensor:
        x = collectives.gathered(rows, shard.group)
        places = torch.where((places >= 0) & (places < weight.shape[0]), places, -1)
        size, keep = division(x, weight)
        keep = keep if keeps else 0
        state, kept = _observe_shard(x, weight, places, weights, size, keep, *settings)
        loss, normalizer, terms = losses(state[:4], labels, weights, shard, terms, weight.shape[0])
        ctx.save_for_backward(x, weight, labels, places, weights, normalizer, kept)
        ctx.shard, ctx.terms, ctx.settings, ctx.division = shard, terms, settings, (size, keep)
        ctx.dtype = rows.dtype
        return own(loss, shard.group).clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, labels, places, weights, normalizer, kept = ctx.saved_tensors
        for_x, for_weight = ctx.needs_input_grad[:2]
        grad = gathered_gradient(grad, labels, weights, ctx.shard, ctx.terms)
        mass = target_mass(weights, ctx.terms)
        rows = torch.stack([normalizer, torch.ones_like(normalizer) if mass is None else mass])
        facts = (*ctx.division, ctx.terms.eps, ctx.terms.classes, *ctx.settings, for_x, for_weight)
        v, dweight = _pull_back_shard(grad, x, weight, places, weights, rows, kept, *facts)
        dx = scattered_gradient(v, ctx.dtype, ctx.shard.group) if for_x else None
        return dx, dweight if for_weight else None, *(None,) * 7


class _Mixtures:
    """The functions of `cross_entropy` for mixed labels with indices (B, M) and weights (B, M).

    A kernel takes one label per row, or probabilities of all classes. Here it gets no label, and the M entries of each
    row that belong to labels are corrected afterwards. They are recomputed and not added to, because the slope
    T p_c − t'_c must be rounded once.
    """

    def __init__(self, pieces: Any) -> None:
        self.pieces = pieces

    def observe(
        self, y: Tensor, target: MixedLabels, start: int, terms: Terms, state: Tensor, *results: Tensor
    ) -> None:
        self.pieces.observe(y, _no_labels(target), start, terms, state, *results)
        for number in range(target.labels.shape[1]):
            _, here, mine = _label(y, target.labels[:, number], start, terms.k)
            logit = _logit(torch.linalg.vector_norm(mine, dim=-1), target.labels[:, number], terms)
            state[2] += torch.where(here, target.weights[:, number] * logit, 0)

    def pull_back(
        self, y: Tensor, target: MixedLabels, start: int, terms: Terms, rows: Tensor, grad: Tensor, out: Tensor
    ) -> Tensor:
        places, weights = target.labels, target.weights
        labels = [_label(y, each, start, terms.k) for each in places.unbind(-1)]  # before `out`, which may be y
        result: Tensor = self.pieces.pull_back(y, _no_labels(target), start, terms, rows, grad, out)
        of_class, row = result.unflatten(-1, (-1, terms.k)), torch.arange(len(y), device=y.device)
        for number, (index, here, mine) in enumerate(labels):
            norm = torch.linalg.vector_norm(mine, dim=-1)
            same = places == places[:, number : number + 1]
            share = (1 - terms.smoothing) * (weights * same).sum(-1) + terms.smoothing / terms.classes
            logit = _logit(norm, places[:, number], terms)
            slope = grad * (rows[1] * (logit - rows[0]).exp() - share)
            exact = mine * torch.where(norm == 0, 0, terms.gamma * slope / norm).unsqueeze(-1)
            of_class[row, index] = torch.where(here.unsqueeze(-1), exact.to(result.dtype), of_class[row, index])
        return result


def _no_labels(target: MixedLabels) -> Tensor:
    return torch.full_like(target.labels[:, 0], -1)


def _label(y: Tensor, places: Tensor, start: int, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return for one label per row its index in the chunk (B,), whether it is there, and its coordinates (B, K)."""
    of_class = y.unflatten(-1, (-1, k))
    index = places - start
    here = (index >= 0) & (index < of_class.shape[1])
    index = index.where(here, 0)
    return index, here, of_class[torch.arange(len(y), device=y.device), index].float()


def _logit(norms: Tensor, places: Tensor, terms: Terms) -> Tensor:
    """Return the logits (B,) of one label per row, given the lengths of its coordinates."""
    return terms.gamma * norms + terms.shift * (places >= terms.shifted_from)


def _with_labels(kernels: bool, places: Tensor, weights: Tensor | None) -> tuple[Any, Tensor | MixedLabels]:
    """Return the functions for these labels, and the labels as they take them."""
    pieces = pieces_of(kernels)
    if weights is None:
        return pieces, places.contiguous()
    return _Mixtures(pieces), MixedLabels(places, weights.float())


@torch.library.custom_op("grassy::observe_shard", mutates_args=())
def _observe_shard(
    x: Tensor,
    weight: Tensor,
    places: Tensor,
    weights: Tensor | None,
    size: int,
    keep: int,
    gamma: float,
    boundary: int,
    shift: float,
    kernels: bool,
) -> tuple[Tensor, Tensor]:
    """Return the state (5, B) of `cross_entropy.observe` after all classes here, and the stored coordinates."""
    pieces, target = _with_labels(kernels, places, weights)
    terms = Terms(weight.shape[0], weight.shape[1], gamma, 0.0, -2, shift, boundary, finish=False)
    state, loss, rows = (x.new_zeros(*shape, len(x), dtype=torch.float32) for shape in ((5,), (), (2,)))
    state[0] = -torch.inf
    with as_given(x):
        kept = observe_chunks(x, weight, target, terms, size, keep, pieces, state, loss, rows)
    return state, kept


@_observe_shard.register_fake
def _(
    x: Tensor, weight: Tensor, places: Tensor, weights: Tensor | None, size: int, keep: int, *_: Any
) -> tuple[Tensor, Tensor]:
    return x.new_empty(5, x.shape[0], dtype=torch.float32), x.new_empty(x.shape[0] * keep * weight.shape[1])


@torch.library.custom_op("grassy::pull_back_shard", mutates_args=())
def _pull_back_shard(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    places: Tensor,
    weights: Tensor | None,
    rows: Tensor,
    kept: Tensor,
    size: int,
    keep: int,
    eps: float,
    classes: int,
    gamma: float,
    boundary: int,
    shift: float,
    kernels: bool,
    for_x: bool,
    for_weight: bool,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of all rows, in float32, and of the weight, empty if not needed.

    `rows` (2, B) are log Σ exp l_c and T of each row.
    """
    pieces, target = _with_labels(kernels, places, weights)
    terms = Terms(classes, weight.shape[1], gamma, eps, -2, shift, boundary, finish=False)
    grad, kept = grad.contiguous(), kept.contiguous()
    with as_given(x):
        return pull_back_chunks(x, weight, target, terms, size, keep, pieces, rows, grad, kept, for_x, for_weight)


@_pull_back_shard.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=torch.float32), weight.new_empty(weight.shape if rest[-1] else 0)


_pull_back_shard.register_autograd(no_second_derivative)
