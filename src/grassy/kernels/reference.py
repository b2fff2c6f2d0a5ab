"""The two hot paths in plain torch: the specification of every kernel, and the fallback where no kernel runs.

Shapes: B batch, C classes, K subspace dimension, N feature dimension. Weight, gradient and momentum are (C, K, N).
"""

import math

import torch
from torch import Tensor

from grassy import geometry
from grassy.kernels.step_options import StepOptions

#: Rotation angles are limited to 2**6 = 64 radians per step.
MAX_DOUBLINGS = 6


def subspace_logits(x: Tensor, weight: Tensor, gamma: float | Tensor, normalize: bool) -> Tensor:
    """Map features (..., N) to logits l_c = γ‖W_c x̂‖, (..., C), with x̂ = x/‖x‖ (paper, Eq. 4 and 6).

    Under autocast only the matmul runs in half precision. Norms are computed in at least float32, the dtype of the
    logits. A zero feature has zero logits and, by convention, a zero gradient.
    """
    x = unit(x) if normalize else x.to(torch.promote_types(x.dtype, torch.float32))
    rows = weight.flatten(0, 1)
    if not autocasts(x):
        x = x.to(rows.dtype)
    coordinates = torch.nn.functional.linear(x, rows).unflatten(-1, weight.shape[:2])
    exact = torch.promote_types(coordinates.dtype, torch.float32)
    return gamma * torch.linalg.vector_norm(coordinates, dim=-1, dtype=exact)


def unit(x: Tensor) -> Tensor:
    """Normalise vectors to length 1, in at least float32. A zero vector stays zero and gets a zero gradient.

    Args:
        x: Vectors (..., N).

    Returns:
        Unit vectors (..., N).
    """
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    x = x * scale_of_long_vectors(x)
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return torch.where(length == 0, 0, x / length.clamp_min(torch.finfo(x.dtype).tiny))  # NaN stays NaN


def scale_of_long_vectors(x: Tensor) -> Tensor:
    """Return a factor (..., 1) for vectors (..., N): 2^-100 if the sum of squares might overflow, else 1."""
    largest = torch.linalg.vector_norm(x.detach(), ord=math.inf, dim=-1, keepdim=True)
    # Two Python scalars would give torch's default dtype, in which 2^-100 may be 0.
    return torch.where(largest > 2.0**50, torch.full_like(largest, 2.0**-100), 1)


def autocasts(x: Tensor) -> bool:
    """Return whether autocast will cast a matmul with x, so that the caller must not cast x.

    Args:
        x: Any tensor.
    """
    kind = x.device.type
    return kind != "meta" and torch.is_autocast_enabled(kind)  # torch raises for meta


def supports(weight: Tensor, grad: Tensor, momentum_buffer: Tensor | None, options: StepOptions) -> str | None:
    """Return None: the reference supports every step."""
    return None


def geodesic_step(
    weight: Tensor,
    grad: Tensor,
    momentum_buffer: Tensor | None,
    lr: float | Tensor,
    momentum: float | Tensor,
    options: StepOptions,
    counts: Tensor,
    skip: Tensor | None = None,
) -> None:
    """Make one step of Algorithm 1 in place and add the numbers of skipped and capped classes to counts (2,).

    It works on blocks of classes, which stay in the CPU cache and bound the extra memory. If `skip`, a scalar on the
    device, is not 0, nothing changes.
    """
    size = _classes_in_a_block(weight)
    scratch = torch.empty((2, *weight[:size].shape), dtype=weight.dtype, device=weight.device)
    for start in range(0, weight.shape[0], size):
        w, d = weight[start : start + size], grad[start : start + size].to(weight.dtype)
        m = None if momentum_buffer is None else momentum_buffer[start : start + size]
        d = -d if options.maximize else d
        old_m = None if m is None else m.to(weight.dtype)
        h, out = scratch[0, : w.shape[0]], scratch[1, : w.shape[0]]
        new_w, new_m, finite, within = _step(w, d, old_m, lr, momentum, options, h, out)
        if skip is not None:
            keep = skip != 0
            new_w, new_m = torch.where(keep, w, new_w), new_m if m is None else torch.where(keep, m.to(w.dtype), new_m)
            finite, within = finite | keep, within | keep
        w.copy_(new_w)
        if m is not None:
            m.copy_(new_m)
        counts[0] += (~finite).sum()
        counts[1] += (~within).sum()


