"""Features of images: what a model hands to its classifier, kept on the disk so that they are computed once.

A file of features has the name of a key made from the model's weights, the images and how they are prepared: when one
of them changes, another file is written. Features go to the disk batch by batch and are memory-mapped when read, so
they need not fit in memory.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from grassy.spelling import nearest
from grassy.surgery import find_classifiers
from grassy.training.augment import eval_transform
from grassy.training.checkpoint import load, read_description, weights_file, write_atomically
from grassy.training.datasets import ArrayImages, Images, Joined, ReaderImages
from grassy.training.loader import Failure, Share, ValidationLoader
from grassy.training.models import import_timm
from grassy.training.prepare import Preparation

FORMAT = "1"  # of the files; part of the key


@dataclass(frozen=True)
class FeatureModel:
    """A model to take features from, and how it wants its images."""

    name: str
    model: nn.Module
    img_size: int
    crop_pct: float
    interpolation: str
    mean: tuple[float, ...]
    std: tuple[float, ...]
    fingerprint: str
    recipe: dict[str, Any] = field(default_factory=dict)

    def preparation(self) -> str:
        numbers = (self.img_size, self.crop_pct, self.interpolation, *self.mean, *self.std)
        return " ".join(map(str, numbers))


@dataclass(frozen=True)
class Features:
    """Features (N, n) in float32, labels (N,), and what could not be read, which is not among them."""

    features: Tensor
    labels: Tensor
    failures: list[Failure]


# ------------------------------------------------------------------------------------------------ models


def open_model(source: str, device: torch.device | str = "cpu", pretrained: bool = True) -> FeatureModel:
    """A run's folder or weights; or "timm/NAME" or "torchvision/NAME" with the weights that library has for it."""
    library, slash, name = source.partition("/")
    if slash and library == "timm":
        return _from_timm(name, device, pretrained)
    if slash and library == "torchvision":
        return _from_torchvision(name, device, pretrained)
    path = weights_file(Path(source))
    about = read_description(path)
    return FeatureModel(
        name=source.rstrip("/"),
        model=load(path, device),
        img_size=about.img_size,
        crop_pct=about.crop_pct,
        interpolation=about.interpolation,
        mean=about.mean,
        std=about.std,
        fingerprint=_hash_of_file(path),
        recipe=about.recipe,
    )


def _from_timm(name: str, device: torch.device | str, pretrained: bool) -> FeatureModel:
    timm = import_timm()
    if not timm.is_model(name):
        raise ValueError(f"timm has no model {name!r}{nearest(name, timm.list_models())}")
    model = timm.create_model(name, pretrained=pretrained).eval().to(device)
    config = timm.data.resolve_model_data_config(model)
    return FeatureModel(
        f"timm/{name}",
        model,
        config["input_size"][-1],
        config["crop_pct"],
        config["interpolation"],
        tuple(config["mean"]),
        tuple(config["std"]),
        _hash_of_tensors(model),
    )


def _from_torchvision(name: str, device: torch.device | str, pretrained: bool) -> FeatureModel:
    import_timm()
    from torchvision import models

    if name not in models.list_models():
        raise ValueError(f"torchvision has no model {name!r}{nearest(name, models.list_models())}")
    weights = models.get_model_weights(name).DEFAULT
    model = models.get_model(name, weights=weights if pretrained else None).eval().to(device)
    preset = weights.transforms()
    size, resized = int(preset.crop_size[0]), int(preset.resize_size[0])
    return FeatureModel(
        f"torchvision/{name}",
        model,
        size,
        size / resized,
        str(preset.interpolation.value),
        tuple(preset.mean),
        tuple(preset.std),
        _hash_of_tensors(model),
    )


# ------------------------------------------------------------------------------------------------ extraction


def extract(
    source: FeatureModel,
    images: Images,
    cache: Path,
    device: torch.device,
    *,
    batch_size: int = 256,
    workers: int = 4,
    amp_dtype: torch.dtype | None = None,
    progress: str = "",
) -> Features:
    """Features of all images, from the cache folder if they are there.

    progress: what to call the work in a bar on a terminal; "" for none.
    """
    parts = (FORMAT, source.fingerprint, source.preparation(), str(amp_dtype), fingerprint(images))
    key = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]
    path = cache / f"features-{key}.safetensors"
    kept = _read(path)
    if kept is None:
        batches = _batches(source, images, device, batch_size, workers, amp_dtype)
        _write(path, batches, len(images), progress)
        kept = _read(path)
        assert kept is not None
    return kept


