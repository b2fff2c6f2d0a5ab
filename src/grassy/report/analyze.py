"""`grassy analyze`: every measure of a trained model and its classes, as RUN/analysis.json."""

import json
from pathlib import Path
from typing import Any

from grassy.data.images import Images, check_labels, open_images
from grassy.data.stream_loader import STREAMS
from grassy.distributed.processes import find_device
from grassy.inference.feature_models import file_digest, open_model
from grassy.inference.features import extract
from grassy.precision import amp_dtype
from grassy.report.classes import SCALARS, describe
from grassy.runs.atomic import write_atomically
from grassy.runs.recipe import Recipe
from grassy.runs.records import environment
from grassy.runs.weights import Description, read_description, weights_file
from grassy.surgery import HeadOnMap, find_classifiers

ANALYSIS = "analysis.json"
VERSION = 1


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
    """Measure the best weights of a run and write analysis.json into its folder; the same is returned.

    run: the folder of a run, or a file of its weights. split: default the recipe's val_split. cache: folder for
    features, default RUN/features. Without a data folder, unless the data set needs none, the weights alone are
    measured: angles and orthonormality.
    """
    file = weights_file(Path(run))
    about = read_description(file)
    images, recipe = open_split(about, data_dir, split, dataset)
    where = find_device(device)
    source = open_model(str(file), where)
    classifiers = list(find_classifiers(source.model).values())
    if not classifiers:
        raise ValueError(f"found no classifier in {file}")
    head = classifiers[0].head if isinstance(classifiers[0], HeadOnMap) else classifiers[0]
    features = labels = data = None
    names = about.class_names
    if images is not None:
        check_labels(images, about.num_classes, f"split {recipe.val_split}")
        names = names or (None if images.class_names is None else list(images.class_names))
        found = extract(
            source,
            images,
            cache or file.parent / "features",
            where,
            batch_size=batch_size,
            workers=recipe.workers if workers is None else workers,
            amp_dtype=amp_dtype(recipe.amp, where),
            progress=f"features of {file.parent.name}",
        )
        features, labels = found.features.to(where), found.labels.to(where)
        data = {
            "dataset": recipe.dataset,
            "folder": None if data_dir is None else str(data_dir),
            "split": recipe.val_split,
            "images": len(labels),
            "unreadable": len(found.failures),
        }
    result = {
        "version": VERSION,
        "weights": file.name,
        "weights_sha256": file_digest(file),
        "model": about.model,
        "head": about.head,
        "epoch": about.epoch,
        "data": data,
        **describe(head, names if names and len(names) == about.num_classes else None, features, labels),
        "environment": environment(where),
    }
    text = json.dumps(result, allow_nan=False, separators=(",", ":"))
    write_atomically(file.parent / ANALYSIS, lambda stream: stream.write(text.encode()))
    return result


def open_split(
    about: Description, data_dir: Path | None, split: str | None = None, dataset: str | None = None
) -> tuple[Images | None, Recipe]:
    """The labelled images to measure a model on, or None if nobody said where they are; and how to read them."""
    recipe = Recipe(**about.recipe) if about.recipe else Recipe()
    changes = {"val_split": split, "dataset": dataset}
    recipe = recipe.changed({name: value for name, value in changes.items() if value is not None})
    if recipe.dataset.startswith(STREAMS):
        if data_dir is None and split is None:
            return None, recipe
        raise ValueError(f"{recipe.dataset} is read as a stream, which cannot be analyzed: give another --dataset")
    if data_dir is None and split is None and dataset is None and recipe.dataset != "digits":
        return None, recipe
    return open_images(recipe.dataset, data_dir, recipe.val_split, about.class_names), recipe


def read_analysis(path: Path) -> dict[str, Any]:
    """An analysis.json, or the one in a run's folder or beside its weights; a ValueError if it is not one."""
    if path.suffix != ".json":
        path = (path.parent if path.is_file() else path) / ANALYSIS
    if not path.is_file():
        raise ValueError(f"there is no {path}: run grassy analyze first")
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(result, dict) or result.get("version") != VERSION or "angles" not in result:
        raise ValueError(f"{path} is not an analysis of this version of grassy: run grassy analyze again")
    return result


def render(result: dict[str, Any]) -> str:
    """The scalars of an analysis, a line each."""
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
