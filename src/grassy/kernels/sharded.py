"""Softmax cross-entropy over classes that are sharded over processes: the specification, and a version in chunks.

W processes hold C classes, process s those of the set S_s. Each has B_l features with labels. Every process gathers all
B = W·B_l features and computes the logits l_c of its own classes. For each row it finds, over c in S_s,

    m_s = max l_c,  e_s = Σ exp(l_c − m_s),  q_s = the logit of the label if that is here, else 0,  a_s = Σ l_c.

An empty shard has (−∞, 0, 0, 0). With M = max m_s, and the rest summed over the processes,

    E = Σ e_s exp(m_s − M),  loss = log E − (1 − ε)(q − M) − ε (a/C − M),  ∂loss/∂l_c = exp(l_c − M)/E − t'_c,

where t'_c = (1 − ε)t_c + ε/C is the smoothed target and C the number of all classes. An update takes six collectives,
whose size depends neither on C nor on K. The forward gathers features and labels, reduces m_s, and reduces the sums.
The backward gathers the gradients of the losses and reduce-scatters those of the features.

A target that is a mixture Σ_m w_m e(y_m) of a few labels has q_s = Σ w_m l_{y_m} over the labels in S_s, and
t_c = Σ_m w_m [y_m = c]. All processes know Z = Σ w_m and T = (1 − ε)Z + ε, and

    loss = T log E − (1 − ε)(q − Z M) − ε (a/C − M),  ∂loss/∂l_c = T exp(l_c − M)/E − t'_c.

If only a sample of the classes takes part, C is the number of sampled classes, which is summed with the rest. The loss
is then the smoothed cross-entropy over the sample.

Each process has the losses of its own rows, as under DDP, which averages gradients over processes. The gradients of
sharded parameters are not averaged, so they are divided by W here. The features get the sum for their rows.

`logits(x, labels, *params)` returns the logits of a chunk of classes. x is (B, N), and params have one row per class.
Labels (B,) are relative to the first class of the chunk and may lie outside. The params may belong to some classes of
the shard only. Then `places` (B,) are the indices of the labels among them, out of range for labels elsewhere.
For mixtures, labels, places and weights are (B, M). Otherwise, weights are None.
Shapes: B batch, C classes, M labels of a row, N features.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from grassy.kernels import collectives
from grassy.kernels.cross_entropy import check_options, chunks
from grassy.mixed_labels import MixedLabels
from grassy.shards import Shard

#: Number of logits, or coordinates of subspaces, that a process computes at a time.
CHUNK = 2**24
#: Up to this number they are computed at once and stored for the backward.
WHOLE = 2**26

Logits = Callable[..., Tensor]

NO_PROBABILITIES = (
    "a sharded or sampled head takes class indices, or mixtures of a few as grassy.MixedLabels, not probabilities of "
    "all classes"
)


class Smoothing(NamedTuple):
    """Label smoothing ε, the number of classes over which ε is spread, and the label to ignore.

    If `sampled`, not all classes take part, and their number is not known yet.
    """

    eps: float
    classes: int
    ignore_index: int
    sampled: bool = False


# --- the pieces -------------------------------------------------------------------------------------------------


def nothing_observed(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the state (4, B) of an empty shard: m, e, q and a."""
    state = x.new_zeros(4, x.shape[0], dtype=dtype)
    state[0] = -torch.inf
    return state


