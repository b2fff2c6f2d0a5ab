"""The types and values that recipe settings may have."""

import math
import re
import types
import typing
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from grassy.heads import check_head_options, create_head
from grassy.kernels.step_options import RETRACTIONS, TRANSPORTS
from grassy.schema import CROP_MODES, INTERPOLATIONS, LEAST_CROP, MOST_CLASSES, MOST_CROP, MOST_PIXELS
from grassy.spelling import nearest

if TYPE_CHECKING:
    from grassy.recipes.recipe import Recipe

CHOICES: dict[str, tuple[str, ...]] = {
    "crop": ("resized", "padded", "none"),
    "loss": ("cross-entropy", "bce", "bce-sum"),
    "sched": ("cosine", "step", "constant"),
    "amp": ("auto", "off", "bfloat16", "float16"),
    "loader": ("auto", "workers", "resident"),
    "torchcompile": ("auto", "on", "off"),
    "shard_head": ("auto", "true", "false"),
    "nonfinite": ("stop", "skip"),
    "retraction": RETRACTIONS,
    "transport": TRANSPORTS,
    "remode": ("const", "rand", "pixel"),
    "preparation": ("recipe", "weights"),
    "interpolation": INTERPOLATIONS,
    "crop_mode": CROP_MODES,
}

#: Readers of timm that read images in order, shard by shard.
STREAMS = ("wds/", "hfids/", "tfds/")
#: Prefixes of timm readers. timm would take any other name for a folder of images, and find no splits in it.
READERS = ("torch/", "hfds/", *STREAMS)

POSITIVE: tuple[str, ...] = ("epochs", "batch_size", "grad_accum_steps", "img_size", "aug_repeats", "val_interval")
POSITIVE += ("val_batch_size", "test_size", "num_classes")
NONNEGATIVE: tuple[str, ...] = (
    "lr",
    "weight_decay",
    "head_lr",
    "warmup_epochs",
    "warmup_lr",
    "min_lr",
    "workers",
    "padding",
)
NONNEGATIVE += ("mixup", "cutmix", "color_jitter", "seed", "val_seed", "checkpoint_interval")
PROBABILITIES = ("hflip", "reprob", "smoothing", "drop_path", "mixup_prob", "mixup_switch_prob")
FACTORS = ("layer_decay", "decay_rate")
#: Upper limits: a larger value is a typing error that would exhaust memory or time.
MOST: dict[str, int] = {
    **dict.fromkeys(("epochs", "val_interval", "warmup_epochs", "aug_repeats"), 10**6),
    **dict.fromkeys(("batch_size", "val_batch_size", "grad_accum_steps"), 2**24),
    **dict.fromkeys(("img_size", "test_size", "padding"), MOST_PIXELS),
    "num_classes": MOST_CLASSES,
    "crop_pct": MOST_CROP,
    "workers": 1024,
    "color_jitter": 100,
}
MOST_AUGMENTATION = 1000


def check_values(recipe: "Recipe") -> None:
    """Raise a ValueError that names the first setting with an invalid value."""
    given = {name: value for name, value in vars(recipe).items() if value is not None}

    def require(names: Iterable[str], holds: Callable[[Any], bool], what: str) -> None:
        for name in names:
            if name in given and not holds(given[name]):
                value = list(given[name]) if isinstance(given[name], tuple) else given[name]
                raise ValueError(f"{name} must {what}, got {value}")

    for name, allowed in CHOICES.items():
        value = given[name]
        if value not in allowed:
            raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}{nearest(value, allowed)}")
    check_dataset(recipe.dataset)
    require(POSITIVE, lambda value: value >= 1, "be at least 1")
    require(NONNEGATIVE, lambda value: value >= 0, "not be negative")
    for name, most in MOST.items():
        require([name], float(most).__ge__, f"be at most {most}")
    require(["decay_milestones"], lambda value: len(value) <= 1000, "be at most 1000 numbers")
    require(["aa"], _is_modest, f"be a policy of timm without numbers beyond {MOST_AUGMENTATION} (n: 100)")
    require(["seed", "val_seed"], lambda value: value < 2**63, "be less than 2**63")
    require(PROBABILITIES, lambda value: 0 <= value <= 1, "lie between 0 and 1")
    require(FACTORS, lambda value: 0 < value <= 1, "lie in (0, 1]")
    require(["val_fraction"], lambda value: 0 <= value < 1, "lie in [0, 1)")
    require(["crop_pct"], lambda value: value >= LEAST_CROP, f"be at least {LEAST_CROP}")
    require(["model_ema_decay"], lambda value: 0 <= value < 1, "lie in [0, 1)")
    require(["clip_grad"], lambda value: value > 0, "be positive")
    require(["mean", "std"], lambda value: len(value) == 3, "be three numbers, of red, green and blue")
    require(["std"], lambda value: min(value) > 0, "be positive")
    require(
        ["scale", "ratio"],
        lambda value: len(value) == 2 and 0 < value[0] <= value[1],
        "be two positive numbers, the smaller first",
    )
    for name in ("device", "dtype"):
        if name in recipe.head:
            raise ValueError(f"head.{name} cannot be set: the head has the device and dtype of the model")
    if recipe.batch_size % recipe.grad_accum_steps:
        raise ValueError(f"batch_size {recipe.batch_size} is not divisible by {recipe.grad_accum_steps} accumulations")
    if recipe.warmup_epochs >= recipe.epochs and recipe.warmup_epochs:
        raise ValueError(
            f"warmup_epochs {recipe.warmup_epochs:g} must be fewer than epochs {recipe.epochs}; warmup_epochs=0 does "
            "without"
        )
    if recipe.shard_head == "true" and recipe.mixes and recipe.loss != "cross-entropy":
        raise ValueError(
            f"shard_head=true does not support soft labels with loss={recipe.loss}: mixup and cutmix must be 0"
        )
    if recipe.fsdp and recipe.model_ema:
        raise ValueError("fsdp=true does not support averaging: model_ema must be false")
    if recipe.sched != "step" and recipe.decay_milestones:
        raise ValueError(f"decay_milestones are for sched step, not {recipe.sched}")
    if recipe.smoothing and recipe.loss.startswith("bce") and not recipe.mixes:
        raise ValueError("smoothing with bce requires mixup or cutmix, which make soft targets")


