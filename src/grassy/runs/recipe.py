"""A recipe says all that a training run needs but the place of its data: a YAML file and what is changed in it.

A file names its `base` and says only what differs from it. Names are timm's where timm has one.
"""

import contextlib
import dataclasses
import math
import os
import types
import typing
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import InitVar, dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from grassy.heads import HEADS, check_head_options, create_head
from grassy.models import import_timm
from grassy.runs.recipe_values import MOST, check_values
from grassy.runs.recipe_yaml import parse_yaml
from grassy.runs.schema import MOST_RECIPE, check_head, check_model_kwargs, check_recipe, read_text
from grassy.spelling import natural_key, nearest

#: The share of a run that was shortened that its warm-up takes at most.
LONGEST_WARMUP = 0.25
#: The recipe of a run, in its folder.
ARGS = "args.yaml"
#: How many bases may stand behind a recipe, one after the other.
MOST_BASES = 20
#: What a run of a paper's row may have of its own: how and where it runs, and by what name its data is opened.
NOT_OF_A_ROW = {
    *("description", "paper", "seed", "num_classes", "dataset", "train_split", "val_split", "grad_accum_steps", "amp"),
    *(
        "channels_last",
        "torchcompile",
        "sync_bn",
        "shard_head",
        "fsdp",
        "loader",
        "workers",
        "val_batch_size",
        "val_interval",
    ),
    *("checkpoint_interval", "nonfinite", "model_ema_warmup"),
}


