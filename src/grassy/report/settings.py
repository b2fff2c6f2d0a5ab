"""The settings of a run as flat text, for comparing recipes on a page."""

from collections.abc import Mapping
from typing import Any

from grassy.heads import create_head, describe
from grassy.runs.weights import PREPARATION, Description

#: Fields that describe a recipe without effect on the run.
NOT_SETTINGS = ("description", "paper", "base")


def settings_of(about: Description, width: int) -> dict[str, str]:
    """The settings in a file of weights: its recipe, or what `grassy.save` stored.

    width: feature dimension.
    """
    recipe = {key: value for key, value in about.recipe.items() if key not in NOT_SETTINGS}
    model = {
        "model": about.model,
        "head": _all_options(about.head, width),
        "model_kwargs": about.model_kwargs,
        "num_classes": about.num_classes,
        "img_size": recipe.get("img_size", about.img_size),
        **{name: getattr(about, name) for name in PREPARATION},
    }
    return dict(_flat({**model, **recipe, **{key: model[key] for key in ("model", "head", "num_classes")}}))


def _all_options(head: dict[str, Any], width: int) -> dict[str, Any]:
    """The options of a head, with defaults for those not given, as far as they are known."""
    try:
        return describe(create_head(in_features=width, num_classes=2, **head))
    except (TypeError, ValueError):  # such as a k for each of its classes
        return head


def _flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Flatten a mapping to pairs such as ("head.k", "8")."""
    found: list[tuple[str, str]] = []
    for key, value in values.items():
        if isinstance(value, Mapping):
            found += _flat(value, f"{prefix}{key}.")
        else:
            found.append((f"{prefix}{key}", _text(value)))
    return found


def _text(value: Any) -> str:
    """A value as in a recipe, shortened to about 200 characters."""
    if value is None or value == "":
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list | tuple):
        value = ", ".join(map(_text, value))
    text = str(value)
    return text if len(text) <= 200 else f"{text[:199]}…"
