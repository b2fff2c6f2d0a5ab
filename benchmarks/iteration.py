"""The cost of a training iteration with subspaces instead of vectors: `python -m benchmarks.iteration`.

An iteration is forward, backward and the step of `grassy.make_optimizer` with SGD. The models are the paper's eight
architectures with its batch sizes per GPU, 224 pixels and 1,000 classes. Each has timm's linear classifier, or the
Grassmann head with k = 8.

Iterations run under bfloat16 autocast in channels-last format, on random images in GPU memory, without torch.compile.
Each is a CUDA graph, so the time to launch kernels does not count. The two heads take turns.

`--peers` adds two contestants, which the 50-layer residual networks always have. One is head and step in plain torch.
The other is the same head with the paper's Algorithm 1: an SVD in every step and a QR in every fifth, which a graph
cannot capture.

    python -m benchmarks.iteration --models resnet50:256 resnet50:32
    python -m benchmarks.iteration --device cpu --models resnet18:2 --image-size 32 --rounds 1      no graphs
"""

import argparse
import copy
import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import grassy
from benchmarks import gpu, step_cpu
from benchmarks.gpu import captured, machine, need_gpu, save
from benchmarks.step import svd_step
from grassy import kernels
from grassy.models import import_timm
from grassy.train.training_step import learning_rates_on_device

CLASSES, K, LR = 1000, 8, 0.01
#: The paper's architectures by timm's names, with the paper's batch sizes divided by its eight GPUs; a ResNet50 more.
MODELS = (
    "resnet50:256",
    "resnet50:32",
    "resnet50d:32",
    "resnet101d:32",
    "resnet152d:32",
    "resnext50_32x4d:32",
    "vgg13_bn:32",
    "swin_tiny_patch4_window7_224:128",
    "deit3_small_patch16_224:256",
)
WITH_PEERS = ("resnet50", "resnet50d")
#: Steps of Algorithm 1 from one QR to the next.
ROUND = 5


def iteration(model: nn.Module, images: Tensor, labels: Tensor) -> Callable[[], None]:
    """One update of the weights, as a function."""
    device = images.device
    on_gpu = device.type == "cuda"
    optimizer = grassy.make_optimizer(
        model, "sgd", LR, weight_decay=1e-4, decay_all=True, momentum=0.9, fused=True if on_gpu else None
    )
    if on_gpu:
        learning_rates_on_device(optimizer, device)

    def update() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.bfloat16):
            loss = grassy.classification_loss(model, images, labels)
        loss.backward()
        optimizer.step()

    return update


def in_plain_torch(model: nn.Module, images: Tensor, labels: Tensor) -> Callable[[], None]:
    """All of an update but the step of the subspaces, with the head in plain torch."""
    head: Any = model.get_classifier()  # type: ignore[operator]
    others = [parameter for parameter in model.parameters() if parameter is not head.weight]
    fused = True if images.is_cuda else None
    optimizer = torch.optim.SGD(others, LR, momentum=0.9, weight_decay=1e-4, fused=fused)

    def update() -> None:
        model.zero_grad(set_to_none=True)
        with torch.autocast(images.device.type, torch.bfloat16):
            features = model.forward_head(model.forward_features(images), pre_logits=True)  # type: ignore[operator]
            logits = kernels.subspace_logits(features, head.weight, head.initial_gamma, impl="reference")
            loss = F.cross_entropy(logits, labels)
        loss.backward()
        optimizer.step()

    return update


def peers(model: nn.Module, images: Tensor, labels: Tensor) -> dict[str, Callable[[], Any]]:
    """An iteration with the step in plain torch, and `ROUND` of them by Algorithm 1."""
    weight = model.get_classifier().weight  # type: ignore[operator]
    update, momentum = in_plain_torch(model, images, labels), torch.zeros_like(weight)

    def with_grams() -> None:
        update()
        kernels.geodesic_step(weight, weight.grad, momentum, LR, 0.9, impl="reference")

    graphs = {name: captured(work) if images.is_cuda else work for name, work in
              {"plain torch": with_grams, "update": update}.items()}  # fmt: skip
    s, m = weight.detach().mT.contiguous(), momentum.mT.contiguous()

    def algorithm_1() -> None:
        for _ in range(ROUND):
            graphs["update"]()
            svd_step(s, m, weight.grad.mT, LR)  # where the update captured last leaves it
            weight.data.copy_(s.mT)
        s.copy_(torch.linalg.qr(s).Q)

    return {"plain torch": graphs["plain torch"], "algorithm 1": algorithm_1}