@dataclass(frozen=True)
class Recipe:
    """All settings of a run, with their defaults: ImageNet's, without augmentation beyond crops and flips."""

    description: str = ""
    #: Key of the row of figures in the paper that this recipe is to reproduce (see `grassy.paper`).
    paper: str = ""

    # --- the model
    model: str = "resnet50d"  # any name timm knows
    model_kwargs: dict[str, Any] = field(default_factory=dict)
    head: dict[str, Any] = field(default_factory=lambda: {"name": "linear"})  # its name and its options
    k_share: float = 1.0  # the most that head.k may be of the width of the features; in narrow models it is lowered
    num_classes: int | None = None  # None: as many as the data has
    drop_path: float = 0.0
    drop_before_head: bool = True  # False removes the model's own dropout in front of the classifier
    initial_checkpoint: str = ""  # weights to start from; a classifier of another kind or size is left out
    pretrained: bool = False  # timm's weights to start from, out of its cache or the network
    finetune: bool = False  # weights to start from must be given
    freeze: bool = False  # train the head alone, on such weights

    # --- the data
    dataset: str = ""  # a timm reader ("torch/cifar100", "hfds/...", "wds/..."), "digits", or "" for files
    train_split: str = "train"
    val_split: str = "validation"
    val_fraction: float = 0.0  # to hold out for validation, of images that are not split: a folder of class folders
    val_seed: int = 0  # which images those are; another `seed` keeps them
    preparation: str = "recipe"  # "weights": what is not given of the next six fields is that of the first weights
    img_size: int = 224
    test_size: int | None = None  # None: as in training
    crop_pct: float = 0.875  # of the test image: test_size / crop_pct is what the short side is resized to
    interpolation: str = "bilinear"
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)

    # --- augmentation
    crop: str = "resized"  # random resized crop; "padded": zeros around and a random crop; "none"
    scale: tuple[float, ...] = (0.08, 1.0)
    ratio: tuple[float, ...] = (0.75, 4 / 3)
    padding: int = 4
    hflip: float = 0.5
    color_jitter: float = 0.0
    aa: str = ""  # timm's name of a policy, such as "rand-m9-mstd0.5-inc1" or "3a"
    reprob: float = 0.0
    remode: str = "pixel"
    mixup: float = 0.0
    cutmix: float = 0.0
    mixup_prob: float = 1.0
    mixup_switch_prob: float = 0.5
    aug_repeats: int = 1  # views of each image in an epoch, which then has as many images fewer

    # --- the loss
    loss: str = "cross-entropy"  # bce: the mean over classes, as timm has it; bce-sum: their sum
    smoothing: float = 0.0

    # --- the optimizer and its schedule
    opt: str = "sgd"
    opt_kwargs: dict[str, Any] = field(default_factory=dict)
    lr: float = 0.1
    weight_decay: float = 1e-4
    decay_all: bool = False  # biases and norms too
    layer_decay: float | None = None
    head_lr: float | None = None  # of the subspaces; None: lr beside SGD, else 0.1
    head_momentum: float = 0.9
    retraction: str = "geodesic"
    transport: str = "projection"
    max_angle: float | None = None
    direction: InitVar[str] = "gradient"  # no choice any more, but older files name it
    clip_grad: float | None = None
    epochs: int = 100
    batch_size: int = 256  # of all processes and accumulation steps together
    grad_accum_steps: int = 1
    sched: str = "cosine"
    decay_milestones: tuple[int, ...] = ()
    decay_rate: float = 0.1
    warmup_epochs: float = 0.0
    warmup_lr: float = 0.0
    min_lr: float = 0.0
    model_ema: bool = False
    model_ema_decay: float = 0.9999
    model_ema_warmup: bool = True  # a shorter memory at first, so that a short run forgets its first weights

    # --- how to run it
    seed: int = 0
    amp: str = "auto"  # bfloat16 on a GPU, off on a CPU
    channels_last: bool = True
    torchcompile: str = "auto"  # on for GPUs
    sync_bn: bool = False
    shard_head: str = (
        "auto"  # divide the classes over the processes; auto: if the weight is over 256 MB, "true", "false"
    )
    fsdp: bool = False  # divide the rest of the model over the processes, by FSDP2
    loader: str = "auto"  # resident: all images in the memory of the device, if they are small and few
    workers: int = 4
    val_batch_size: int | None = None
    val_interval: int = 1  # epochs between validations; the last epoch is always validated
    checkpoint_interval: float = 300.0  # seconds between checkpoints; 0: at the end of every epoch
    nonfinite: str = "stop"  # or "skip" the update and go on

    def __post_init__(self, direction: str) -> None:
        if direction != "gradient":
            raise ValueError(f"direction must be 'gradient', since spectral steps were removed, got {direction!r}")
        if isinstance(self.shard_head, bool):  # as YAML reads it
            object.__setattr__(self, "shard_head", str(self.shard_head).lower())
        for f in dataclasses.fields(self):
            object.__setattr__(self, f.name, _typed(f.name, getattr(self, f.name), HINTS[f.name]))
        check_values(self)
        check_model_kwargs("model_kwargs", self.model_kwargs)
        object.__setattr__(self, "head", {"name": "linear", **self.head})
        _check_head(**self.head)
        check_head("head", self.head)
        check_recipe("recipe", self.to_dict())

    @property
    def mixes(self) -> bool:
        return self.mixup > 0 or self.cutmix > 0

    def changed(self, changes: Mapping[str, Any]) -> "Recipe":
        """The recipe with some fields changed; mappings are merged, and "head.k" is the k of the head."""
        before = dataclasses.asdict(self)
        after = _schedule_follows(before, _merged(before, changes), changes)
        return Recipe(**_still_described(before, after, changes))

    def differences(self, other: "Recipe") -> list[str]:
        """Fields in which two recipes differ, those aside in which runs of one row of the paper may differ."""
        free = NOT_OF_A_ROW | ({"initial_checkpoint"} if self.finetune or self.freeze else set())
        return [name for name in vars(self) if name not in free and getattr(self, name) != getattr(other, name)]

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, numbers and strings, as YAML and JSON have them."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in vars(self).items()}


HINTS: dict[str, Any] = typing.get_type_hints(Recipe)
DEFAULTS: dict[str, Any] = {
    f.name: f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
    for f in dataclasses.fields(Recipe)
}
#: As others call them.
OPTIMIZER_OPTIONS = ("momentum", "betas", "eps", "nesterov")
ALIASES = {"learning_rate": "lr", "optimizer": "opt", "scheduler": "sched", "wd": "weight_decay", "bs": "batch_size"}


