"""The loss over sharded classes in one process: every implementation against the specification, and that against torch.

`tests/distributed/test_sharded_head.py` has several processes.
"""

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from grassy import kernels
from grassy.kernels import sharded
from grassy.kernels.sampling import Sampling, drawn
from grassy.kernels.sharded import sharded_cross_entropy
from grassy.mixed_labels import MixedLabels
from grassy.shards import Shard, bounds
from ranks import on_ranks

from .sharded_kernels import SHARDS, differences, evaluated, example
from .triton_cases import interpreted

INTERPRETED = """
import json
from sharded_kernels import differences
print(json.dumps(differences("triton", ("part",), (True,))))
"""


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_of_all_classes_it_is_the_cross_entropy_of_torch(smoothing):
    rows, labels, weight = example(SHARDS["whole"], torch.float64)
    logits = kernels.subspace_logits(rows, weight, 12.0, normalize=False)
    expected = F.cross_entropy(logits, labels, label_smoothing=smoothing, reduction="none")
    loss, _, _ = evaluated("reference", SHARDS["whole"], torch.float64, label_smoothing=smoothing)
    torch.testing.assert_close(loss, expected, rtol=1e-13, atol=1e-13)


def test_chunks_of_plain_torch_agree_with_the_specification():
    found = differences("chunks")
    assert len(found) == 36
    assert max(max(error) for error in found.values()) < 1e-4, found


@pytest.mark.slow
def test_kernels_agree_with_the_specification():
    found = interpreted(INTERPRETED)
    assert len(found) == 6
    assert max(max(error) for error in found.values()) < 1e-4, found


@pytest.mark.parametrize("impl", ["reference", "chunks"])
def test_a_sample_has_the_loss_of_its_classes_alone(impl):
    """With the correction, each negative that was drawn counts 1/0.4 times in the sum of exponentials."""
    rows, labels, weight = example(SHARDS["whole"])
    sample = drawn(labels, SHARDS["whole"], Sampling(0.4, 5, torch.tensor(2), False, weight))
    places, positives = sample.places.tolist(), sample.positives
    assert set(places[:positives]) == set(labels.tolist()) - {-100}
    assert 0 < len(places) - positives < 11 - positives
    logits = kernels.subspace_logits(rows, weight, 12.0, normalize=False)[:, places]
    own = torch.tensor([places.index(label) if label >= 0 else -100 for label in labels.tolist()])
    for sampling, shift in (("plain", 0.0), ("corrected", -torch.tensor(0.4).log())):
        moved = logits + shift * (torch.arange(len(places)) >= positives)
        loss, _, _ = evaluated(impl, SHARDS["whole"], sampling=sampling)
        torch.testing.assert_close(loss, F.cross_entropy(moved, own, reduction="none"))


def test_a_label_that_is_no_class_makes_the_loss_a_nan():
    rows, labels, weight = example(SHARDS["whole"])
    labels[0] = 11
    shard = SHARDS["whole"]
    for impl in ("reference", "chunks"):
        loss = kernels.sharded_subspace_cross_entropy(rows, labels, weight, 12.0, shard, reduction="none", impl=impl)
        assert loss.isnan().tolist() == [True] + [False] * 12


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reduction": "max"}, "reduction must be"),
        ({"label_smoothing": 2.0}, "label_smoothing must lie in"),
        ({"impl": "cuda"}, "impl must be 'auto' or one of"),
        ({"target": torch.rand(13, 11)}, "takes class indices, or mixtures of a few as grassy.MixedLabels"),
        ({"target": torch.zeros(12, dtype=torch.int64)}, r"need labels of shape \(13,\)"),
    ],
)
def test_wrong_options_are_refused(change, message):
    rows, labels, weight = example(SHARDS["whole"])
    options = {"target": labels, **change}
    with pytest.raises(ValueError, match=message):
        kernels.sharded_subspace_cross_entropy(rows, weight=weight, gamma=12.0, shard=SHARDS["whole"], **options)


@pytest.mark.parametrize("classes", [1, 2, 9, 10, 4097])
@pytest.mark.parametrize("world", [1, 2, 3, 4, 7])
def test_bounds_are_those_of_torch_chunk(classes, world):
    parts = torch.arange(classes).chunk(world)
    for rank in range(world):
        start, stop = bounds(classes, rank, world)
        expected = parts[rank].tolist() if rank < len(parts) else []
        assert list(range(start, stop)) == expected


def test_chunks_of_any_head_give_what_all_classes_at_once_give(monkeypatch):
    torch.manual_seed(0)
    x, weight, labels = torch.randn(6, 5, dtype=torch.float64), torch.randn(10, 5, dtype=torch.float64), torch.arange(6)

    def result(impl):
        rows, w = x.clone().requires_grad_(), weight.clone().requires_grad_()
        loss = sharded_cross_entropy(rows, labels, lambda x, _, w: x @ w.T, [w], Shard(0, 10, 10), 0.1, impl=impl)
        loss.backward()
        return loss.detach(), rows.grad, w.grad

    expected = result("reference")
    monkeypatch.setattr("grassy.kernels.sharded.WHOLE", 1)
    monkeypatch.setattr("grassy.kernels.sharded.CHUNK", 18)
    for ours, theirs in zip(result("chunks"), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-13)


