"""A recipe: all settings of a training run except the location of its data. Names follow timm where possible."""

import dataclasses
import typing
from collections.abc import Mapping
from dataclasses import InitVar, dataclass, field
from typing import Any

from grassy.recipes.values import STREAMS, check_head_settings, check_values, typed_value
from grassy.schema import check_head, check_model_kwargs, check_recipe

#: Fields in which a run may differ from its row of the paper: how and where it runs, and how its data is opened.
NOT_OF_A_ROW = {
    *("description", "paper", "seed", "num_classes", "dataset", "train_split", "val_split", "grad_accum_steps", "amp"),
    *("channels_last", "torchcompile", "sync_bn", "shard_head", "fsdp", "loader", "workers", "val_batch_size"),
    *("val_interval", "checkpoint_interval", "nonfinite", "model_ema_warmup"),
}


@dataclass(frozen=True)
class Recipe:
    """All settings of a run. The defaults are for ImageNet, with crops and flips as the only augmentation."""

    description: str = ""
    #: Key of the row of the paper that this recipe reproduces (see `grassy.paper`).
    paper: str = ""

    # --- the model
    model: str = "resnet50d"  # any name timm knows
    model_kwargs: dict[str, Any] = field(default_factory=dict)
    head: dict[str, Any] = field(default_factory=lambda: {"name": "linear"})  # name and options of the head
    num_classes: int | None = None  # None: the number of classes in the data
    drop_path: float = 0.0
    drop_before_head: bool = True  # False removes the model's own dropout in front of the classifier
    initial_checkpoint: str = ""  # weights to start from; a classifier of another kind or size is skipped
    pretrained: bool = False  # start from timm's pretrained weights, from its cache or the network
    finetune: bool = False  # require weights to start from
    freeze: bool = False  # require weights to start from, and train only the head

    # --- the data
    dataset: str = ""  # a timm reader ("torch/cifar100", "hfds/...", "wds/..."), "digits", or "" for files
    train_split: str = "train"
    val_split: str = "validation"
    val_fraction: float = 0.0  # share to hold out for validation, if the data has no split: a folder of class folders
    val_seed: int = 0  # seed of the held-out images, independent of `seed`
    preparation: str = "recipe"  # "weights": take those of the next seven fields that are not set from the weights
    img_size: int = 224
    test_size: int | None = None  # None: as in training
    crop_pct: float = 0.875  # for testing, the short side is resized to test_size / crop_pct, then cropped
    crop_mode: str = "center"  # for testing; "squash": distort the image to a square, "border": show all of it
    interpolation: str = "bilinear"
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)

    # --- augmentation
    crop: str = "resized"  # random resized crop; "padded": zero padding and a random crop; "none"
    scale: tuple[float, ...] = (0.08, 1.0)
    ratio: tuple[float, ...] = (0.75, 4 / 3)
    padding: int = 4
    hflip: float = 0.5
    color_jitter: float = 0.0
    aa: str = ""  # timm's auto-augment policy, such as "rand-m9-mstd0.5-inc1" or "3a"
    reprob: float = 0.0
    remode: str = "pixel"
    mixup: float = 0.0
    cutmix: float = 0.0
    mixup_prob: float = 1.0
    mixup_switch_prob: float = 0.5
    aug_repeats: int = 1  # repeated augmentation: views per image; an epoch has proportionally fewer images

    # --- the loss
    loss: str = "cross-entropy"  # "bce": mean over classes, as in timm; "bce-sum": sum over classes
    smoothing: float = 0.0

    # --- the optimizer and its schedule
    opt: str = "sgd"
    opt_kwargs: dict[str, Any] = field(default_factory=dict)
    lr: float = 0.1
    weight_decay: float = 1e-4
    decay_all: bool = False  # also decay biases and norm parameters
    layer_decay: float | None = None
    head_lr: float | None = None  # learning rate of the subspaces; None: lr with SGD, else 0.1
    head_momentum: float = 0.9
    retraction: str = "geodesic"
    transport: str = "projection"
    max_angle: float | None = None
    direction: InitVar[str] = "gradient"  # has only one value now; older files still name it
    clip_grad: float | None = None
    epochs: int = 100
    batch_size: int = 256  # total over all processes and accumulation steps
    grad_accum_steps: int = 1
    sched: str = "cosine"
    decay_milestones: tuple[int, ...] = ()
    decay_rate: float = 0.1
    warmup_epochs: float = 0.0
    warmup_lr: float = 0.0
    min_lr: float = 0.0
    model_ema: bool = False
    model_ema_decay: float = 0.9999
    model_ema_warmup: bool = True  # smaller decay at first, so that a short run forgets its initial weights

    # --- how to run it
    seed: int = 0
    amp: str = "auto"  # bfloat16 on a GPU, off on a CPU
    channels_last: bool = True
    torchcompile: str = "auto"  # "auto": compile on GPUs
    sync_bn: bool = False
    shard_head: str = "auto"  # shard the classes over the processes: "true", "false"; "auto": if over 256 MB
    fsdp: bool = False  # shard the rest of the model over the processes with FSDP2
    loader: str = "auto"  # "resident": keep all images in device memory, for small datasets
    workers: int = 4
    val_batch_size: int | None = None
    val_interval: int = 1  # epochs between validations; the last epoch is always validated
    checkpoint_interval: float = 300.0  # seconds between checkpoints; 0: at the end of every epoch
    nonfinite: str = "stop"  # "skip": skip the update and continue

    def __post_init__(self, direction: str) -> None:
        if direction != "gradient":
            raise ValueError(f"direction must be 'gradient', since spectral steps were removed, got {direction!r}")
        if isinstance(self.shard_head, bool):  # as YAML reads it
            object.__setattr__(self, "shard_head", str(self.shard_head).lower())
        for f in dataclasses.fields(self):
            object.__setattr__(self, f.name, typed_value(f.name, getattr(self, f.name), HINTS[f.name]))
        check_values(self)
        check_model_kwargs("model_kwargs", self.model_kwargs)
        object.__setattr__(self, "head", {"name": "linear", **self.head})
        check_head_settings(**self.head)
        check_head("head", self.head)
        check_recipe("recipe", self.to_dict())

    @property
    def is_stream(self) -> bool:
        """Whether the images can only be read in order."""
        return self.dataset.startswith(STREAMS)

    @property
    def reads_files(self) -> bool:
        """Whether the images are read from --data-dir. Otherwise a library provides them."""
        return self.dataset != "digits" and not self.dataset.startswith((*STREAMS, "hfds/"))

    @property
    def mixes(self) -> bool:
        return self.mixup > 0 or self.cutmix > 0

    def differences(self, other: "Recipe") -> list[str]:
        """Fields in which two recipes differ, except those in which runs of one row of the paper may differ."""
        free = NOT_OF_A_ROW | ({"initial_checkpoint"} if self.finetune or self.freeze else set())
        return [name for name in vars(self) if name not in free and getattr(self, name) != getattr(other, name)]

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, numbers and strings, for YAML and JSON."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in vars(self).items()}


HINTS: dict[str, Any] = typing.get_type_hints(Recipe)
DEFAULTS: dict[str, Any] = {
    f.name: f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
    for f in dataclasses.fields(Recipe)
}


def saved_recipe(values: Mapping[str, Any]) -> Recipe:
    """The recipe saved with weights, without fields unknown to this version; a ValueError if it is invalid."""
    try:
        return Recipe(**{name: value for name, value in values.items() if name in HINTS})
    except (ValueError, TypeError) as error:
        raise ValueError(f"the recipe that is saved with the weights is damaged: {error}") from None