def load_recipe(
    name: str | Path,
    overrides: Iterable[str] = (),
    fields: Mapping[str, Any] | None = None,
    preparation: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None,
    goes_on: bool = False,
) -> Recipe:
    """The recipe of that name, or of a user's file, with `key=value` overrides, and further fields as they are.

    name: of a recipe of the package, or the path of a YAML file (whose base may be either, too) or of a run's folder.
    preparation: tells how images are prepared for the weights that settings name, for recipes that leave it to these.
    goes_on: the run is resumed, and so fetches no weights, whatever it began with.
    """
    before = read_settings(name)
    changes: dict[str, Any] = {}
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals:
            raise ValueError(f"a setting is given as key=value, got {override!r}")
        _add(changes, key.strip(), parse_yaml(value, override))
    settings, said = (_merged(_merged(start, changes), fields or {}) for start in (before, {}))
    if _fetches(settings) and not (_fetches(said) or goes_on or _is_packaged(name)):
        raise ValueError(f"{name}: weights are fetched only if you say so yourself: give pretrained=true")
    given = {*changes, *(fields or {})}
    if preparation is not None and settings.get("preparation") == "weights":
        settings = {**preparation(settings), **settings}
    return Recipe(**_still_described(before, _schedule_follows(before, settings, given), given))


def run_name(name: str | Path) -> str:
    """What a run of a recipe is called: as the recipe, or as the run whose recipe it is."""
    path = Path(name)
    if path.name == ARGS:
        return path.resolve().parent.name
    return path.resolve().name if path.is_dir() else path.stem


def saved_recipe(values: Mapping[str, Any]) -> Recipe:
    """The recipe that is saved with weights, without fields that grassy does not have; a ValueError if it is none."""
    try:
        return Recipe(**{name: value for name, value in values.items() if name in HINTS})
    except (ValueError, TypeError) as error:
        raise ValueError(f"the recipe that is saved with the weights is damaged: {error}") from None


def _fetches(settings: Mapping[str, Any]) -> bool:
    """Whether timm would fetch weights for the model."""
    options = settings.get("model_kwargs")
    return bool(settings.get("pretrained")) or (isinstance(options, dict) and bool(options.get("pretrained")))


def _still_described(before: Mapping[str, Any], after: dict[str, Any], given: Container[str]) -> dict[str, Any]:
    """Settings without the description and the paper's row, unless these are given, if they say something else now."""
    settings = ({**DEFAULTS, **each} for each in (before, after))
    old, new = ({name: value for name, value in each.items() if name not in NOT_OF_A_ROW} for each in settings)
    if old.get("finetune") or old.get("freeze"):  # begins with weights that everyone has to give
        old.pop("initial_checkpoint"), new.pop("initial_checkpoint")
    same = _as_lists(old) == _as_lists(new)
    return after if same else {k: v for k, v in after.items() if k in given or k not in ("description", "paper")}


def _as_lists(value: Any) -> Any:
    """Plain values, with lists for tuples."""
    if isinstance(value, Mapping):
        return {key: _as_lists(item) for key, item in value.items()}
    return [_as_lists(item) for item in value] if isinstance(value, list | tuple) else value


def _add(changes: dict[str, Any], key: str, value: Any) -> None:
    """Another change: the last one counts, and of another head, model or optimizer none of the options before it."""
    options = {"model": "model_kwargs", "opt": "opt_kwargs", "head.name": "head"}.get(key)
    again = options is not None and key in changes and changes[key] != value
    parts = [f"{key}.{part}" for part in value] if isinstance(value, dict) else []
    for name in list(changes):
        if name in parts or (again and (name == options or name.startswith(f"{options}."))):
            del changes[name]
    changes[key] = value


