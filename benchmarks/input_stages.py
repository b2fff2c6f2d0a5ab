"""What each part of the way from a JPEG file to a batch costs, and what a GPU could take over.

Part of `python -m benchmarks.input`. "before" is the way by Pillow, which timm and torchvision go; "now" is grassy's.
"packed" is grassy's with a pack, whose pixels need no decoding.
Times are of one process that takes one part after the other on the same images. On a CPU they are CPU times.
"""

import io
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from grassy.data.batch import collate
from grassy.data.decode import read_pixels, to_rgb
from grassy.data.images import Images
from grassy.data.transforms import CropTransform, train_transform
from grassy.data.worker_loader import seeded
from grassy.data.worker_processes import one_thread
from grassy.models import import_timm
from grassy.recipes.recipe import Recipe


def stages(files: Sequence[Path], packed: Images, recipe: Recipe, turns: int) -> dict[str, dict[str, float]]:
    """Microseconds of CPU time per image of each part: medians over turns."""
    import_timm()
    from timm.data import create_transform

    transform = train_transform(recipe)
    assert isinstance(transform, CropTransform)
    peer = create_transform(
        recipe.img_size,
        is_training=True,
        use_prefetcher=True,
        hflip=recipe.hflip,
        color_jitter=None,
        auto_augment=recipe.aa or None,
        interpolation=recipe.interpolation,
        mean=recipe.mean,
        std=recipe.std,
    )

    def by_pillow(content: bytes) -> Any:
        return to_rgb(Image.open(io.BytesIO(content)))

    def each(function: Callable[[Any], Any]) -> Callable[[list[Any]], list[Any]]:
        return lambda batch: [function(image) for image in batch]

    ways: dict[str, dict[str, Callable[[list[Any]], Any]]] = {
        "before": {
            "disk": each(Path.read_bytes),
            "decode": each(by_pillow),
            "augment": each(peer),
            "collate": lambda images: torch.stack(images),
        },
        "now": {
            "disk": each(Path.read_bytes),
            "decode": each(lambda content: read_pixels(io.BytesIO(content), transform)),
            "augment": each(transform.of_crop),
            "collate": lambda images: collate([(image, 0, 0, []) for image in images]),
        },
        "packed": {
            "disk": lambda batch: [packed.load(index, transform)[0] for index in range(len(batch))],
            "augment": each(transform.of_crop),
            "collate": lambda images: collate([(image, 0, 0, []) for image in images]),
        },
    }
    found: dict[str, dict[str, list[float]]] = {way: {part: [] for part in parts} for way, parts in ways.items()}
    for turn in range(turns + 1):  # the first one, which warms up, does not count
        for way, parts in ways.items():
            batch: Any = list(files)
            with seeded(turn), one_thread():  # all draw the same
                for part, function in parts.items():
                    before = time.process_time()
                    batch = function(batch)
                    if turn:
                        found[way][part].append(1e6 * (time.process_time() - before) / len(files))
    return {way: {part: statistics.median(times) for part, times in parts.items()} for way, parts in found.items()}


def on_device(files: Sequence[Path], size: int, device: torch.device, turns: int) -> dict[str, float | str]:
    """Images per second of decoding on the device and of copies to it; a sentence for what it cannot do here."""
    import_timm()
    from torchvision import io as torchvision_io

    contents = [torch.from_numpy(np.frombuffer(path.read_bytes(), np.uint8).copy()) for path in files]
    resized = torch.zeros(len(files), size, size, 3, dtype=torch.uint8).permute(0, 3, 1, 2)
    pinned = resized.pin_memory() if device.type == "cuda" else resized

    def nvjpeg() -> list[Tensor]:
        kind = {"device": device} if device.type == "cuda" else {}
        return torchvision_io.decode_jpeg(contents, mode=torchvision_io.ImageReadMode.RGB, **kind)  # type: ignore[no-any-return]

    works: dict[str, Callable[[], Any]] = {
        "decode_jpeg of torchvision": nvjpeg,
        "copy of uint8 to the device": lambda: pinned.to(device, non_blocking=True),
    }
    return {name: _rate_of(work, len(files), device, turns) for name, work in works.items()}


def _rate_of(work: Callable[[], Any], images: int, device: torch.device, turns: int) -> float | str:
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    times = []
    try:
        for turn in range(turns + 1):
            wait()
            before = time.perf_counter()
            work()
            wait()
            times += [time.perf_counter() - before] if turn else []
    except (RuntimeError, TypeError, ImportError, AttributeError) as error:
        return " ".join(str(error).split())[:200]
    return images / statistics.median(times)
