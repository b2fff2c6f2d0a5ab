"""Features of images: the inputs of a model's classifier, cached on disk.

The name of a cache file is a hash of the model's weights, the images and their preprocessing: if one of them changes,
another file is written. Features are written batch by batch and memory-mapped when read, so they need not fit in
memory.
"""

import contextlib
import hashlib
import itertools
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from grassy.atomic import STALE, remove_torn_files, write_atomically
from grassy.data.batch import Failure
from grassy.data.batch_transforms import Preparation
from grassy.data.class_folders import FolderImages
from grassy.data.images import ArrayImages, Images, Joined
from grassy.data.order import Share
from grassy.data.transforms import Transform, eval_transform
from grassy.data.worker_loader import ValidationLoader
from grassy.inference.feature_models import FeatureModel
from grassy.inference.layer_inputs import LayerInputs
from grassy.surgery import find_classifiers
from grassy.terminal import bar

FORMAT = "2"  # version of the files; part of the hash
HEADER = 1024  # bytes, enough to describe three tensors


@dataclass(frozen=True)
class Features:
    """Features (N, n) in float32, labels (N,), and the images that could not be read, which have no features."""

    features: Tensor
    labels: Tensor
    failures: list[Failure]


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

    Images that could not be read are tried again. If one of them can be read now, all features are recomputed.

    Args:
        source: The model and how it wants its images.
        images: The images.
        cache: The folder of the cache.
        device: Where the model runs.
        batch_size: Images per forward pass.
        workers: Processes that read images.
        amp_dtype: The type for autocast; None to compute in float32.
        progress: Title of the progress bar; "" for no bar.

    Returns:
        The features, memory-mapped.

    Raises:
        ValueError: If `batch_size` is below 1, if the model has no classifier, or if no image can be read.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    parts = (FORMAT, source.fingerprint, source.preparation(), str(amp_dtype), fingerprint(images))
    key = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]
    path = cache / f"features-{key}.safetensors"
    kept = _read(path, images)
    if kept is None:
        remove_torn_files(cache, older_than=STALE)  # a live process writes a batch within the hour
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
    loader = ValidationLoader(images, _transform(source), batch_size, Share(), workers, device)
    prepare = Preparation(source.mean, source.std, device)
    model = source.model.eval()
    with LayerInputs(feature_classifiers(source).values()) as inputs:
        for batch in loader:
            if batch.blank == len(batch.labels):  # no readable image, so no image size
                batch.images = torch.zeros(batch.blank, 3, source.img_size, source.img_size, dtype=torch.uint8)
            prepared, labels = prepare(batch.images.to(device), batch.labels.to(device))
            with torch.autocast(device.type, amp_dtype, enabled=amp_dtype is not None):
                output = model(prepared)
            if inputs.layers:
                last = dict(inputs.take())  # the last call counts
                found = [_over_locations(each, isinstance(layer, nn.Conv2d)) for layer, each in last.items()]
            else:
                found = [_over_locations(output, channels_first=output.ndim == 4)]
            yield torch.cat([part.float() for part in found], 1).cpu(), labels.cpu(), batch.failures


def _transform(source: FeatureModel) -> Transform:
    return eval_transform(source.img_size, source.crop_pct, source.interpolation, source.crop_mode, source.mean)


def feature_classifiers(source: FeatureModel) -> dict[str, nn.Module]:
    """The classifiers whose inputs are the features: all of them, except the distillation head of a distilled model.

    Empty for a model with num_classes=0, whose output is the features.
    """
    classifiers = find_classifiers(source.model)
    if not classifiers and getattr(source.model, "num_classes", None) != 0:
        raise ValueError(f"found no classifier in {source.name}: features are the inputs of a classifier")
    return {path: layer for path, layer in classifiers.items() if "dist" not in path} or classifiers


def _over_locations(features: Tensor, channels_first: bool) -> Tensor:
    """Features (B, n) unchanged; a feature map (B, n, H, W), or (B, ..., n) with channels last, averaged over space."""
    if features.ndim == 2:
        return features
    return features.flatten(2).mean(2) if channels_first else features.flatten(1, -2).mean(1)


