"""Softmax cross-entropy over classes that are sharded over processes: the specification, and a version in chunks.

W processes hold C classes, process s those of the set S_s. Each has B_l features with labels. Every process gathers all
B = W·B_l features and computes the logits l_c of its own classes. For each row it finds, over c in S_s,

    m_s = max l_c,  e_s = Σ exp(l_c − m_s),  q_s = the logit of the label if that is here, else 0,  a_s = Σ l_c.

An empty shard has (−∞, 0, 0, 0). With M = max m_s, and the rest summed over the processes,

    E = Σ e_s exp(m_s − M),  loss = log E − (1 − ε)(q − M) − ε (a/C − M),  ∂loss/∂l_c = exp(l_c − M)/E − t'_c,

where t'_c = (1 − ε)t_c + ε/C is the smoothed target and C the number of all classes. An update takes six collectives,
whose size depends neither on C nor on K. The forward gathers features and labels, reduces m_s, and reduces the sums.
The backward gathers the gradients of the losses and reduce-scatters those of the features.

Each process has the losses of its own rows, as under DDP, which averages gradients over processes. The gradients of
sharded parameters are not averaged, so they are divided by W here. The features get the sum for their rows.

`logits(x, labels, *params)` returns the logits of a chunk of classes. x is (B, N), and params have one row per class.
Labels (B,) are relative to the first class of the chunk and may lie outside. The params may belong to some classes of
the shard only. Then `places` (B,) are the indices of the labels among them, out of range for labels elsewhere.
Shapes: B batch, C classes, N features.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from grassy.kernels import collectives
from grassy.shards import Shard

#: Number of logits, or coordinates of subspaces, that a process computes at a time.
CHUNK = 2**24
#: Up to this number they are computed at once and stored for the backward.
WHOLE = 2**26

Logits = Callable[..., Tensor]


class Smoothing(NamedTuple):
    """Label smoothing ε, the number of all classes, over which ε is spread, and the label to ignore."""

    eps: float
    classes: int
    ignore_index: int


# --- the pieces -------------------------------------------------------------------------------------------------


def nothing_observed(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the state (4, B) of an empty shard: m, e, q and a."""
    state = x.new_zeros(4, x.shape[0], dtype=dtype)
    state[0] = -torch.inf
    return state


