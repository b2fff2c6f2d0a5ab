"""A recipe: all that a training run needs but the place of its data. Names are timm's where timm has one."""

import dataclasses
import typing
from collections.abc import Mapping
from dataclasses import InitVar, dataclass, field
from typing import Any

from grassy.runs.recipe_values import check_head_settings, check_values, typed_value
from grassy.runs.schema import check_head, check_model_kwargs, check_recipe

#: What a run of a paper's row may have of its own: how and where it runs, and by what name its data is opened.
NOT_OF_A_ROW = {
    *("description", "paper", "seed", "num_classes", "dataset", "train_split", "val_split", "grad_accum_steps", "amp"),
    *("channels_last", "torchcompile", "sync_bn", "shard_head", "fsdp", "loader", "workers", "val_batch_size"),
    *("val_interval", "checkpoint_interval", "nonfinite", "model_ema_warmup"),
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
        "auto"  # divide the classes over the processes: "true", "false"; auto: if the weight is over 256 MB
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
            object.__setattr__(self, f.name, typed_value(f.name, getattr(self, f.name), HINTS[f.name]))
        check_values(self)
        check_model_kwargs("model_kwargs", self.model_kwargs)
        object.__setattr__(self, "head", {"name": "linear", **self.head})
        check_head_settings(**self.head)
        check_head("head", self.head)
        check_recipe("recipe", self.to_dict())

    @property
    def mixes(self) -> bool:
        return self.mixup > 0 or self.cutmix > 0

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


def saved_recipe(values: Mapping[str, Any]) -> Recipe:
    """The recipe that is saved with weights, without fields that grassy does not have; a ValueError if it is none."""
    try:
        return Recipe(**{name: value for name, value in values.items() if name in HINTS})
    except (ValueError, TypeError) as error:
        raise ValueError(f"the recipe that is saved with the weights is damaged: {error}") from None
