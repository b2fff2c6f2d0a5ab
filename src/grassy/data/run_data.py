"""The data of a run: the datasets of a recipe, and suitable loaders."""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath

from grassy.data.class_folders import FolderImages
from grassy.data.held_out import set_to_split, split
from grassy.data.image_files import MORE_SUFFIXES
from grassy.data.images import ArrayImages, Images, check_labels, number_of_classes, open_images
from grassy.data.order import EpochBatches, Share
from grassy.data.pack import side_of_pack
from grassy.data.resident_loader import SMALL_ENOUGH, ResidentLoader, ResidentValidation, unfit
from grassy.data.stream_loader import StreamLoader, StreamValidation
from grassy.data.transforms import Transform, eval_transform, train_transform
from grassy.data.worker_loader import ValidationLoader, WorkerLoader
from grassy.distributed.processes import Process
from grassy.recipes.recipe import Recipe

#: Warn about classes with fewer training images.
FEW = 5


@dataclass
class Data:
    """Loaders, and what the model needs to know about the data."""

    train: WorkerLoader | ResidentLoader | StreamLoader
    validation: ValidationLoader | ResidentValidation | StreamValidation
    #: Whether each process validates only its part of the images.
    own_batches: bool
    num_classes: int
    class_names: list[str] | None
    batch_size: int
    #: Messages to the user about deviations from the recipe.
    notes: list[str]
    #: Keys of the images held out for validation, if the run split its data itself.
    held_out: list[str] | None = None
    #: Keys that the run held out before it was resumed, and that no longer exist.
    gone: list[str] = field(default_factory=list)


def open_data(recipe: Recipe, data_dir: Path | None, process: Process, recorded: Sequence[str] | None = None) -> Data:
    """Open the training and validation sets of a recipe, and check them against each other and the head.

    recorded: the keys that a resumed run has held out; None to draw them.
    """
    share = Share(process.rank, process.world_size)
    if recipe.is_stream:
        return _streams(recipe, data_dir, process, share)
    place = set_to_split(recipe, data_dir)
    if recipe.dataset == "" and data_dir is not None and data_dir.is_file() and place is None:
        kind = ".tar" if data_dir.suffix == ".tar" else ".npz"
        wanted = f"a folder with {recipe.train_split}{kind} and {recipe.val_split}{kind}"
        raise ValueError(f"--data-dir {data_dir} is one file, with nothing to validate on: give {wanted}")
    chosen, notes = None, []
    gone: list[str] = []
    if place is not None:
        images, held_out, chosen = split(recipe, place, recorded)
        notes.append(f"holds out {len(held_out)} of {len(images) + len(held_out)} images for validation")
        if recorded is not None:
            gone, chosen = sorted(set(recorded).difference(chosen)), list(recorded)
        if gone:
            some = f"{len(gone)} of the {len(recorded or ())} images that the run held out"
            notes.append(f"{some} are no longer in {place}, {gone[0]} first")
        notes += _deeper(images, place)
    else:
        images = open_images(recipe.dataset, data_dir, recipe.train_split)
        held_out = open_images(recipe.dataset, data_dir, recipe.val_split, images.class_names)
        _check_numbering(images, held_out)
    num_classes = recipe.num_classes or number_of_classes(images)
    hint = "; leave num_classes out to have it follow the data" if recipe.num_classes else ""
    check_labels(images, num_classes, "training set", hint)
    check_labels(held_out, num_classes, "validation set", hint)

    parts = process.world_size * recipe.grad_accum_steps
    batch_size, about_batches = _batch_size(recipe, len(images), parts)
    batches = EpochBatches(
        len(images), batch_size, recipe.grad_accum_steps, share, recipe.seed, repeats=recipe.aug_repeats
    )
    train = (
        ResidentLoader(images, recipe, batches, process.device)
        if _keep_on_device(recipe, images) and isinstance(images, ArrayImages)
        else WorkerLoader(images, train_transform(recipe), batches, recipe.workers, process.device, num_classes)
    )
    names = None if images.class_names is None else list(images.class_names)
    validation = _validation_loader(recipe, held_out, num_classes, process)
    own_batches = isinstance(validation, ValidationLoader)
    return Data(
        train,
        validation,
        own_batches,
        num_classes,
        names,
        batch_size,
        [
            *notes,
            *about_batches,
            *_unusual(images),
            *_few(images),
            *_unseen(images, held_out),
            *_small(recipe, data_dir),
        ],
        chosen,
        gone,
    )


