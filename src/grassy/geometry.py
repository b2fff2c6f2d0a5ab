"""The Grassmann manifold G(k, n): the k-dimensional linear subspaces of R^n, as pure functions of tensors.

A subspace is a tensor (..., K, N) whose rows are an orthonormal basis; every rotation of the rows names the same
subspace. A tangent vector H at W has the same shape and satisfies H Wᵀ = 0; its length is the Frobenius norm.
Leading dimensions are batch dimensions and broadcast.

Zero rows are absent directions: a point with k_i nonzero rows lies on G(k_i, n). Every function here keeps them zero.

Nothing here takes the singular value decomposition of a K x N matrix where one of K x K will do: along a geodesic
only the Gram matrix A = H Hᵀ matters, through the entire functions cos√X and sin√X/√X of X = t²A.
Formulas: Edelman, Arias, Smith 1998 (EAS); Bendokat, Zimmermann, Absil 2024 (BZA).
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from grassy.precision import exact_products


def _in_full_precision(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Compute in the widest dtype of the tensors, at least float32, with full-precision matmuls.

    The result has the dtype that torch's promotion gives the tensors, half precision included.
    """

    @functools.wraps(function)
    def wrapped(*args, **kwargs):  # type: ignore[no-untyped-def]
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        if not tensors[0].is_floating_point():
            raise TypeError(f"{function.__name__}: subspaces must be floating point tensors, got {tensors[0].dtype}")
        # A time t may be a tensor, too, of any dtype: like a number, it does not count.
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
    """Uniformly distributed subspaces of the given shape (*batch, K, N): the qf factor of a Gaussian matrix.

    ``random_subspace(10, 8, 64)`` and ``random_subspace(10, k=8, n=64)`` are the same.
    """
    shape = (*shape, *(size for size in (k, n) if size is not None))
    if len(shape) < 2 or not 1 <= shape[-2] <= shape[-1]:
        raise ValueError(f"random_subspace: need 1 <= k <= n, got shape (*batch, k, n) = {shape}")
    dtype = dtype or torch.get_default_dtype()
    exact = torch.promote_types(dtype, torch.float32)  # torch has no Cholesky factors in half precision
    gaussian = torch.randn(shape, generator=generator, dtype=exact, device=device)
    with exact_products(gaussian):
        return _qf(gaussian).to(dtype)


def present_rows(weight: Tensor) -> Tensor:
    """Which rows are directions of the subspace, (..., K) bool; the others are zero rows, absent directions."""
    return (weight != 0).any(dim=-1)


def orthonormality_error(weight: Tensor) -> Tensor:
    """The largest entry of |W Wᵀ − diag(present)| over all subspaces: 0 on the manifold."""
    weight = weight.float() if weight.dtype in (torch.float16, torch.bfloat16) else weight
    with exact_products(weight):
        return (gram(weight) - torch.diag_embed(present_rows(weight).to(weight.dtype))).abs().amax()


@_in_full_precision
def orthonormalize(weight: Tensor) -> Tensor:
    """The orthonormal rows closest to the given ones (the polar factor); they span the same subspace.

    Raises ValueError if the nonzero rows of a matrix are linearly dependent.
    """
    return _polar(weight)


# --- tangent vectors and geodesics ------------------------------------------------------------------------------


@_in_full_precision
def project(weight: Tensor, ambient: Tensor) -> Tensor:
    """The tangent part at W of any (..., K, N) tensor: B − (B Wᵀ) W.  (Paper, Eq. 2.)"""
    tangent = ambient - (ambient @ weight.mT) @ weight
    return tangent * present_rows(weight).unsqueeze(-1)


@_in_full_precision
def geodesic(weight: Tensor, tangent: Tensor, t: float = 1.0) -> Tensor:
    """The point reached from W after time t along the geodesic with velocity H: the exponential map of tH.

    cos(t√A) W + [sin(t√A)/√A] H with A = H Hᵀ, which is Eq. 3 of the paper with its V cos(tΣ) Vᵀ and
    U sin(tΣ) Vᵀ written as functions of A = V Σ² Vᵀ. Zero, repeated and tiny singular values need no care.
    """
    cosm1, sinc = cosm1_sinc(t**2 * (tangent @ tangent.mT))
    return weight + cosm1 @ weight + t * (sinc @ tangent)


@_in_full_precision
def transport(weight: Tensor, direction: Tensor, tangent: Tensor, t: float = 1.0) -> Tensor:
    """Parallel transport of a tangent vector from W along the geodesic with velocity `direction`, for time t.

    EAS Theorem 2.4. With A the Gram matrix of the direction H and K = Δ Hᵀ:
    Δ − t² K [(1 − cos√X)/X] H − t K [sin√X/√X] W at X = t²A. An isometry.
    """
    # The half angle gives the third entire function: (1 − cos θ)/θ² = ½ (sin(θ/2)/(θ/2))².
    cosm1_half, sinc_half = cosm1_sinc((t / 2) ** 2 * (direction @ direction.mT))
    sinc = sinc_half + cosm1_half @ sinc_half
    overlap = tangent @ direction.mT
    return tangent - t**2 / 2 * (overlap @ sinc_half @ sinc_half @ direction) - t * (overlap @ sinc @ weight)