def _is_modest(policy: str) -> bool:
    """Whether the numbers in an augmentation policy are small enough for timm to finish."""
    numbers = [float(found) for found in re.findall(r"\d+(?:\.\d*)?", policy[:1000])]
    layers = [int(found) for found in re.findall(r"-n(\d{1,9})", policy)]
    return len(policy) <= 200 and max(numbers, default=0) <= MOST_AUGMENTATION and max(layers, default=0) <= 100


def check_dataset(name: str) -> None:
    """Raise a ValueError unless the name is a timm reader, "digits" or "" (files)."""
    if name in ("", "digits") or any(name.startswith(reader) and name != reader for reader in READERS):
        return
    hint = nearest(name, ["digits"]) or nearest(name.partition("/")[0] + "/", READERS)
    readers = ", ".join(f"{reader}NAME" for reader in READERS)
    raise ValueError(
        f"dataset must be a timm reader ({readers}), digits, or empty for folders, tars and .npz files in "
        f"--data-dir, got {name!r}{hint}"
    )


def check_head_settings(name: Any, **options: Any) -> None:
    """Raise a ValueError or TypeError for an unknown head or option, or an invalid value."""
    if not isinstance(name, str):
        raise TypeError(f"the name of a head must be a string, got {name!r}")
    check_head_options(name, options)
    dims = options.get("k", 1)
    dims = dims if isinstance(dims, list) else [dims]
    sizes = [dim for dim in dims if isinstance(dim, int)]
    if len(sizes) == len(dims) > 2:
        options = {**options, "k": [min(dims), max(dims)]}  # only the extremes can be wrong
    # The head checks its own options. On the device "meta" it needs no memory and draws no random numbers.
    try:
        create_head(name, max(64, *sizes, 0) + 1, min(len(dims), 2), **options, device="meta")
    except (ValueError, TypeError) as error:
        raise type(error)(f"head {name!r} with {options}: {error}") from None
    except (RuntimeError, OverflowError) as error:  # sizes beyond those of any tensor
        raise ValueError(f"head {name!r} with {options}: {str(error).splitlines()[0]}") from None


def typed_value(name: str, value: Any, hint: Any) -> Any:
    """Convert a value to the type of its field; a TypeError names the field."""
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if value is None and type(None) in options:
        return None
    kind = next(option for option in options if option is not type(None))
    origin = typing.get_origin(kind) or kind
    if value is None and origin is str:
        return ""  # YAML parses nothing as None, as in `dataset=`
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(typed_value(name, item, typing.get_args(kind)[0]) for item in value)
    if origin is float and not isinstance(value, bool):
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if math.isfinite(number):
            return number
    elif origin is int and isinstance(value, int) and not isinstance(value, bool):
        return value
    elif origin in (bool, str, dict) and isinstance(value, origin):
        return dict(value) if origin is dict else value
    elif name in ("torchcompile", "amp") and isinstance(value, bool):  # YAML parses on and off as booleans
        return ("on" if value else "off") if name == "torchcompile" else ("auto" if value else "off")
    words = {tuple: "a list of numbers", float: "a number", int: "an integer", bool: "true or false"}
    allowed = words.get(origin, {str: "a string", dict: "a mapping"}.get(origin, str(origin)))
    hint = f": say head.name={value}" if name == "head" and isinstance(value, str) else ""
    raise TypeError(f"{name} must be {allowed}, got {value!r}{hint}")