def open_validation(
    recipe: Recipe, data_dir: Path | None, images: Images | None, num_classes: int, process: Process
) -> tuple[ValidationLoader | ResidentValidation | StreamValidation, bool]:
    """Validation batches for a model with `num_classes`, and whether each process has its own part of them.

    images: those of the recipe's `val_split`; None for a stream.
    """
    if images is None:
        return _validation_stream(recipe, data_dir, num_classes, process), True
    loader = _validation_loader(recipe, images, num_classes, process)
    return loader, isinstance(loader, ValidationLoader)


def _validation_loader(
    recipe: Recipe, images: Images, num_classes: int, process: Process
) -> ValidationLoader | ResidentValidation:
    """All images of a set, with the recipe's preprocessing for testing."""
    size, batch_size = recipe.test_size or recipe.img_size, _validation_batch_size(recipe)
    if isinstance(images, ArrayImages) and images.images.shape[1:3] == (size, size) and recipe.crop_pct == 1:
        return ResidentValidation(images, batch_size, process.device)
    share = Share(process.rank, process.world_size)
    transform = _validation_transform(recipe)
    return ValidationLoader(images, transform, batch_size, share, recipe.workers, process.device, num_classes)


def _validation_stream(recipe: Recipe, data_dir: Path | None, num_classes: int, process: Process) -> StreamValidation:
    share = Share(process.rank, process.world_size)
    batch_size, transform = _validation_batch_size(recipe), _validation_transform(recipe)
    return StreamValidation(recipe, data_dir, transform, batch_size, share, process.device, num_classes)


def _validation_transform(recipe: Recipe) -> Transform:
    size = recipe.test_size or recipe.img_size
    return eval_transform(size, recipe.crop_pct, recipe.interpolation, recipe.crop_mode, recipe.mean)


def _validation_batch_size(recipe: Recipe) -> int:
    return recipe.val_batch_size or max(1, min(1000, recipe.batch_size))


def _batch_size(recipe: Recipe, images: int, parts: int) -> tuple[int, list[str]]:
    """The total batch size: the recipe's, or less if there are fewer images."""
    if recipe.batch_size <= images:
        _check_division(recipe, parts)
        return recipe.batch_size, []
    unit = 2 * parts if recipe.mixes else parts  # mixup and cutmix pair the images of a part
    batch_size = images // unit * unit
    if batch_size < 1:
        pairs = " of pairs" if recipe.mixes else ""
        raise ValueError(f"{images} images are too few for {parts} parts{pairs}, processes times grad_accum_steps")
    return batch_size, [f"batch_size {recipe.batch_size} is more than the {images} images: using {batch_size}"]


def _unusual(images: Images) -> list[str]:
    """Warnings about images in unusual formats, which may be masks or copies."""
    if not isinstance(images, FolderImages):
        return []
    kinds = Counter(os.path.splitext(file)[1].lower() for file in images.names)
    some = {kind: count for kind, count in kinds.items() if kind in MORE_SUFFIXES}
    if not some or len(some) == len(kinds):
        return []
    listing = ", ".join(f"{count} {kind}" for kind, count in sorted(some.items()))
    return [f"among {len(images)} training images there are {listing}: if they are not meant, move them away"]


def _deeper(images: Images, place: Path) -> list[str]:
    """Warnings about images in subfolders of their class folders."""
    if not isinstance(images, FolderImages):
        return []
    folders = [PurePath(name).parent.name for name in images.names]
    titles = [images.class_names[label] for label in images.targets]
    some = [
        name for name, folder, title in zip(images.names, folders, titles, strict=True) if folder not in ("", title)
    ]
    if not some:
        return []
    return [
        f"{len(some)} training images lie in folders within their class folders, {some[0]} first: the classes are "
        f"the topmost folders in {place}"
    ]


