"""Accuracy of a model on a set of labelled images."""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass

import torch
from torch import nn
from torch.nn import functional as F

from grassy.data.batch_transforms import Preparation
from grassy.data.loader import Batch, Failure
from grassy.distributed import processes as distributed
from grassy.inference.effective_rank import SubspaceUse
from grassy.runs.schema import finite


@dataclass(frozen=True)
class Metrics:
    """Mean cross-entropy of the logits, and accuracies in percent, over so many images.

    effective_rank: how many directions of its subspace a class uses, in the mean; None without subspaces.
    """

    loss: float
    top1: float
    top5: float
    images: int
    effective_rank: float | None = None

    def to_dict(self) -> dict[str, float | None]:
        """For JSON: a loss that is not finite is None."""
        return {name: finite(value) for name, value in asdict(self).items() if value is not None}


@torch.no_grad()
def evaluate(
    model: nn.Module,
    batches: Iterable[Batch],
    prepare: Preparation,
    device: torch.device,
    amp_dtype: torch.dtype | None = None,
    sharded: bool = False,
) -> tuple[Metrics, list[Failure]]:
    """Metrics of a model, in eval mode, and the images that could not be read, which do not count.

    sharded: each process of the run has its own batches; the metrics are those of all.
    """
    was_training = [module.training for module in model.modules()]
    model.eval()
    sums = torch.zeros(4, dtype=torch.float64, device=device)
    failures: list[Failure] = []
    with SubspaceUse(model) as use:
        for batch in in_step(batches, sharded):
            failures += batch.failures
            if not batch.images.numel():  # not one that would tell how large its images are
                continue
            images, labels = prepare(batch.images.to(device), batch.labels.to(device))
            with torch.autocast(device.type, amp_dtype, enabled=amp_dtype is not None):
                logits = model(images)
            use.add(labels)
            logits = logits.float().flatten(1)
            read = labels >= 0
            losses = F.cross_entropy(logits, labels.clamp_min(0), reduction="none")
            best = logits.topk(min(5, logits.shape[1])).indices == labels[:, None]
            counts = (losses * read, best[:, 0] & read, best.any(1) & read, read)
            sums += torch.stack([count.double().sum() for count in counts])
    for module, training in zip(model.modules(), was_training, strict=True):
        module.training = training
    if sharded:
        sums, failures = distributed.summed(sums), distributed.gathered(failures)
    rank = use.effective_rank(sharded)
    loss, top1, top5, images_read = sums.tolist()
    if not images_read:
        first = f", {failures[0].name} first: {failures[0].reason}" if failures else ""
        raise ValueError(f"none of the images could be read{first}")
    top1, top5 = 100 * top1 / images_read, 100 * top5 / images_read
    return Metrics(loss / images_read, top1, top5, int(images_read), rank), failures


def in_step(batches: Iterable[Batch], sharded: bool) -> Iterator[Batch]:
    """The same batches; a process that has no more, or none that could be read, gets a blank image instead.

    So all processes make the same number of forward passes, whatever their share of the images: a model whose weights
    are sharded needs all of them in each. Without an image anywhere, a batch has images of no size.

    sharded: each process of the run has its own batches.
    """
    own = iter(batches)
    while True:
        batch = next(own, None)
        read = batch is not None and batch.blank < len(batch.labels)
        size = list(batch.images.shape[-2:]) if batch is not None and read else [0, 0]
        asked = torch.tensor([batch is not None, *size])
        more, *size = (distributed.largest(asked) if sharded else asked).tolist()
        if not more:
            return
        if batch is None or not read:
            blank = torch.zeros(1, 3, *size, dtype=torch.uint8)
            batch = Batch(blank, torch.tensor([-1]), failures=batch.failures if batch is not None else [], blank=1)
        yield batch
