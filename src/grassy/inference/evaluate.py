"""Loss and accuracy of a model on labelled images."""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from grassy.data.batch import Batch, Failure
from grassy.data.batch_transforms import Preparation
from grassy.distributed import processes
from grassy.heads import heads_of
from grassy.heads.base import evaluating
from grassy.heads.per_class import PerClassHead
from grassy.inference.effective_rank import SubspaceUse
from grassy.inference.outliers import OutlierScores, threshold_of
from grassy.schema import finite


@dataclass(frozen=True)
class Metrics:
    """Mean cross-entropy of the logits, and accuracies in percent.

    images: the number of images that these are measured on.
    effective_rank: the number of directions of its subspace that a class uses, averaged over classes; None without
        subspaces.
    outlier_threshold: the outlier score that 5 % of the images exceed; None without scores.
    """

    loss: float
    top1: float
    top5: float
    images: int
    effective_rank: float | None = None
    outlier_threshold: float | None = None

    def to_dict(self) -> dict[str, float | None]:
        """A dictionary for JSON, without the fields that are None. A loss that is not finite becomes None."""
        return {name: finite(value) for name, value in asdict(self).items() if value is not None}


@torch.no_grad()
def evaluate(
    model: nn.Module,
    batches: Iterable[Batch],
    prepare: Preparation,
    device: torch.device,
    amp_dtype: torch.dtype | None = None,
    own_batches: bool = False,
) -> tuple[Metrics, list[Failure]]:
    """Metrics of a model in eval mode, and the images that could not be read, which are not counted.

    own_batches: each process has its own batches; the metrics cover all of them.
    """
    sums = torch.zeros(4, dtype=torch.float64, device=device)
    failures: list[Failure] = []
    scores: list[float] = []
    with evaluating(model), SubspaceUse(model) as use, OutlierScores(model) as outliers:
        for batch in _in_step(batches, own_batches, device):
            failures += batch.failures
            if not batch.images.numel():  # no image could be read anywhere, so the image size is unknown
                continue
            images, labels = prepare(batch.images.to(device), batch.labels.to(device))
            with torch.autocast(device.type, amp_dtype, enabled=amp_dtype is not None):
                losses, best = judged(model, images, labels)
            use.add(labels)
            of_batch = outliers.of_last()
            read = labels >= 0
            scores += [] if of_batch is None else of_batch[read].tolist()
            counts = (losses * read, best[:, 0] & read, best.any(1) & read, read)
            sums += torch.stack([count.double().sum() for count in counts])
    if own_batches:
        sums, failures = processes.summed(sums), processes.gathered(failures)
        scores = processes.gathered(scores)
    rank = use.effective_rank(own_batches)
    loss, top1, top5, images_read = sums.tolist()
    if not images_read:
        first = f", {failures[0].name} first: {failures[0].reason}" if failures else ""
        raise ValueError(f"none of the images could be read{first}")
    top1, top5 = 100 * top1 / images_read, 100 * top5 / images_read
    return Metrics(loss / images_read, top1, top5, int(images_read), rank, threshold_of(scores)), failures


def judged(model: nn.Module, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy (B,) of each image, and whether its label is the first, second, ... prediction (B, up to 5).

    A label of -1 marks a blank image. If the head is sharded over processes, no process has all logits. The head then
    returns losses and predictions instead of logits.
    """
    heads = [head for head in heads_of(model) if isinstance(head, PerClassHead) and head.is_sharded]
    known = labels.clamp_min(0)
    if not heads:
        logits = model(images).float().flatten(1)
        best = logits.topk(min(5, logits.shape[1])).indices
        return F.cross_entropy(logits, known, reduction="none"), best == labels[:, None]
    if len(heads) > 1:
        raise ValueError(f"{type(model).__name__} has {len(heads)} heads sharded over processes: only one is allowed")
    head = heads[0]

    def answer(features: Tensor, target: Tensor | None = None) -> Tensor:
        losses = head.cross_entropy(head.prepare(features), known, reduction="none")
        _, classes = head.top(features, min(5, head.num_classes))
        return torch.cat([losses.double().unsqueeze(1), classes.double()], 1)

    head.forward = answer  # type: ignore[method-assign]
    try:
        answers = model(images)
    finally:
        del head.forward
    return answers[:, 0], answers[:, 1:].long() == labels[:, None]


def _in_step(batches: Iterable[Batch], own_batches: bool, device: torch.device) -> Iterator[Batch]:
    """The same batches, padded with blank images so that all processes run equally many forward passes of equal size.

    A model with sharded weights needs every process in each forward pass. A process without further images, or without
    readable ones, therefore gets blank images. If no process has an image, the batch is empty.

    own_batches: each process has its own batches.
    """
    own = iter(batches)
    place = processes.device_to_agree_on(device)
    while True:
        batch = next(own, None)
        shape = [0, 0, 0]
        if batch is not None and batch.blank < len(batch.labels):
            shape = [len(batch.labels), *batch.images.shape[-2:]]
        asked = torch.tensor([batch is not None, *shape], device=place)
        more, size, height, width = (processes.largest(asked) if own_batches else asked).tolist()
        if not more:
            return
        if batch is None or not shape[0]:
            batch = Batch(
                torch.zeros(0, 3, height, width, dtype=torch.uint8),
                torch.zeros(0, dtype=torch.int64),
                failures=[] if batch is None else batch.failures,
            )
        if missing := size - len(batch.labels):
            images, labels = batch.images, batch.labels
            blank = images.new_zeros(missing, 3, height, width)
            batch.images, batch.labels = (
                torch.cat([images, blank]),
                torch.cat([labels, labels.new_full((missing,), -1)]),
            )
            batch.blank += missing
        yield batch