def read_settings(name: str | Path, seen: tuple[str, ...] = ()) -> dict[str, Any]:
    """What a recipe file and its bases say, field by field."""
    if len(seen) > MOST_BASES:
        raise ValueError(f"{seen[0]} has a chain of more than {MOST_BASES} bases")
    text, place = _read(name, seen)
    if place in seen:
        raise ValueError(f"a recipe is among its own bases: {' -> '.join((*seen, place))}")
    own = parse_yaml(text, place) or {}
    if not isinstance(own, dict):
        raise ValueError(f"{place} must hold keys and values, not a {type(own).__name__}")
    if Path(place).name == ARGS and own.get("model_ema"):
        own.setdefault("model_ema_warmup", False)  # a run of a version that had none means what it meant
    base = own.pop("base", None)
    settings = read_settings(_beside(base, place), (*seen, place)) if base else {}
    if base:
        settings.pop("description", None)  # a description and the paper's row are a file's own
        settings.pop("paper", None)
    try:
        return _schedule_follows(settings, _merged(settings, own), own)
    except (ValueError, TypeError) as error:
        raise type(error)(f"{place}: {error}") from None


def recipe_names() -> list[str]:
    """Names of the recipes in the package; those that are only a base to others begin with an underscore."""
    names = [file.name.removesuffix(".yaml") for file in _folder().iterdir() if file.name.endswith(".yaml")]
    return sorted((name for name in names if not name.startswith("_")), key=natural_key)


