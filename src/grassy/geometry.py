"""The Grassmann manifold G(k, n) of k-dimensional linear subspaces of R^n, as pure functions of tensors.

A subspace is a tensor (..., K, N) whose rows are an orthonormal basis. Rotating the rows gives another basis of the
same subspace. A tangent vector H at W has the same shape and satisfies H Wᵀ = 0. Its length is the Frobenius norm.
Leading dimensions are batch dimensions and broadcast.

Zero rows are absent directions: a point with k_i nonzero rows lies on G(k_i, n). Every function here keeps them zero.

Functions of subspaces compute in at least float32 with full-precision matmuls, under autocast too. Their result has
the promoted dtype of the arguments.

A geodesic with velocity H needs no singular value decomposition of H. It uses the entire functions cos√X and sin√X/√X
of the K x K matrix X = t² H Hᵀ. Formulas: Edelman, Arias, Smith 1998 (EAS); Bendokat, Zimmermann, Absil 2024 (BZA).
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from grassy.precision import exact_products


def _in_full_precision(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Compute in the promoted dtype of the tensors, at least float32, with full-precision matmuls.

    The result has the promoted dtype, half precision included.
    """

    @functools.wraps(function)
    def wrapped(*args, **kwargs):  # type: ignore[no-untyped-def]
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        if not tensors[0].is_floating_point():
            raise TypeError(f"{function.__name__}: subspaces must be floating point tensors, got {tensors[0].dtype}")
        # A time t may be a tensor of any dtype. Like a Python scalar, it does not take part in the promotion.
        dtype = functools.reduce(torch.promote_types, [tensor.dtype for tensor in tensors if tensor.ndim > 1])
        exact = torch.promote_types(dtype, torch.float32)

        def cast(value: Any) -> Any:
            return value.to(exact) if isinstance(value, Tensor) else value

        with exact_products(tensors[0]):
            args, kwargs = tuple(map(cast, args)), {name: cast(value) for name, value in kwargs.items()}
            return function(*args, **kwargs).to(dtype)

    return wrapped


# --- points -----------------------------------------------------------------------------------------------------


