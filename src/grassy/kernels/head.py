"""The public functions of the head: logits, and the loss without them."""

from torch import Tensor

from grassy.kernels import cross_entropy, dispatch, logits, reference


def subspace_logits(
    x: Tensor, weight: Tensor, gamma: float | Tensor = 25.0, *, normalize: bool = True, impl: str = "auto"
) -> Tensor:
    """Length of the projection of each feature (..., N) onto each subspace of weight (C, K, N): logits (..., C).

    Features are first scaled to length gamma; with ``normalize=False`` they are multiplied by gamma as they are.
    impl: "auto", "triton" or "reference"; `explain_logits` says which one "auto" takes.

    The kernels in Triton keep the coordinates of all classes in half precision under autocast and have no second
    derivative. If gamma is a tensor, they take its absolute value. float16 and float64 are left to plain torch.
    """
    chosen = dispatch.choose_logits(impl, x, weight, gamma)
    return (logits if chosen == "triton" else reference).subspace_logits(x, weight, gamma, normalize)


def subspace_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    gamma: float | Tensor = 25.0,
    label_smoothing: float = 0.0,
    *,
    normalize: bool = True,
    reduction: str = "mean",
    ignore_index: int = -100,
    impl: str = "auto",
) -> Tensor:
    """Softmax cross-entropy of `subspace_logits(x, weight, gamma)` without ever having them: for very many classes.

    target: class indices (...) of features (..., N), or probabilities (..., C). The other options are those of
    `torch.nn.functional.cross_entropy`. A label that is no class makes the loss NaN.
    impl: "auto"; "triton" or "chunks", by kernels or in plain torch, a chunk of classes at a time; or "reference",
    plain torch that keeps all coordinates.

    The coordinates W_c x̂, of size B x C x K, are kept for the backward if they are few; otherwise those of the first
    classes are, and the others are computed again there. There is no second derivative, and of a gamma that is a tensor
    the absolute value counts. float16, float64 and a target that wants a gradient are left to the reference.
    """
    cross_entropy.check(x, weight, target, label_smoothing, reduction)
    chosen = dispatch.choose_loss(impl, x, weight, target, gamma)
    return cross_entropy.subspace_cross_entropy(
        x, weight, target, gamma, label_smoothing, normalize, reduction, ignore_index, chosen
    )