def _check_numbering(images: Images, held_out: Images) -> None:
    """Raise a ValueError if only the validation images take their classes from folder names."""
    if images.class_names is None and isinstance(held_out, FolderImages):
        raise ValueError(
            "the training images have numbers for their classes and the validation images have names: give both names "
            "(an array `classes` in train.npz), or both numbers"
        )


def _few(images: Images) -> list[str]:
    """Warnings about classes with very few training images."""
    labels = images.labels()
    if labels is None:
        return []
    few = {label: count for label, count in sorted(Counter(labels.tolist()).items()) if count < FEW}
    if not few:
        return []
    names = images.class_names
    listing = [f"{names[label] if names else label} ({count})" for label, count in list(few.items())[:3]]
    more = f" and {len(few) - 3} more" if len(few) > 3 else ""
    which = "1 class has" if len(few) == 1 else f"{len(few)} classes have"
    return [f"{which} fewer than {FEW} training images, too few to learn much: {', '.join(listing)}{more}"]


def _unseen(images: Images, held_out: Images) -> list[str]:
    """Warnings about classes without validation images, if the labels are known."""
    trained, validated = images.labels(), held_out.labels()
    if trained is None or validated is None:
        return []
    numbers = sorted(set(trained.tolist()) - set(validated.tolist()))
    if not numbers:
        return []
    names = [str(images.class_names[number] if images.class_names else number) for number in numbers[:3]]
    more = f" and {len(numbers) - 3} more" if len(numbers) > 3 else ""
    return [f"no validation image has the class {', '.join(names)}{more}"]


def _small(recipe: Recipe, data_dir: Path | None) -> list[str]:
    """A warning about a pack whose images were reduced to fewer pixels than the run resizes them to."""
    side = None if data_dir is None else side_of_pack(data_dir)
    wanted = int(max(recipe.img_size, (recipe.test_size or recipe.img_size) / recipe.crop_pct))  # as it is resized
    if side is None or side >= wanted:
        return []
    return [f"the pack has images of {side} pixels, and this run wants {wanted}: pack again with --size {wanted}"]


def _check_division(recipe: Recipe, parts: int) -> None:
    size, rest = divmod(recipe.batch_size, parts)
    if rest:
        whole = recipe.batch_size // recipe.grad_accum_steps
        numbers = [number for number in range(1, min(whole, 1024) + 1) if whole % number == 0]
        near = [number for number in numbers if number * recipe.grad_accum_steps < parts][-1:] + [
            number for number in numbers if number * recipe.grad_accum_steps > parts
        ][:1]
        raise ValueError(
            f"batch_size {recipe.batch_size} is not divisible by {parts}, processes times grad_accum_steps; "
            f"{' or '.join(map(str, near))} processes can share it"
        )
    if recipe.mixes and size % 2:
        raise ValueError(f"mixup and cutmix pair up images: {size} in a batch is not an even number")


def _keep_on_device(recipe: Recipe, images: Images) -> bool:
    reason = unfit(recipe, images)
    if recipe.loader == "resident" and reason is not None:
        raise ValueError(f"loader=resident cannot be used: {reason}")
    if recipe.loader == "auto":
        return reason is None and isinstance(images, ArrayImages) and images.images.size <= SMALL_ENOUGH
    return recipe.loader == "resident"


def _streams(recipe: Recipe, data_dir: Path | None, process: Process, share: Share) -> Data:
    if recipe.num_classes is None:
        raise ValueError(f"{recipe.dataset} is read as a stream and does not tell its classes: give num_classes=N")
    if recipe.aug_repeats > 1:
        raise ValueError("aug_repeats needs a data set that is not a stream")
    _check_division(recipe, process.world_size * recipe.grad_accum_steps)
    train = StreamLoader(recipe, data_dir, share, train_transform(recipe), process.device)
    validation = _validation_stream(recipe, data_dir, recipe.num_classes, process)
    return Data(train, validation, True, recipe.num_classes, None, recipe.batch_size, [])