def fingerprint(images: Images) -> str:
    """A hash that changes with any image, label or their order. Files enter by name, size and modification time."""
    digest = hashlib.sha256()

    def add(*facts: object) -> None:
        digest.update(json.dumps(facts).encode() + b"\n")

    if isinstance(images, Joined):
        add(*map(fingerprint, images.parts))
        return digest.hexdigest()
    if isinstance(images, ArrayImages):
        add(images.images.shape, len(images.labels()))
        digest.update(np.ascontiguousarray(images.images).data)
        digest.update(np.ascontiguousarray(images.labels()).data)
        return digest.hexdigest()
    if isinstance(images, FolderImages):
        for path in sorted({place.path for place in images.places}):
            status = os.stat(path) if os.path.exists(path) else None
            add(path, *([status.st_size, status.st_mtime_ns] if status else []))
        add(*zip(images.names, images.places, images.targets, strict=True))
        return digest.hexdigest()
    files = 0
    for index in range(len(images)):
        name = images.name(index)
        status = os.stat(name) if os.path.exists(name) else None
        files += status is not None
        add(name, *([status.st_size, status.st_mtime_ns] if status else []))
    if not files:
        _add_contents(images, add, digest.update)
    labels = images.labels()
    if labels is not None:
        digest.update(labels.tobytes())
    return digest.hexdigest()


def _add_contents(images: Images, add: Any, update: Any) -> None:
    """Hash images that are not separate files: by their arrays, or else by decoding each of them."""
    dataset = getattr(getattr(images, "reader", images), "dataset", None)  # of a timm reader, or of torchvision
    pixels, version = getattr(dataset, "data", None), getattr(dataset, "_fingerprint", None)  # of Hugging Face
    if isinstance(pixels, np.ndarray | Tensor):
        array = np.ascontiguousarray(pixels)
        add(array.shape, str(array.dtype))
        update(array.view(np.uint8).data)
    elif version is not None:
        add(version)
    else:
        for index in range(len(images)):
            try:
                image, label = images.load(index)
                add(image.shape[1::-1], label, hashlib.sha256(image.tobytes()).hexdigest())
            except Exception as error:  # the extraction reports images that cannot be read
                add(str(error))


# ------------------------------------------------------------------------------------------------ files


def _write(path: Path, batches: Iterator[tuple[Tensor, Tensor, list[Failure]]], count: int, progress: str) -> None:
    """Write a safetensors file batch by batch: header, features, labels, and the images that could not be read.

    The number of readable images is known only at the end, so the header has a fixed size and is written last.
    """
    first = next(batches)
    width = first[0].shape[1]
    failures: list[Failure] = []
    kept: list[Tensor] = []
    unread: list[int] = []  # indices of the images that could not be read

    def write(file: IO[bytes]) -> None:
        file.write(b" " * (8 + HEADER))
        done = 0
        with bar(progress, count, shown=bool(progress)) as advance:
            for features, labels, failed in itertools.chain([first], batches):
                readable = labels >= 0
                file.write(features[readable].contiguous().numpy().data)
                kept.append(labels[readable])
                unread.extend((done + (~readable).nonzero()[:, 0]).tolist())
                failures.extend(failed)
                done += len(labels)
                advance(len(labels))
        all_labels = torch.cat(kept).contiguous()
        rows = len(all_labels)
        if not rows:
            raise ValueError(f"none of the images could be read{f', {failures[0].name} first' if failures else ''}")
        file.write(all_labels.numpy().data)
        record = json.dumps({"failures": failures, "places": unread}).encode()
        file.write(record)
        ends = [0, rows * width * 4, rows * (width * 4 + 8), rows * (width * 4 + 8) + len(record)]
        layout = {
            "features": {"dtype": "F32", "shape": [rows, width], "data_offsets": ends[:2]},
            "labels": {"dtype": "I64", "shape": [rows], "data_offsets": ends[1:3]},
            "unreadable": {"dtype": "U8", "shape": [len(record)], "data_offsets": ends[2:]},
        }
        file.seek(0)
        file.write(HEADER.to_bytes(8, "little") + json.dumps(layout).encode().ljust(HEADER))

    write_atomically(path, write)


def _read(path: Path, images: Images | None = None) -> Features | None:
    """The features in a file, memory-mapped; None if the file is missing or damaged.

    images: return None too if one of these could not be read when the file was written, but can be read now.
    """
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            features, labels, record = (file.get_tensor(name) for name in ("features", "labels", "unreadable"))
    except (SafetensorError, OSError):
        return None
    about = json.loads(record.numpy().tobytes())
    if images is not None and any(_can_be_read(images, index) for index in about["places"]):
        return None
    return Features(features, labels, [Failure(*pair) for pair in about["failures"]])


def _can_be_read(images: Images, index: int) -> bool:
    with contextlib.suppress(Exception):
        images.load(index)
        return True
    return False
