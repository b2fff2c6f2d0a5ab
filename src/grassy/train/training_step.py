"""One update of the weights: forward, backward, clipping and the optimizer's step, in plain PyTorch.

On a GPU nothing in it waits for the device: losses are summed there, and the first update with a non-finite loss is
recorded there and read now and then. So a CUDA graph can capture a whole update, which helps small models on a host
that launches kernels slowly.
"""

import contextlib
import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from grassy.data.batch import Batch, Failure
from grassy.data.batch_transforms import Preparation
from grassy.data.order import seed_of
from grassy.data.resident_loader import ResidentLoader
from grassy.distributed import GradScaler, processes
from grassy.heads import heads_of
from grassy.loss import classification_loss
from grassy.optim import clip_grad_norm_
from grassy.shards import is_dtensor, local

#: Steps to run before capture, in which kernels are compiled and buffers created.
EAGER_STEPS = 3


class TrainingStep:
    """Computes the gradient of one update in parts, and takes the optimizer's step."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        criterion: Callable[[Tensor, Tensor], Tensor],
        prepare: Preparation,
        device: torch.device,
        *,
        amp_dtype: torch.dtype | None = None,
        clip_grad: float | None = None,
        skip_nonfinite: bool = False,
    ) -> None:
        self.model, self.optimizer, self.criterion, self.prepare = model, optimizer, criterion, prepare
        self.device, self.amp_dtype, self.clip_grad, self.skip_nonfinite = device, amp_dtype, clip_grad, skip_nonfinite
        sharded = any(map(is_dtensor, model.parameters()))
        sampled = any(getattr(head, "sample", 1.0) < 1 for head in heads_of(model))
        kind = GradScaler if sharded or sampled else torch.amp.GradScaler
        self.scaler = kind(device.type, enabled=amp_dtype is torch.float16)
        self.losses = torch.zeros(2, device=device)  # sum and number of losses since the epoch began
        self.number = torch.zeros((), dtype=torch.int64, device=device)
        self.first_bad = torch.full((), -1, dtype=torch.int64, device=device)
        self.skipped_in_a_row = 0

    def __call__(self, parts: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Make one update from the parts of its batch: uint8 images and labels on the device."""
        buffers = [buffer.clone() for buffer in self.model.buffers()] if self.skip_nonfinite else []
        self.optimizer.zero_grad(set_to_none=True)  # not at the end, so that gradients can be inspected
        loss = torch.zeros((), device=self.device)
        for i, (images, labels) in enumerate(parts):
            images, target = self.prepare(images, labels)
            with self._without_communication(last=i == len(parts) - 1):
                with torch.autocast(self.device.type, self.amp_dtype, enabled=self.amp_dtype is not None):
                    part = classification_loss(self.model, images, target, self.criterion) / len(parts)
                self.scaler.scale(part).backward()
            loss += part.detach()
        if self.skip_nonfinite and self._is_bad(loss):
            self.skipped_in_a_row += 1
            for buffer, before in zip(self.model.buffers(), buffers, strict=True):
                buffer.copy_(before)  # the skipped batch has changed the batch statistics
        else:
            self.skipped_in_a_row = 0
            self._note(loss)
            self.scaler.unscale_(self.optimizer)
            if self.clip_grad is not None:
                clip_grad_norm_(self.model, self.clip_grad)
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.number += 1

    def mean_loss(self) -> float:
        """The mean loss since the epoch began. Waits for the device."""
        total, count = self.losses.tolist()
        return total / count if count else math.nan

    def _is_bad(self, loss: Tensor) -> bool:
        """Whether the loss or a gradient is not finite in some process. GradScaler itself handles scaled gradients."""
        bad = ~loss.isfinite()
        if not self.scaler.is_enabled():
            gradients = [local(p.grad) for p in self.model.parameters() if p.grad is not None]
            bad = bad | ~torch.nn.utils.get_total_norm(gradients).isfinite()
        return bool(processes.anywhere(bool(bad), self.device))

    def _note(self, loss: Tensor) -> None:
        new = (self.first_bad < 0) & ~loss.isfinite()
        self.first_bad.copy_(torch.where(new, self.number, self.first_bad))
        self.losses += torch.stack([loss, torch.ones_like(loss)])

    def _without_communication(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        """Make DDP sum gradients once per update, with the last part."""
        if last or not isinstance(self.model, nn.parallel.DistributedDataParallel):
            return contextlib.nullcontext()
        return self.model.no_sync()


class EagerSteps:
    """Takes steps one by one with the batches of a loader."""

    def __init__(self, step: TrainingStep, loader: Any, seed: int, rank: int) -> None:
        self.step, self.loader, self.seed, self.rank = step, loader, seed, rank

    def batches(self, epoch: int, start: int) -> Iterator[Any]:
        """The parts of each update of an epoch, from update `start` on."""
        return self.loader.epoch(epoch, start)

    def take(self, parts: list[Batch], number: int) -> list[Failure]:
        """Take step `number` of the run, and return the images of its batch that could not be read."""
        # A resumed run draws the same random numbers; other processes draw different ones.
        seed_everything(seed_of(self.seed, number, self.rank))
        self.step([(part.images, part.labels) for part in parts])
        return [failure for part in parts for failure in part.failures]


class CapturedSteps:
    """The same steps, from the rows of a plan to the new weights, replayed as one CUDA graph.

    The learning rates must be tensors on the device, which the graph reads.
    """

    def __init__(self, step: TrainingStep, loader: ResidentLoader) -> None:
        self.step, self.loader = step, loader
        self.taken = 0
        self.rows: Tensor | None = None
        self.graph = torch.cuda.CUDAGraph()
        self.stream = torch.cuda.Stream(step.device)

    def batches(self, epoch: int, start: int) -> Iterator[Any]:
        """The rows, (parts, B, 4), of each update of an epoch, from update `start` on."""
        return self.loader.plans(epoch, start)

    def take(self, rows: Tensor, number: int) -> list[Failure]:
        """Take a step. The plan holds its random draws, and images on the device are readable."""
        self.taken += 1
        if self.taken <= EAGER_STEPS:
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                self._step(rows)
            torch.cuda.current_stream().wait_stream(self.stream)
            return []
        if self.rows is None:
            self.rows = rows.clone()
            torch.cuda.synchronize()
            with torch.cuda.graph(self.graph, stream=self.stream):
                self._step(self.rows)
        self.rows.copy_(rows)
        self.graph.replay()
        return []

    def _step(self, rows: Tensor) -> None:
        self.step([self.loader.assemble(part) for part in rows])


Steps = EagerSteps | CapturedSteps


def seed_everything(seed: int) -> None:
    """Seed Python's, NumPy's and torch's generators on all devices."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 (what timm's mixup draws from)
    torch.manual_seed(seed)


def learning_rates_on_device(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Make every group's learning rate a tensor, which a captured step reads in each replay."""
    for group in optimizer.param_groups:
        group["lr"] = torch.as_tensor(float(group["lr"]), device=device)
