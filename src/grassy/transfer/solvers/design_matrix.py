"""The design matrix of a linear model: features divided by a scale, with a constant 1 appended, without a copy.

Shapes: B samples, N features, Q columns of weights.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from grassy.transfer.solvers.folds import row_blocks

LARGEST_EIGENPROBLEM = 4096


@dataclass(frozen=True)
class Design:
    """The matrix A = [features / scale, 1] of shape (B, N + 1), with arithmetic in `dtype`.

    Features of another dtype are converted block by block in each matrix product.
    """

    features: Tensor
    scale: float = 1.0
    dtype: torch.dtype = torch.float32

    def to(self, dtype: torch.dtype) -> "Design":
        return replace(self, dtype=dtype)

    def scores(self, weight: Tensor) -> Tensor:
        """A @ weight: (N + 1, ...) -> (B, ...)."""
        flat = weight.reshape(len(weight), -1)
        slopes, intercept = flat[:-1] / self.scale, flat[-1]
        if self.features.dtype == self.dtype:
            out = torch.addmm(intercept, self.features, slopes)
        else:
            out = slopes.new_empty(len(self.features), flat.shape[1])
            for start, rows in row_blocks(self.features):
                torch.addmm(intercept, rows.to(self.dtype), slopes, out=out[start : start + len(rows)])
        return out.reshape(len(out), *weight.shape[1:])

    def pull(self, residual: Tensor) -> Tensor:
        """A.T @ residual: (B, ...) -> (N + 1, ...)."""
        flat = residual.reshape(len(residual), -1)
        out = flat.new_empty(self.features.shape[1] + 1, flat.shape[1])
        torch.sum(flat, 0, out=out[-1])
        if self.features.dtype == self.dtype:
            torch.mm(self.features.mT, flat, out=out[:-1])
        else:
            out[:-1] = 0
            for start, rows in row_blocks(self.features):
                out[:-1].addmm_(rows.to(self.dtype).mT, flat[start : start + len(rows)])
        out[:-1] /= self.scale
        return out.reshape(len(out), *residual.shape[1:])

    def gram(self) -> Tensor:
        """A.T @ A, (N + 1, N + 1)."""
        width = self.features.shape[1]
        out = torch.zeros(width + 1, width + 1, dtype=self.dtype, device=self.features.device)
        for _, rows in row_blocks(self.features):
            rows = rows.to(self.dtype) / self.scale  # before the product, whose squares could overflow
            out[:-1, :-1].addmm_(rows.mT, rows)
            out[-1, :-1] += rows.sum(0)
        out[:-1, -1] = out[-1, :-1]
        out[-1, -1] = len(self.features)
        return out


@dataclass(frozen=True)
class Spectrum:
    """Eigenvalues (N + 1,) and eigenvectors in columns (N + 1, N + 1) of A.T @ A.

    Beyond LARGEST_EIGENPROBLEM only the diagonal, with None for the eigenvectors: a coarser preconditioner.
    """

    values: Tensor
    vectors: Tensor | None

    @classmethod
    def of(cls, design: Design) -> "Spectrum":
        if design.features.shape[1] > LARGEST_EIGENPROBLEM:
            blocks = ((rows.to(design.dtype) / design.scale).square().sum(0) for _, rows in row_blocks(design.features))
            squares = torch.stack(list(blocks)).sum(0)
            return cls(torch.cat([squares, squares.new_tensor([len(design.features)])]), None)
        values, vectors = torch.linalg.eigh(design.gram())
        return cls(values.clamp(min=0), vectors)

    def solve(self, weights: Tensor, vectors: Tensor) -> Tensor:
        """(I + weight A.T A)⁻¹ applied to vectors (N + 1, P, M), one weight (P, M) for each."""
        if self.vectors is None:
            return vectors / (1 + weights * self.values.to(vectors.dtype)[:, None, None])
        basis, flat = self.vectors.to(vectors.dtype), vectors.flatten(1)
        inner = (basis.mT @ flat) / (1 + weights.flatten() * self.values.to(flat.dtype)[:, None])
        return (basis @ inner).reshape(vectors.shape)


class Span:
    """For fewer samples than features: the same problem in coordinates of the span of the samples.

    Optimal weights lie in that span. With features @ features.T = U Λ U.T, the rows of U √Λ have the same inner
    products as the features. A problem of N unknowns becomes one of at most B, with a diagonal Gram matrix.
    """

    def __init__(self, design: Design) -> None:
        self.outer = design.to(torch.float64)
        features = design.features
        gram = torch.zeros(len(features), len(features), dtype=torch.float64, device=features.device)
        columns = max(1, 2**24 // len(features))
        for block in features.split(columns, dim=1):
            block = block.double() / design.scale
            gram.addmm_(block, block.mT)
        values, vectors = torch.linalg.eigh(gram)
        kept = values >= 1e-12 * values[-1]
        self.roots, self.vectors = values[kept].clamp(min=1e-300).sqrt(), vectors[:, kept]  # all 0 for zero features
        self.inner = Design((self.vectors * self.roots).to(design.dtype), 1.0, design.dtype)

    def up(self, weight: Tensor) -> Tensor:
        """Weights (R + 1, ...) of `inner` as weights (N + 1, ...) of the features, float64."""
        coordinates = weight[:-1].double().flatten(1) / self.roots[:, None]
        slopes = self.outer.pull(self.vectors @ coordinates)[:-1]
        return torch.cat([slopes, weight[-1:].double().flatten(1)]).reshape(-1, *weight.shape[1:])

    def down(self, weight: Tensor) -> Tensor:
        """Project weights (N + 1, ...) onto the span: weights (R + 1, ...) of `inner`."""
        flat = weight.double().flatten(1)
        slopes = torch.cat([flat[:-1], torch.zeros_like(flat[-1:])])
        coordinates = self.vectors.mT @ self.outer.scores(slopes) / self.roots[:, None]
        return torch.cat([coordinates, flat[-1:]]).reshape(-1, *weight.shape[1:])
