"""What the benchmarks of `grassy.transfer` share: features, options, measuring, and a description of the machine.

The synthetic classes come in families. A class is a Gaussian in 48 dimensions around a mean near that of its family,
mapped nonlinearly to 256 dimensions. A small network learns 50 classes. The features are its penultimate activations,
after a ReLU, on classes that it has never seen. As in real features, a few directions hold most of the energy, many are
nearly empty, and classes of one family overlap, which makes the linear SVM problems hard.
"""

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import grassy

LATENT, INPUT, LEARNED, FAMILIES = 48, 256, 50, 10
BLOCK = 16384


class Features(NamedTuple):
    train: Tensor  # (B, N), float32
    labels: Tensor  # (B,)
    test: Tensor
    test_labels: Tensor


def make_features(samples: int, test: int, width: int, classes: int, device: str, spread: float = 1.8) -> Features:
    """Features of `samples` and `test` images; the larger the spread, the more the classes overlap."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    family = torch.randint(FAMILIES, (classes + LEARNED,), generator=generator).to(device)
    means = normal(FAMILIES, LATENT)[family] + 0.7 * normal(classes + LEARNED, LATENT)
    first, second = normal(LATENT, INPUT) / LATENT**0.5, normal(INPUT, INPUT) / INPUT**0.5
    deviation = spread * torch.linspace(1.6, 0.6, LATENT, device=device)

    def images(labels: Tensor) -> Tensor:
        latent = means[labels] + deviation * torch.randn(len(labels), LATENT, device=device)
        return torch.tanh(latent @ first) @ second + 0.1 * torch.randn(len(labels), INPUT, device=device)

    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(INPUT, 512), nn.ReLU(), nn.Linear(512, width), nn.ReLU()).to(device)
    head = nn.Linear(width, LEARNED).to(device)
    optimizer = torch.optim.AdamW([*body.parameters(), *head.parameters()], lr=1e-3)
    for _ in range(300):
        labels = torch.randint(LEARNED, (256,), device=device)
        loss = nn.functional.cross_entropy(head(body(images(classes + labels))), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def features(number: int) -> tuple[Tensor, Tensor]:
        labels = torch.randint(classes, (number,), device=device)
        out = torch.empty(number, width, device=device)
        with torch.no_grad():
            for start in range(0, number, BLOCK):
                out[start : start + BLOCK] = body(images(labels[start : start + BLOCK]))
        return out, labels

    return Features(*features(samples), *features(test))


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def machine(device: str) -> dict[str, object]:
    """Hardware, versions and date, for a results file."""
    return {
        "date": date.today().isoformat(),
        "device": torch.cuda.get_device_name() if device == "cuda" else cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_average": os.getloadavg()[0],  # on a busy machine threads of torch wait for each other
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "grassy": grassy.__version__,
    }


def timed(run: Callable[[], Any], device: str) -> tuple[float, Any]:
    """Seconds, and what came of it."""
    start = time.perf_counter()
    result = run()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start, result


def timed_with_memory(run: Callable[[], Any], data: Features, device: str) -> tuple[dict[str, Any], Any]:
    """Seconds, and the memory that the work takes beyond the features of a GPU; and what came of it."""
    size = data.train.numel() * data.train.element_size()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    seconds, result = timed(run, device)
    facts: dict[str, Any] = {"seconds": seconds, "features_bytes": size}
    if device == "cuda":
        facts["extra_bytes_over_features"] = (torch.cuda.max_memory_allocated() - before) / size
    return facts, result


def make_parser(about: str | None, search: str, large: str) -> argparse.ArgumentParser:
    """The options of a benchmark of a search; `large` says what is done in its place with --large."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--samples", type=int, default=5000)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--classes", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, help="of torch; scikit-learn takes all cores")
    parser.add_argument("--no-sklearn", action="store_true", help=f"only time {search}")
    parser.add_argument("--large", action="store_true", help=f"{large} instead")
    parser.add_argument("--output", type=Path)
    return parser


def save(result: dict[str, Any], output: Path) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(result, indent=1) + "\n")
    print(f"Saved {output}")
