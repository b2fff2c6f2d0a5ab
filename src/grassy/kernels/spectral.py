"""The spectral direction: every principal direction of a class turns by the same angle, whatever its gradient.

A tangent vector has a thin SVD H = U Σ Vᵀ, and the geodesic along it turns the i-th principal direction of the class by
lr σ_i. So a step turns a class mostly in the few directions where its gradient is large, and classes with small
gradients hardly at all. The spectral step goes along O = U Vᵀ instead, the tangent vector with all singular values 1:
the learning rate is the angle, in radians. (It is to the Grassmannian what Muon is to matrices.) Softened,

    O = (A + ε λ_max(A) I)^(−1/2) H,     A = H Hᵀ (K x K),     singular values σ_i/√(σ_i² + ε σ_max²),

directions with σ_i well below √ε σ_max, which are mostly noise, turn less. In another basis QW of the class, H becomes
QH and O becomes QO, so the motion of the subspace does not depend on the basis.
"""

import torch
from torch import Tensor

#: ε: directions whose gradient is below about 3 % of the largest are not turned by the full angle.
SOFTENING = 1e-3
#: Of Newton–Schulz: 9 bring the smallest eigenvalue, ε, near 1, each by a factor of 9/4, and then digits double.
ITERATIONS = 14


def whitening(a: Tensor, largest: Tensor, floor: Tensor) -> Tensor:
    """(A + ρI)^(−1/2) for positive semidefinite A (..., K, K), with ρ = ε λ_max + floor: the matrix that makes O of H.

    largest: λ_max(A) or a little more, (..., 1, 1). floor: the square of a length of H that is but rounding, or 0.
    For A = 0 it is 0, so that O = 0 even if only the squares of H have vanished; 0, too, where A is about to overflow.

    A coupled Newton–Schulz iteration (Higham, Functions of Matrices, Eq. 6.35): Y → M^(1/2) and Z → M^(−1/2) for M with
    eigenvalues in (0, 1]. It consists of products alone, where an eigendecomposition would make a GPU wait.
    """
    eye = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    scale = ((1 + SOFTENING) * largest + floor).clamp_min(torch.finfo(a.dtype).tiny)
    y, z = a / scale + (SOFTENING * largest + floor) / scale * eye, eye.expand_as(a)
    for _ in range(ITERATIONS):
        correction = 1.5 * eye - 0.5 * (z @ y)
        y, z = y @ correction, correction @ z
    return torch.where((largest > 0) & scale.isfinite(), z / scale.sqrt(), 0)
