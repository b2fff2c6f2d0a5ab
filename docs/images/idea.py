"""Draw the idea of grassy, a class as a vector against a class as a subspace, for light and dark pages.

    python docs/images/idea.py

The points are drawn at random, to show the idea. They are not measured.
"""

from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import numpy as np

THEMES = {
    "light": {"ink": "#1f2933", "faint": "#9aa5b1", "first": "#0b6e99", "second": "#c2571a"},
    "dark": {"ink": "#e4e7eb", "faint": "#616e7c", "first": "#5cc3ee", "second": "#f0965a"},
}
#: A view from above and from the right: x to the right and towards the viewer, y to the right, z up.
VIEW = np.array([[-0.62, 0.88, 0.0], [-0.34, -0.22, 0.92]])


def flat(points: np.ndarray) -> np.ndarray:
    """Points (..., 3) on the page."""
    return points @ VIEW.T


def arrow(axes, tip, color, **options) -> None:
    end = flat(np.asarray(tip, float))
    axes.annotate("", end, (0, 0), arrowprops={"arrowstyle": "-|>", "color": color, "lw": 1.8, **options})


def plane(axes, first, second, color) -> None:
    corners = np.array([[-1, -1], [1, -1], [1, 1], [-1, 1]]) @ np.array([first, second], float)
    axes.add_patch(plt.Polygon(flat(corners), facecolor=color, alpha=0.16, edgecolor=color, lw=1.2))


def dots(axes, points, color) -> None:
    axes.scatter(*flat(points).T, s=13, color=color, alpha=0.85, linewidths=0)


def vectors(axes, theme, rng) -> None:
    for tip, color in (((1.0, -0.1, 0.75), theme["first"]), ((-0.2, 0.95, 0.35), theme["second"])):
        spread = 0.06 * rng.normal(size=(28, 3))
        dots(axes, np.array(tip) * rng.uniform(0.8, 1.0, (28, 1)) + spread, color)
        arrow(axes, 1.12 * np.array(tip), color)
    axes.set_title("softmax: a class is a vector", color=theme["ink"], fontsize=12, pad=8)
    axes.text(
        0.5, -0.06, "features gather around it", color=theme["ink"], ha="center", fontsize=11, transform=axes.transAxes
    )


def subspaces(axes, theme, rng) -> None:
    planes = [
        (np.array([0.9, -0.5, 0.0]), np.array([0.0, 0.1, 0.9]), theme["first"], (0.15, 1.35)),
        (np.array([0.9, 0.75, 0.0]), np.array([-0.55, 0.85, 0.0]), theme["second"], (-0.35, 1.25)),
    ]
    for first, second, color, (begin, end) in planes:
        plane(axes, first, second, color)
        angles, radii = rng.uniform(begin, end, 34), rng.uniform(0.5, 0.95, 34)
        within = np.column_stack([radii * np.cos(angles), radii * np.sin(angles)]) @ np.array([first, second])
        dots(axes, within + 0.03 * rng.normal(size=within.shape), color)
    axes.set_title("grassy: a class is a subspace", color=theme["ink"], fontsize=12, pad=8)
    axes.text(
        0.5, -0.06, "features vary inside it", color=theme["ink"], ha="center", fontsize=11, transform=axes.transAxes
    )


def projection(axes, theme, _) -> None:
    first, second, color = np.array([1.0, 0.25, 0.0]), np.array([-0.2, 1.0, 0.0]), theme["first"]
    plane(axes, first, second, color)
    shadow = 0.55 * first + 0.5 * second
    feature = shadow + np.array([0, 0, 0.85])
    arrow(axes, feature, theme["ink"])
    arrow(axes, shadow, color)
    axes.plot(*flat(np.stack([feature, shadow])).T, ls=":", color=theme["faint"], lw=1.4)
    axes.text(*(flat(feature) + np.array([0.05, 0.02])), "feature x", color=theme["ink"], fontsize=11)
    axes.text(*(flat(shadow) + np.array([0.04, -0.13])), "W x", color=color, fontsize=11)
    axes.set_title("the logit is a length", color=theme["ink"], fontsize=12, pad=8)
    axes.text(0.5, -0.06, r"$\gamma\,\|W_c x\| \,/\, \|x\|$", color=theme["ink"], ha="center", fontsize=12,
              transform=axes.transAxes)  # fmt: skip


def draw(name: str, theme: dict[str, str], folder: Path) -> Path:
    figure, panels = plt.subplots(1, 3, figsize=(9.6, 3.3))
    for axes, paint in zip(panels, (vectors, subspaces, projection), strict=True):
        paint(axes, theme, np.random.default_rng(3))
        axes.set(xlim=(-1.5, 1.5), ylim=(-1.1, 1.2), aspect="equal")
        axes.plot(0, 0, "o", ms=4, color=theme["ink"])
        axes.axis("off")
    figure.tight_layout()
    path = folder / f"idea-{name}.svg"
    figure.savefig(path, transparent=True, metadata={"Date": None})
    plt.close(figure)
    return path


if __name__ == "__main__":
    plt.rcParams["svg.hashsalt"] = "grassy"  # the same file each time
    for name, theme in THEMES.items():
        print(draw(name, theme, Path(__file__).parent))
