"""Evaluation of sharded classes: the largest logits of each feature, or all logits if there are few classes.

As in `sharded`, every process gathers all features and computes the logits of its own classes. It then sends to the
owner of each feature what it needs. Shapes: W processes, B = W·B_l rows in all, C classes, C_l of them here.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from grassy.kernels import collectives
from grassy.kernels.cross_entropy import chunks
from grassy.kernels.sharded import GatherRows, Logits, applied, chunk_size, exact_dtype, nothing_observed, observed, own
from grassy.shards import Shard

#: Largest number of logits (B_l x C) that a process receives: 256 MiB in float32.
GATHER_AT_MOST = 2**26


class ExchangeLogits(torch.autograd.Function):
    """Turns the logits (B, C_l) of all rows and the own classes into those (B_l, C) of the own rows and all classes."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, shard: Shard) -> Tensor:
        ctx.shard, ctx.here = shard, logits.shape[1]
        world = collectives.world_size(shard.group)
        each = -(-shard.classes // world)
        blocks = torch.nn.functional.pad(logits, (0, each - logits.shape[1])).unflatten(0, (world, -1))
        return collectives.exchanged(blocks, shard.group).movedim(0, 1).flatten(1)[:, : shard.classes].contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        world = collectives.world_size(ctx.shard.group)
        each = -(-ctx.shard.classes // world)
        padded = torch.nn.functional.pad(grad, (0, world * each - grad.shape[1]))
        blocks = collectives.exchanged(padded.unflatten(1, (world, each)).movedim(1, 0), ctx.shard.group)
        return blocks.flatten(0, 1)[:, : ctx.here] / world, None


def sharded_logits(
    rows: Tensor, target: Tensor | None, logits: Logits, params: Sequence[Tensor], shard: Shard
) -> Tensor:
    """Return all logits of this process's rows. Each process receives the logits of all classes, so C must be small.

    Args:
        rows: Rows (..., N) of this process.
        target: Labels (...), or None.
        logits: Function `logits(x, labels, *params)` that returns the logits of some classes.
        params: Parameters of the classes of this process, one row per class.
        shard: Classes of this process.

    Returns:
        Logits (..., C).

    Raises:
        ValueError: If there are more than 2^26 logits.
    """
    flat = rows.reshape(-1, rows.shape[-1])
    if flat.shape[0] * shard.classes > GATHER_AT_MOST:
        raise ValueError(
            f"the logits of {flat.shape[0]:,} features and {shard.classes:,} sharded classes are more than the "
            f"{GATHER_AT_MOST:,} that can be gathered: use head.top(features, 5), or compute the loss with "
            "grassy.classification_loss"
        )
    x = applied(GatherRows, flat, shard.group)
    labels = None if target is None else collectives.gathered(target.reshape(-1).long(), shard.group) - shard.offset
    return applied(ExchangeLogits, logits(x, labels, *params), shard).reshape(*rows.shape[:-1], shard.classes)


@torch.no_grad()
def sharded_top(
    rows: Tensor, logits: Logits, params: Sequence[Tensor], shard: Shard, count: int
) -> tuple[Tensor, Tensor]:
    """Return the largest logits of this process's rows and their classes, without storing all logits at once.

    Args:
        rows: Rows (..., N) of this process.
        logits: Function `logits(x, labels, *params)` that returns the logits of some classes.
        params: Parameters of the classes of this process, one row per class.
        shard: Classes of this process.
        count: How many logits to return per row.

    Returns:
        Logits (..., count) in descending order and the indices (..., count) of their classes.
    """
    flat = rows.reshape(-1, rows.shape[-1])
    x = collectives.gathered(flat, shard.group)
    values = x.new_full((x.shape[0], count), -torch.inf, dtype=exact_dtype(params))
    places = torch.zeros(x.shape[0], count, dtype=torch.int64, device=x.device)
    for start, stop in chunks(len(params[0]), chunk_size(x.shape[0], params)):
        part = logits(x, None, *(p[start:stop] for p in params)).to(values.dtype)
        best, index = part.topk(min(count, stop - start), dim=-1)
        here = index + (shard.offset + start)
        values, places = _largest(torch.cat([values, best], -1), torch.cat([places, here], -1), count)
    world = collectives.world_size(shard.group)
    blocks = (collectives.exchanged(each.unflatten(0, (world, -1)), shard.group) for each in (values, places))
    values, places = (each.movedim(0, 1).flatten(1) for each in blocks)
    values, places = _largest(values, places, count)
    return values.reshape(*rows.shape[:-1], count), places.reshape(*rows.shape[:-1], count)


def _largest(values: Tensor, places: Tensor, count: int) -> tuple[Tensor, Tensor]:
    values, index = values.topk(count, dim=-1)
    return values, places.gather(-1, index)


@torch.no_grad()
def sharded_largest_probability(rows: Tensor, logits: Logits, params: Sequence[Tensor], shard: Shard) -> Tensor:
    """Return the largest softmax probability of each of this process's rows, (...).

    Args:
        rows: Rows (..., N) of this process.
        logits: Function `logits(x, labels, *params)` that returns the logits of some classes.
        params: Parameters of the classes of this process, one row per class.
        shard: Classes of this process.
    """
    x = collectives.gathered(rows.reshape(-1, rows.shape[-1]), shard.group)
    nobody = torch.full((x.shape[0],), -1, dtype=torch.int64, device=x.device)
    state = nothing_observed(x, exact_dtype(params))
    for start, stop in chunks(len(params[0]), chunk_size(x.shape[0], params)):
        state = observed(state, logits(x, None, *(p[start:stop] for p in params)).to(state.dtype), nobody)
    top = collectives.maximum(state[0], shard.group)
    exponentials = collectives.total(state[1] * (state[0] - top).exp(), shard.group)
    return own(1 / exponentials, shard.group).reshape(rows.shape[:-1])
