"""Many regularised linear problems in one batch: truncated Newton with conjugate gradients.

Each problem is min over weights W (N + 1, M) of ½‖W‖² + C Σ_i loss_i(A_i W), where A is the matrix of a Design. The
problems differ in their samples and targets. Products with A are two large matmuls for all problems together. A problem
that has converged leaves the batch.

Shapes: B samples, N features, P problems, M columns of weights in a problem.
"""

from functools import cached_property
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from grassy.transfer.solvers.design_matrix import LARGEST_EIGENPROBLEM, Design, Span, Spectrum

FORCING = 0.1  # a Newton system is solved until the preconditioned norm of its residual has shrunk by this
LARGEST_CG = 200
HALVINGS = 20
SETTLING = 20  # steps for the intercept alone


class Point(Protocol):
    """A loss at given scores: its derivative (B, P, M), and its second derivative along a direction."""

    slope: Tensor
    level: Tensor  # (P, M), the mean over the B samples of the diagonal second derivatives

    def curve(self, direction: Tensor) -> Tensor: ...


class Loss(Protocol):
    @property
    def shape(self) -> tuple[int, int]:
        """(P, M)."""

    def value(self, scores: Tensor) -> Tensor:
        """The sum over samples (P,), float64, of scores (B, P, M)."""

    def at(self, scores: Tensor) -> Point: ...

    def select(self, kept: Tensor) -> "Loss":
        """The loss of some of the problems."""


class Solution(NamedTuple):
    weight: Tensor  # (N + 1, P, M), float64
    value: Tensor  # (P,), float64, the objective
    gap: Tensor  # (P,), float64, the bound on how far it lies above its minimum
    steps: int


class Solver:
    """The Newton solver of one design. It caches what does not depend on the loss.

    penalised: whether ‖W‖² includes the intercept. If so, the objective is 1-strongly convex, so its distance from the
    minimum is at most ‖gradient‖²/2. This bound is the certificate; for the squared hinge it equals the duality gap.
    If not, the solver first minimises over the intercept. The remaining function of the weights is 1-strongly convex
    with the same gradient, so the bound holds unchanged.

    The iterations run in float32. The certificate is computed in float64 on the original features. A problem that
    misses `tol` there continues in float64.
    """

    def __init__(self, design: Design, penalised: bool, tol: float, max_iter: int) -> None:
        self.design, self.penalised, self.tol, self.max_iter = design, penalised, tol, max_iter

    @cached_property
    def span(self) -> Span | None:
        samples, width = self.design.features.shape
        return Span(self.design) if samples < width and samples <= LARGEST_EIGENPROBLEM else None

    @cached_property
    def spectrum(self) -> Spectrum:
        return Spectrum.of(self.design)

    @cached_property
    def spectrum_of_span(self) -> Spectrum:
        return Spectrum.of(self.span.inner) if self.span else self.spectrum

    def minimise(self, loss: Loss, C: float, start: Tensor) -> Solution:
        """Weights that bring every problem within tol · value of its minimum, from start (N + 1, P, M)."""
        design, rough = (self.span.inner, self.span.down(start)) if self.span else (self.design, start)
        # Half the tolerance, so that rounding alone does not make a problem continue in float64.
        near = self._newton(design, loss, C, rough.float(), max(self.tol / 2, 1e-7), self.max_iter)
        weight = self.span.up(near.weight) if self.span else near.weight.double()
        weight = torch.where(weight.isfinite(), weight, start.double())
        exact = self._newton(self.design.to(torch.float64), loss, C, weight, self.tol, self.max_iter)
        return exact._replace(steps=near.steps + exact.steps)

    def evaluate(self, loss: Loss, C: float, weight: Tensor) -> Solution:
        """Objectives and gaps at given weights (N + 1, P, M)."""
        return self._newton(self.design.to(torch.float64), loss, C, weight.double(), self.tol, 0)

    def _newton(self, design: Design, loss: Loss, C: float, weight: Tensor, tol: float, max_iter: int) -> Solution:
        ridge = torch.ones_like(weight[:, :1, :1])
        ridge[-1] = float(self.penalised)
        found, alive = weight.clone(), torch.arange(weight.shape[1], device=weight.device)
        values = torch.zeros(len(alive), dtype=torch.float64, device=weight.device)
        gaps = values.clone()
        scores = design.scores(weight)
        for step in range(max_iter + 1):
            if not self.penalised and weight.dtype == torch.float64:
                shift = _settle(loss, C, scores)
                scores = scores + shift
                weight = torch.cat([weight[:-1], weight[-1:] + shift])
            value = _dot(ridge * weight, weight) / 2 + C * loss.value(scores)
            point = loss.at(scores)
            gradient = ridge * weight + C * design.pull(point.slope)
            gap = _gap(gradient, C * len(scores) * point.level, self.penalised)
            found[:, alive], values[alive], gaps[alive] = weight, value, gap
            open_ = ~(gap <= tol * value)  # so that NaN counts as open
            if step == max_iter or not bool(open_.any()):
                break
            if not bool(open_.all()):
                alive, value, weight, gradient, scores = (
                    alive[open_], value[open_], weight[:, open_], gradient[:, open_], scores[:, open_]
                )  # fmt: skip
                loss = loss.select(open_)
                point = loss.at(scores)
            spectrum = self.spectrum_of_span if self.span and design is self.span.inner else self.spectrum
            direction, moved = _conjugate_gradients(design, spectrum, point, C, ridge, gradient)
            length = _backtrack(loss, C, ridge, value, weight, gradient, scores, direction, moved)
            going = length > 0
            if not bool(going.all()):  # progress is below rounding
                if not bool(going.any()):
                    break
                alive, length, loss = alive[going], length[going], loss.select(going)
                weight, scores, direction, moved = (t[:, going] for t in (weight, scores, direction, moved))
            weight, scores = weight + length[:, None] * direction, scores + length[:, None] * moved
        return Solution(found, values, gaps, step)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """Inner products (P,) of weights (N + 1, P, M), float64."""
    return (a * b).sum((0, 2), dtype=torch.float64)


