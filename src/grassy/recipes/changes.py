"""Change settings of a recipe, and adapt what depends on them: head options, schedule, description."""

import contextlib
import dataclasses
from collections.abc import Container, Mapping
from typing import Any

from grassy.heads import HEADS, check_head_options
from grassy.recipes.recipe import DEFAULTS, HINTS, NOT_OF_A_ROW, Recipe
from grassy.recipes.values import MOST
from grassy.spelling import nearest

#: Largest share of a shortened run that its warm-up may take.
LONGEST_WARMUP = 0.25
#: Names that other libraries use.
OPTIMIZER_OPTIONS = ("momentum", "betas", "eps", "nesterov")
ALIASES = {"learning_rate": "lr", "optimizer": "opt", "scheduler": "sched", "wd": "weight_decay", "bs": "batch_size"}


def with_changes(recipe: Recipe, changes: Mapping[str, Any]) -> Recipe:
    """The recipe with some fields changed. Mappings are merged; "head.k" names the option k of the head."""
    before = dataclasses.asdict(recipe)
    after = schedule_follows(before, merged(before, changes), changes)
    return Recipe(**still_described(before, after, changes))


def merged(settings: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Apply changes to settings. Mappings are merged key by key.

    Another head, model or optimizer starts from its own defaults, plus the options among the changes, in any order.
    """
    result = dict(settings)
    for whole, options in (("model", "model_kwargs"), ("opt", "opt_kwargs")):
        if whole in changes and changes[whole] != settings.get(whole, getattr(Recipe, whole)):
            result[options] = {}
    first = ("head.name", "head")  # before its options, which belong to the named head
    for key, value in sorted(changes.items(), key=lambda change: first.index(change[0]) if change[0] in first else 2):
        name, dot, part = str(key).partition(".")
        if name not in HINTS:
            raise ValueError(f"a recipe has no field {name!r}{_meant(name, result)}")
        if dot:
            if HINTS[name] != dict[str, Any]:
                raise ValueError(f"{name} has no parts, got {key!r}")
            value = {part: value}
        if isinstance(value, dict) and isinstance(result.get(name), dict) and "name" not in value:
            value = {**result[name], **value}
        elif isinstance(value, dict) and isinstance(result.get(name), dict) and dot:
            value = {**(result[name] if result[name].get("name") == value["name"] else {}), **value}
        result[name] = value
    return result


def _meant(name: str, settings: Mapping[str, Any]) -> str:
    """A phrase to append to the error for an unknown field: what the user may have meant."""
    if name in ALIASES:
        return f", did you mean {ALIASES[name]!r}?"
    head = settings.get("head")
    kind = head.get("name", "linear") if isinstance(head, Mapping) else "linear"
    for known in (kind, *HEADS):  # an option of the recipe's head, or else of another
        with contextlib.suppress(ValueError, TypeError):
            check_head_options(known, [name])
            return f", did you mean 'head.{name}'?"
    if name in OPTIMIZER_OPTIONS:
        return f", did you mean 'opt_kwargs.{name}'?"
    return nearest(name, [*HINTS, "base"])


def still_described(before: Mapping[str, Any], after: dict[str, Any], given: Container[str]) -> dict[str, Any]:
    """Drop the description and the paper's row if the changes make them wrong, unless they are given."""
    settings = ({**DEFAULTS, **each} for each in (before, after))
    old, new = ({name: value for name, value in each.items() if name not in NOT_OF_A_ROW} for each in settings)
    if old.get("finetune") or old.get("freeze"):  # such a recipe always needs weights from the user
        old.pop("initial_checkpoint"), new.pop("initial_checkpoint")
    same = _as_lists(old) == _as_lists(new)
    return after if same else {k: v for k, v in after.items() if k in given or k not in ("description", "paper")}


def _as_lists(value: Any) -> Any:
    """Plain values, with lists for tuples."""
    if isinstance(value, Mapping):
        return {key: _as_lists(item) for key, item in value.items()}
    return [_as_lists(item) for item in value] if isinstance(value, list | tuple) else value


def schedule_follows(before: Mapping[str, Any], after: dict[str, Any], given: Container[str]) -> dict[str, Any]:
    """Scale the milestones with the number of epochs, drop them for another schedule, and limit the warm-up.

    For example, with a tenth of the epochs the learning rate decays ten times as early.
    """
    after = _warmup_follows(before, after, given)
    milestones = after.get("decay_milestones")
    if not milestones or "decay_milestones" in given:
        return after
    if after.get("sched") != "step":
        return {**after, "decay_milestones": ()} if "sched" in given else after
    old, new = (settings.get("epochs", Recipe.epochs) for settings in (before, after))
    numbers = [old, new, *milestones] if isinstance(milestones, list | tuple) else [None]
    if old == new or not all(isinstance(value, int) and 0 < value <= MOST["epochs"] for value in numbers):
        return after  # unchanged, or invalid, which the check reports
    return {**after, "decay_milestones": tuple(max(1, round(each * new / old)) for each in milestones)}


def _warmup_follows(before: Mapping[str, Any], after: dict[str, Any], given: Container[str]) -> dict[str, Any]:
    old, new = (settings.get("epochs", Recipe.epochs) for settings in (before, after))
    warmup = after.get("warmup_epochs", 0)
    numbers = all(isinstance(value, int | float) and 0 < value <= MOST["epochs"] for value in (old, new, warmup))
    if not numbers or "warmup_epochs" in given or "epochs" not in given or new >= old:
        return after
    return {**after, "warmup_epochs": min(warmup, LONGEST_WARMUP * new)}
