"""L-BFGS on a product of Grassmannians, for a full-batch loss that is expensive to evaluate.

Nocedal & Wright, Algorithm 7.4, with three changes for a manifold. Gradients are tangent, a step follows a geodesic,
and the curvature pairs are transported by projection, like the momentum of Riemannian SGD.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from grassy import geometry

#: Number of stored curvature pairs (step, change of the gradient).
MEMORY = 10
#: Length of the first step: the rotation angle of all classes together, in radians.
FIRST_TURN = 0.5
#: A step must lower the loss by this fraction of what its slope predicts (Armijo).
SUFFICIENT = 1e-4
#: Largest number of halvings in the line search.
HALVINGS = 20


class Minimum(NamedTuple):
    weight: Tensor
    losses: list[float]  # before the first and after each step


def minimize(
    loss_and_gradient: Callable[[Tensor], tuple[float, Tensor]], weight: Tensor, max_iter: int, tol: float
) -> Minimum:
    """Minimise a loss from initial subspaces (C, K, N), in at most max_iter steps.

    `loss_and_gradient` returns the loss and its Euclidean gradient. It stops when a step lowers the loss by less than
    the fraction `tol`.
    """
    loss, gradient = _tangent(loss_and_gradient, weight)
    losses = [loss]
    pairs: list[tuple[Tensor, Tensor]] = []
    for _ in range(max_iter):
        direction = geometry.project(weight, -_inverse_hessian_times(gradient, pairs))
        slope = _dot(direction, gradient)
        if slope >= 0:  # by rounding, or by outdated pairs
            pairs, direction = [], -gradient
            slope = _dot(direction, gradient)
        if slope == 0:
            break
        t = 1.0 if pairs else FIRST_TURN / float(direction.norm())
        for _ in range(HALVINGS):
            moved = geometry.geodesic(weight, direction, t)
            new_loss, new_gradient = _tangent(loss_and_gradient, moved)
            if new_loss <= loss + SUFFICIENT * t * slope:
                break
            t /= 2
        else:
            break
        pairs = [(geometry.project(moved, step), geometry.project(moved, change)) for step, change in pairs]
        step = geometry.project(moved, t * direction)
        change = new_gradient - geometry.project(moved, gradient)
        if _dot(step, change) > torch.finfo(step.dtype).eps * float(step.norm() * change.norm()):
            pairs = [*pairs, (step, change)][-MEMORY:]
        decrease = loss - new_loss
        weight, loss, gradient = moved, new_loss, new_gradient
        losses.append(loss)
        if decrease <= tol * abs(loss):
            break
    return Minimum(weight, losses)


def _tangent(loss_and_gradient: Callable[[Tensor], tuple[float, Tensor]], weight: Tensor) -> tuple[float, Tensor]:
    loss, gradient = loss_and_gradient(weight)
    return loss, geometry.project(weight, gradient)


def _inverse_hessian_times(gradient: Tensor, pairs: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Multiply the gradient by the inverse Hessian estimate: the two-loop recursion of L-BFGS."""
    out = gradient.clone()
    shares = []
    for step, change in reversed(pairs):
        shares.append(_dot(step, out) / _dot(step, change))
        out -= shares[-1] * change
    if pairs:
        step, change = pairs[-1]
        out *= _dot(step, change) / _dot(change, change)
    for (step, change), share in zip(pairs, reversed(shares), strict=True):
        out += (share - _dot(change, out) / _dot(step, change)) * step
    return out


def _dot(a: Tensor, b: Tensor) -> float:
    return float(torch.dot(a.flatten(), b.flatten()))
