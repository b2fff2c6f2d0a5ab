"""What is measured of trained weights: variability, class separation, orthonormality, and transfer by linear SVMs.

The protocol is that of `grassy transfer`; images stay on the device between jobs, since all models take the same ones.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from grassy import analysis, geometry
from grassy.data.batch_transforms import Preparation
from grassy.data.images import ArrayImages, Images
from grassy.data.order import Share
from grassy.data.transforms import eval_transform
from grassy.data.worker_loader import ValidationLoader
from grassy.inference.feature_models import FeatureModel, open_model
from grassy.precision import amp_dtype
from grassy.recipes.recipe import Recipe
from grassy.surgery import find_classifiers
from grassy.transfer import search_svm
from grassy.transfer.datasets import KNOWN, MissingData, TransferSet, open_transfer_set
from grassy.transfer.protocol import accuracy
from studies.cifar100.plan import HELD_OUT, HELD_OUT_SEED, SETS

Labelled = tuple[Tensor, Tensor]  # uint8 (N, 3, H, W), labels (N,), on the device
BATCH, WORKERS = 1000, 4
#: What the arrays were made of, in a file beside them, and how many images of each split are compared with it.
STAMP, LOOKED_AT = "source.json", 16


class View(NamedTuple):
    """How a test image is resized and cropped."""

    size: int
    crop_pct: float
    interpolation: str

    @classmethod
    def of(cls, recipe: Recipe) -> "View":
        return cls(recipe.test_size or recipe.img_size, recipe.crop_pct, recipe.interpolation)


def find_set(name: str, data_dir: Path) -> TransferSet:
    """A data set by its name: in a folder of that name, or with 64 behind it, or as torchvision has it."""
    beside = data_dir / f"{name}64"
    if (data_dir / name).exists() or not beside.exists():
        return open_transfer_set(name, data_dir)
    return replace(open_transfer_set(f"{name}={beside}", data_dir), metric=KNOWN[name][3])


def split(labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Indices of the images to train on and of those held out, the same share of every class."""
    rng = np.random.default_rng(HELD_OUT_SEED)
    members = [rng.permutation(np.flatnonzero(labels == label)) for label in np.unique(labels)]
    held_out = np.sort(np.concatenate([each[: max(1, round(HELD_OUT * len(each)))] for each in members]))
    return np.setdiff1d(np.arange(len(labels)), held_out), held_out


def write_arrays(data_dir: Path, folder: Path, view: View) -> None:
    """All images as models see them, in .npz files: FOLDER/tune, where held-out images take the place of the test
    images, FOLDER/final, and a folder for each transfer set. What is there already, of the same images, is left.
    """
    sets = {name: find_set(name, data_dir) for name in ("cifar100", *SETS)}
    looks = [look(images) for data in sets.values() for images in (data.train, data.test)]
    stamp, source = folder / STAMP, json.dumps([str(data_dir), *view, HELD_OUT, HELD_OUT_SEED, looks])
    if stamp.exists() and stamp.read_text() == source:
        return
    stamp.unlink(missing_ok=True)  # from here on until all is written there is something of both
    parts = {}
    for name, data in sets.items():
        parts[name] = {"train": as_arrays(data.train, view), "test": as_arrays(data.test, view)}
    parts["final"] = parts.pop("cifar100")
    x, y = parts["final"]["train"]
    kept, held_out = split(y)
    parts["tune"] = {"train": (x[kept], y[kept]), "test": (x[held_out], y[held_out])}
    for name, splits in parts.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for part, (images, labels) in splits.items():
            np.savez(folder / name / f"{part}.npz", x=images, y=labels)
    stamp.write_text(source)


def look(images: Images) -> str:
    """A digest by which other images are told from these: of their number, their labels, and some of them."""
    labels = images.labels()
    digest = hashlib.sha256(b"" if labels is None else np.asarray(labels, np.int64).tobytes())
    for index in np.linspace(0, len(images) - 1, LOOKED_AT).astype(int).tolist():
        image, label = images.load(index)
        digest.update(image.tobytes() + str(label).encode())
    return f"{len(images)}-{digest.hexdigest()[:16]}"