def _settle(loss: Loss, C: float, scores: Tensor) -> Tensor:
    """The shift (P, M) of all scores (B, P, M) that minimises the loss, by Newton's method."""
    shift = torch.zeros_like(scores[0])
    value = loss.value(scores)
    for _ in range(SETTLING):
        point = loss.at(scores + shift)
        residual = -point.slope.sum(0)
        curvature = (len(scores) * point.level).clamp(min=1e-30)
        size = (residual.square() / curvature).sum(-1)
        if bool((size <= 1e-15 * value).all()):
            break
        step = _solve_intercept(point, residual, curvature, scores)
        length = torch.ones_like(value)
        for _ in range(HALVINGS):
            trial = loss.value(scores + shift + length[:, None] * step)
            worse = ~(trial <= value)
            if not bool(worse.any()):
                break
            length = torch.where(worse, length / 2, length)
        better = trial <= value
        shift = shift + torch.where(better[:, None], length[:, None] * step, 0.0)  # a step may be NaN
        value = torch.where(better, trial, value)
        if not bool(better.any()):
            break
    return shift


def _solve_intercept(point: Point, residual: Tensor, curvature: Tensor, scores: Tensor) -> Tensor:
    """The Newton step (P, M) of the intercept, by conjugate gradients with a diagonal preconditioner."""
    step = torch.zeros_like(residual)
    z = residual / curvature
    search, size = z, (residual * z).sum(-1, keepdim=True)
    enough = 1e-12 * size
    for _ in range(SETTLING):
        product = point.curve(search.expand_as(scores)).sum(0)
        length = size / (search * product).sum(-1, keepdim=True).clamp(min=1e-300)
        step = step + length * search
        residual = residual - length * product
        z = residual / curvature
        before, size = size, (residual * z).sum(-1, keepdim=True)
        if bool((size <= enough).all()):
            break
        search = z + size / before.clamp(min=1e-300) * search
    return step


def _gap(gradient: Tensor, intercept_curvature: Tensor, penalised: bool) -> Tensor:
    squares = gradient.double().square()
    # At its minimum the intercept's gradient is rounding. In float32 it is not there yet, and an estimate is enough.
    last = squares[-1] if penalised else squares[-1] / intercept_curvature.double().clamp(min=1e-30)
    return (squares[:-1].sum((0, 2)) + last.sum(-1)) / 2


def _conjugate_gradients(
    design: Design, spectrum: Spectrum, point: Point, C: float, ridge: Tensor, gradient: Tensor
) -> tuple[Tensor, Tensor]:
    """The Newton direction (N + 1, P, M), with Hessian · direction ≈ −gradient, and A @ direction (B, P, M).

    The preconditioner is the Hessian for samples of equal (mean) curvature.
    """
    level = C * point.level
    direction = torch.zeros_like(gradient)
    moved = torch.zeros_like(point.slope)
    residual = -gradient
    z = spectrum.solve(level, residual)
    search, size = z, _dot(residual, z)
    enough = FORCING**2 * size
    for _ in range(LARGEST_CG):
        along = design.scores(search)
        product = ridge * search + C * design.pull(point.curve(along))
        length = (size / _dot(search, product).clamp(min=1e-300)).to(search.dtype)[:, None]
        direction.addcmul_(length, search)
        moved.addcmul_(length, along)
        residual.addcmul_(length, product, value=-1)
        z = spectrum.solve(level, residual)
        before, size = size, _dot(residual, z)
        # One matmul serves all problems, so finished ones stay in the batch until nine tenths are finished.
        if float((size > enough).double().mean()) <= 0.1:
            break
        search = z + (size / before.clamp(min=1e-300)).to(z.dtype)[:, None] * search
    return direction, moved


def _backtrack(
    loss: Loss,
    C: float,
    ridge: Tensor,
    value: Tensor,
    weight: Tensor,
    gradient: Tensor,
    scores: Tensor,
    direction: Tensor,
    moved: Tensor,
) -> Tensor:
    """The first step length (P,) of 1, ½, ¼, ... at which each objective decreases enough; 0 if none does.

    Close to the minimum the decrease is smaller than the rounding of the value, but the slope is still accurate. There
    a slope that has not turned far upwards is enough (Hager and Zhang 2005, Eq. 4.1).
    """
    slope = _dot(gradient, direction)
    linear, quadratic = _dot(ridge * weight, direction), _dot(ridge * direction, direction) / 2
    norm = _dot(ridge * weight, weight) / 2
    rounding = 10 * torch.finfo(weight.dtype).eps * value
    length = torch.ones_like(value)
    for _ in range(HALVINGS):
        there = scores + length.to(scores.dtype)[:, None] * moved
        trial = norm + length * (linear + length * quadratic) + C * loss.value(there)
        enough = trial <= value + 1e-4 * length * slope
        if not bool(enough.all()):
            slope_there = linear + 2 * length * quadratic + C * _dot(loss.at(there).slope, moved)
            enough |= (trial <= value + rounding) & (slope_there <= -0.8 * slope)
        if bool(enough.all()):
            break
        length = torch.where(enough, length, length / 2)
    return torch.where(enough, length, 0.0).to(weight.dtype)
