"""Load recipes: a YAML file of the package or of a user, its bases, and overrides.

A file names its `base` and states only what differs from it.
"""

import os
from collections.abc import Callable, Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from grassy.heads import RECOMMENDED
from grassy.models import import_timm
from grassy.recipes.changes import merged, schedule_follows, still_described
from grassy.recipes.recipe import Recipe
from grassy.recipes.safe_yaml import parse_yaml
from grassy.schema import MOST_RECIPE, read_text
from grassy.spelling import natural_key, nearest

#: The recipe of a run, in its folder.
ARGS = "args.yaml"
#: The head of the recipe `finetune` in earlier versions, whose k a field `k_share` of 0.25 limited.
FINETUNED = {"name": "grassmann", "k": 32, "gamma": "auto", "standardize": True, "normalize": False}
#: Longest allowed chain of bases.
MOST_BASES = 20


def load_recipe(
    name: str | Path,
    overrides: Iterable[str] = (),
    fields: Mapping[str, Any] | None = None,
    preparation: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None,
    goes_on: bool = False,
) -> Recipe:
    """Load a recipe by name or from a file, with `key=value` overrides and further fields.

    Args:
        name: A recipe of the package, the path of a YAML file, or the folder of a run.
        overrides: Settings as `key=value` text, parsed as YAML.
        fields: Settings as Python values.
        preparation: Returns the preprocessing of the weights that the settings name, for recipes that use it.
        goes_on: The run is resumed, so it downloads no weights.

    Returns:
        The checked recipe.

    Raises:
        ValueError: If there is no such recipe, or if a setting is unknown or out of range.
        TypeError: If a setting has the wrong type.
    """
    before = read_settings(name)
    changes: dict[str, Any] = {}
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals:
            raise ValueError(f"a setting is given as key=value, got {override!r}")
        _add(changes, key.strip(), parse_yaml(value, override))
    settings, said = (merged(merged(start, changes), fields or {}) for start in (before, {}))
    if _fetches(settings) and not (_fetches(said) or goes_on or _is_packaged(name)):
        raise ValueError(f"{name} would download weights: give pretrained=true to allow it")
    given = {*changes, *(fields or {})}
    if preparation is not None and settings.get("preparation") == "weights":
        settings = {**preparation(settings), **settings}
    return Recipe(**still_described(before, schedule_follows(before, settings, given), given))


def run_name(name: str | Path) -> str:
    """The default name of a run: that of its recipe, or of the run whose recipe it repeats."""
    path = Path(name)
    if path.name == ARGS:
        return path.resolve().parent.name
    return path.resolve().name if path.is_dir() else path.stem


def _fetches(settings: Mapping[str, Any]) -> bool:
    """Whether timm would download weights for the model."""
    options = settings.get("model_kwargs")
    return bool(settings.get("pretrained")) or (isinstance(options, dict) and bool(options.get("pretrained")))


def _add(changes: dict[str, Any], key: str, value: Any) -> None:
    """Add a change. The last one counts; another head, model or optimizer discards earlier options."""
    options = {"model": "model_kwargs", "opt": "opt_kwargs", "head.name": "head"}.get(key)
    again = options is not None and key in changes and changes[key] != value
    parts = [f"{key}.{part}" for part in value] if isinstance(value, dict) else []
    for name in list(changes):
        if name in parts or (again and (name == options or name.startswith(f"{options}."))):
            del changes[name]
    changes[key] = value


def read_settings(name: str | Path, seen: tuple[str, ...] = ()) -> dict[str, Any]:
    """The settings of a recipe file and its bases, by field."""
    if len(seen) > MOST_BASES:
        raise ValueError(f"{seen[0]} has a chain of more than {MOST_BASES} bases")
    text, place = _read(name, seen)
    if place in seen:
        raise ValueError(f"a recipe is among its own bases: {' -> '.join((*seen, place))}")
    own = parse_yaml(text, place) or {}
    if not isinstance(own, dict):
        raise ValueError(f"{place} must hold keys and values, not a {type(own).__name__}")
    if Path(place).name == ARGS:
        own = of_this_version(own)
    base = own.pop("base", None)
    settings = read_settings(_beside(base, place), (*seen, place)) if base else {}
    if base:
        settings.pop("description", None)  # a description is not inherited, nor is the paper's row
        settings.pop("paper", None)
    try:
        return schedule_follows(settings, merged(settings, own), own)
    except (ValueError, TypeError) as error:
        raise type(error)(f"{place}: {error}") from None


def of_this_version(saved: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that a run of an earlier version saved, with today's fields: they mean what they meant then."""
    settings = {"crop_mode": "center", **saved}
    if settings.get("model_ema"):
        settings.setdefault("model_ema_warmup", False)
    if settings.pop("k_share", 1.0) < 1 and settings.get("head") == FINETUNED:
        settings["head"] = {"name": RECOMMENDED}  # which reduces k for narrow features in the same way
    return settings


def recipe_names() -> list[str]:
    """The names of the package's recipes, without those that are only bases (with a leading underscore)."""
    names = [file.name.removesuffix(".yaml") for file in _folder().iterdir() if file.name.endswith(".yaml")]
    return sorted((name for name in names if not name.startswith("_")), key=natural_key)


def _read(name: str | Path, seen: tuple[str, ...]) -> tuple[str, str]:
    """The text of a recipe and its name or path."""
    path, packaged = Path(name), _is_packaged(name)
    if packaged:
        return (_folder() / f"{name}.yaml").read_text(encoding="utf-8"), str(name)
    if path.is_dir():
        path = path / ARGS
        if not path.is_file():
            raise ValueError(f"{name} is a folder without {ARGS}, so it is no run: give the name of a recipe")
    if path.suffix in (".yaml", ".yml"):
        return read_text(path, MOST_RECIPE), os.path.normpath(path)  # normalised, so that circular bases are detected
    of = f" (the base of {seen[-1]})" if seen else ""
    hint = _other_model(str(name)) or nearest(str(name), recipe_names())
    raise ValueError(f"there is no recipe {str(name)!r}{of}{hint}; `grassy recipes` lists them, or give a .yaml file")


def _other_model(name: str) -> str:
    """A phrase to append if the unknown recipe is named like a known one, but with another timm model."""
    model, _, head = name.partition("-")
    base = next((each for each in (f"resnet50-{head}", f"resnet50d-{head}") if head and _is_packaged(each)), None)
    if base is None or not import_timm().is_model(model):
        return ""
    return f": any recipe accepts another model, as in `grassy train {base} model={model}`"


def _is_packaged(name: str | Path) -> bool:
    return "/" not in str(name) and len(str(name)) < 200 and (_folder() / f"{name}.yaml").is_file()


def _beside(base: Any, place: str) -> str | Path:
    """A base given as a file is relative to the file that names it."""
    if not isinstance(base, str):
        raise TypeError(f"{place}: base must be the name or the file of a recipe, got {base!r}")
    return Path(place).parent / base if base.endswith((".yaml", ".yml")) else base


def _folder() -> Any:
    return resources.files("grassy.recipes") / "library"