def as_arrays(images: Images, view: View) -> tuple[np.ndarray, np.ndarray]:
    """All images, resized and cropped as test images are: uint8 (N, H, W, 3), and labels."""
    if isinstance(images, ArrayImages) and images.images.shape[1:3] == (view.size, view.size) and view.crop_pct == 1:
        return images.images, images.labels()
    batches = list(ValidationLoader(images, eval_transform(*view), BATCH, Share(), WORKERS, torch.device("cpu")))
    failures = [failure for batch in batches for failure in batch.failures]
    if failures:
        raise ValueError(f"cannot read {failures[0].name}: {failures[0].reason}")
    pixels = torch.cat([batch.images for batch in batches]).permute(0, 2, 3, 1)
    return pixels.contiguous().numpy(), torch.cat([batch.labels for batch in batches]).numpy()


@dataclass
class Lab:
    """The images that every model is measured on, on the device, by data set and split."""

    device: torch.device
    images: dict[str, dict[str, Labelled]]

    @classmethod
    def open(cls, arrays: Path, device: torch.device) -> "Lab":
        """From what `write_arrays` wrote."""
        images: dict[str, dict[str, Labelled]] = {}
        for name in ("tune", "final", *SETS):
            for part in ("train", "test"):
                with np.load(arrays / name / f"{part}.npz") as file:
                    pixels, labels = (torch.from_numpy(file[key]).to(device) for key in ("x", "y"))
                images.setdefault(name, {})[part] = pixels.permute(0, 3, 1, 2), labels
        return cls(device, images)

    def measure(self, weights: Path, recipe: Recipe, stage: str) -> dict[str, Any]:
        """All measures. While settings are being chosen, transfer is that of cross-validation alone."""
        source = open_model(str(weights), self.device)
        dtype = amp_dtype(recipe.amp, self.device)
        found: dict[str, Any] = {}
        for split_name, (images, labels) in self.images[stage].items():
            x = features(source, images, dtype)
            found[f"variability_{split_name}"] = analysis.variability(x, labels)
            found[f"r2_{split_name}"] = analysis.class_separation(x, labels)
        weight = next(iter(find_classifiers(source.model).values())).weight
        if recipe.head["name"] == "grassmann":
            assert isinstance(weight, Tensor)
            found["orthonormality_error"] = float(geometry.orthonormality_error(weight.detach()))
        for name in SETS:
            (images, labels), (test_images, test_labels) = self.images[name]["train"], self.images[name]["test"]
            metric = KNOWN[name][3]
            search = search_svm(features(source, images, dtype), labels, metric=metric)
            chosen = search.values.index(search.chosen)
            found.setdefault("transfer_cv", {})[name] = 100 * float(search.accuracies[chosen].mean())
            found.setdefault("svm_C", {})[name] = float(search.chosen)
            if stage == "final":
                predicted = search.model.predict(features(source, test_images, dtype))
                score = 100 * accuracy(predicted.cpu(), test_labels.cpu(), metric)
                found.setdefault("transfer", {})[name] = score
        return found


@torch.inference_mode()
def features(source: FeatureModel, images: Tensor, dtype: torch.dtype | None) -> Tensor:
    """What the model hands to its classifier (N, n), in float32, for uint8 images (N, 3, H, W) on its device."""
    prepare = Preparation(source.mean, source.std, images.device)
    seen: list[Tensor] = []
    (classifier,) = find_classifiers(source.model).values()
    hook = classifier.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].float()))
    try:
        for batch in images.split(BATCH):
            prepared, _ = prepare(batch, batch)
            with torch.autocast(images.device.type, dtype, enabled=dtype is not None):
                source.model.eval()(prepared)
    finally:
        hook.remove()
    return torch.cat(seen).clone()


def check(data_dir: Path, names: Sequence[str] = ("cifar100", *SETS)) -> None:
    """Raise a ValueError that names every data set that is not there, before anything is trained."""
    missing = []
    for name in names:
        try:
            find_set(name, data_dir)
        except MissingData as error:
            missing.append(str(error))
    if missing:
        raise ValueError("; ".join(missing))
