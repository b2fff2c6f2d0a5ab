"""The public functions of the head: logits, and the cross-entropy without storing them."""

from typing import Literal

from torch import Tensor

from grassy.kernels import cross_entropy, dispatch, fused_logits, reference
from grassy.kernels.dispatch import LogitsImpl, LossImpl


def subspace_logits(
    x: Tensor, weight: Tensor, gamma: float | Tensor = 25.0, *, normalize: bool = True, impl: LogitsImpl = "auto"
) -> Tensor:
    """Return the logits γ‖W_c x̂‖: γ times the length of the projection of the unit feature onto each subspace.

    The Triton kernels store the coordinates of all classes in half precision under autocast. They have no second
    derivative and use the absolute value of a gamma that is a tensor. Plain torch handles float16 and float64.

    Args:
        x: Features (..., N).
        weight: Subspaces (C, K, N).
        gamma: Scale γ of the logits.
        normalize: Normalise the features. False gives γ‖W_c x‖.
        impl: "auto", "triton" or "reference". `explain_logits` says which one "auto" chooses.

    Returns:
        Logits (..., C), at least float32.

    Raises:
        ValueError: If `impl` is unknown.
        RuntimeError: If the named implementation cannot run.
    """
    chosen = dispatch.choose_logits(impl, x, weight, gamma)
    return (fused_logits if chosen == "triton" else reference).subspace_logits(x, weight, gamma, normalize)


def subspace_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    gamma: float | Tensor = 25.0,
    label_smoothing: float = 0.0,
    *,
    normalize: bool = True,
    reduction: Literal["mean", "sum", "none"] = "mean",
    ignore_index: int = -100,
    impl: LossImpl = "auto",
) -> Tensor:
    """Return the softmax cross-entropy of `subspace_logits(x, weight, gamma)` without storing the logits.

    It is meant for very many classes. The backward needs the B x C x K coordinates W_c x̂. If they are many, the forward
    stores those of the first classes, and the backward recomputes the others. "triton" and "chunks" have no second
    derivative and use the absolute value of a gamma that is a tensor. The reference handles float16, float64 and
    targets that require a gradient.

    Args:
        x: Features (..., N).
        weight: Subspaces (C, K, N).
        target: Class indices (...) or probabilities (..., C). An index that is no class gives a NaN loss.
        gamma: Scale γ of the logits.
        label_smoothing: As in `torch.nn.functional.cross_entropy`.
        normalize: Normalise the features.
        reduction: As in `torch.nn.functional.cross_entropy`.
        ignore_index: As in `torch.nn.functional.cross_entropy`.
        impl: "auto", "triton", "chunks" or "reference". "triton" and "chunks" process one chunk of classes at a time,
            by kernels or in plain torch. "reference" is plain torch and stores all coordinates.

    Returns:
        The loss: a scalar, or (...) with `reduction="none"`.

    Raises:
        ValueError: If shapes or options are invalid.
        RuntimeError: If the named implementation cannot run.
    """
    cross_entropy.check(x, weight, target, label_smoothing, reduction)
    chosen = dispatch.choose_loss(impl, x, weight, target, gamma)
    return cross_entropy.subspace_cross_entropy(
        x, weight, target, gamma, label_smoothing, normalize, reduction, ignore_index, chosen
    )
