"""Evaluation of classes that are divided among processes: the largest logits of each feature, or all of a few classes.

As in `sharded`, every process gathers the features of all and computes the logits of its own classes. What the owner of
a feature needs of them is then sent to it. Shapes: B = W·B_l rows of all processes, C classes, C_l of them here.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from grassy.kernels import collectives
from grassy.kernels.sharded import GatherRows, Logits, applied, chunk_size, chunks, nothing_observed, observed, own
from grassy.shards import Shard

#: The largest number of logits (B_l x C) that a process is sent: 256 MiB in float32.
GATHER_AT_MOST = 2**26


class ExchangeLogits(torch.autograd.Function):
    """The logits (B_l, C) of this process's rows from the logits (B, C_l) that each process has of all rows."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, shard: Shard) -> Tensor:
        ctx.shard, ctx.here = shard, logits.shape[1]
        world = collectives.world_size(shard.group)
        each = -(-shard.classes // world)
        blocks = torch.nn.functional.pad(logits, (0, each - logits.shape[1])).unflatten(0, (world, -1))
        return collectives.exchanged(blocks, shard.group).movedim(0, 1).flatten(1)[:, : shard.classes].contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        world = collectives.world_size(ctx.shard.group)
        each = -(-ctx.shard.classes // world)
        padded = torch.nn.functional.pad(grad, (0, world * each - grad.shape[1]))
        blocks = collectives.exchanged(padded.unflatten(1, (world, each)).movedim(1, 0), ctx.shard.group)
        return blocks.flatten(0, 1)[:, : ctx.here] / world, None


def sharded_logits(
    rows: Tensor, target: Tensor | None, logits: Logits, params: Sequence[Tensor], shard: Shard
) -> Tensor:
    """All logits (..., C) of this process's rows (..., N): for few classes, since each process gets those of all."""
    flat = rows.reshape(-1, rows.shape[-1])
    if flat.shape[0] * shard.classes > GATHER_AT_MOST:
        raise ValueError(
            f"logits of {flat.shape[0]:,} features and {shard.classes:,} classes that are divided over processes are "
            f"more than the {GATHER_AT_MOST:,} that are gathered: use head.top(features, 5), or a loss by "
            "grassy.classification_loss"
        )
    x = applied(GatherRows, flat, shard.group)
    labels = None if target is None else collectives.gathered(target.reshape(-1).long(), shard.group) - shard.offset
    return applied(ExchangeLogits, logits(x, labels, *params), shard).reshape(*rows.shape[:-1], shard.classes)


@torch.no_grad()
def sharded_top(
    rows: Tensor, logits: Logits, params: Sequence[Tensor], shard: Shard, count: int
) -> tuple[Tensor, Tensor]:
    """The `count` largest logits of each of this process's rows (..., N), and their classes: (..., count) each."""
    flat = rows.reshape(-1, rows.shape[-1])
    x = collectives.gathered(flat, shard.group)
    values = x.new_full((x.shape[0], count), -torch.inf, dtype=torch.promote_types(params[0].dtype, torch.float32))
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
    """The largest softmax probability of each of this process's rows (..., N): (...)."""
    x = collectives.gathered(rows.reshape(-1, rows.shape[-1]), shard.group)
    nobody = torch.full((x.shape[0],), -1, dtype=torch.int64, device=x.device)
    state = nothing_observed(x, torch.promote_types(params[0].dtype, torch.float32))
    for start, stop in chunks(len(params[0]), chunk_size(x.shape[0], params)):
        state = observed(state, logits(x, None, *(p[start:stop] for p in params)).to(state.dtype), nobody)
    top = collectives.maximum(state[0], shard.group)
    exponentials = collectives.total(state[1] * (state[0] - top).exp(), shard.group)
    return own(1 / exponentials, shard.group).reshape(rows.shape[:-1])