def random_subspace(
    *shape: int,
    k: int | None = None,
    n: int | None = None,
    generator: torch.Generator | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Draw uniformly distributed subspaces: the qf factors of Gaussian matrices.

    Args:
        *shape: Batch dimensions, followed by K and N unless they are given by name.
        k: Dimension of the subspaces.
        n: Dimension of the space.
        generator: Random generator.
        dtype: Dtype of the result. None means torch's default dtype.
        device: Device of the result.

    Returns:
        Subspaces (*batch, K, N) with orthonormal rows.

    Raises:
        ValueError: If not 1 <= k <= n.

    Examples:
        >>> from grassy import geometry
        >>> geometry.random_subspace(10, k=8, n=64).shape  # the same as random_subspace(10, 8, 64)
        torch.Size([10, 8, 64])
    """
    shape = (*shape, *(size for size in (k, n) if size is not None))
    if len(shape) < 2 or not 1 <= shape[-2] <= shape[-1]:
        raise ValueError(f"random_subspace: need 1 <= k <= n, got shape (*batch, k, n) = {shape}")
    dtype = dtype or torch.get_default_dtype()
    exact = torch.promote_types(dtype, torch.float32)  # torch has no Cholesky in half precision
    gaussian = torch.randn(shape, generator=generator, dtype=exact, device=device)
    with exact_products(gaussian):
        return _qf(gaussian).to(dtype)


def present_rows(weight: Tensor) -> Tensor:
    """Return which rows are nonzero, (..., K) bool. Zero rows are absent directions.

    Args:
        weight: Subspaces (..., K, N).
    """
    return (weight != 0).any(dim=-1)


def orthonormality_error(weight: Tensor) -> Tensor:
    """Return the largest entry of |W Wᵀ − diag(present)| over all subspaces, a scalar: 0 on the manifold.

    Args:
        weight: Tensor (..., K, N).
    """
    weight = weight.float() if weight.dtype in (torch.float16, torch.bfloat16) else weight
    with exact_products(weight):
        return (gram(weight) - torch.diag_embed(present_rows(weight).to(weight.dtype))).abs().amax()


@_in_full_precision
def orthonormalize(weight: Tensor) -> Tensor:
    """Return the closest matrices with orthonormal rows: the polar factors, which span the same subspaces.

    Args:
        weight: Tensor (..., K, N).

    Returns:
        Subspaces (..., K, N).

    Raises:
        ValueError: If the nonzero rows of a matrix are linearly dependent or not finite.
    """
    return _polar(weight)


# --- tangent vectors and geodesics ------------------------------------------------------------------------------


@_in_full_precision
def project(weight: Tensor, ambient: Tensor) -> Tensor:
    """Project a tensor B onto the tangent space at W: B − (B Wᵀ) W (paper, Eq. 2).

    Args:
        weight: Subspaces W, (..., K, N).
        ambient: Any tensor B, (..., K, N), such as a Euclidean gradient.

    Returns:
        Tangent vectors (..., K, N).
    """
    tangent = ambient - (ambient @ weight.mT) @ weight
    return tangent * present_rows(weight).unsqueeze(-1)


@_in_full_precision
def geodesic(weight: Tensor, tangent: Tensor, t: float = 1.0) -> Tensor:
    """Follow the geodesic from W with velocity H for time t: the exponential map of tH.

    The result is cos(t√A) W + [sin(t√A)/√A] H with A = H Hᵀ. This is Eq. 3 of the paper, with its V cos(tΣ) Vᵀ and
    U sin(tΣ) Vᵀ written as functions of A = V Σ² Vᵀ. Zero, repeated and tiny singular values need no special case.

    Args:
        weight: Subspaces W, (..., K, N).
        tangent: Tangent vectors H at W, (..., K, N).
        t: Time. The geodesic moves along +tangent for t > 0.

    Returns:
        Subspaces (..., K, N).

    Examples:
        >>> import torch
        >>> from grassy import geometry
        >>> start, end = geometry.random_subspace(2, 4, 64)
        >>> velocity = geometry.log(start, end)
        >>> bool(geometry.distance(geometry.geodesic(start, velocity), end) < 1e-5)
        True
    """
    cosm1, sinc = cosm1_sinc(t**2 * (tangent @ tangent.mT))
    return weight + cosm1 @ weight + t * (sinc @ tangent)


@_in_full_precision
def transport(weight: Tensor, direction: Tensor, tangent: Tensor, t: float = 1.0) -> Tensor:
    """Transport a tangent vector Δ parallel along the geodesic from W with velocity H, for time t. An isometry.

    EAS Theorem 2.4. Let X = t² H Hᵀ and K = Δ Hᵀ. The result is Δ − t² K [(1 − cos√X)/X] H − t K [sin√X/√X] W.

    Args:
        weight: Subspaces W, (..., K, N).
        direction: Velocity H of the geodesic, tangent at W, (..., K, N).
        tangent: Tangent vectors Δ at W, (..., K, N).
        t: Time.

    Returns:
        Tangent vectors (..., K, N) at `geodesic(weight, direction, t)`.
    """
    # The half angle gives the third entire function: (1 − cos θ)/θ² = ½ (sin(θ/2)/(θ/2))².
    cosm1_half, sinc_half = cosm1_sinc((t / 2) ** 2 * (direction @ direction.mT))
    sinc = sinc_half + cosm1_half @ sinc_half
    overlap = tangent @ direction.mT
    return tangent - t**2 / 2 * (overlap @ sinc_half @ sinc_half @ direction) - t * (overlap @ sinc @ weight)


@_in_full_precision
def log(weight: Tensor, other: Tensor) -> Tensor:
    """Return the shortest tangent vector at W whose geodesic reaches `other` at time 1: the inverse of `geodesic`.

    BZA Algorithm 5.3. If a principal angle is π/2, several vectors are shortest, and this is one of them.

    Args:
        weight: Subspaces W, (..., K, N).
        other: Subspaces of the same dimensions, (..., K, N).

    Returns:
        Tangent vectors (..., K, N) at W.

    Raises:
        ValueError: If two subspaces have different dimensions.
    """
    present, other_present = present_rows(weight), present_rows(other)
    if not torch.equal(*torch.broadcast_tensors(present.sum(-1), other_present.sum(-1))):
        raise ValueError("log: the subspaces have different dimensions, so no geodesic joins them")
    # Principal vectors: row i of Uᵀ W and row i of Vᵀ Y enclose the i-th principal angle.
    u, cosine, vt = torch.linalg.svd(weight @ other.mT + _absent_pairs(present, other_present))
    offset = vt @ other - cosine.unsqueeze(-1) * (u.mT @ weight)
    sine = torch.linalg.vector_norm(offset, dim=-1)
    stretch = torch.where(sine > 0, torch.atan2(sine, cosine) / sine.clamp_min(torch.finfo(sine.dtype).tiny), 1)
    return (u @ (stretch.unsqueeze(-1) * offset)) * present.unsqueeze(-1)


@_in_full_precision
def retract_qf(weight: Tensor, tangent: Tensor) -> Tensor:
    """Return qf(W + H), which agrees with the geodesic up to second order (paper, appendix variant of Algorithm 1).

    The triangular factor has a positive diagonal, so no basis vector flips its sign.

    Args:
        weight: Subspaces W, (..., K, N).
        tangent: Tangent vectors H at W, (..., K, N).

    Returns:
        Subspaces (..., K, N).
    """
    return _qf(weight + tangent)


@_in_full_precision
def retract_polar(weight: Tensor, tangent: Tensor) -> Tensor:
    """Return the polar factor of W + H: like `retract_qf`, but equivariant under a change of basis.

    Args:
        weight: Subspaces W, (..., K, N).
        tangent: Tangent vectors H at W, (..., K, N).

    Returns:
        Subspaces (..., K, N).
    """
    return _polar(weight + tangent)


# --- two subspaces, and many ------------------------------------------------------------------------------------


@_in_full_precision
def principal_angles(a: Tensor, b: Tensor) -> Tensor:
    """Return the principal angles between two subspaces, in radians, ascending.

    Angles below 45° come from their sines, since arccos loses half of the digits near 1.

    Args:
        a: Subspaces (..., K_a, N).
        b: Subspaces (..., K_b, N).

    Returns:
        Angles (..., min(K_a, K_b)). Two subspaces of dimensions k_i and k_j have min(k_i, k_j) angles. The remaining
        entries are NaN.
    """
    k, kept = max(a.shape[-2], b.shape[-2]), min(a.shape[-2], b.shape[-2])
    a, b = (torch.nn.functional.pad(x, (0, 0, 0, k - x.shape[-2])) for x in (a, b))
    a, b = torch.broadcast_tensors(a, b)
    dims_a, dims_b = present_rows(a).sum(-1), present_rows(b).sum(-1)
    cosine = torch.linalg.svdvals(a @ b.mT).clamp(max=1)
    # The sines are the singular values of the part of the smaller subspace outside the larger one. In descending order
    # the values of present directions come first, those of zero rows last.
    a_is_larger = (dims_a > dims_b)[..., None, None]
    small, large = torch.where(a_is_larger, b, a), torch.where(a_is_larger, a, b)
    sine = torch.linalg.svdvals(small - (small @ large.mT) @ large).clamp(max=1)
    index, count = torch.arange(k, device=a.device), torch.minimum(dims_a, dims_b).unsqueeze(-1)
    sine = sine.gather(-1, (count - 1 - index).clamp(min=0))
    angles = torch.where(cosine.square() < 0.5, cosine.arccos(), sine.arcsin())
    return angles.masked_fill(index >= count, math.nan)[..., :kept]


def distance(a: Tensor, b: Tensor) -> Tensor:
    """Return the length of the shortest geodesic between two subspaces: the 2-norm of their principal angles.

    Args:
        a: Subspaces (..., K_a, N).
        b: Subspaces (..., K_b, N).

    Returns:
        Distances (...) in radians.
    """
    return torch.linalg.vector_norm(principal_angles(a, b).nan_to_num(nan=0.0), dim=-1)


@_in_full_precision
def align(weight: Tensor, other: Tensor) -> Tensor:
    """Return the basis of W that is closest to the basis of `other` (Procrustes).

    Args:
        weight: Subspaces W, (..., K, N).
        other: Subspaces of the same dimensions, (..., K, N).

    Returns:
        The same subspaces as W, (..., K, N), with zero rows where `other` has them.
    """
    present = present_rows(other)
    u, _, vt = torch.linalg.svd(other @ weight.mT + _absent_pairs(present, present_rows(weight)))
    return u @ vt @ weight * present.unsqueeze(-1)


@_in_full_precision
def mean(points: Tensor, max_iterations: int = 200) -> Tensor:
    """Return the Fréchet mean of subspaces: the point with the least sum of squared distances.

    It starts from the dominant directions of the average projector and follows the mean of the logarithms. Averaging
    bases would be wrong: two bases of the same subspace average to a lower rank.

    Args:
        points: P subspaces to average, (..., P, K, N).
        max_iterations: Largest number of iterations.

    Returns:
        Subspaces (..., K, N).

    Raises:
        ValueError: If `points` has fewer than 3 dimensions, or the points have different zero rows.
    """
    if points.ndim < 3:
        raise ValueError(f"mean: need points of shape (..., P, K, N), got {tuple(points.shape)}")
    present = present_rows(points)
    if not bool((present == present[..., :1, :]).all()):
        raise ValueError("mean: all points must have the same absent (zero) rows")
    k = points.shape[-2]
    # Present rows take the leading directions in order. The others are zeroed.
    dims = present[..., 0, :].sum(-1, keepdim=True)
    dominant = torch.linalg.svd(points.flatten(-3, -2), full_matrices=False).Vh[..., :k, :]
    rank = (present[..., 0, :].cumsum(-1) - 1).clamp(min=0)
    center = dominant.gather(-2, rank.unsqueeze(-1).expand_as(dominant)) * present[..., 0, :].unsqueeze(-1)
    tolerance = 10 * torch.finfo(points.dtype).eps * float(dims.max()) ** 0.5
    for _ in range(max_iterations):
        step = log(center.unsqueeze(-3), points).mean(-3)
        center = orthonormalize(geodesic(center, step))
        if float(torch.linalg.matrix_norm(step).amax()) < tolerance:
            break
    return center


# --- small matrices ---------------------------------------------------------------------------------------------


def cosm1_sinc(x: Tensor, doublings: int | None = None) -> tuple[Tensor, Tensor]:
    """Return cos√X − I and sin√X/√X of symmetric positive semidefinite matrices X, by matmuls alone.

    Both are entire functions of X. A short Taylor polynomial suffices for ‖X‖ <= 1. Larger X are divided by 4^s, the
    angles by 2^s, and the result is doubled s times: sinc ← sinc·cos, cos ← 2cos² − I. Working with cos − I keeps the
    relative accuracy of small angles.

    Args:
        x: Matrices X, (..., K, K).
        doublings: Number of doublings for all matrices, enough for angles up to 2**doublings. None computes it from X,
            which synchronises with a GPU.

    Returns:
        Two tensors (..., K, K).
    """
    size = x.diagonal(dim1=-2, dim2=-1).sum(-1)  # the trace: at least the largest eigenvalue
    terms = len(_TAYLOR[x.dtype][0])
    if doublings is None:
        largest = float(size.max()) if size.numel() else 0.0
        doublings = math.ceil(math.log2(largest) / 2) if 1 < largest < math.inf else 0
        while terms > 1 and largest ** (2 * terms - 2) / math.factorial(4 * terms - 4) < torch.finfo(x.dtype).eps / 4:
            terms -= 1  # small angles need fewer terms
    if doublings:
        needed = (size.log2() / 2).ceil().nan_to_num(nan=0.0, posinf=0.0).clamp(0, doublings)
        x = torch.ldexp(x, -2 * needed[..., None, None])
    # Both polynomials at once, by Horner's rule in X² with two coefficients at a time: a + bX.
    # The coefficients are Python scalars: copying a tensor to the GPU is not allowed in a CUDA graph.
    eye = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
    even, odd = _TAYLOR[x.dtype]
    pairs = [
        torch.stack([a * eye + b * x for a, b in zip(constant, linear, strict=True)])
        for constant, linear in zip(even[:terms], odd[:terms], strict=True)
    ]
    squared = x @ x
    result = pairs[-1]
    for pair in reversed(pairs[:-1]):
        result = pair + squared @ result
    cosm1, sinc = result
    for done in range(doublings):
        more = (needed > done)[..., None, None]
        sinc = torch.where(more, sinc + cosm1 @ sinc, sinc)
        cosm1 = torch.where(more, 2 * (cosm1 @ cosm1) + 4 * cosm1, cosm1)
    return cosm1, sinc


def _taylor(terms: int) -> list[list[list[float]]]:
    """Return the coefficients of cos√x − 1 and sin√x/√x as [even or odd power][power of x²][function]."""
    cosm1 = [0.0] + [(-1) ** j / math.factorial(2 * j) for j in range(1, terms)]
    sinc = [(-1) ** j / math.factorial(2 * j + 1) for j in range(terms)]
    return [[[cosm1[j], sinc[j]] for j in range(parity, terms, 2)] for parity in (0, 1)]


# Truncation error at ‖X‖ = 1: 1/12! = 2e-9 in float32, 1/20! = 4e-19 in float64.
_TAYLOR = {torch.float32: _taylor(6), torch.float64: _taylor(10)}


def _absent_pairs(present: Tensor, other_present: Tensor) -> Tensor:
    """Return (..., K, K) with a 1 where the r-th absent row of one meets the r-th absent row of the other.

    Added to W Yᵀ, it makes the matrix regular without changing the present directions. For W = Y it is diag(absent).
    """
    rank, other_rank = (~present).cumsum(-1), (~other_present).cumsum(-1)
    both = ~present.unsqueeze(-1) & ~other_present.unsqueeze(-2)
    return (both & (rank.unsqueeze(-1) == other_rank.unsqueeze(-2))).float()


def gram(rows: Tensor) -> Tensor:
    """Return the Gram matrices W Wᵀ, (..., K, K), summed over blocks of 256 columns.

    A single float32 sum over thousands of terms has an error of 1e-6, which is the whole tolerance of orthonormality.

    Args:
        rows: Tensor (..., K, N).
    """
    first, *rest = rows.split(256, dim=-1)
    total = first @ first.mT
    for columns in rest:
        total = total + columns @ columns.mT
    return total


def _gram(rows: Tensor) -> Tensor:
    """Return W Wᵀ with 1 on the diagonal of absent rows, so that it can be factored."""
    return gram(rows) + torch.diag_embed((~present_rows(rows)).to(rows.dtype))


def _qf(rows: Tensor) -> Tensor:
    """Return Q of W = L Q, with L lower triangular with a positive diagonal, by Cholesky factors of Gram matrices.

    Batched Householder QR is slow on a GPU and flips signs. Three Cholesky passes, the first with a small shift, are as
    accurate (Fukaya et al. 2020). The product of their lower triangular factors is lower triangular.
    """
    shift = rows.shape[-2] * torch.finfo(rows.dtype).eps
    eye = torch.eye(rows.shape[-2], dtype=rows.dtype, device=rows.device)
    for scale in (shift, 0.0, 0.0):
        products = _gram(rows)
        products = products + scale * products.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None] * eye
        # Multiplying by the inverse is faster and more accurate than a triangular solve of the rows.
        inverse = torch.linalg.solve_triangular(torch.linalg.cholesky(products), eye.expand_as(products), upper=False)
        rows = inverse @ rows
    return rows


def _polar(rows: Tensor) -> Tensor:
    """Return (W Wᵀ)^(-1/2) W. The second pass removes the error of the first, due to the squared condition number."""
    present = present_rows(rows).unsqueeze(-1)
    for _ in range(2):
        eigenvalue, eigenvector = torch.linalg.eigh(_gram(rows))
        smallest = rows.shape[-2] * torch.finfo(rows.dtype).eps * eigenvalue[..., -1:]
        if not bool((eigenvalue > smallest).all()):
            raise ValueError("orthonormalize: the rows of a subspace are linearly dependent or not finite")
        # Eigenvectors for the eigenvalue 1 may mix present and absent rows by a rounding error: hence the mask.
        rows = (eigenvector * eigenvalue.rsqrt().unsqueeze(-2)) @ eigenvector.mT @ rows * present
    return rows
