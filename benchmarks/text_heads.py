"""Heads on a text classifier trained from scratch: `python -m benchmarks.text_heads`.

Texts are sentences of docstrings of Python's standard library, and the class is their module (`examples/texts.py`). The
network is a small BERT. All rows have the same seeds, data and settings. The question is which features suit texts:
standardised ones, as for images, or normalised ones, as in the paper.
"""

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

import grassy
from benchmarks.gpu import machine, save
from benchmarks.markdown import table
from grassy.torchvision_import import import_torchvision

HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "linear": ("linear", {}),
    "linear, standardised": ("linear", {"standardize": True}),
    "subspaces, normalised": ("subspaces", {"normalize": True, "standardize": False}),
    "subspaces, k = 4, normalised": ("subspaces", {"k": 4, "normalize": True, "standardize": False}),
    "subspaces, standardised": ("subspaces", {"normalize": False, "standardize": True}),
    "subspaces, standardised and normalised": ("subspaces", {"normalize": True, "standardize": True}),
    "subspaces, k = 4, standardised": ("subspaces", {"k": 4, "normalize": False, "standardize": True}),
}
BATCH, LENGTH = 32, 64


def load(seed: int) -> tuple[list[Any], list[Any], int, list[str]]:
    """Token ids and labels for training and test, the size of the vocabulary, and the classes."""
    from sklearn.model_selection import train_test_split

    sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
    import texts as source

    words, labels = source.load_texts()
    train, test, y, test_y = train_test_split(words, labels, random_state=seed, stratify=labels)
    tokenizer = source.train_tokenizer(train)
    parts = []
    for each, own in ((train, y), (test, test_y)):
        ids = tokenizer(each, truncation=True, max_length=LENGTH, padding=True, return_tensors="pt")
        parts.append((ids["input_ids"], ids["attention_mask"], torch.tensor(own)))
    return parts[0], parts[1], len(tokenizer), source.MODULES


def accuracies(name: str, options: dict[str, Any], seed: int, epochs: int) -> dict[str, float]:
    """Accuracy on training and test texts, in percent."""
    import transformers

    train, test, words, classes = load(seed)
    torch.manual_seed(seed)
    config = transformers.BertConfig(
        vocab_size=words, hidden_size=64, num_hidden_layers=1, num_attention_heads=4, intermediate_size=128,
        max_position_embeddings=LENGTH, num_labels=len(classes),
    )  # fmt: skip
    model = transformers.BertForSequenceClassification(config)
    grassy.replace_head(model, name, **options)
    rate = {} if name == "linear" else {"head_lr": 0.1}
    optimizer = grassy.make_optimizer(model, "adamw", lr=3e-3, weight_decay=0.01, **rate)
    ids, mask, labels = train
    steps = epochs * -(-len(labels) // BATCH)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    for _ in range(epochs):
        for rows in torch.randperm(len(labels)).split(BATCH):
            optimizer.zero_grad()
            logits = model(input_ids=ids[rows], attention_mask=mask[rows]).logits
            torch.nn.functional.cross_entropy(logits, labels[rows]).backward()
            grassy.clip_grad_norm_(model, 1.0)
            optimizer.step()
            schedule.step()
    model.eval()
    found = {}
    for part, (ids, mask, labels) in (("train", train), ("test", test)):
        with torch.no_grad():
            predicted = model(input_ids=ids, attention_mask=mask).logits.argmax(-1)
        found[part] = 100 * float((predicted == labels).float().mean())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--heads", nargs="+", choices=HEADS, default=list(HEADS), metavar="HEAD")
    parser.add_argument("--output", type=Path, help="write the figures to this JSON file")
    arguments = parser.parse_args()
    import_torchvision()
    found = {
        label: [accuracies(*HEADS[label], seed, arguments.epochs) for seed in range(arguments.seeds)]
        for label in arguments.heads
    }
    rows = [
        [label, *(f"{statistics.mean(run[part] for run in runs):.1f}" for part in ("train", "test"))]
        for label, runs in found.items()
    ]
    print(table(["head", "accuracy on training texts, %", "on test texts, %"], rows))
    if arguments.output:
        facts = {"seeds": arguments.seeds, "epochs": arguments.epochs}
        save({**machine("cpu"), **facts, "accuracy": found}, arguments.output)


if __name__ == "__main__":
    main()
