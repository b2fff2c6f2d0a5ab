"""Accuracy over the images of several processes."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from grassy.data.batch import Batch, Failure
from grassy.data.batch_transforms import Preparation
from grassy.heads import GrassmannHead
from grassy.inference.evaluate import evaluate
from ranks import on_ranks

CPU = torch.device("cpu")
PLAIN = Preparation((0.0, 0.0, 0.0), (1.0, 1.0, 1.0), CPU)


class Together(nn.Module):
    """A model whose forward pass needs all ranks, as one with sharded weights does."""

    def __init__(self):
        super().__init__()
        self.passes = 0

    def forward(self, images):
        self.passes += 1
        if dist.is_initialized():
            dist.all_reduce(torch.zeros(1))
        return images.flatten(2).sum(-1)  # (B, 3): one logit for each colour


def batches():
    """Images of the colours 0, 1 and 2, of which the classifier takes the last for another."""
    generator = torch.Generator().manual_seed(0)
    for number in range(5):
        labels = torch.arange(4) % 3
        images = torch.randint(0, 9, (4, 3, 2, 2), dtype=torch.uint8, generator=generator)
        images[torch.arange(3), labels[:3]] += 40
        yield Batch(images, labels, failures=[Failure(f"image {number}", "broken")])
    yield Batch(torch.zeros(2, 3, 1, 1, dtype=torch.uint8), torch.tensor([-1, -1]), blank=2)  # none could be read


class Identity(nn.Module):
    """The pixels of an image, through a head: its outlier score is the share of them outside of the first three."""

    def __init__(self):
        super().__init__()
        self.head = GrassmannHead(12, 2, k=3, gamma=1.0)
        with torch.no_grad():
            self.head.weight.zero_()
            self.head.weight[0, :, :3] = self.head.weight[1, :, :3] = torch.eye(3)

    def forward(self, images):
        return self.head(images.flatten(1))


def test_images_that_cannot_be_read_do_not_count_for_the_outlier_threshold():
    """Forty images with increasing scores, of which one in twenty may be above it, and blank ones with a score of 1."""
    outside = torch.arange(1, 41, dtype=torch.uint8)
    pixels = torch.zeros(44, 12, dtype=torch.uint8)
    pixels[:40, 0], pixels[:40, 5] = 100, outside
    labels = torch.zeros(44, dtype=torch.int64).index_fill(0, torch.arange(40, 44), -1)
    failures = [Failure(f"image {number}", "broken") for number in range(4)]
    order = torch.randperm(44, generator=torch.Generator().manual_seed(0))
    batch = Batch(pixels[order].view(44, 3, 2, 2), labels[order], failures=failures, blank=4)
    metrics, found = evaluate(Identity(), [batch], PLAIN, CPU)
    assert (metrics.images, found) == (40, failures)
    assert metrics.outlier_threshold == pytest.approx(39**2 / (39**2 + 100**2), rel=1e-5)


@pytest.mark.distributed
@pytest.mark.parametrize(
    "shares", [([0, 1, 2, 3, 4, 5], [], []), ([5], [0, 1], [2, 3, 4]), ([5, 0], [5, 1, 2, 3], [4])]
)
def test_ranks_with_unequal_shares_make_the_same_number_of_passes(tmp_path, shares):
    alone = evaluate(Together(), batches(), PLAIN, CPU)

    def work(rank):
        model, whole = Together(), list(batches())
        return evaluate(model, [whole[place] for place in shares[rank]], PLAIN, CPU, own_batches=True), model.passes

    answers = on_ranks(3, tmp_path, work)
    assert {passes for _, passes in answers} == {max(map(len, shares)) - (shares[0] == [0, 1, 2, 3, 4, 5])}
    for (metrics, failures), _ in answers:
        assert metrics.to_dict() == pytest.approx(alone[0].to_dict())
        assert sorted(failures) == sorted(alone[1])


def test_an_error_leaves_the_modes_of_the_model_as_they_were():
    model = nn.Sequential(nn.Linear(2, 4), nn.Dropout().eval(), nn.Linear(4, 3))
    batch = Batch(torch.randn(2, 5), torch.zeros(2, dtype=torch.long), [])  # too wide for the model
    with pytest.raises(RuntimeError):
        evaluate(model, [batch], lambda *pair: pair, torch.device("cpu"))
    assert [module.training for module in model.modules()] == [True, True, False, True]
