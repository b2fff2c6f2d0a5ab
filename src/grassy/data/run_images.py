"""The images to measure a saved model on: those that its run held out."""

from pathlib import Path

from grassy.data.class_folders import FolderImages
from grassy.data.held_out import held_out, open_with_keys, part_of, recorded_keys, set_to_split
from grassy.data.images import Images, check_labels, open_images
from grassy.data.layout import TRAIN_NAMES, VALIDATION_NAMES, split_place
from grassy.recipes.changes import with_changes
from grassy.recipes.recipe import Recipe, saved_recipe
from grassy.runs.records import read_split, remembered_data_dir, took_given_parts
from grassy.runs.weights import PREPARATION, Description, run_folder

#: A folder with at least this share of the held-out images is the run's data, with some files missing.
MOST = 0.5
#: Another folder with less than this share is other data: some equal file names are common.
ALMOST_NONE = 0.1


def run_recipe(about: Description, split: str | None = None, dataset: str | None = None) -> Recipe:
    """The recipe saved with a model, or one built from its description, with another split or dataset if given."""
    view = {name: getattr(about, name) for name in ("img_size", *PREPARATION)}
    changes = {"val_split": split, "dataset": dataset}
    recipe = saved_recipe(about.recipe or view)
    return with_changes(recipe, {name: value for name, value in changes.items() if value is not None})


def data_dir_of(file: Path, recipe: Recipe, data_dir: Path | None, dataset: str | None = None) -> Path | None:
    """The given folder, or else the one that the run of these weights recorded."""
    if data_dir is not None or recipe.dataset == "digits" or dataset is not None:
        return data_dir
    return remembered_data_dir(run_folder(file))


def run_images(file: Path, about: Description, recipe: Recipe, data_dir: Path | None) -> tuple[Images, list[str]]:
    """The split `recipe.val_split` of the data of the run with the weights `file`, and messages to the user.

    Labels are the class indices of the model.
    """
    place = set_to_split(recipe, data_dir)
    notes: list[str] = []
    if place is None:
        images = open_images(recipe.dataset, data_dir, recipe.val_split, about.class_names)
    else:
        images = _part(file, about, recipe, place, notes)
    _check_order(images, about, file)
    check_labels(images, about.num_classes, f"split {recipe.val_split}")
    return images, notes


def _check_order(images: Images, about: Description, file: Path) -> None:
    """Raise a ValueError for class folders that cannot be matched to the model's classes.

    Libraries order folders differently: torchvision puts Zebra before ant and 10 before 2; timm and grassy do not.
    """
    if isinstance(images, FolderImages) and about.class_names is None:
        raise ValueError(
            f"{file} does not say what its classes are called, so class folders cannot be matched to them: save the "
            "weights again with grassy.save(model, path, class_names=[...]), in the order of the labels"
        )


def _part(file: Path, about: Description, recipe: Recipe, place: Path, notes: list[str]) -> Images:
    """One part of a split set: as the run recorded it or, without a record, by the same rule."""
    training = recipe.val_split in TRAIN_NAMES
    if not training and recipe.val_split not in VALIDATION_NAMES:
        raise ValueError(f"{place} is split by val_fraction into train and val: it has no split {recipe.val_split!r}")
    images, keys = open_with_keys(place, about.class_names)
    run = run_folder(file)
    recorded, before = read_split(run), remembered_data_dir(run)
    if recorded is None and took_given_parts(run):
        if training:
            return images
        if before is not None and place.absolute() == split_place(before, TRAIN_NAMES):
            raise ValueError(f"the run was trained on all images in {place}: give a folder with others")
        notes.append(f"all {len(keys)} images in {place} count: make sure that the run was not trained on them")
        return images
    if recorded is not None:
        wanted = recorded_keys(recorded, place)
    else:
        wanted = held_out(images, keys, recipe.val_fraction, recipe.val_seed)
    here = len(wanted.intersection(keys))
    elsewhere = before is None or not place.absolute().is_relative_to(before)
    if elsewhere and here < ALMOST_NONE * len(wanted):
        notes.append(f"{place} is not the data of the run, so all of its {len(keys)} images count")
        return images
    if here < MOST * len(wanted):
        name = f"val{place.suffix if place.is_file() else ''}"
        raise ValueError(
            f"{place} has {here} of the {len(wanted)} images that the run held out, and may hold some that it was "
            f"trained on: bring back the missing ones or, if all are new, give a folder that holds them as {name}"
        )
    if here < len(wanted):
        notes.append(f"{len(wanted) - here} of the {len(wanted)} images that the run held out are no longer in {place}")
    part = part_of(images, keys, wanted, not training)
    rule = "did not hold out" if training else "held out" if recorded is not None else "would hold out by its rule"
    by_name = ", by their names" if elsewhere else ""
    notes.append(f"{len(part)} of the {len(keys)} images in {place} count: those that the run {rule}{by_name}")
    return part