def of_half_precision(x, labels, w):
    """Logits as a linear layer gives them under autocast."""
    return (x @ w.T).bfloat16()


@pytest.mark.parametrize("impl", ["reference", "chunks"])
def test_logits_of_half_precision_are_summed_in_float32(monkeypatch, impl):
    """In bfloat16 the sum over so many classes would stop growing."""
    torch.manual_seed(0)
    monkeypatch.setattr("grassy.kernels.sharded.CHUNK", 2**14)
    monkeypatch.setattr("grassy.kernels.sharded.WHOLE", 2**14 if impl == "chunks" else 2**26)
    x, w, labels = torch.randn(4, 8), 0.01 * torch.randn(20_000, 8), torch.arange(4)
    rows, weight = x.clone().requires_grad_(), w.clone().requires_grad_()
    loss = sharded_cross_entropy(rows, labels, of_half_precision, [weight], Shard(0, 20_000, 20_000), impl=impl)
    loss.backward()
    logits = of_half_precision(x, None, w).float().requires_grad_()
    expected = F.cross_entropy(logits, labels)
    expected.backward()
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    slopes = logits.grad.bfloat16().float()  # what autograd hands to the matmul
    torch.testing.assert_close(weight.grad, slopes.T @ x, rtol=2e-2, atol=1e-9)


def test_a_process_without_classes_communicates_in_the_dtype_of_the_others():
    rows, labels = torch.randn(4, 8), torch.arange(4)
    for shard, w in ((Shard(0, 9, 9), torch.randn(9, 8)), (Shard(9, 9, 9), torch.randn(0, 8))):
        for impl in ("reference", "chunks"):
            loss = sharded_cross_entropy(rows, labels, of_half_precision, [w], shard, impl=impl, reduction="none")
            assert loss.dtype == torch.float32


@pytest.mark.distributed
def test_processes_of_different_ways_agree_on_whether_features_get_a_gradient(tmp_path, monkeypatch):
    """With a frozen backbone, the one whose logits are few enough to be stored would not answer the other."""
    monkeypatch.setattr("grassy.kernels.sharded.WHOLE", 8 * 3)
    torch.manual_seed(0)
    x, w, labels = torch.randn(8, 5), torch.randn(7, 5), torch.arange(8) % 7
    alone = w.clone().requires_grad_()
    F.cross_entropy(x @ alone.T, labels).backward()

    def work(rank):
        start, stop = bounds(7, rank, 2)
        own = w[start:stop].clone().requires_grad_()
        shard = Shard(start, stop, 7, dist.group.WORLD)
        mine = slice(4 * rank, 4 * rank + 4)
        sharded_cross_entropy(x[mine], labels[mine], lambda x, _, w: x @ w.T, [own], shard).backward()
        return own.grad

    torch.testing.assert_close(torch.cat(on_ranks(2, tmp_path, work)), alone.grad)


@pytest.mark.distributed
def test_weights_of_mixed_labels_may_cancel_in_one_process(tmp_path):
    torch.manual_seed(0)
    x, w = torch.randn(2, 6, dtype=torch.float64), torch.eye(6, dtype=torch.float64)
    labels, weights = torch.tensor([[0, 1, 4]] * 2), torch.tensor([[0.5, -0.5, 1.0]] * 2, dtype=torch.float64)
    share = torch.tensor([0.5, -0.5, 0.0, 0.0, 1.0, 0.0], dtype=torch.float64)

    def work(rank):
        own, mine = slice(3 * rank, 3 * rank + 3), slice(rank, rank + 1)
        target, shard = MixedLabels(labels[mine], weights[mine]), Shard(own.start, own.stop, 6, dist.group.WORLD)
        return sharded_cross_entropy(x[mine], target, lambda x, _, w: x @ w.T, [w[own]], shard)

    losses = torch.stack(on_ranks(2, tmp_path, work))
    torch.testing.assert_close(losses, -(share * x.log_softmax(-1)).sum(-1))


class Integers(TorchDispatchMode):
    """Within this, the number of elements of the largest tensor of integers that is made is kept."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        made = result if isinstance(result, list | tuple) else [result]
        sizes = [t.numel() for t in made if isinstance(t, torch.Tensor) and t.dtype == torch.int64]
        self.largest = max([self.largest, *sizes])
        return result


@pytest.mark.parametrize("count", [1, 3, 50])
def test_the_largest_logits_need_indices_of_themselves_alone(monkeypatch, count):
    monkeypatch.setattr(sharded, "WHOLE", 0)
    monkeypatch.setattr(sharded, "CHUNK", 40 * 8)  # 40 classes at a time, fewer than 50
    torch.manual_seed(0)
    rows, weight = torch.randn(8, 5), torch.randn(200, 5)
    shard = Shard(1000, 1200, 5000)
    with Integers() as seen:
        values, places = kernels.sharded_top(rows, lambda x, _, w: x @ w.T, [weight], shard, count)
    expected, index = (rows @ weight.T).topk(count)
    torch.testing.assert_close(values, expected)
    assert torch.equal(places, index + 1000)
    assert seen.largest <= 8 * (count + min(count, 40))
