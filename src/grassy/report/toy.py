"""Toy example on G(1, 2): a line in the plane learns a class, by Riemannian steps and by plain gradient descent.

A line through the origin corresponds to a pair of opposite points on the circle. Riemannian steps move it along the
circle. Plain descent pulls its basis vector off the circle, and the vector's length becomes an unwanted parameter.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from grassy import geometry
from grassy.report.pictures import BLUE, GREEN, GREY, ORANGE, tidy

GAMMA = 6.0


@dataclass(frozen=True)
class Toy:
    """Features (B, 2) of the learned class and of another class, whose line is fixed, and the starting point."""

    features: Tensor
    others: Tensor
    other_line: Tensor
    start: Tensor


def make_toy(seed: int = 0, samples: int = 40) -> Toy:
    """Directions around 115° for the class and around 20° for the other; the line starts at 50°, the wrong side."""
    generator = torch.Generator().manual_seed(seed)

    def around(degrees: float, spread: float) -> Tensor:
        return _directions(degrees + spread * torch.randn(samples, generator=generator, dtype=torch.float64))

    degrees = torch.tensor([20.0, 50.0], dtype=torch.float64)
    other_line, start = _directions(degrees).unsqueeze(1)
    return Toy(around(115, 9), around(20, 9), other_line, start)


def descend(toy: Toy, steps: int = 40, lr: float = 0.3, riemannian: bool = True) -> Tensor:
    """The basis vector after each step, (steps + 1, 2), for cross-entropy over the logits γ‖Wx‖ of both lines."""
    weight = toy.start
    path = [weight[0]]
    for _ in range(steps):
        gradient = _gradient(toy, weight)
        if riemannian:
            weight = geometry.geodesic(weight, -lr * geometry.project(weight, gradient))
        else:
            weight = weight - lr * gradient
        path.append(weight[0])
    return torch.stack(path)


def draw_toy(steps: int = 40, lr: float = 0.3, toy: Toy | None = None) -> Figure:
    """Draw both descents in the plane, and the length of the basis vector after each step."""
    toy = toy or make_toy()
    figure = Figure(figsize=(10.5, 3.9), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    paths = _paths(toy, steps, lr)
    for axes, (title, color, path) in zip((left, middle), paths, strict=True):
        _plane(axes, toy, title)
        _line(axes, path[-1], color)
        axes.plot(*path.T, "o-", color=color, markersize=3.5, linewidth=1.2, zorder=4)
        axes.plot(*path[0], "o", color="white", markeredgecolor=color, markersize=8, zorder=5, label="start")
        axes.plot(*path[-1], "o", color=color, markersize=8, zorder=5)
    _legend(figure, left)
    for (title, color, path), style in zip(paths, ("-", "--"), strict=True):
        length = torch.linalg.vector_norm(path, dim=-1)
        right.plot(length, style, color=color, linewidth=2, label=title)
    right.set_title("Length of the basis vector", loc="left", fontsize=11)
    right.set_xlabel("step")
    right.legend(frameon=False, fontsize=9, loc="upper left")
    right.set_ylim(0.9 * float(length.min()), 1.15 * float(length.max()))
    tidy(right)
    return figure


def animate_toy(
    path: Path, steps: int = 40, lr: float = 0.3, toy: Toy | None = None, frames_per_second: int = 8
) -> None:
    """The same as a GIF with one frame per step; the last frame stays for two seconds."""
    from matplotlib.animation import FuncAnimation, PillowWriter
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    toy = toy or make_toy()
    figure = Figure(figsize=(7.2, 3.9), layout="constrained")
    FigureCanvasAgg(figure)
    paths = _paths(toy, steps, lr)
    artists = []
    for axes, (title, color, _) in zip(figure.subplots(1, 2), paths, strict=True):
        _plane(axes, toy, title)
        spanned = _line(axes, toy.start[0], color)
        (trail,) = axes.plot([], [], "o-", color=color, markersize=3, linewidth=1, alpha=0.6, zorder=4)
        (point,) = axes.plot([], [], "o", color=color, markersize=9, zorder=5)
        artists.append((spanned, trail, point))
    _legend(figure, figure.axes[0])

    def show(frame: int) -> list[Any]:
        at = min(frame, steps)
        for (spanned, trail, point), (_, _, walked) in zip(artists, paths, strict=True):
            spanned.set_data(*_ends(walked[at]))
            trail.set_data(*walked[: at + 1].T)
            point.set_data(*walked[at : at + 1].T)
        return [artist for group in artists for artist in group]

    frames = steps + 1 + 2 * frames_per_second
    FuncAnimation(figure, show, frames=frames).save(str(path), writer=PillowWriter(fps=frames_per_second), dpi=80)


# ------------------------------------------------------------------------------------------------ pieces


def _gradient(toy: Toy, weight: Tensor) -> Tensor:
    weight = weight.clone().requires_grad_()
    inputs = torch.cat([toy.features, toy.others])
    labels = torch.arange(2).repeat_interleave(torch.tensor([len(toy.features), len(toy.others)]))
    logits = GAMMA * torch.stack(
        [torch.linalg.vector_norm(inputs @ line.mT, dim=-1) for line in (weight, toy.other_line)], -1
    )
    (gradient,) = torch.autograd.grad(torch.nn.functional.cross_entropy(logits, labels), weight)
    return gradient


def _paths(toy: Toy, steps: int, lr: float) -> list[tuple[str, str, Tensor]]:
    return [
        ("Riemannian steps", BLUE, descend(toy, steps, lr)),
        ("Plain SGD", ORANGE, descend(toy, steps, lr, riemannian=False)),
    ]


def _directions(degrees: Tensor) -> Tensor:
    angle = torch.deg2rad(degrees)
    return torch.stack([angle.cos(), angle.sin()], -1)


def _ends(vector: Tensor) -> tuple[list[float], list[float]]:
    """The ends of a line through the origin along a vector, as long as the picture is wide."""
    x, y = (vector / torch.linalg.vector_norm(vector) * 3).tolist()
    return [-x, x], [-y, y]


def _plane(axes: Axes, toy: Toy, title: str) -> None:
    circle = torch.linspace(0, 2 * math.pi, 200)
    axes.plot(circle.cos(), circle.sin(), color=GREY, linewidth=1, zorder=1)
    (x, y), (other_x, other_y) = (1.32 * points.T for points in (toy.features, toy.others))  # outside of the circle
    axes.scatter(x, y, s=12, color=GREEN, marker="^", label="features of the class", zorder=2)
    axes.scatter(other_x, other_y, s=12, color="0.5", marker="x", linewidth=1, label="features of another", zorder=2)
    axes.plot(*_ends(toy.other_line[0]), color=GREY, linewidth=1.5, linestyle=":", zorder=1, label="its line")
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_aspect("equal")
    axes.set_xlim(-1.75, 1.75)
    axes.set_ylim(-1.75, 1.75)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_visible(False)


def _legend(figure: Figure, axes: Axes) -> None:
    """One legend for all planes, below them, so that it covers no line."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower left", ncols=len(labels), fontsize=9, frameon=False)


def _line(axes: Axes, vector: Tensor, color: str) -> Any:
    return axes.plot(*_ends(vector), color=color, linewidth=1.5, alpha=0.45, zorder=3)[0]
