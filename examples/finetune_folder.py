"""Fine-tune a timm model on a folder of photos, with subspaces, in a loop of your own; save it and predict with it.

    python examples/finetune_folder.py photos --pretrained      # photos/CLASS/*.jpg; downloads weights
    python examples/finetune_folder.py                          # makes a folder out of two photos of scikit-learn

A fifth of the images is held out. The file that it saves opens in `grassy predict`, `report` and `export`.
`grassy train finetune --data-dir photos` does more by itself: a schedule, an average of the weights, the best epoch.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_sample_images
from sklearn.model_selection import train_test_split
from torch.utils.data import DataLoader, Subset

import grassy
from grassy.inference.predict import predict

grassy.torchvision_import.import_torchvision()  # only beside a CPU build of torch
import timm  # noqa: E402
from torchvision.datasets import ImageFolder  # noqa: E402

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("folder", nargs="?", type=Path, help="one folder of images per class")
parser.add_argument("--model", default="resnet18")
parser.add_argument("--pretrained", action="store_true", help="start from weights that timm downloads")
parser.add_argument("--img-size", type=int, default=64)
parser.add_argument("--epochs", type=int, default=5)
args = parser.parse_args()


def make_folder(folder: Path, per_class: int = 60, size: int = 96) -> Path:
    """Random crops of a photo of a temple and of one of a flower, a folder for each."""
    random = np.random.default_rng(0)
    for name, photo in zip(("temple", "flower"), load_sample_images().images, strict=True):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number in range(per_class):
            top, left = (random.integers(length - size) for length in photo.shape[:2])
            Image.fromarray(photo[top : top + size, left : left + size]).save(folder / name / f"{number}.jpg")
    return folder


torch.manual_seed(0)
folder = args.folder or make_folder(Path("photos"))
labels = ImageFolder(folder).targets
classes = ImageFolder(folder).classes
model = timm.create_model(args.model, pretrained=args.pretrained, num_classes=len(classes))
grassy.replace_head(model, k=8)
optimizer = grassy.make_optimizer(model, "adamw", lr=1e-3, weight_decay=0.05)

prepared = {**timm.data.resolve_model_data_config(model), "input_size": (3, args.img_size, args.img_size)}
train_rows, test_rows = train_test_split(range(len(labels)), test_size=0.2, stratify=labels, random_state=0)
train, test = (
    DataLoader(
        Subset(
            ImageFolder(folder, timm.data.create_transform(**prepared, is_training=training, scale=(0.4, 1.0))), rows
        ),
        batch_size=16,
        shuffle=training,
        drop_last=training,
    )
    for training, rows in ((True, train_rows), (False, test_rows))
)
for epoch in range(args.epochs):
    model.train()
    for images, targets in train:
        optimizer.zero_grad()
        loss = grassy.classification_loss(model, images, targets)
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        correct = [(model(images).argmax(-1) == targets).float() for images, targets in test]
    accuracy = float(torch.cat(correct).mean())
    print(f"epoch {epoch}: loss {loss.item():.3f}, accuracy on held-out images {accuracy:.3f}", flush=True)

saved = grassy.save(model, "finetuned/model_best.safetensors", classes, img_size=args.img_size)
predictions = list(predict("finetuned", [folder / classes[0]]))
shown = predictions[0]
print(f"{shown.path}: {shown.labels[0]} with probability {shown.probabilities[0]:.2f}")
error = float(grassy.geometry.orthonormality_error(model.get_classifier().weight.detach()))