@_in_full_precision
def log(weight: Tensor, other: Tensor) -> Tensor:
    """The shortest tangent vector at W whose geodesic reaches `other` at time 1: the inverse of `geodesic`.

    BZA Algorithm 5.3. Where a principal angle is π/2 there are several shortest ones, and this is one of them.
    Raises ValueError if the two have different dimensions.
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
    """qf(W + H), the retraction of the paper's Algorithm 1 variant: the geodesic up to second order.

    The triangular factor has a positive diagonal, so that no basis vector flips its sign.
    """
    return _qf(weight + tangent)


@_in_full_precision
def retract_polar(weight: Tensor, tangent: Tensor) -> Tensor:
    """The polar factor of W + H: like `retract_qf`, but equivariant under a change of basis."""
    return _polar(weight + tangent)


# --- two subspaces, and many ------------------------------------------------------------------------------------


@_in_full_precision
def principal_angles(a: Tensor, b: Tensor) -> Tensor:
    """The principal angles between two subspaces in radians, ascending, (..., min(K_a, K_b)).

    Two subspaces of dimensions k_i and k_j have min(k_i, k_j) angles; what is left of the last dimension is NaN.
    Angles below 45° are taken from their sines, since arccos loses half of the digits near 1.
    """
    k, kept = max(a.shape[-2], b.shape[-2]), min(a.shape[-2], b.shape[-2])
    a, b = (torch.nn.functional.pad(x, (0, 0, 0, k - x.shape[-2])) for x in (a, b))
    a, b = torch.broadcast_tensors(a, b)
    dims_a, dims_b = present_rows(a).sum(-1), present_rows(b).sum(-1)
    cosine = torch.linalg.svdvals(a @ b.mT).clamp(max=1)
    # Sines: what of the smaller subspace sticks out of the larger one. In descending order the singular values of
    # the present directions come first, those of zero rows last.
    a_is_larger = (dims_a > dims_b)[..., None, None]
    small, large = torch.where(a_is_larger, b, a), torch.where(a_is_larger, a, b)
    sine = torch.linalg.svdvals(small - (small @ large.mT) @ large).clamp(max=1)
    index, count = torch.arange(k, device=a.device), torch.minimum(dims_a, dims_b).unsqueeze(-1)
    sine = sine.gather(-1, (count - 1 - index).clamp(min=0))
    angles = torch.where(cosine.square() < 0.5, cosine.arccos(), sine.arcsin())
    return angles.masked_fill(index >= count, math.nan)[..., :kept]


def distance(a: Tensor, b: Tensor) -> Tensor:
    """The length of the shortest geodesic: the 2-norm of the principal angles, (...)."""
    return torch.linalg.vector_norm(principal_angles(a, b).nan_to_num(nan=0.0), dim=-1)


@_in_full_precision
def align(weight: Tensor, other: Tensor) -> Tensor:
    """The same subspace as W in that basis which lies closest to the basis of `other` (Procrustes).

    Both have the same dimension; absent rows are then where those of `other` are.
    """
    present = present_rows(other)
    u, _, vt = torch.linalg.svd(other @ weight.mT + _absent_pairs(present, present_rows(weight)))
    return u @ vt @ weight * present.unsqueeze(-1)


@_in_full_precision
def mean(points: Tensor, max_iterations: int = 200) -> Tensor:
    """The Fréchet mean of subspaces (..., P, K, N) -> (..., K, N): where the sum of squared distances is least.

    Starts from the dominant directions of the average projector and follows the mean of the logarithms. Averaging
    bases would be wrong: one subspace in two bases averages to something of lower rank.
    """
    if points.ndim < 3:
        raise ValueError(f"mean: need points of shape (..., P, K, N), got {tuple(points.shape)}")
    present = present_rows(points)
    if not bool((present == present[..., :1, :]).all()):
        raise ValueError("mean: all points must have the same absent (zero) rows")
    k = points.shape[-2]
    # The absent rows take the directions of least variance, which have weight 0, and are then zeroed.
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
    """cos√X − I and sin√X/√X of symmetric positive semidefinite X, (..., K, K), by products alone.

    Both are entire functions of X. A short Taylor polynomial serves ‖X‖ <= 1; larger X are divided by 4^s, that is,
    the angles by 2^s, and the result doubled s times: sinc ← sinc·cos, cos ← 2cos² − I. cos − I is carried instead
    of cos so that small angles keep their relative accuracy through the doublings.

    `doublings`, if given, is the number of rounds to run for all matrices, enough for angles up to 2**doublings;
    otherwise it is read off X, which on a GPU waits for the GPU.
    """
    size = x.diagonal(dim1=-2, dim2=-1).sum(-1)  # the trace: at least the largest eigenvalue
    terms = len(_TAYLOR[x.dtype][0])
    if doublings is None:
        largest = float(size.max()) if size.numel() else 0.0
        doublings = math.ceil(math.log2(largest) / 2) if 1 < largest < math.inf else 0
        while terms > 1 and largest ** (2 * terms - 2) / math.factorial(4 * terms - 4) < torch.finfo(x.dtype).eps / 4:
            terms -= 1  # small angles need fewer
    if doublings:
        needed = (size.log2() / 2).ceil().nan_to_num(nan=0.0, posinf=0.0).clamp(0, doublings)
        x = torch.ldexp(x, -2 * needed[..., None, None])
    # Both polynomials at once, by Horner's rule in X² with two coefficients at a time: a + bX.
    # The numbers go in as scalars: a tensor of them would have to be copied to a GPU, which a CUDA graph refuses.
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
    """Coefficients of cos√x − 1 and sin√x/√x as [even or odd power][power of x²][function]."""
    cosm1 = [0.0] + [(-1) ** j / math.factorial(2 * j) for j in range(1, terms)]
    sinc = [(-1) ** j / math.factorial(2 * j + 1) for j in range(terms)]
    return [[[cosm1[j], sinc[j]] for j in range(parity, terms, 2)] for parity in (0, 1)]


# Truncation error at ‖X‖ = 1: 1/12! = 2e-9 in float32, 1/20! = 4e-19 in float64.
_TAYLOR = {torch.float32: _taylor(6), torch.float64: _taylor(10)}


def _absent_pairs(present: Tensor, other_present: Tensor) -> Tensor:
    """(..., K, K) with a 1 where the r-th absent row of one meets the r-th absent row of the other.

    Added to W Yᵀ it makes the matrix regular without touching the present directions; for W = Y it is diag(absent).
    """
    rank, other_rank = (~present).cumsum(-1), (~other_present).cumsum(-1)
    both = ~present.unsqueeze(-1) & ~other_present.unsqueeze(-2)
    return (both & (rank.unsqueeze(-1) == other_rank.unsqueeze(-2))).float()


def gram(rows: Tensor, piece: int = 256) -> Tensor:
    """W Wᵀ, (..., K, K), summed over pieces of the columns.

    One float32 sum over thousands of products is off by 1e-6, which is as much as a basis may be.
    """
    first, *rest = rows.split(piece, dim=-1)
    total = first @ first.mT
    for columns in rest:
        total = total + columns @ columns.mT
    return total


def _gram(rows: Tensor) -> Tensor:
    """W Wᵀ with 1 on the diagonal of absent rows, so that it can be factored."""
    return gram(rows) + torch.diag_embed((~present_rows(rows)).to(rows.dtype))


def _qf(rows: Tensor) -> Tensor:
    """Gram–Schmidt on rows: W = L Q with L lower triangular of positive diagonal, by Cholesky factors of Gram matrices.

    Householder QR is slow in batches on a GPU and flips signs. Three Cholesky passes with a small shift in the first
    are as accurate (Fukaya et al. 2020); a product of lower triangular factors is again one.
    """
    shift = rows.shape[-2] * torch.finfo(rows.dtype).eps
    eye = torch.eye(rows.shape[-2], dtype=rows.dtype, device=rows.device)
    for scale in (shift, 0.0, 0.0):
        products = _gram(rows)
        products = products + scale * products.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None] * eye
        # The inverse is applied by a product: a triangular solve of the rows is less accurate, and slower.
        inverse = torch.linalg.solve_triangular(torch.linalg.cholesky(products), eye.expand_as(products), upper=False)
        rows = inverse @ rows
    return rows


def _polar(rows: Tensor) -> Tensor:
    """(W Wᵀ)^(-1/2) W. The second pass removes what the squared condition number cost the first."""
    present = present_rows(rows).unsqueeze(-1)
    for _ in range(2):
        eigenvalue, eigenvector = torch.linalg.eigh(_gram(rows))
        smallest = rows.shape[-2] * torch.finfo(rows.dtype).eps * eigenvalue[..., -1:]
        if not bool((eigenvalue > smallest).all()):
            raise ValueError("orthonormalize: the rows of a subspace are linearly dependent or not finite")
        # Eigenvectors of an eigenvalue 1 may mix present and absent rows, by a rounding error: hence the mask.
        rows = (eigenvector * eigenvalue.rsqrt().unsqueeze(-2)) @ eigenvector.mT @ rows * present
    return rows
