"""`grassy analyze`: measure a trained model and its classes, and write RUN/analysis.json."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from grassy import schema
from grassy.atomic import write_text_atomically
from grassy.data.images import Images
from grassy.data.run_images import data_dir_of, run_images, run_recipe
from grassy.distributed.processes import find_device
from grassy.inference.feature_models import open_model
from grassy.inference.features import extract, feature_classifiers
from grassy.precision import amp_dtype
from grassy.recipes.recipe import Recipe
from grassy.report.classes import MOST_ANGLES, SCALARS, describe
from grassy.report.examples import check_examples
from grassy.report.thumbnails import short_name
from grassy.runs.records import environment
from grassy.runs.weights import Description, read_description, run_folder, weights_digest, weights_file

ANALYSIS = "analysis.json"
VERSION = 1


def _part(**fields: schema.Check) -> schema.Check:
    """Check that a value is a mapping with at least these fields."""

    def check(name: str, value: Any) -> Any:
        if not isinstance(value, dict):
            raise schema.fail(name, "a mapping", value)
        for key, each in fields.items():
            each(f"{name}.{key}", value.get(key))
        return value

    return check


_COUNT = schema.integer(0, 2**63)
#: The fields of an analysis that other code reads.
FIELDS: dict[str, schema.Check] = {
    "model": schema.text(200),
    "representation": schema.one_of("subspaces", "vectors"),
    "classes": schema.integer(1, math.isqrt(MOST_ANGLES)),
    "k": schema.integer(1, MOST_ANGLES),
    "width": schema.integer(1, MOST_ANGLES),
    "data": schema.or_none(
        _part(
            dataset=schema.text(10_000),
            folder=schema.or_none(schema.text(10_000)),
            split=schema.text(10_000),
            images=_COUNT,
        )
    ),
    "scalars": _part(**dict.fromkeys(SCALARS, schema.or_none(schema.number(-1e300, 1e300)))),
    "per_class": _part(),
    "orders": _part(),
    "angles": _part(
        classes=_COUNT,
        k=_COUNT,
        limit=schema.number(1, 360),
        data=schema.text(schema.MOST_ANALYSIS),
    ),
}


def analyze(
    run: Path,
    data_dir: Path | None = None,
    split: str | None = None,
    device: str = "auto",
    *,
    dataset: str | None = None,
    batch_size: int = 256,
    workers: int | None = None,
    cache: Path | None = None,
) -> dict[str, Any]:
    """Measure the best weights of a run, write analysis.json into its folder and return its contents.

    If the images are not found, only the weights are measured: angles and orthonormality.

    Args:
        run: The folder of a run, or a file of its weights.
        data_dir: Folder of the images (default: the folder that the run was trained on).
        split: Split to measure on (default: the recipe's val_split).
        device: "auto", "cpu", "cuda" or "cuda:N".
        dataset: Dataset, as in a recipe (default: the recipe's).
        batch_size: Images per batch.
        workers: Processes that load images (default: the recipe's).
        cache: Folder for features (default: RUN/features).

    Returns:
        The contents of analysis.json.
    """
    file = weights_file(Path(run))
    folder = run_folder(file)
    about = read_description(file)
    data_dir = where_images_are(file, about, data_dir, dataset)
    images, recipe = open_split(about, data_dir, file, split, dataset)
    where = find_device(device)
    source = open_model(str(file), where)
    classifiers = feature_classifiers(source)
    if len(classifiers) > 1:
        raise ValueError(
            f"{file} has {len(classifiers)} classifiers, {', '.join(classifiers)}, each with features of its own: only "
            "one can be analyzed"
        )
    head = next(iter(classifiers.values()))
    features = labels = data = None
    names = about.class_names
    if images is not None:
        names = names or (None if images.class_names is None else list(images.class_names))
        found = extract(
            source,
            images,
            cache or folder / "features",
            where,
            batch_size=batch_size,
            workers=recipe.workers if workers is None else workers,
            amp_dtype=amp_dtype(recipe.amp, where),
            progress=f"features of {folder.name}",
        )
        features, labels = found.features.to(where), found.labels.to(where)
        data = {
            "dataset": recipe.dataset,
            "folder": None if data_dir is None else str(data_dir),
            "split": recipe.val_split,
            "images": len(labels),
            "unreadable": len(found.failures),
        }
    measured = describe(head, names if names and len(names) == about.num_classes else None, features, labels)
    if images is not None and labels is not None:
        name_examples(measured, images, [failure.name for failure in found.failures], labels)
        measured["per_class"]["training_images"] = _training_images(file, about, data_dir, recipe)
    result = {
        "version": VERSION,
        "weights": file.name,
        "weights_sha256": weights_digest(file),
        "model": about.model,
        "head": about.head,
        "epoch": about.epoch,
        "data": data,
        **measured,
        "environment": environment(where),
    }
    text = json.dumps(result, allow_nan=False, separators=(",", ":"))
    write_text_atomically(folder / ANALYSIS, text)
    return result


def name_examples(measured: dict[str, Any], images: Images, unreadable: Sequence[str], labels: Tensor) -> None:
    """Give the examples of an analysis the indices and names that their images have in the dataset.

    labels (B,): labels of the readable images. If they differ from the dataset's labels, in order, the examples cannot
    be matched and become None.
    """
    examples = measured["examples"]
    missing = set(unreadable)
    readable = [index for index in range(len(images)) if not missing or images.name(index) not in missing]
    known = images.labels()
    if len(readable) != len(labels) or (known is not None and (known[readable] != labels.cpu().numpy()).any()):
        measured["examples"] = None
        return
    examples["index"] = [readable[row] for row in examples["index"]]
    examples["name"] = [short_name(images.name(index)) for index in examples["index"]]


def _training_images(file: Path, about: Description, data_dir: Path | None, recipe: Recipe) -> list[int] | None:
    """The number of training images per class; None if there is no training set or its labels are unknown."""
    try:
        images, _ = open_split(about, data_dir, file, recipe.train_split, recipe.dataset)
    except ValueError:
        return None
    labels = None if images is None else images.labels()
    if labels is None or (len(labels) and labels.max() >= about.num_classes):
        return None
    counts: list[int] = np.bincount(labels, minlength=about.num_classes).tolist()
    return counts


def where_images_are(file: Path, about: Description, data_dir: Path | None, dataset: str | None = None) -> Path | None:
    """The given folder, or else the folder that the run was trained on, if it still exists."""
    recipe = run_recipe(about)
    found = data_dir_of(file, recipe, data_dir, dataset)
    if data_dir is None and (recipe.is_stream or found is None or not found.exists()):
        return None
    return found


def gone_folder(run: Path) -> Path | None:
    """The folder that a run was trained on, if it no longer exists."""
    file = weights_file(run)
    recipe = run_recipe(read_description(file))
    found = data_dir_of(file, recipe, None)
    return None if found is None or found.exists() or recipe.is_stream else found


def open_split(
    about: Description,
    data_dir: Path | None,
    file: Path,
    split: str | None = None,
    dataset: str | None = None,
) -> tuple[Images | None, Recipe]:
    """The labelled images to measure a model on, or None if their folder is unknown, and the recipe to read them with.

    file: the weights. A run that split its data recorded the split beside them.
    """
    recipe = run_recipe(about, split, dataset)
    if recipe.is_stream:
        if data_dir is None and split is None:
            return None, recipe
        raise ValueError(f"{recipe.dataset} is a stream, which cannot be analyzed: give another --dataset")
    if data_dir is None and split is None and dataset is None and recipe.dataset != "digits":
        return None, recipe
    return run_images(file, about, recipe, data_dir)[0], recipe


def read_analysis(path: Path) -> dict[str, Any]:
    """Read an analysis.json, given its path, its run's folder or the weights beside it; a ValueError if invalid."""
    if path.suffix != ".json":
        path = (path.parent if path.is_file() else path) / ANALYSIS
    if not path.is_file():
        raise ValueError(f"there is no {path}: run grassy analyze first")
    text = schema.read_text(path, schema.MOST_ANALYSIS)
    try:
        result = schema.parse_json(text)
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(result, dict) or result.get("version") != VERSION or "angles" not in result:
        raise ValueError(f"{path} is not an analysis of this version of grassy: run grassy analyze again")
    try:
        return _check_analysis(result)
    except ValueError as error:
        raise ValueError(f"{path} is damaged, run grassy analyze again: {error}") from None


def _check_analysis(result: dict[str, Any]) -> dict[str, Any]:
    """Check an analysis; a ValueError names a field that is missing, of another type or out of bounds."""
    for name, check in FIELDS.items():
        if name not in result:
            raise ValueError(f"it has no {name}")
        check(name, result[name])
    classes, angles = result["classes"], result["angles"]
    if (angles["classes"], angles["k"]) != (classes, result["k"]) or classes**2 * result["k"] > MOST_ANGLES:
        raise ValueError(f"angles of {angles['classes']} classes and k = {angles['k']} cannot be those of {classes}")
    for name, values in result["per_class"].items():
        if values is not None:
            schema.list_of(lambda _, value: value, classes, classes)(f"per_class.{name}", values)
    schema.list_of(schema.text(10_000), classes, classes)("per_class.name", result["per_class"].get("name"))
    for name in ("index", "name", "cluster"):
        order = schema.list_of(schema.integer(0, classes - 1), classes, classes)(name, result["orders"].get(name))
        if len(set(order)) < classes:
            raise ValueError(f"orders.{name} must hold each class once")
    if result.get("examples") is not None and result["data"] is not None:
        check_examples(result["examples"], classes, result["data"]["images"] + (result["data"].get("unreadable") or 0))
    return result


def render(result: dict[str, Any]) -> str:
    """The scalars of an analysis, one per line."""
    lines = [
        (title, f"{result['scalars'][key]:.{decimals}f}")
        for key, (title, decimals, _) in SCALARS.items()
        if result["scalars"].get(key) is not None
    ]
    width, digits = (max(len(line[column]) for line in lines) for column in (0, 1)) if lines else (0, 0)
    what = "subspaces" if result["representation"] == "subspaces" else "class vectors"
    where = result["data"]
    on = (
        "weights only: give --data-dir for the rest" if where is None else f"{where['images']} images, {where['split']}"
    )
    head = f"{result['model']}, {result['classes']} {what}, width {result['width']} ({on})"
    return "\n".join([head, *(f"  {title.ljust(width)}  {value.rjust(digits)}" for title, value in lines)])