def observed(state: Tensor, logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the state updated by the logits (B, c) of c more classes. Labels are relative to the first one."""
    maximum, exponentials, picked, total = state
    raised = torch.maximum(maximum, logits.amax(-1))
    exponentials = exponentials * (maximum - raised).exp() + (logits - raised.unsqueeze(-1)).exp().sum(-1)
    if weights is None:
        picked = picked + logits.where(_is_label(labels, logits), 0).sum(-1)
    else:
        picked = picked + (_shares(labels, weights, logits) * logits).sum(-1)
    return torch.stack([raised, exponentials, picked, total + logits.sum(-1)])


def losses(
    state: Tensor, labels: Tensor, weights: Tensor | None, shard: Shard, terms: Smoothing, here: int
) -> tuple[Tensor, Tensor, Smoothing]:
    """Return the losses (B,), log Σ exp l_c (B,) and the terms from the states of all processes, by two collectives.

    Labels count over all classes, and `here` is the number of logits in the state. A label that is no class gives NaN.
    Logits are relative to the largest one before the sum, because a small loss is a small difference of logits.
    The returned terms have the number of classes that take part, if it was not known.
    """
    maximum, exponentials, picked, total = state
    top = collectives.maximum(maximum, shard.group)
    is_here = (labels >= shard.offset) & (labels < shard.stop)
    mass_here = is_here if weights is None else (weights * is_here).sum(-1)
    picked = torch.where(is_here if weights is None else is_here.any(-1), picked - mass_here * top, 0)
    sums = [exponentials * (maximum - top).exp(), picked]
    if terms.eps:
        sums.append(total - here * top)
        sums += [torch.full_like(top, here)] if terms.sampled else []
    exponential, label, *rest = collectives.total(torch.stack(sums), shard.group)
    if terms.eps and terms.sampled and len(top):
        terms = terms._replace(classes=max(1, round(float(rest[1][0]))))
    logarithm = exponential.log()
    wrong = (labels < 0) | (labels >= shard.classes)
    label = label.masked_fill(wrong if weights is None else (wrong & (weights != 0)).any(-1), torch.nan)
    mass = target_mass(weights, terms)
    loss = (logarithm if mass is None else mass * logarithm) - (1 - terms.eps) * label
    if terms.eps:
        loss = loss - terms.eps / terms.classes * rest[0]
    return loss.masked_fill(_is_ignored(labels, weights, terms), 0), top + logarithm, terms


def slopes(
    logits: Tensor, labels: Tensor, weights: Tensor | None, normalizer: Tensor, grad: Tensor, terms: Smoothing
) -> Tensor:
    """Return ∂loss/∂l_c (B, c) times the gradients of the losses (B,), given normalizer = log Σ exp l_c (B,)."""
    probabilities = (logits - normalizer.unsqueeze(-1)).exp()
    if (mass := target_mass(weights, terms)) is not None:
        probabilities = probabilities * mass.unsqueeze(-1)
    shares = _shares(labels, weights, logits) * (1 - terms.eps) + terms.eps / terms.classes
    return grad.unsqueeze(-1) * (probabilities - shares)


def target_mass(weights: Tensor | None, terms: Smoothing) -> Tensor | None:
    """Return T (B,), the sum of the smoothed target of each row, or None if all are 1."""
    return None if weights is None else (1 - terms.eps) * weights.sum(-1) + terms.eps


def own(rows: Tensor, group: Any) -> Tensor:
    """Return this process's rows (B_l, ...) among those of all processes (W·B_l, ...)."""
    if (world := collectives.world_size(group)) == 1:
        return rows
    each = rows.shape[0] // world
    rank = dist.get_rank(group)
    return rows[rank * each : (rank + 1) * each]


def _is_label(labels: Tensor, logits: Tensor) -> Tensor:
    return labels.unsqueeze(-1) == torch.arange(logits.shape[-1], device=labels.device)


def _shares(labels: Tensor, weights: Tensor | None, logits: Tensor) -> Tensor:
    """Return the target t_c (B, c) of some classes."""
    if weights is None:
        return _is_label(labels, logits).to(logits.dtype)
    pairs = zip(labels.unbind(-1), weights.unbind(-1), strict=True)
    return torch.stack([_is_label(y, logits) * w.unsqueeze(-1).to(logits.dtype) for y, w in pairs]).sum(0)


def _is_ignored(labels: Tensor, weights: Tensor | None, terms: Smoothing) -> Tensor:
    ignored = labels == terms.ignore_index
    return ignored if weights is None else ignored.all(-1)


# --- the specification ------------------------------------------------------------------------------------------


class GatherRows(torch.autograd.Function):
    """Gathers the features (B, N) of all processes. The backward reduce-scatters their gradients."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Any) -> Tensor:
        ctx.group, ctx.dtype = group, rows.dtype
        return collectives.gathered(rows, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return scattered_gradient(grad, ctx.dtype, ctx.group), None


class SoftmaxOverShards(torch.autograd.Function):
    """Computes the losses (B_l,) of this process's rows from its logits (B, C_l) of all rows."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        places: Tensor,
        weights: Tensor | None,
        shard: Shard,
        terms: Smoothing,
    ) -> Tensor:
        state = nothing_observed(logits, logits.dtype)
        if logits.shape[-1]:
            state = observed(state, logits, places, weights)
        loss, normalizer, terms = losses(state, labels, weights, shard, terms, logits.shape[-1])
        ctx.save_for_backward(logits, labels, places, weights, normalizer)
        ctx.shard, ctx.terms = shard, terms
        return own(loss, shard.group).clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, labels, places, weights, normalizer = ctx.saved_tensors
        grad = gathered_gradient(grad, labels, weights, ctx.shard, ctx.terms)
        return slopes(logits, places, weights, normalizer, grad, ctx.terms), *(None,) * 5


