"""The two hot paths in plain torch: the specification of every kernel, and the path where no kernel fits.

Shapes: B batch, C classes, K subspace dimension, N feature dimension. Weight, gradient and momentum are (C, K, N).
"""

import math

import torch
from torch import Tensor

from grassy import geometry
from grassy.kernels.options import StepOptions

#: A turn by more than 2**6 = 64 radians in one step is scaled down to that.
MAX_DOUBLINGS = 6


def subspace_logits(x: Tensor, weight: Tensor, gamma: float | Tensor, normalize: bool) -> Tensor:
    """l_c = γ‖W_c x̂‖ with x̂ = x/‖x‖ (paper, Eq. 4 and 6): features (..., N) to logits (..., C).

    Only the product runs in half precision under autocast; squares, sums and norms do not, and the logits are at least
    float32. A zero feature has zero logits and, the limit being undefined, a zero gradient.
    """
    x = unit(x) if normalize else x.to(torch.promote_types(x.dtype, torch.float32))
    rows = weight.flatten(0, 1)
    if not autocasts(x):
        x = x.to(rows.dtype)
    coordinates = torch.nn.functional.linear(x, rows).unflatten(-1, weight.shape[:2])
    exact = torch.promote_types(coordinates.dtype, torch.float32)
    return gamma * torch.linalg.vector_norm(coordinates, dim=-1, dtype=exact)


def unit(x: Tensor) -> Tensor:
    """Vectors (..., N) scaled to length 1, in at least float32; a zero vector stays zero and gets no gradient."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    x = x * scale_of_long_vectors(x)
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return torch.where(length == 0, 0, x / length.clamp_min(torch.finfo(x.dtype).tiny))  # a NaN stays one


def scale_of_long_vectors(x: Tensor) -> Tensor:
    """For vectors (..., N) in float32 or float64 a factor (..., 1): 1, or 2^-100 if an element is so large that the sum
    of squares might overflow, and the length of the vector with it.
    """
    largest = torch.linalg.vector_norm(x.detach(), ord=math.inf, dim=-1, keepdim=True)
    # Not of two Python numbers: those would have torch's default dtype, in which 2^-100 may be 0.
    return torch.where(largest > 2.0**50, torch.full_like(largest, 2.0**-100), 1)


def autocasts(x: Tensor) -> bool:
    """Whether a product with x will be cast by autocast, so that x must be left as it is."""
    kind = x.device.type
    return kind != "meta" and torch.is_autocast_enabled(kind)  # of the meta device it must not be asked


def supports(weight: Tensor, grad: Tensor, momentum_buffer: Tensor | None, options: StepOptions) -> str | None:
    """The reference makes every step."""
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
    """One step of Algorithm 1 in place, a block of classes at a time; adds to counts (2,): skipped, capped.

    A block is small enough to stay in a CPU's cache between the passes over it, and bounds the extra memory. If `skip`,
    a number on the device, is not 0, nothing is changed.
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
    """New weight and momentum of some classes, and per class whether it was finite and within the largest angle.

    h and out are where the tangent vector and the new weight may be written.

    Algorithm 1 of the paper, descending. Steps 1 to 3 are one projection, since projecting is linear. Step 4 is the
    geodesic in the Gram form of `geometry.geodesic`, and step 5 one Newton–Schulz iteration towards the polar factor,
    taken in every step: being K x K arithmetic it costs next to nothing, and the error never builds up.
    """
    gram_w, a = _tangent(w, d, m, lr, momentum, h)
    present = (gram_w.diagonal(dim1=-2, dim2=-1) > 0).to(w.dtype)
    if _any(present == 0):
        h.mul_(present.unsqueeze(-1))
        a = a * present.unsqueeze(-1) * present.unsqueeze(-2)
    energy = _trace(a)  # ‖H‖²; a NaN or Inf anywhere in B shows here
    finite = energy.isfinite() & (lr.isfinite() if isinstance(lr, Tensor) else math.isfinite(lr))
    if _any(~finite):
        h, a, energy = (torch.where(finite, tensor, 0) for tensor in (h, a, energy))

    speed = energy.sqrt() if options.max_angle is None else _largest_eigenvalue(a).sqrt()
    limit = min(2.0**MAX_DOUBLINGS, math.inf if options.max_angle is None else options.max_angle)
    within = (lr * speed <= limit) | ~finite
    tau = lr if not _any(~within) else torch.where(within, lr, limit / speed)

    if options.retraction == "qf":
        # The variant of the appendix: a Euclidean step, then step 5 with a positive diagonal.
        new_w, new_m = torch.where(energy > 0, _qf(w - tau * h, present), w), h
    else:
        cosm1, sinc = geometry.cosm1_sinc(tau**2 * a, None if a.device.type == "cpu" else MAX_DOUBLINGS)
        eye = torch.eye(w.shape[-2], dtype=w.dtype, device=w.device)
        p, q = cosm1 + eye, -tau * sinc
        # The Gram matrix of P W + Q H, without forming it. A class that does not move is left alone, to the bit.
        gram = p @ gram_w @ p + q @ a @ q
        polar = torch.where(energy > 0, 1.5 * eye - 0.5 * gram, eye)
        new_m = h if options.transport == "projection" else torch.bmm(p, h).baddbmm_(tau * (a @ sinc), w)
        new_w = torch.bmm(polar @ p, w, out=out).baddbmm_(polar @ q, h)
        large = lr * (lr * energy) > 1
        if _any(large):  # for rotations of a radian and more, rounding in A is felt: look at the result itself
            new_w = torch.where(large, 1.5 * eye - 0.5 * (new_w @ new_w.mT), eye) @ new_w
    if _any(~finite):
        new_w, new_m = torch.where(finite, new_w, w), new_m if m is None else torch.where(finite, new_m, m)
    return new_w, new_m, finite.flatten(), within.flatten()


