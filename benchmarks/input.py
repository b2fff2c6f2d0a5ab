"""Images per second from JPEG files: grassy's loader, timm's, and torchvision's reference transforms.

    python -m benchmarks.input                          the loaders alone
    python -m benchmarks.input --train resnet50         then an iteration on every batch; on a GPU, in bfloat16
    python -m benchmarks.input --source photos          files made of your photos
    python -m benchmarks.input --size 4000 3000 --grain 5 --count 100 --batch-size 16 --batches 5    a phone's photos
    python -m benchmarks.input --workers 0              one process, by its CPU time: for a busy machine

The files have the size of ImageNet's: 10,000 JPEG images of 500 x 375 pixels, quality 90, about 110 kB. They are made
of two photos that come with scikit-learn, or of the images below --source: random cutouts, enlarged, with grain. All
contestants get the same files, batch size, number of workers and augmentation: a random resized crop to 224 pixels and
a flip, with or without RandAugment. They take turns. A turn begins after as many batches as the workers prepare ahead:
these come faster than the loader can go on. Batches come in waves, one from each worker, so a turn lasts ten whole
waves: a part of a wave would count for too much or too little.

timm's loader collates uint8 images, its fastest way, as grassy's does; both leave the normalisation to the device.
torchvision's reference normalises in its workers. "grassy, packed" reads what `grassy pack` has made of the files. With
--train, "resident" repeats one batch that stays on the device.

The result also holds the time of each part of the way, before and now, of decoding by nvJPEG, and of copies to the
device (`input_stages`).

With 16 workers and a GPU, `python -m benchmarks.input --train resnet50` takes about 25 minutes by our estimate. With
`--batches 32`, a turn is two waves, and the run takes about a fifth of that, with more scatter.

grassy decodes with simplejpeg where it is installed, and with Pillow where it is not. A machine without network gets it
in a folder:

    pip download --no-deps --python-version 3.12 --only-binary :all: simplejpeg
    unzip simplejpeg-*.whl -d runs/simplejpeg
    PYTHONPATH=src:runs/simplejpeg python -m benchmarks.input --train resnet50
"""

import argparse
import importlib.util
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import grassy
from benchmarks import input_stages
from benchmarks.gpu import machine, save
from grassy.data.batch_transforms import Preparation
from grassy.data.class_folders import open_files
from grassy.data.order import EpochBatches, Share
from grassy.data.pack import pack
from grassy.data.transforms import train_transform
from grassy.data.worker_loader import WorkerLoader
from grassy.data.worker_processes import processors
from grassy.models import import_timm
from grassy.recipes.recipe import Recipe
from grassy.terminal import bar

CROP, QUALITY, CLASSES = 224, 90, 10
#: RandAugment as RSB A2 and DeiT use it.
AUGMENTATIONS = {"crop and flip": "", "with RandAugment": "rand-m7-mstd0.5-inc1"}
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


# --------------------------------------------------------------------------------------------------- files