def gathered_gradient(grad: Tensor, labels: Tensor, weights: Tensor | None, shard: Shard, terms: Smoothing) -> Tensor:
    """Gather the gradients (B,) of all losses, divided by W: see the top of this file."""
    grad = collectives.gathered(grad, shard.group) / collectives.world_size(shard.group)
    return grad.masked_fill(_is_ignored(labels, weights, terms), 0)


def scattered_gradient(grad: Tensor, dtype: torch.dtype, group: Any) -> Tensor:
    """Sum the gradients (B, N) of all processes and return those of this process's features, (B_l, N).

    The sum is in at least float32.
    """
    exact = torch.promote_types(grad.dtype, torch.float32)
    return (collectives.scattered_sum(grad.to(exact), group) * collectives.world_size(group)).to(dtype)


def applied(function: type[torch.autograd.Function], *inputs: Any) -> Tensor:
    """Apply an autograd function, with types that torch lacks."""
    result: Tensor = function.apply(*inputs)
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
        weights: Tensor | None,
        logits: Logits,
        size: int,
        shard: Shard,
        terms: Smoothing,
        *params: Tensor,
    ) -> Tensor:
        x = collectives.gathered(rows, shard.group)
        state = nothing_observed(x, exact_dtype(params))
        for start, stop in chunks(len(params[0]), size):
            part = logits(x, places - start, *(p[start:stop] for p in params)).to(state.dtype)
            state = observed(state, part, places - start, weights)
        loss, normalizer, terms = losses(state, labels, weights, shard, terms, len(params[0]))
        ctx.save_for_backward(x, labels, places, weights, normalizer, *params)
        ctx.logits, ctx.size, ctx.shard, ctx.terms, ctx.autocast = logits, size, shard, terms, _autocast_as_now(x)
        return own(loss, shard.group).clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, labels, places, weights, normalizer, *params = ctx.saved_tensors
        grad = gathered_gradient(grad, labels, weights, ctx.shard, ctx.terms)
        pulled = x.new_zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32))
        results = [torch.empty_like(p) for p in params]
        x = x.detach().requires_grad_()
        for start, stop in chunks(len(params[0]), ctx.size):
            parts = [p[start:stop].detach().requires_grad_() for p in params]
            with torch.enable_grad(), ctx.autocast():
                part = ctx.logits(x, places - start, *parts)
            exact = part.detach().to(normalizer.dtype)
            g = slopes(exact, places - start, weights, normalizer, grad, ctx.terms).to(part.dtype)
            dx, *dparts = torch.autograd.grad(part, [x, *parts], g)
            pulled += dx
            for result, dpart in zip(results, dparts, strict=True):
                result[start:stop] = dpart
        # Without it, a process that stores its logits would not take part either.
        drows = scattered_gradient(pulled, x.dtype, ctx.shard.group) if ctx.needs_input_grad[0] else None
        return drows, *(None,) * 7, *results


def _autocast_as_now(x: Tensor) -> Callable[[], AbstractContextManager[Any]]:
    """Return a factory of contexts with the current autocast state, which a backward does not have."""
    kind = x.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return nullcontext
    dtype = torch.get_autocast_dtype(kind)
    return lambda: torch.autocast(kind, dtype)