def observed(state: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
    """Return the state updated by the logits (B, c) of c more classes. Labels (B,) are relative to the first one."""
    maximum, exponentials, picked, total = state
    raised = torch.maximum(maximum, logits.amax(-1))
    exponentials = exponentials * (maximum - raised).exp() + (logits - raised.unsqueeze(-1)).exp().sum(-1)
    picked = picked + logits.where(_is_label(labels, logits), 0).sum(-1)
    return torch.stack([raised, exponentials, picked, total + logits.sum(-1)])


def losses(state: Tensor, labels: Tensor, shard: Shard, terms: Smoothing, here: int) -> tuple[Tensor, Tensor]:
    """Return the losses (B,) and log Σ exp l_c (B,) from the states (4, B) of all processes, by two collectives.

    Labels count over all classes, and `here` is the number of logits in the state. A label that is no class gives NaN.
    Logits are relative to the largest one before the sum, because a small loss is a small difference of logits.
    """
    maximum, exponentials, picked, total = state
    top = collectives.maximum(maximum, shard.group)
    is_here = (labels >= shard.offset) & (labels < shard.stop)
    sums = [exponentials * (maximum - top).exp(), torch.where(is_here, picked - top, 0)]
    if terms.eps:
        sums.append(total - here * top)
    exponential, label, *rest = collectives.total(torch.stack(sums), shard.group)
    logarithm = exponential.log()
    label = label.masked_fill((labels < 0) | (labels >= shard.classes), torch.nan)
    loss = logarithm - (1 - terms.eps) * label
    if terms.eps:
        loss = loss - terms.eps / terms.classes * rest[0]
    return loss.masked_fill(labels == terms.ignore_index, 0), top + logarithm


def slopes(logits: Tensor, labels: Tensor, normalizer: Tensor, grad: Tensor, terms: Smoothing) -> Tensor:
    """Return ∂loss/∂l_c (B, c) times the gradients of the losses (B,), given normalizer = log Σ exp l_c (B,)."""
    probabilities = (logits - normalizer.unsqueeze(-1)).exp()
    shares = _is_label(labels, logits).to(logits.dtype) * (1 - terms.eps) + terms.eps / terms.classes
    return grad.unsqueeze(-1) * (probabilities - shares)


def own(rows: Tensor, group: Any) -> Tensor:
    """Return this process's rows (B_l, ...) among those of all processes (W·B_l, ...)."""
    if (world := collectives.world_size(group)) == 1:
        return rows
    each = rows.shape[0] // world
    rank = dist.get_rank(group)
    return rows[rank * each : (rank + 1) * each]


def _is_label(labels: Tensor, logits: Tensor) -> Tensor:
    return labels.unsqueeze(-1) == torch.arange(logits.shape[-1], device=labels.device)


# --- the specification ------------------------------------------------------------------------------------------


class GatherRows(torch.autograd.Function):
    """Gathers the features (B, N) of all processes. The backward reduce-scatters their gradients."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Any) -> Tensor:
        ctx.group, ctx.dtype = group, rows.dtype
        return collectives.gathered(rows, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return scattered_gradient(grad, ctx.dtype, ctx.group), None


class SoftmaxOverShards(torch.autograd.Function):
    """Computes the losses (B_l,) of this process's rows from its logits (B, C_l) of all rows."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, places: Tensor, shard: Shard, terms: Smoothing) -> Tensor:
        state = nothing_observed(logits, logits.dtype)
        if logits.shape[-1]:
            state = observed(state, logits, places)
        loss, normalizer = losses(state, labels, shard, terms, logits.shape[-1])
        ctx.save_for_backward(logits, labels, places, normalizer)
        ctx.shard, ctx.terms = shard, terms
        return own(loss, shard.group).clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        logits, labels, places, normalizer = ctx.saved_tensors
        grad = gathered_gradient(grad, labels, ctx.shard, ctx.terms)
        return slopes(logits, places, normalizer, grad, ctx.terms), None, None, None, None


def gathered_gradient(grad: Tensor, labels: Tensor, shard: Shard, terms: Smoothing) -> Tensor:
    """Gather the gradients (B,) of all losses, divided by W: see the top of this file."""
    grad = collectives.gathered(grad, shard.group) / collectives.world_size(shard.group)
    return grad.masked_fill(labels == terms.ignore_index, 0)


def scattered_gradient(grad: Tensor, dtype: torch.dtype, group: Any) -> Tensor:
    """Sum the gradients (B, N) of all processes and return those of this process's features, (B_l, N).

    The sum is in at least float32.
    """
    exact = torch.promote_types(grad.dtype, torch.float32)
    return (collectives.scattered_sum(grad.to(exact), group) * collectives.world_size(group)).to(dtype)


def _reference(
    rows: Tensor,
    labels: Tensor,
    places: Tensor,
    logits: Logits,
    params: Sequence[Tensor],
    shard: Shard,
    terms: Smoothing,
) -> Tensor:
    own_logits = logits(applied(GatherRows, rows, shard.group), places, *params)
    return applied(SoftmaxOverShards, own_logits, labels, places, shard, terms)


def applied(function: type[torch.autograd.Function], *inputs: Any) -> Tensor:
    """Apply an autograd function, with types that torch lacks."""
    result: Tensor = function.apply(*inputs)  # type: ignore[no-untyped-call]
    return result


# --- in chunks of classes ---------------------------------------------------------------------------------------


class _InChunks(torch.autograd.Function):
    """The same with one chunk of classes at a time, whose logits the backward recomputes."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        labels: Tensor,
        places: Tensor,
        logits: Logits,
        size: int,
        shard: Shard,
        terms: Smoothing,
        *params: Tensor,
    ) -> Tensor:
        x = collectives.gathered(rows, shard.group)
        state = None
        for start, stop in chunks(len(params[0]), size):
            part = logits(x, places - start, *(p[start:stop] for p in params))
            state = nothing_observed(x, part.dtype) if state is None else state
            state = observed(state, part, places - start)
        if state is None:
            state = nothing_observed(x, torch.promote_types(params[0].dtype, torch.float32))
        loss, normalizer = losses(state, labels, shard, terms, len(params[0]))
        ctx.save_for_backward(x, labels, places, normalizer, *params)
        ctx.logits, ctx.size, ctx.shard, ctx.terms, ctx.autocast = logits, size, shard, terms, autocast_as_now(x)
        return own(loss, shard.group).clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, labels, places, normalizer, *params = ctx.saved_tensors
        grad = gathered_gradient(grad, labels, ctx.shard, ctx.terms)
        pulled = x.new_zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32))
        results = [torch.empty_like(p) for p in params]
        x = x.detach().requires_grad_()
        for start, stop in chunks(len(params[0]), ctx.size):
            parts = [p[start:stop].detach().requires_grad_() for p in params]
            with torch.enable_grad(), ctx.autocast():
                part = ctx.logits(x, places - start, *parts)
            g = slopes(part.detach(), places - start, normalizer, grad, ctx.terms)
            dx, *dparts = torch.autograd.grad(part, [x, *parts], g)
            pulled += dx
            for result, dpart in zip(results, dparts, strict=True):
                result[start:stop] = dpart
        return scattered_gradient(pulled, x.dtype, ctx.shard.group), *(None,) * 6, *results


def autocast_as_now(x: Tensor) -> Callable[[], AbstractContextManager[Any]]:
    """Return a factory of contexts with the current autocast state, which a backward does not have."""
    kind = x.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return nullcontext
    dtype = torch.get_autocast_dtype(kind)
    return lambda: torch.autocast(kind, dtype)


def chunks(classes: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield the first class of each chunk and that of the next one."""
    return ((start, min(start + size, classes)) for start in range(0, classes, size))


def chunk_size(batch: int, params: Sequence[Tensor]) -> int:
    """Return the number of classes per chunk: all, if there are few logits."""
    classes = max(1, params[0].shape[0])
    of_a_class = max(1, batch) * max(1, params[0][:1].numel() // max(1, params[0].shape[-1]))
    if torch.compiler.is_exporting():  # the exported model must not depend on the batch size
        return classes
    return classes if of_a_class * classes <= WHOLE else max(1, CHUNK // of_a_class)


def reduced(loss: Tensor, target: Tensor, reduction: str, ignore_index: int) -> Tensor:
    """Reduce the losses of rows as `torch.nn.functional.cross_entropy` does."""
    if reduction == "none":
        return loss.reshape(target.shape)
    return loss.sum() if reduction == "sum" else loss.sum() / (target != ignore_index).sum()


def sharded_cross_entropy(
    rows: Tensor,
    target: Tensor,
    logits: Logits,
    params: Sequence[Tensor],
    shard: Shard,
    label_smoothing: float = 0.0,
    *,
    reduction: str = "mean",
    ignore_index: int = -100,
    impl: str = "auto",
) -> Tensor:
    """Return the cross-entropy of this process's rows over sharded classes. All processes must call it together.

    Args:
        rows: Rows (..., N) of this process, sent in their dtype.
        target: Labels (...) of the rows.
        logits: Function `logits(x, labels, *params)` that returns the logits of some classes.
        params: Parameters of the classes of this process, one row per class.
        shard: Classes of this process.
        label_smoothing: As in `torch.nn.functional.cross_entropy`.
        reduction: As in `torch.nn.functional.cross_entropy`.
        ignore_index: As in `torch.nn.functional.cross_entropy`.
        impl: "reference" stores the logits (B, C_l). "chunks" computes some at a time and recomputes them in the
            backward. "auto" chooses "reference" if they are few.

    Returns:
        The loss: a scalar, or (...) with `reduction="none"`.

    Raises:
        ValueError: If the target or an option is invalid.
    """
    check(rows, target, label_smoothing, reduction)
    terms = Smoothing(float(label_smoothing), shard.classes, ignore_index)
    flat, labels = rows.reshape(-1, rows.shape[-1]), collectives.gathered(target.reshape(-1).long(), shard.group)
    loss = losses_of_rows(flat, labels, labels - shard.offset, logits, params, shard, terms, impl)
    return reduced(loss, target.long(), reduction, ignore_index)


def losses_of_rows(
    rows: Tensor,
    labels: Tensor,
    places: Tensor,
    logits: Logits,
    params: Sequence[Tensor],
    shard: Shard,
    terms: Smoothing,
    impl: str,
) -> Tensor:
    """Return the losses (B_l,) of rows (B_l, N), given the labels (B,) of all rows and their indices in the params."""
    size = chunk_size(labels.shape[0], params)
    if impl == "reference" or (impl == "auto" and size >= params[0].shape[0]):
        return _reference(rows, labels, places, logits, params, shard, terms)
    if impl in ("auto", "chunks"):
        return applied(_InChunks, rows, labels, places, logits, size, shard, terms, *params)
    raise ValueError(f"impl must be 'auto', 'chunks' or 'reference', got {impl!r}")


def check(rows: Tensor, target: Tensor, label_smoothing: float, reduction: str) -> None:
    """Raise ValueError for an invalid target or option."""
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction must be 'mean', 'sum' or 'none', got {reduction!r}")
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing must lie in [0, 1], got {label_smoothing!r}")
    if target.is_floating_point():
        raise ValueError(
            f"a sharded head takes class indices, not probabilities, got a target {target.dtype} of "
            f"shape {tuple(target.shape)}: train without mixup and cutmix"
        )
    if target.shape != rows.shape[:-1]:
        raise ValueError(f"need labels of shape {tuple(rows.shape[:-1])} for these features, got {tuple(target.shape)}")