def _merged(settings: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with changes: of mappings key by key, but another head, model or optimizer starts with its defaults, to
    which the options among the changes are added, whatever their order.
    """
    merged = dict(settings)
    for whole, options in (("model", "model_kwargs"), ("opt", "opt_kwargs")):
        if whole in changes and changes[whole] != settings.get(whole, getattr(Recipe, whole)):
            merged[options] = {}
    first = ("head.name", "head")  # options are those of the head that is named
    for key, value in sorted(changes.items(), key=lambda change: first.index(change[0]) if change[0] in first else 2):
        name, dot, part = str(key).partition(".")
        if name not in HINTS:
            raise ValueError(f"a recipe has no field {name!r}{_meant(name, merged)}")
        if dot:
            if HINTS[name] != dict[str, Any]:
                raise ValueError(f"{name} has no parts, got {key!r}")
            value = {part: value}
        if isinstance(value, dict) and isinstance(merged.get(name), dict) and "name" not in value:
            value = {**merged[name], **value}
        elif isinstance(value, dict) and isinstance(merged.get(name), dict) and dot:
            value = {**(merged[name] if merged[name].get("name") == value["name"] else {}), **value}
        merged[name] = value
    return merged


def _meant(name: str, settings: Mapping[str, Any]) -> str:
    """A phrase to append: what a user may have meant by a field that a recipe does not have."""
    if name in ALIASES:
        return f", did you mean {ALIASES[name]!r}?"
    head = settings.get("head")
    kind = head.get("name", "linear") if isinstance(head, Mapping) else "linear"
    for known in (kind, *HEADS):  # an option of the head, of this one first
        with contextlib.suppress(ValueError, TypeError):
            check_head_options(known, [name])
            return f", did you mean 'head.{name}'?"
    if name in OPTIMIZER_OPTIONS:
        return f", did you mean 'opt_kwargs.{name}'?"
    return nearest(name, [*HINTS, "base"])


def _schedule_follows(before: Mapping[str, Any], after: dict[str, Any], given: Container[str]) -> dict[str, Any]:
    """A run of a tenth of the epochs also decays ten times as early, and another schedule has no milestones. Nor does a
    warm-up take most of a shortened run.
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
        return after  # the same, or wrong: the check says so
    return {**after, "decay_milestones": tuple(max(1, round(each * new / old)) for each in milestones)}


def _warmup_follows(before: Mapping[str, Any], after: dict[str, Any], given: Container[str]) -> dict[str, Any]:
    old, new = (settings.get("epochs", Recipe.epochs) for settings in (before, after))
    warmup = after.get("warmup_epochs", 0)
    numbers = all(isinstance(value, int | float) and 0 < value <= MOST["epochs"] for value in (old, new, warmup))
    if not numbers or "warmup_epochs" in given or "epochs" not in given or new >= old:
        return after
    return {**after, "warmup_epochs": min(warmup, LONGEST_WARMUP * new)}


def _check_head(name: Any, **options: Any) -> None:
    """Raise a ValueError or TypeError for a head or an option that does not exist, or a value that it cannot have."""
    if not isinstance(name, str):
        raise TypeError(f"the name of a head must be a string, got {name!r}")
    check_head_options(name, options)
    dims = options.get("k", 1)
    dims = dims if isinstance(dims, list) else [dims]
    sizes = [dim for dim in dims if isinstance(dim, int)]
    if len(sizes) == len(dims) > 2:
        options = {**options, "k": [min(dims), max(dims)]}  # of many classes these two can be wrong
    # The head itself knows what it takes. On the device "meta" it needs no memory and draws no random numbers.
    try:
        create_head(name, max(64, *sizes, 0) + 1, min(len(dims), 2), **options, device="meta")
    except (ValueError, TypeError) as error:
        raise type(error)(f"head {name!r} with {options}: {error}") from None
    except (RuntimeError, OverflowError) as error:  # sizes that no tensor can have
        raise ValueError(f"head {name!r} with {options}: {str(error).splitlines()[0]}") from None


def _typed(name: str, value: Any, hint: Any) -> Any:
    """The value as the type of the field, or a TypeError that names the field."""
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if value is None and type(None) in options:
        return None
    kind = next(option for option in options if option is not type(None))
    origin = typing.get_origin(kind) or kind
    if value is None and origin is str:
        return ""  # what YAML makes of nothing, as in `dataset=`
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(_typed(name, item, typing.get_args(kind)[0]) for item in value)
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
    elif name in ("torchcompile", "amp") and isinstance(value, bool):  # YAML takes on and off for booleans
        return ("on" if value else "off") if name == "torchcompile" else ("auto" if value else "off")
    words = {tuple: "a list of numbers", float: "a number", int: "an integer", bool: "true or false"}
    allowed = words.get(origin, {str: "a string", dict: "a mapping"}.get(origin, str(origin)))
    hint = f": say head.name={value}" if name == "head" and isinstance(value, str) else ""
    raise TypeError(f"{name} must be {allowed}, got {value!r}{hint}")


def _read(name: str | Path, seen: tuple[str, ...]) -> tuple[str, str]:
    """The text of a recipe and its name or path."""
    path, packaged = Path(name), _is_packaged(name)
    if packaged:
        return (_folder() / f"{name}.yaml").read_text(encoding="utf-8"), str(name)
    if path.is_dir():
        path = path / ARGS
        if not path.is_file():
            raise ValueError(f"{name} is a folder without {ARGS}, so not that of a run: give the name of a recipe")
    if path.suffix in (".yaml", ".yml"):
        return read_text(path, MOST_RECIPE), os.path.normpath(path)  # so that a circle of bases meets itself
    of = f" (the base of {seen[-1]})" if seen else ""
    hint = _other_model(str(name)) or nearest(str(name), recipe_names())
    raise ValueError(f"there is no recipe {str(name)!r}{of}{hint}; `grassy recipes` lists them, or give a .yaml file")


def _other_model(name: str) -> str:
    """A phrase to append if a recipe that does not exist is named as another one, but for a model that timm has."""
    model, _, head = name.partition("-")
    base = next((each for each in (f"resnet50-{head}", f"resnet50d-{head}") if head and _is_packaged(each)), None)
    if base is None or not import_timm().is_model(model):
        return ""
    return f": any recipe takes another model, as in `grassy train {base} model={model}`"


def _is_packaged(name: str | Path) -> bool:
    return "/" not in str(name) and len(str(name)) < 200 and (_folder() / f"{name}.yaml").is_file()


def _beside(base: Any, place: str) -> str | Path:
    """A base that is a file is looked for beside the file that names it."""
    if not isinstance(base, str):
        raise TypeError(f"{place}: base must be the name or the file of a recipe, got {base!r}")
    return Path(place).parent / base if base.endswith((".yaml", ".yml")) else base


def _folder() -> Any:
    return resources.files("grassy") / "recipes"