def make_files(folder: Path, count: int, source: Path | None, size: tuple[int, int], grain: float) -> None:
    """`count` JPEG files in class folders below folder/train, unless they are there."""
    if len(list(folder.glob("train/*/*.jpg"))) == count:
        return
    for number in range(min(CLASSES, count)):
        (folder / "train" / f"class{number}").mkdir(parents=True, exist_ok=True)
    make = partial(_make_file, folder, _photos(source), size, grain)
    with ProcessPoolExecutor(processors()) as pool, bar("Making files", count) as advance:
        for _ in pool.map(make, range(count), chunksize=max(1, count // 500)):
            advance()


def _make_file(folder: Path, photos: list[Any], size: tuple[int, int], grain: float, number: int) -> None:
    from PIL import Image

    rng = np.random.default_rng(number)
    photo = photos[number % len(photos)]
    scale = rng.uniform(0.3, 0.9)
    width, height = (max(8, round(scale * side)) for side in photo.size)
    left, top = rng.integers(0, photo.width - width + 1), rng.integers(0, photo.height - height + 1)
    cutout = photo.crop((left, top, left + width, top + height)).resize(size, Image.Resampling.BICUBIC)
    noise = rng.normal(0, grain, (size[1], size[0], 1))
    pixels = (np.asarray(cutout) + noise).clip(0, 255).astype(np.uint8)
    Image.fromarray(pixels).save(folder / "train" / f"class{number % CLASSES}" / f"{number:05}.jpg", quality=QUALITY)


def _photos(source: Path | None) -> list[Any]:
    from PIL import Image

    if source is None:
        from sklearn.datasets import load_sample_images

        return [Image.fromarray(pixels) for pixels in load_sample_images().images]
    files = sorted(path for path in source.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg", ".png"))
    if not files:
        raise SystemExit(f"{source} holds no .jpg or .png files.")
    return [Image.open(path).convert("RGB") for path in files[:: max(1, len(files) // 500)]]


# --------------------------------------------------------------------------------------------------- contestants

Epoch = Callable[[int], Iterator[tuple[Tensor, Tensor]]]


@dataclass(frozen=True)
class Setting:
    """What all contestants get. An epoch has each file `repeats` times, and crops are resized to `size` pixels."""

    folder: Path
    policy: str
    batch_size: int
    workers: int
    device: torch.device
    repeats: int = 1
    size: int = CROP
    seed: int = 0


def recipe_with(policy: str, size: int = CROP) -> Recipe:
    return Recipe(img_size=size, aa=policy, interpolation="bicubic", color_jitter=0.0, mean=MEAN, std=STD)


def from_grassy(setting: Setting, folder: Path | None = None) -> Epoch:
    images = open_files(folder or setting.folder / "train")
    images = images.some([*range(len(images))] * setting.repeats)
    batches = EpochBatches(len(images), setting.batch_size, 1, Share(), seed=setting.seed)
    prepare = Preparation(MEAN, STD, setting.device, channels_last=True)
    transform = train_transform(recipe_with(setting.policy, setting.size))
    loader = WorkerLoader(images, transform, batches, setting.workers, setting.device)

    def epoch(number: int) -> Iterator[tuple[Tensor, Tensor]]:
        for (part,) in loader.epoch(number):
            on_cpu = setting.device.type == "cpu"
            yield (part.images, part.labels) if on_cpu else prepare(part.images, part.labels)

    return epoch


def from_pack(setting: Setting) -> Epoch:
    return from_grassy(setting, pack_of(setting.folder))


def pack_of(folder: Path) -> Path:
    """The pack of the files in a folder, which is made if it is not there."""
    packed = folder.with_name(f"{folder.name}_packed")
    if not packed.exists():
        before = time.perf_counter()
        pack(folder, packed)
        print(f"packed in {time.perf_counter() - before:.0f} s")
    return packed / "train.tar"


def from_timm(setting: Setting) -> Epoch:
    import_timm()
    from timm.data import create_dataset, create_loader

    images = create_dataset("", root=str(setting.folder), split="train", is_training=True)
    images.reader.samples *= setting.repeats
    loader = create_loader(
        images,
        input_size=(3, setting.size, setting.size),
        batch_size=setting.batch_size,
        is_training=True,
        use_prefetcher=True,
        auto_augment=setting.policy or None,
        color_jitter=None,
        interpolation="bicubic",
        mean=MEAN,
        std=STD,
        num_workers=setting.workers,
        pin_memory=setting.device.type == "cuda",
        persistent_workers=setting.workers > 0,
        device=setting.device,
    )
    return lambda _: iter(loader if setting.device.type == "cuda" else loader.loader)


def from_torchvision(setting: Setting) -> Epoch:
    import_timm()
    from torchvision import datasets, transforms

    mode = transforms.InterpolationMode.BICUBIC
    steps: list[Any] = [
        transforms.RandomResizedCrop(setting.size, interpolation=mode),
        transforms.RandomHorizontalFlip(),
    ]
    if setting.policy:
        steps.append(transforms.RandAugment(magnitude=7, interpolation=mode))
    steps += [transforms.PILToTensor(), transforms.ConvertImageDtype(torch.float), transforms.Normalize(MEAN, STD)]
    images = datasets.ImageFolder(str(setting.folder / "train"), transforms.Compose(steps))
    images.samples *= setting.repeats
    loader = torch.utils.data.DataLoader(
        images,
        setting.batch_size,
        shuffle=True,
        drop_last=True,
        num_workers=setting.workers,
        pin_memory=setting.device.type == "cuda",
        persistent_workers=setting.workers > 0,
    )

    def epoch(_: int) -> Iterator[tuple[Tensor, Tensor]]:
        for images, labels in loader:
            yield images.to(setting.device, non_blocking=True), labels.to(setting.device, non_blocking=True)

    return epoch


CONTESTANTS: dict[str, Callable[[Setting], Epoch]] = {
    "grassy, packed": from_pack,
    "grassy": from_grassy,
    "timm": from_timm,
    "torchvision": from_torchvision,
}


# --------------------------------------------------------------------------------------------------- measuring


def training(name: str, device: torch.device) -> Callable[[Tensor, Tensor], None]:
    """One iteration of a model with a Grassmann head."""
    model = import_timm().create_model(name, num_classes=CLASSES).to(device, memory_format=torch.channels_last)
    grassy.replace_head(model, "grassmann", k=8, gamma="auto")
    optimizer = grassy.make_optimizer(model, "sgd", lr=0.01)
    compiled = torch.compile(model) if device.type == "cuda" else model

    def update(images: Tensor, labels: Tensor) -> None:
        images = images.float().contiguous(memory_format=torch.channels_last)
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = grassy.classification_loss(compiled, images, labels)
        loss.backward()
        optimizer.step()

    return update


@dataclass(frozen=True)
class Turn:
    """How long a contestant is measured, after the batches that its workers have prepared while they started."""

    skipped: int
    batches: int
    clock: Callable[[], float]


def whole_waves(workers: int) -> int:
    """The batches of a turn: ten from each worker, and at least 20."""
    return max(20, 10 * workers)


def rate(batches: Iterable[tuple[Tensor, Tensor]], turn: Turn, use: Callable[[Tensor, Tensor], None] | None) -> float:
    """Images per second in a turn."""
    seen, start = 0, 0.0
    for number, (images, labels) in enumerate(batches):
        if use is not None:
            use(images, labels)
        if number <= turn.skipped:
            start = _now(images.device, turn.clock) if number == turn.skipped else 0.0
            continue
        seen += len(images)
        if number == turn.skipped + turn.batches:
            break
    return seen / (_now(images.device, turn.clock) - start)


def _now(device: torch.device, clock: Callable[[], float]) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return clock()


def compare(
    epochs: dict[str, Epoch], turns: int, turn: Turn, use: Callable[[Tensor, Tensor], None] | None
) -> dict[str, Any]:
    """Images per second of all contestants, in turns."""
    rates: dict[str, list[float]] = {name: [] for name in epochs}
    for number in range(turns):
        for name, epoch in epochs.items():
            rates[name].append(rate(epoch(number), turn, use))
    medians = {name: statistics.median(values) for name, values in rates.items()}
    for name, median in medians.items():
        spread = f"{min(rates[name]):.0f} to {max(rates[name]):.0f}"
        print(f"  {name:15} {median:8.1f} images/s ({spread}), {median / medians['timm']:.2f} x timm", flush=True)
    return {"images_per_second": rates, "medians": medians}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=Path, help="where the files are, or are made; default: below runs/bench")
    parser.add_argument("--count", type=int, default=10_000, help="number of files")
    parser.add_argument(
        "--size", type=int, nargs=2, default=(500, 375), metavar=("WIDTH", "HEIGHT"), help="of the files"
    )
    parser.add_argument("--grain", type=float, default=16.0, help="in levels of 256, which makes files larger")
    parser.add_argument("--source", type=Path, help="folder of photos to make the files of")
    parser.add_argument("--train", metavar="MODEL", help="train this timm model on the batches")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--batches", type=int, help="in a turn (default: ten per worker, at least 20)")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--workers", type=int, default=processors())
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    device, size = torch.device(args.device), tuple(args.size)
    folder = args.files or Path(f"runs/bench/jpeg_{size[0]}x{size[1]}")
    make_files(folder, args.count, args.source, size, args.grain)
    files = sorted(folder.glob("train/*/*.jpg"))
    clock = time.perf_counter if args.workers else time.process_time
    turn = Turn(2 * args.workers, args.batches or whole_waves(args.workers), clock)  # a worker prepares two batches
    repeats = math.ceil(args.batch_size * (turn.skipped + turn.batches + 2) / len(files))
    if not args.workers:
        torch.set_num_threads(1)
    result: dict[str, Any] = {
        **machine(device.type),
        "simplejpeg": importlib.util.find_spec("simplejpeg") is not None,
        "processors": processors(),
        "workers": args.workers,
        "clock": clock.__name__,
        "batch_size": args.batch_size,
        "files": len(files),
        "batches": turn.batches,
        "grain": args.grain,
        "size": size,
        "mean_bytes": round(statistics.mean(path.stat().st_size for path in files)),
        "model": args.train,
        "loaders": {},
        "training": {},
        "stages_us": {},
    }
    use = training(args.train, device) if args.train else None
    for title, policy in AUGMENTATIONS.items():
        setting = Setting(folder, policy, args.batch_size, args.workers, device, repeats)
        epochs = {name: contestant(setting) for name, contestant in CONTESTANTS.items()}
        for epoch in epochs.values():
            kept = next(iter(epoch(0)))  # workers start
        print(f"{title}: the loaders alone")
        result["loaders"][title] = compare(epochs, args.turns, turn, None)
        if use is not None:
            for _ in range(3):
                use(*kept)  # kernels compile
            epochs["resident"] = lambda _, kept=kept: itertools.repeat(kept)
            print(f"{title}: training {args.train}")
            result["training"][title] = compare(epochs, args.turns, turn, use)
        del epochs  # and their workers
        packed = open_files(pack_of(folder))
        found = input_stages.stages(files[: args.batch_size], packed, recipe_with(policy), args.turns)
        result["stages_us"][title] = found
        for way, parts in found.items():
            times = ", ".join(f"{part} {microseconds:.0f}" for part, microseconds in parts.items())
            print(f"  {way:15} {times} µs of an image")
    result["device"] = input_stages.on_device(files[: args.batch_size], recipe_with("").img_size, device, args.turns)
    for name, found in result["device"].items():
        print(f"{device.type}: {name}: {found if isinstance(found, str) else f'{found:,.0f} images/s'}")
    save(result, args.output or Path(f"runs/bench/input_{device.type}.json"))


if __name__ == "__main__":
    main()
