"""The model that a recipe trains, and the weights that it starts from."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from grassy.heads import GrassmannHead, Head, heads_of
from grassy.heads.gamma import automatic_gamma
from grassy.heads.saved_options import KEY, difference, options_in
from grassy.models import create_model
from grassy.recipes.recipe import Recipe
from grassy.runs.weights import read_description, read_weights, weights_file
from grassy.train.pretrained import fetching_weights

#: Warn about a gamma this many times larger or smaller than the rule of thumb.
MUCH, LITTLE = 1.25, 0.5
#: Warn about a factor this large if features are not normalised.
LONG = 5.0


def build_model(
    recipe: Recipe,
    num_classes: int,
    say: Callable[[str], None] = lambda _: None,
    divide: Callable[[nn.Module], object] | None = None,
) -> nn.Module:
    """The model of a recipe with random weights, or those of its `initial_checkpoint`.

    say: called with each message to the user.
    divide: creates a sharded head in a model whose head is on the meta device.
    """
    if num_classes < 2:
        raise ValueError(
            "the training images have one class only, and a classifier needs two: --data-dir is the folder that holds "
            "the class folders; for classes that have no images yet, give num_classes=N"
        )
    options, on_meta = _model_options(recipe), divide is not None
    with fetching_weights(recipe.model) if options.get("pretrained") else contextlib.nullcontext():
        model = create_model(recipe.model, num_classes, recipe.head, options, on_meta)
    if options.get("pretrained"):
        say(f"starts from timm's pretrained weights for {recipe.model}; the classifier is new")
    if divide is not None:
        divide(model)
    _check_image_size(model, recipe)
    if not recipe.drop_before_head:
        _remove_dropout_before_head(model, recipe.model)
    if recipe.initial_checkpoint:
        loaded = start_from(model, Path(recipe.initial_checkpoint), recipe.model)
        say(f"starts from {recipe.initial_checkpoint}: {loaded}")
    if recipe.freeze:
        _freeze_all_but_head(model)
    for head in heads_of(model) if divide is None else ():
        _check_gamma(head, say)
    return model


def _check_gamma(head: Head, say: Callable[[str], None]) -> None:
    """Warn about an unsuitable gamma. The paper's is for 1,000 classes; for few classes it is too large."""
    if not isinstance(head, GrassmannHead):
        return
    options = {"normalize": head.normalize, "standardize": head.batch_norm is not None}
    rule = automatic_gamma(head.num_classes, head.dims.tolist(), head.in_features, **options)
    if rule is None and head.initial_gamma > LONG:
        say(f"gamma {head.initial_gamma:g} multiplies features that keep their length, since normalize is false; try 1")
    if rule is not None and head.initial_gamma > MUCH * rule:
        say(f"gamma {head.initial_gamma:g} is large for {head.num_classes} classes: head.gamma=auto would use {rule:g}")
    if rule is not None and head.initial_gamma < LITTLE * rule:
        say(
            f"gamma {head.initial_gamma:g} is small for {head.num_classes} classes, so no class can get a high "
            f"probability: head.gamma=auto would use {rule:g}"
        )


def _check_image_size(model: nn.Module, recipe: Recipe) -> None:
    """Raise a ValueError if a transformer is built for another image size than the recipe's."""
    patches = getattr(model, "patch_embed", None)
    expected = getattr(patches, "img_size", None) if getattr(patches, "strict_img_size", False) else None
    if expected is None:
        return
    if tuple(expected) != (recipe.img_size, recipe.img_size):
        raise ValueError(
            f"{recipe.model} takes images of {expected[0]} pixels, but img_size is {recipe.img_size}: change one, or "
            f"give model_kwargs.img_size={recipe.img_size} too"
        )
    if recipe.test_size not in (None, recipe.img_size):
        raise ValueError(
            f"{recipe.model} takes images of {expected[0]} pixels, but test_size is {recipe.test_size}: it cannot be "
            "tested at another size than it is trained at"
        )


def _freeze_all_but_head(model: nn.Module) -> None:
    """Freeze everything but the head. Its features must stay fixed too: see `training_mode`."""
    trained = {id(p) for head in heads_of(model) for p in head.parameters()}
    for p in model.parameters():
        p.requires_grad_(id(p) in trained)


def training_mode(model: nn.Module, frozen: bool) -> None:
    """`model.train()`, or only the head's if frozen: features must not depend on batch statistics or dropout."""
    model.train(not frozen)
    if frozen:
        for head in heads_of(model):
            head.train()


def start_from(model: nn.Module, path: Path, name: str = "") -> str:
    """Load weights into the model, except a classifier of another kind or size, which keeps its random weights.

    name: timm's name of the model.

    Returns a phrase that describes what was loaded. A classifier with another gamma is loaded, but keeps its own gamma.
    """
    weights = read_weights(path)
    own = model.state_dict()
    saved_options, own_options = options_in(weights), options_in(own)  # options of heads; older files have none
    weights, own = _without_options(weights), _without_options(own)
    prefixes = {name for name, module in model.named_modules() if isinstance(module, Head)}
    in_head = {key for key in own if any(key.startswith(f"{prefix}.") for prefix in prefixes)}
    fits = {key: value for key, value in weights.items() if key in own and own[key].shape == value.shape}
    missing = [key for key in own if key not in fits and key not in in_head]
    if missing:
        raise ValueError(
            f"{path} does not fit the model: {len(missing)} of {len(own)} tensors are missing or of another shape, "
            f"{missing[0]!r} first{_other_model(path, name)}"
        )
    # A head is loaded completely or not at all: a bias alone would be worse than random weights, and so would subspaces
    # without the statistics that standardise their features.
    unknown = {key for key in weights.keys() - own.keys() if any(key.startswith(f"{prefix}.") for prefix in prefixes)}
    other_kind = any(saved["head"] != own_options.get(prefix, saved)["head"] for prefix, saved in saved_options.items())
    if other := bool(unknown or in_head - fits.keys() or other_kind):
        fits = {key: value for key, value in fits.items() if key not in in_head}
    model.load_state_dict(fits, strict=False)
    if other:
        return "its classifier does not fit, ours is new"
    changed = {difference(saved, own_options.get(prefix, {})) for prefix, saved in saved_options.items()} - {""}
    return "all of it" + "".join(f", but {each}" for each in sorted(changed))


def _without_options(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: value for key, value in state.items() if key.split(".")[-1] != KEY}


def _other_model(path: Path, name: str) -> str:
    """A phrase to append if a file of weights describes another model."""
    with contextlib.suppress(ValueError, OSError):
        about = read_description(weights_file(path))
        if about.model != name:
            return f"; it is of {about.model}: give model={about.model}"
    return ""


def _model_options(recipe: Recipe) -> dict[str, Any]:
    options = dict(recipe.model_kwargs)
    if recipe.pretrained and not recipe.initial_checkpoint:
        options["pretrained"] = True
    if recipe.drop_path:
        options.setdefault("drop_path_rate", recipe.drop_path)
    return options


def _remove_dropout_before_head(model: nn.Module, name: str) -> None:
    """Set timm's dropout between the features and the classifier to 0."""
    owners = [model, getattr(model, "head", None)]
    for owner in owners:
        for attribute in ("head_drop", "drop"):
            dropout = getattr(owner, attribute, None)
            if isinstance(dropout, nn.Dropout):
                dropout.p = 0.0
                return
    if not isinstance(getattr(model, "drop_rate", None), float):
        raise ValueError(f"cannot find the dropout before the classifier of {name}: leave drop_before_head at true")
    model.drop_rate = 0.0  # type: ignore[assignment]