def measure(
    name: str, batch: int, device: str, image_size: int, rounds: int, with_peers: bool = False
) -> dict[str, Any]:
    torch.manual_seed(0)
    linear = import_timm().create_model(name, num_classes=CLASSES).train()
    linear = linear.to(device, memory_format=torch.channels_last)
    subspaces = copy.deepcopy(linear)
    grassy.replace_head(subspaces, "grassmann", k=K)
    images = torch.randn(batch, 3, image_size, image_size, device=device).to(memory_format=torch.channels_last)
    labels = torch.randint(0, CLASSES, (batch,), device=device)
    works: dict[str, Callable[[], Any]]
    works = {"linear": iteration(linear, images, labels), "grassmann": iteration(subspaces, images, labels)}
    works = {head: captured(work) for head, work in works.items()} if device == "cuda" else works
    medians = gpu.medians if device == "cuda" else step_cpu.medians
    failed = {}
    if with_peers:
        try:
            times = medians({**works, **peers(subspaces, images, labels)}, rounds)
            times["algorithm 1"] /= ROUND
        except RuntimeError as error:  # the two heads are still worth their time
            failed = {"peers_failed": str(error)}
    if not with_peers or failed:
        times = medians(works, rounds)
    overhead = 100 * (times["grassmann"] / times["linear"] - 1)
    return {"model": name, "batch": batch, "ms": times, "overhead_percent": overhead, **failed}


def parse(text: str) -> tuple[str, int]:
    name, _, batch = text.rpartition(":")
    if not name or not batch.isdigit() or int(batch) < 1:
        raise argparse.ArgumentTypeError(f"a model is given as NAME:BATCH, such as resnet50:32, got {text!r}")
    return name, int(batch)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--models", type=parse, nargs="+", default=[parse(text) for text in MODELS], metavar="NAME:BATCH"
    )
    parser.add_argument("--image-size", type=int, default=224, help="other sizes are for convolutional networks only")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--peers", action="store_true", help="plain torch and Algorithm 1 for all models")
    parser.add_argument("--output", type=Path, help="default runs/bench/iteration_gpu.json, or iteration_cpu.json")
    args = parser.parse_args()
    need_gpu(args.device)
    output = args.output or Path(f"runs/bench/iteration_{'gpu' if args.device == 'cuda' else 'cpu'}.json")
    result = {
        **machine(args.device),
        "classes": CLASSES,
        "k": K,
        "image_size": args.image_size,
        "rows": [],
        "failed": {},
    }
    for name, batch in args.models:
        start = time.monotonic()
        try:
            with_peers = args.peers or (name in WITH_PEERS and args.device == "cuda")
            row = measure(name, batch, args.device, args.image_size, args.rounds, with_peers)
        except RuntimeError as error:  # the others are still worth their time
            result["failed"][f"{name}:{batch}"] = str(error)
            print(f"{name}, batch {batch}: failed, {str(error).splitlines()[0]}", flush=True)
        else:
            result["rows"].append(row)
            times, seconds = row["ms"], time.monotonic() - start
            others = "".join(
                f", {times[peer]:.2f} by {peer}" for peer in ("plain torch", "algorithm 1") if peer in times
            )
            others += f", the others failed: {row['peers_failed'].splitlines()[0]}" if "peers_failed" in row else ""
            print(f"{name}, batch {batch}: {times['linear']:.2f} ms with vectors, {times['grassmann']:.2f} ms with "
                  f"subspaces, {row['overhead_percent']:+.2f} %{others} ({seconds:.0f} s)", flush=True)  # fmt: skip
        save(result, output)
        gc.collect()  # graphs and models, before the next ones
        if args.device == "cuda":
            torch.cuda.empty_cache()
    print(f"Saved {output}")


if __name__ == "__main__":
    main()