@torch.inference_mode()
def _batches(
    source: FeatureModel,
    images: Images,
    device: torch.device,
    batch_size: int,
    workers: int,
    amp_dtype: torch.dtype | None,
) -> Iterator[tuple[Tensor, Tensor, list[Failure]]]:
    transform = eval_transform(source.img_size, source.crop_pct, source.interpolation)
    loader = ValidationLoader(images, transform, batch_size, Share(), workers, device)
    prepare = Preparation(source.mean, source.std, device)
    model = source.model.eval()
    classifiers = find_classifiers(model)
    if not classifiers:
        raise ValueError(f"found no classifier in {source.name}, in front of which its features would be")
    seen: list[Tensor] = []
    first = next(iter(classifiers.values()))  # of a distilled model, that of the class token
    hook = first.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    try:
        for batch in loader:
            if batch.blank == len(batch.labels):  # not one image to take the size from
                batch.images = torch.zeros(batch.blank, 3, source.img_size, source.img_size, dtype=torch.uint8)
            prepared, labels = prepare(batch.images.to(device), batch.labels.to(device))
            with torch.autocast(device.type, amp_dtype, enabled=amp_dtype is not None):
                model(prepared)
            yield seen.pop().flatten(1).float().cpu(), labels.cpu(), batch.failures
            seen.clear()
    finally:
        hook.remove()


def fingerprint(images: Images) -> str:
    """What changes when an image, a label or the order changes: of files, names, sizes and times of change."""
    digest = hashlib.sha256()
    if isinstance(images, Joined):
        return " ".join(map(fingerprint, images.parts))
    if isinstance(images, ArrayImages):
        digest.update(np.ascontiguousarray(images.images).data)
        digest.update(np.ascontiguousarray(images.labels()).data)
        return digest.hexdigest()
    for index in range(len(images)):
        name = images.name(index)
        digest.update(name.encode(errors="surrogateescape"))
        if os.path.exists(name):
            status = os.stat(name)
            digest.update(f" {status.st_size} {status.st_mtime_ns}".encode())
        elif isinstance(images, ReaderImages) and index == 0 and os.path.exists(images.where):
            digest.update(f" {os.stat(images.where).st_mtime_ns}".encode())  # a tar
    labels = images.labels()
    if labels is not None:
        digest.update(labels.tobytes())
    return digest.hexdigest()


# ------------------------------------------------------------------------------------------------ files


def _write(path: Path, batches: Iterator[tuple[Tensor, Tensor, list[Failure]]], count: int, progress: str) -> None:
    """A safetensors file, written batch by batch: its header, the features, then the labels."""
    first = next(batches)
    width = first[0].shape[1]
    failures: list[Failure] = []

    def write(file: IO[bytes]) -> None:
        size = count * width * 4
        layout = {
            "features": {"dtype": "F32", "shape": [count, width], "data_offsets": [0, size]},
            "labels": {"dtype": "I64", "shape": [count], "data_offsets": [size, size + 8 * count]},
        }
        header = json.dumps(layout).encode()
        header += b" " * (-len(header) % 8)
        file.write(len(header).to_bytes(8, "little") + header)
        labels = []
        with _bar(progress, count) as advance:
            for features, batch_labels, failed in _chain(first, batches):
                file.write(features.contiguous().numpy().data)
                labels.append(batch_labels)
                failures.extend(failed)
                advance(len(batch_labels))
        file.write(torch.cat(labels).contiguous().numpy().data)

    write_atomically(path, write)
    if failures:
        text = json.dumps([list(failure) for failure in failures])
        write_atomically(path.with_suffix(".failures.json"), lambda file: file.write(text.encode()))


def _read(path: Path) -> Features | None:
    """The features in a file, memory-mapped; None if there is no file, or none that is whole."""
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            features, labels = file.get_tensor("features"), file.get_tensor("labels")
    except (SafetensorError, OSError):
        return None
    record = path.with_suffix(".failures.json")
    failures = [Failure(*pair) for pair in json.loads(record.read_text())] if record.is_file() else []
    readable = labels >= 0
    if not bool(readable.all()):  # a copy, for the few sets with broken images
        features, labels = features[readable], labels[readable]
    if not len(labels):
        raise ValueError(f"none of the images could be read{f', {failures[0].name} first' if failures else ''}")
    return Features(features, labels, failures)


def _chain(first: Any, rest: Iterator[Any]) -> Iterator[Any]:
    yield first
    yield from rest


class _bar:
    """A bar on a terminal, and nothing elsewhere."""

    def __init__(self, text: str, total: int) -> None:
        self.text, self.total = text, total
        self.bar: Any = None

    def __enter__(self) -> Any:
        import sys

        if not self.text or not sys.stderr.isatty():
            return lambda _: None
        from rich.console import Console
        from rich.progress import Progress

        self.bar = Progress(console=Console(stderr=True), transient=True)
        self.bar.start()
        task = self.bar.add_task(self.text, total=self.total)
        return lambda count: self.bar.advance(task, count)

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()


def _hash_of_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _hash_of_tensors(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