def _step(
    w: Tensor,
    d: Tensor,
    m: Tensor | None,
    lr: float | Tensor,
    momentum: float | Tensor,
    options: StepOptions,
    h: Tensor,
    out: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the new weight and momentum of some classes, and per class whether it was finite and within the limit.

    It may use h and out as buffers for the tangent vector and the new weight.

    Algorithm 1 of the paper, descending. Steps 1 to 3 are one projection, since projection is linear. Step 4 is the
    geodesic in the Gram form of `geometry.geodesic`. Step 5 is one Newton–Schulz iteration towards the polar factor in
    every step, so that errors do not accumulate. It needs only K x K matrices and is cheap.
    """
    gram_w, a = _tangent(w, d, m, lr, momentum, h)
    present = (gram_w.diagonal(dim1=-2, dim2=-1) > 0).to(w.dtype)
    if _any(present == 0):
        h.mul_(present.unsqueeze(-1))
        a = a * present.unsqueeze(-1) * present.unsqueeze(-2)
    energy = _trace(a)  # ‖H‖², not finite if B holds a NaN or Inf
    finite = energy.isfinite() & (lr.isfinite() if isinstance(lr, Tensor) else math.isfinite(lr))
    if _any(~finite):
        h, a, energy = (torch.where(finite, tensor, 0) for tensor in (h, a, energy))

    speed = energy.sqrt() if options.max_angle is None else _largest_eigenvalue(a).sqrt()
    limit = min(2.0**MAX_DOUBLINGS, math.inf if options.max_angle is None else options.max_angle)
    within = (lr * speed <= limit) | ~finite
    tau = lr if not _any(~within) else torch.where(within, lr, limit / speed)

    if options.retraction == "qf":
        # The variant of the appendix: a Euclidean step, then qf with a positive diagonal.
        new_w, new_m = torch.where(energy > 0, _qf(w - tau * h, present), w), h
    else:
        cosm1, sinc = geometry.cosm1_sinc(tau**2 * a, None if a.device.type == "cpu" else MAX_DOUBLINGS)
        eye = torch.eye(w.shape[-2], dtype=w.dtype, device=w.device)
        p, q = cosm1 + eye, -tau * sinc
        # The Gram matrix of P W + Q H, without forming P W + Q H. A class that does not move stays bit-identical.
        gram = p @ gram_w @ p + q @ a @ q
        polar = torch.where(energy > 0, 1.5 * eye - 0.5 * gram, eye)
        new_m = h if options.transport == "projection" else torch.bmm(p, h).baddbmm_(tau * (a @ sinc), w)
        new_w = torch.bmm(polar @ p, w, out=out).baddbmm_(polar @ q, h)
        large = lr * (lr * energy) > 1
        if _any(large):  # beyond one radian, rounding in A matters: correct by the Gram matrix of the result
            new_w = torch.where(large, 1.5 * eye - 0.5 * (new_w @ new_w.mT), eye) @ new_w
    if _any(~finite):
        new_w, new_m = torch.where(finite, new_w, w), new_m if m is None else torch.where(finite, new_m, m)
    return new_w, new_m, finite.flatten(), within.flatten()


def _tangent(
    w: Tensor, d: Tensor, m: Tensor | None, lr: float | Tensor, momentum: float | Tensor, h: Tensor
) -> tuple[Tensor, Tensor]:
    """Steps 1 to 3: fill h with H = B − (B Wᵀ)(W Wᵀ)⁻¹ W, where B = μM + D, and return W Wᵀ and H Hᵀ.

    Rounding leaves a component of H within the subspace. It matters where lr‖B‖ > 1: there H is projected a second
    time, which suffices. If the second projection removes most of H, then H was rounding only, and the class does not
    move. This happens for a gradient inside the subspace, and for k = n.
    """
    # In place throughout: allocating memory for every block would cost more than the arithmetic.
    if m is None:
        h.copy_(d)
    elif isinstance(momentum, Tensor):
        torch.addcmul(d, m, momentum, out=h)
    else:
        torch.add(d, m, alpha=momentum, out=h)
    gram_w = geometry.gram(w)
    overlap = h @ w.mT
    # 2I − WWᵀ is the inverse of WWᵀ to first order, so H ⟂ W although W is orthonormal only up to rounding.
    h.baddbmm_(2 * overlap - overlap @ gram_w, w, alpha=-1)
    a = h @ h.mT
    length = _trace(a) + overlap.square().sum((-2, -1), keepdim=True)  # ‖B‖²
    far = lr * (lr * length) > 1  # in this order, since lr² might overflow
    if _any(far):
        before = _trace(a)
        overlap = torch.where(far, h @ w.mT, 0)
        h.baddbmm_(2 * overlap - overlap @ gram_w, w, alpha=-1)
        a = h @ h.mT
        gone = far & (2 * _trace(a) < before)
        if _any(gone):
            h.copy_(torch.where(gone, 0, h))
            a = torch.where(gone, 0, a)
    return gram_w, a


def _trace(a: Tensor) -> Tensor:
    """Return the traces (..., 1, 1) of matrices (..., K, K)."""
    return a.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]


def _qf(z: Tensor, present: Tensor) -> Tensor:
    """Return Q of Z = L Q, where L is the Cholesky factor of ZZᵀ: `geometry.retract_qf` without synchronising.

    The second pass removes the error of the first, the rounding of ZZᵀ times its condition number. That is at most 64²
    for rotations of 64 radians.
    """
    absent = torch.diag_embed(1 - present)
    for _ in range(2):
        z = _inverse_cholesky_factor(geometry.gram(z) + absent) @ z
    return z


def _inverse_cholesky_factor(gram: Tensor) -> Tensor:
    """Return R, lower triangular with a positive diagonal, with R G Rᵀ = I: Gram–Schmidt in the metric G.

    It uses matmuls only, because a library factorisation checks for errors, which synchronises with the GPU.
    """
    k = gram.shape[-1]
    r = torch.eye(k, dtype=gram.dtype, device=gram.device).repeat(*gram.shape[:-2], 1, 1)
    for j in range(k):
        row = r[..., j : j + 1, :]
        image = row @ gram
        length = (row * image).sum(-1, keepdim=True).sqrt()
        row /= length
        below = r[..., j + 1 :, :]
        below -= (below @ (image / length).mT) * row
    return r


def _largest_eigenvalue(a: Tensor, squarings: int = 8) -> Tensor:
    """Return the largest eigenvalue of positive semidefinite A (..., K, K) as (..., 1, 1), up to a factor K**(1/512).

    It is ‖A^p‖_F^(1/p) with p = 256. This uses matmuls only, where eigvalsh would synchronise with the GPU.
    """
    tiny = torch.finfo(a.dtype).tiny
    largest = a.abs().amax((-2, -1)).clamp_min(tiny)  # divided out, since squares of a large A overflow
    a = a / largest[..., None, None]
    norm = torch.linalg.matrix_norm(a).clamp_min(tiny)
    logarithm = largest.log() + norm.log()
    for step in range(1, squarings + 1):
        a = a / norm[..., None, None]
        a = a @ a
        norm = torch.linalg.matrix_norm(a).clamp_min(tiny)
        logarithm = logarithm + norm.log() / 2**step
    return logarithm.exp()[..., None, None]


def _any(mask: Tensor) -> bool:
    """Whether a rare case must be handled. On a GPU it is always True, to avoid synchronising."""
    return mask.device.type != "cpu" or bool(mask.any())


def _classes_in_a_block(weight: Tensor) -> int:
    """Return the number of classes per block.

    On a CPU a block has at most 4 MiB, and two blocks are less than a tenth of a large weight. On a GPU it has 256 MiB.
    """
    budget = min(max(2**20, weight.nbytes // 22), 2**22) if weight.device.type == "cpu" else 2**28
    return max(1, budget * weight.shape[0] // max(1, weight.nbytes))
