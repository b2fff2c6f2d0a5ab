"""`grassy validate`: the accuracy of a file of weights, with images preprocessed as the file describes."""

import sys
from pathlib import Path
from typing import Any

import torch

from grassy import paper
from grassy.data.batch_transforms import Preparation
from grassy.data.images import Images
from grassy.data.run_data import open_validation
from grassy.data.run_images import data_dir_of, run_images, run_recipe
from grassy.distributed import processes
from grassy.inference.evaluate import Metrics, evaluate
from grassy.inference.load import load, load_sharded
from grassy.precision import amp_dtype
from grassy.recipes.changes import with_changes
from grassy.runs.paper_row import paper_row
from grassy.runs.records import data_is_gone
from grassy.runs.weights import check_rgb, read_description, weights_file


def validate(
    checkpoint: Path,
    data_dir: Path | None,
    split: str | None = None,
    dataset: str | None = None,
    batch_size: int | None = None,
    workers: int | None = None,
    device: str = "auto",
) -> Metrics | None:
    """Metrics of a file of weights, or of a run's best weights, on one split of a dataset.

    Args:
        checkpoint: A file of weights, or the folder of a run.
        data_dir: The images; None for those that the run was trained on.
        split: The split; None for the validation split of the recipe.
        dataset: The name of the dataset; None for that of the recipe.
        batch_size: Images per forward pass; None for that of the recipe.
        workers: Processes that read images; None for the number of the recipe.
        device: "auto", "cpu" or "cuda".

    Returns:
        The metrics. With several processes, only the first returns them; the others return None.

    Raises:
        ValueError: If the weights or the images cannot be read, or if memory runs out.
    """
    file = weights_file(checkpoint)
    description = read_description(file)
    check_rgb(description, file)
    recipe = run_recipe(description, split, dataset)
    changes = {"val_batch_size": batch_size, "workers": workers}
    recipe = with_changes(recipe, {name: value for name, value in changes.items() if value is not None})
    given, data_dir = data_dir, data_dir_of(file, recipe, data_dir, dataset)
    if given is None and data_dir is not None and recipe.reads_files and not data_dir.exists():
        raise ValueError(data_is_gone(data_dir))
    with processes.joined(device) as process:
        images: Images | None = None
        notes: list[str] = []
        if not recipe.is_stream:
            images, notes = run_images(file, description, recipe, data_dir)
        batches, own_batches = open_validation(recipe, data_dir, images, description.num_classes, process)
        in_shards = file.is_dir() and process.world_size > 1
        model = load_sharded(file, process.device) if in_shards else load(file, process.device)
        prepare = Preparation(description.mean, description.std, process.device)
        dtype = amp_dtype(recipe.amp, process.device)
        try:
            metrics, failures = evaluate(model, batches, prepare, process.device, dtype, own_batches)
        except (torch.OutOfMemoryError, MemoryError):
            raise ValueError(
                f"{process.device} ran out of memory with batches of this size: give a smaller --batch-size"
            ) from None
    if not process.is_main:
        return None
    for note in notes:
        print(note, file=sys.stderr)
    for failure in failures:
        print(f"cannot read {failure.name}: {failure.reason}", file=sys.stderr)
    return metrics


def paper_figures(checkpoint: Path) -> dict[str, Any] | None:
    """The paper's results for the row that a model reproduces or was imported from; None for any other model."""
    row = paper_row(read_description(weights_file(checkpoint)))
    return paper.figures(row) if row else None