def _tangent(
    w: Tensor, d: Tensor, m: Tensor | None, lr: float | Tensor, momentum: float | Tensor, h: Tensor
) -> tuple[Tensor, Tensor]:
    """Steps 1 to 3: fills h with H = B − (B Wᵀ)(W Wᵀ)⁻¹ W, B = μM + D, and returns W Wᵀ and H Hᵀ.

    What rounding leaves of the part of B within the subspace is not orthogonal to W. It is felt where lr‖B‖ > 1:
    there H is projected once more, and twice is enough. If even that takes most of H away, H was nothing but rounding,
    of a gradient inside the subspace or with k = n, and the class does not move.
    """
    # In place throughout: fresh memory for every block would cost more than the arithmetic.
    if m is None:
        h.copy_(d)
    elif isinstance(momentum, Tensor):
        torch.addcmul(d, m, momentum, out=h)
    else:
        torch.add(d, m, alpha=momentum, out=h)
    gram_w = geometry.gram(w)
    overlap = h @ w.mT
    # (2I − WWᵀ) is the inverse of WWᵀ to first order: H ⟂ W even where W is orthonormal only to rounding.
    h.baddbmm_(2 * overlap - overlap @ gram_w, w, alpha=-1)
    a = h @ h.mT
    length = _trace(a) + overlap.square().sum((-2, -1), keepdim=True)  # ‖B‖²
    far = lr * (lr * length) > 1  # lr² alone might overflow
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
    """Traces (..., 1, 1) of matrices (..., K, K)."""
    return a.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]


def _qf(z: Tensor, present: Tensor) -> Tensor:
    """`geometry.retract_qf` without a QR, which takes a GPU very long: Z = L Q, where L is the Cholesky factor of ZZᵀ.

    Twice, since the first time the rounding of ZZᵀ is felt, times its condition: at most 64² for turns of 64 radians.
    """
    absent = torch.diag_embed(1 - present)
    for _ in range(2):
        z = _inverse_cholesky_factor(geometry.gram(z) + absent) @ z
    return z


def _inverse_cholesky_factor(gram: Tensor) -> Tensor:
    """R, lower triangular with a positive diagonal, such that R G Rᵀ = I: Gram–Schmidt on unit vectors in the metric G.

    By products alone: a factorisation by the library would look whether it went well, and a GPU had to be waited for.
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
    """The largest eigenvalue of positive semidefinite A (..., K, K) as (..., 1, 1), too large by at most K**(1/512).

    ‖A^p‖_F^(1/p) at p = 256: products alone, where eigvalsh would make a GPU wait.
    """
    tiny = torch.finfo(a.dtype).tiny
    largest = a.abs().amax((-2, -1)).clamp_min(tiny)  # divided out first, or the squares of a large A overflow
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
    """Whether a rare case must be handled. A GPU is not asked, since it would have to be waited for: it handles all."""
    return mask.device.type != "cpu" or bool(mask.any())


def _classes_in_a_block(weight: Tensor) -> int:
    """How many classes to take at a time.

    On a CPU a block has at most 4 MiB, and of a large weight two blocks are below a tenth. On a GPU it has 256 MiB.
    """
    budget = min(max(2**20, weight.nbytes // 22), 2**22) if weight.device.type == "cpu" else 2**28
    return max(1, budget * weight.shape[0] // max(1, weight.nbytes))
