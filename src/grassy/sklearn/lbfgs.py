"""L-BFGS on a product of Grassmannians: for a loss of all data, of which a pass is dear and steps are to be few.

Nocedal & Wright, Algorithm 7.4, with three changes for a manifold: gradients are tangent, a step follows a geodesic,
and the pairs that stand for curvature follow the point by projection, as the momentum of Riemannian SGD does.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from grassy import geometry

#: Pairs of steps and changes of the gradient that are kept.
MEMORY = 10
#: The angle, in radians, that the first step turns all classes together by.
FIRST_TURN = 0.5
#: A step must lower the loss by this share of what its slope promises (Armijo).
SUFFICIENT = 1e-4
#: A step that was halved so often is not worth another look.
HALVINGS = 20


class Minimum(NamedTuple):
    weight: Tensor
    losses: list[float]  # at the start, and after each step


def minimize(
    loss_and_gradient: Callable[[Tensor], tuple[float, Tensor]], weight: Tensor, max_iter: int, tol: float
) -> Minimum:
    """Subspaces (C, K, N) with a lower loss, from given ones, in at most max_iter steps.

    loss_and_gradient: of subspaces, the gradient being Euclidean.
    tol: stop when a step lowers the loss by less than this share of it.
    """
    loss, gradient = _tangent(loss_and_gradient, weight)
    losses = [loss]
    pairs: list[tuple[Tensor, Tensor]] = []
    for _ in range(max_iter):
        direction = geometry.project(weight, -_inverse_hessian_times(gradient, pairs))
        slope = _dot(direction, gradient)
        if slope >= 0:  # rounding, or pairs that no longer hold here
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
    """The two loops of L-BFGS."""
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
