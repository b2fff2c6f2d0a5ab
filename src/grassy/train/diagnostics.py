"""Diagnostics of subspaces in training: orthonormality, rotation angle per update, and cost."""

import copy
import math
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from grassy.geometry import orthonormality_error, project
from grassy.heads import heads_of
from grassy.kernels.reference import MAX_DOUBLINGS
from grassy.loss import classification_loss
from grassy.optim import make_optimizer
from grassy.optim.clipping import blocks_of_classes, riemannian_norm
from grassy.optim.joint import JointOptimizer
from grassy.optim.riemannian_sgd import rate
from grassy.precision import exact_products
from grassy.shards import local
from grassy.subspaces import named_subspaces


@torch.no_grad()
def after_an_update(model: nn.Module, optimizer: JointOptimizer) -> dict[str, float]:
    """Scalars about the weights and the last update; `rotation` is the largest angle of a class, in degrees.

    For sharded weights they cover this process's shard, since only one process asks.
    """
    subspaces = {name: weight for name, weight in named_subspaces(model) if weight.requires_grad}
    scalars = {}
    if subspaces:
        weights = [local(weight.detach()) for weight in subspaces.values()]
        parts = (weight[block] for weight in weights for block in blocks_of_classes(weight))
        scalars["subspaces/orthonormality_error"] = max(
            (float(orthonormality_error(part)) for part in parts), default=0.0
        )
        scalars["subspaces/rotation"] = largest_turn(optimizer)
        scalars["subspaces/skipped_classes"] = float(optimizer.skipped_classes)
        scalars["subspaces/capped_classes"] = float(optimizer.capped_classes)
        pairs = [(local(w.detach()), local(w.grad)) for w in subspaces.values() if w.grad is not None]
        norms = [float(riemannian_norm(w, grad)) for w, grad in pairs]
        scalars["gradient/subspaces"] = math.hypot(*norms)
    others = [local(p.grad) for name, p in model.named_parameters() if name not in subspaces and p.grad is not None]
    scalars["gradient/others"] = _norm(others)
    return scalars


def trouble_of_an_epoch(before: tuple[int, int], after: tuple[int, int], max_angle: float | None) -> list[str]:
    """Messages about rotations that were capped and gradients that were not finite, from the counts of both."""
    capped, skipped = (new - old for new, old in zip(after, before, strict=True))
    lines = []
    if capped > 0 and max_angle is None:
        lines.append(f"{capped:,} rotations of classes were capped at 64 radians: head_lr is far too large")
    if skipped > 0:
        lines.append(f"{skipped:,} updates of a class were skipped: its gradient was not finite")
    return lines


@torch.no_grad()
def largest_turn(optimizer: JointOptimizer) -> float:
    """The largest rotation angle of a class in the last step, in degrees: lr · σ_max(H).

    It is never more than `max_angle`, or 64 radians.
    """
    turns = [0.0]
    for group in optimizer.riemannian.param_groups if optimizer.riemannian else ():
        for p in group["params"]:
            weight, momentum = local(p), optimizer.state.get(p, {}).get("momentum_buffer")
            if momentum is None and p.grad is None:
                continue
            largest = min(group["max_angle"] or math.inf, 2.0**MAX_DOUBLINGS)
            for block in blocks_of_classes(weight):
                tangent = (
                    project(weight[block], local(p.grad)[block])
                    if momentum is None
                    else local(momentum)[block].to(p.dtype)
                )
                turns.append(min(float(rate(group) * _largest_speed(tangent)), largest))
    return math.degrees(max(turns))


def _largest_speed(tangent: Tensor) -> Tensor:
    """The largest singular value of the tangents (C, K, N) that are finite. Other classes do not move."""
    with exact_products(tangent):
        energies = tangent @ tangent.mT
    finite = energies.isfinite().all(-1).all(-1)[..., None, None]
    return torch.linalg.eigvalsh(energies.where(finite, 0))[..., -1].amax().clamp_min(0).sqrt()


def head_seconds(model: nn.Module, batch: int, amp_dtype: torch.dtype | None, rounds: int = 10) -> float:
    """Seconds for forward, backward and step of the model's heads, for a batch of random features.

    It measures copies. On a GPU it replays a CUDA graph, so the time is the device's, not the host's.
    """
    total = 0.0
    for original in heads_of(model):
        head = copy.deepcopy(original).train()
        device = next(head.parameters()).device
        optimizer = make_optimizer(head, "sgd", lr=1e-4, momentum=0.9, fused=device.type == "cuda")
        features = torch.randn(batch, head.in_features, device=device, requires_grad=True)
        target = torch.randint(head.num_classes, (batch,), device=device)

        def work(
            head: nn.Module = head, x: Tensor = features, y: Tensor = target, o: JointOptimizer = optimizer
        ) -> None:
            o.zero_grad(set_to_none=True)
            with torch.autocast(x.device.type, amp_dtype, enabled=amp_dtype is not None):
                loss = classification_loss(head, x, y)
            loss.backward()
            o.step()

        total += _seconds_on_gpu(work, rounds) if device.type == "cuda" else _seconds_on_cpu(work, rounds)
    return total


def _seconds_on_cpu(work: Callable[[], None], rounds: int) -> float:
    work()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return sorted(times)[rounds // 2]


def _seconds_on_gpu(work: Callable[[], None], rounds: int) -> float:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(rounds):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3 / rounds


def _norm(tensors: list[Tensor]) -> float:
    return float(torch.nn.utils.get_total_norm(tensors)) if tensors else 0.0
