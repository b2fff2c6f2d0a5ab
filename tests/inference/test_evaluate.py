"""Accuracy over the images of several processes."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from grassy.data.batch_transforms import Preparation
from grassy.data.loader import Batch, Failure
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


@pytest.mark.distributed
@pytest.mark.parametrize(
    "shares", [([0, 1, 2, 3, 4, 5], [], []), ([5], [0, 1], [2, 3, 4]), ([5, 0], [5, 1, 2, 3], [4])]
)
def test_ranks_with_unequal_shares_make_the_same_number_of_passes(tmp_path, shares):
    alone = evaluate(Together(), batches(), PLAIN, CPU)

    def work(rank):
        model, whole = Together(), list(batches())
        return evaluate(model, [whole[place] for place in shares[rank]], PLAIN, CPU, sharded=True), model.passes

    answers = on_ranks(3, tmp_path, work)
    assert {passes for _, passes in answers} == {max(map(len, shares)) - (shares[0] == [0, 1, 2, 3, 4, 5])}
    for (metrics, failures), _ in answers:
        assert metrics.to_dict() == pytest.approx(alone[0].to_dict())
        assert sorted(failures) == sorted(alone[1])