def exact_dtype(params: Sequence[Tensor]) -> torch.dtype:
    """Return the dtype of maxima and sums. It must not depend on logits, which a process without classes lacks."""
    return torch.promote_types(params[0].dtype, torch.float32)


def chunk_size(batch: int, params: Sequence[Tensor]) -> int:
    """Return the number of classes per chunk: all, if there are few logits."""
    classes = max(1, params[0].shape[0])
    of_a_class = max(1, batch) * max(1, params[0][:1].numel() // max(1, params[0].shape[-1]))
    if torch.compiler.is_exporting():  # the exported model must not depend on the batch size
        return classes
    return classes if of_a_class * classes <= WHOLE else max(1, CHUNK // of_a_class)


def reduced(loss: Tensor, target: Tensor | MixedLabels, reduction: str, ignore_index: int) -> Tensor:
    """Reduce the losses of rows as `torch.nn.functional.cross_entropy` does."""
    if reduction == "none":
        return loss.reshape(target.shape)
    if reduction == "sum":
        return loss.sum()
    counted = target.counted(ignore_index) if isinstance(target, MixedLabels) else target.long() != ignore_index
    return loss.sum() / counted.sum()


def gathered_target(
    target: Tensor | MixedLabels, dtype: torch.dtype, shard: Shard, ignore_index: int
) -> tuple[Tensor, Tensor | None]:
    """Gather the labels of all processes, and their weights in the dtype of the logits if they are mixed.

    One collective sends both: the weights as the bits of float64 numbers.
    """
    if not isinstance(target, MixedLabels):
        return collectives.gathered(target.reshape(-1).long(), shard.group), None
    own = [each.reshape(-1, each.shape[-1]) for each in (target.labels.long(), target.weights.double())]
    both = collectives.gathered(torch.cat([own[0], own[1].view(torch.int64)], -1), shard.group)
    labels, weights = both.tensor_split(2, -1)
    return labels, weights.contiguous().view(torch.float64).to(dtype).masked_fill(labels == ignore_index, 0)


def sharded_cross_entropy(
    rows: Tensor,
    target: Tensor | MixedLabels,
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
        target: Labels (...) of the rows, or mixtures of a few labels.
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
    flat, dtype = rows.reshape(-1, rows.shape[-1]), torch.promote_types(rows.dtype, torch.float32)
    labels, weights = gathered_target(target, dtype, shard, ignore_index)
    loss = losses_of_rows(flat, labels, labels - shard.offset, weights, logits, params, shard, terms, impl)
    return reduced(loss, target, reduction, ignore_index)


def losses_of_rows(
    rows: Tensor,
    labels: Tensor,
    places: Tensor,
    weights: Tensor | None,
    logits: Logits,
    params: Sequence[Tensor],
    shard: Shard,
    terms: Smoothing,
    impl: str,
) -> Tensor:
    """Return the losses (B_l,) of rows (B_l, N), given the labels (B,) of all rows and their indices in the params."""
    size = chunk_size(labels.shape[0], params)
    if impl == "reference" or (impl == "auto" and size >= params[0].shape[0]):
        own_logits = logits(applied(GatherRows, rows, shard.group), places, *params).to(exact_dtype(params))
        return applied(SoftmaxOverShards, own_logits, labels, places, weights, shard, terms)
    if impl in ("auto", "chunks"):
        return applied(_InChunks, rows, labels, places, weights, logits, size, shard, terms, *params)
    raise ValueError(f"impl must be 'auto', 'chunks' or 'reference', got {impl!r}")


def check(rows: Tensor, target: Tensor | MixedLabels, label_smoothing: float, reduction: str) -> None:
    """Raise ValueError for an invalid target or option."""
    check_options(label_smoothing, reduction)
    if isinstance(target, Tensor) and target.is_floating_point():
        raise ValueError(f"{NO_PROBABILITIES}, got a target {target.dtype} of shape {tuple(target.shape)}")
    if target.shape != rows.shape[:-1]:
        raise ValueError(f"need labels of shape {tuple(rows.shape[:-1])} for these features, got {tuple(target.shape)}")
