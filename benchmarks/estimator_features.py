"""Features of real models, as arrays for `benchmarks.estimator`.

    python -m benchmarks.estimator_features images FEATURES.npz --source cifar10 --target cifar100 --per-class 100
    python -m benchmarks.estimator_features text FEATURES.npz --model FOLDER --packages numpy scipy torch

`images` trains a small convolutional network on one data set and takes its pooled features of another one. Source and
target are folders with `train.npz` and `test.npz`, each with images `x` (B, H, W, 3) and labels `y`. `text` takes the
sentence embeddings of a Hugging Face encoder that lies in a folder. The texts are the first paragraphs of docstrings of
installed packages, and the class of a text is its package.
"""

import argparse
import ast
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from grassy.torchvision_import import import_torchvision


def read_images(folder: Path, part: str) -> tuple[Tensor, Tensor]:
    """Images (B, 3, H, W) in [0, 1] and labels (B,)."""
    with np.load(folder / f"{part}.npz") as file:
        images = torch.from_numpy(file["x"]).permute(0, 3, 1, 2).contiguous()
        return images, torch.from_numpy(file["y"]).long()


def small_network(classes: int) -> tuple[nn.Module, nn.Module]:
    """A body that gives 256 features, and its classifier."""

    def block(inside: int, outside: int) -> list[nn.Module]:
        return [nn.Conv2d(inside, outside, 3, padding=1, bias=False), nn.BatchNorm2d(outside), nn.ReLU()]

    layers = [*block(3, 32), nn.MaxPool2d(2), *block(32, 64), nn.MaxPool2d(2), *block(64, 128), nn.MaxPool2d(2)]
    body = nn.Sequential(*layers, *block(128, 256), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return body, nn.Linear(256, classes)


def pixels(images: Tensor) -> Tensor:
    return (images.float() / 255 - 0.5) / 0.25


def train(images: Tensor, labels: Tensor, epochs: int) -> nn.Module:
    torch.manual_seed(0)
    body, head = small_network(int(labels.max()) + 1)
    optimizer = torch.optim.AdamW([*body.parameters(), *head.parameters()], lr=2e-3, weight_decay=0.05)
    steps = epochs * (len(images) // 128)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    for epoch in range(epochs):
        for rows in torch.randperm(len(images))[: len(images) // 128 * 128].split(128):
            batch = pixels(images[rows])
            batch = batch.flip(-1) if torch.rand(()) < 0.5 else batch
            loss = nn.functional.cross_entropy(head(body(batch)), labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        print(f"epoch {epoch + 1}: loss {float(loss):.3f}", flush=True)
    return body.eval()


@torch.inference_mode()
def of_images(body: nn.Module, images: Tensor) -> np.ndarray:
    return torch.cat([body(pixels(part)) for part in images.split(500)]).numpy()


def docstrings(package: str) -> Iterator[str]:
    """The first paragraphs of the docstrings of a package, of at least eight words."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise SystemExit(f"the package {package} is not installed")
    for file in sorted(Path(spec.origin).parent.rglob("*.py")):
        try:
            tree = ast.parse(file.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
                text = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
                text = re.sub(rf"\b{package}\b", "it", text, flags=re.IGNORECASE)  # the name would give it away
                if len(text.split()) >= 8:
                    yield text


@torch.inference_mode()
def of_texts(folder: Path, texts: list[str]) -> np.ndarray:
    """The mean over the tokens of the last layer, scaled to length 1: what sentence encoders are trained for."""
    import_torchvision()  # before transformers imports it
    from transformers import AutoModel, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))  # texts of one length need no padding
    out = torch.empty(len(texts), model.config.hidden_size)
    for start in range(0, len(order), 64):
        rows = order[start : start + 64]
        batch = tokenizer([texts[i] for i in rows], padding=True, truncation=True, max_length=64, return_tensors="pt")
        mask = batch["attention_mask"].unsqueeze(-1)
        mean = (model(**batch).last_hidden_state * mask).sum(1) / mask.sum(1)
        out[rows] = nn.functional.normalize(mean, dim=-1)
    return out.numpy()


def images_main(args: argparse.Namespace) -> dict[str, np.ndarray]:
    body = train(*read_images(args.source, "train"), args.epochs)
    arrays: dict[str, np.ndarray] = {}
    for part in ("train", "test"):
        images, labels = read_images(args.target, part)
        if part == "train" and args.per_class:
            rows = np.concatenate([np.flatnonzero(labels == c)[: args.per_class] for c in range(int(labels.max()) + 1)])
            images, labels = images[rows], labels[rows]
        arrays[f"{part}_x"], arrays[f"{part}_y"] = of_images(body, images), labels.numpy()
    return arrays


def text_main(args: argparse.Namespace) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    texts: list[str] = []
    labels: list[int] = []
    for label, package in enumerate(args.packages):
        found = sorted(set(docstrings(package)) - set(texts))
        chosen = generator.permutation(len(found))[: args.per_class * 2]
        texts += [found[i] for i in chosen]
        labels += [label] * len(chosen)
        print(f"{package}: {len(chosen)} of {len(found)} texts", flush=True)
    features, y = of_texts(args.model, texts), np.array(labels)
    test = generator.random(len(y)) < 0.5
    return {"train_x": features[~test], "train_y": y[~test], "test_x": features[test], "test_y": y[test]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(required=True)
    images = kinds.add_parser("images")
    images.add_argument("--source", type=Path, required=True)
    images.add_argument("--target", type=Path, required=True)
    images.add_argument("--epochs", type=int, default=4)
    images.set_defaults(run=images_main)
    text = kinds.add_parser("text")
    text.add_argument("--model", type=Path, required=True)
    text.add_argument("--packages", nargs="+", required=True)
    text.set_defaults(run=text_main)
    for kind in (images, text):
        kind.add_argument("output", type=Path)
        kind.add_argument("--per-class", type=int, default=100, help="training samples of a class, at most")
    args = parser.parse_args()
    arrays = args.run(args)
    np.savez(args.output, **arrays)
    print(f"Saved {args.output}: {arrays['train_x'].shape} and {arrays['test_x'].shape}")


if __name__ == "__main__":
    main()
