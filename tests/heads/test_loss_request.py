"""The target survives activation checkpointing, and threads that share a model do not mix their targets."""

import copy
import pickle
import sys
import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointError, checkpoint

import grassy
from grassy.heads import HEADS

N, C, B = 12, 5, 7
HEADS_AND_OPTIONS = [*((name, {}) for name in sorted(HEADS)), ("grassmann", {"fuse_loss": True})]
every_head = pytest.mark.parametrize(("name", "options"), HEADS_AND_OPTIONS)
both_kinds = pytest.mark.parametrize("reentrant", [True, False])


class Checkpointed(nn.Module):
    """A layer and a head, of which the head, or both, are computed again in the backward."""

    def __init__(self, head, reentrant=None, whole=False, nested=False):
        super().__init__()
        self.fc, self.head, self.reentrant, self.whole, self.nested = nn.Linear(3, N), head, reentrant, whole, nested

    def again(self, function, *inputs):
        return (
            function(*inputs) if self.reentrant is None else checkpoint(function, *inputs, use_reentrant=self.reentrant)
        )

    def both(self, x):
        features = self.fc(x)
        return self.again(self.head, features) if self.nested else self.head(features)

    def forward(self, x):
        return self.again(self.both, x) if self.whole or self.nested else self.again(self.head, self.fc(x))


def batch():
    return torch.randn(B, 3, requires_grad=True), torch.randint(0, C, (B,))


def gradients(model, *losses):
    model.zero_grad()
    for loss in losses:
        loss.backward()
    return [p.grad.clone() for p in model.parameters()]


def same(found, expected):
    return all(torch.allclose(f, e, atol=1e-6) for f, e in zip(found, expected, strict=True))


@every_head
@both_kinds
@pytest.mark.parametrize("whole", [True, False])
def test_a_checkpointed_head_has_the_same_gradient(name, options, reentrant, whole):
    model, (x, y) = Checkpointed(grassy.create_head(name, N, C, **options)), batch()
    expected = gradients(model, grassy.classification_loss(model, x, y))
    model.reentrant, model.whole = reentrant, whole
    assert same(gradients(model, grassy.classification_loss(model, x, y)), expected)
    assert model.head.loss_request is None


@both_kinds
@pytest.mark.parametrize("whole", [True, False])
def test_a_sampled_head_that_would_draw_other_classes_again_is_refused(reentrant, whole):
    model, (x, y) = Checkpointed(grassy.create_head("grassmann", N, C, k=2, sample=0.5)), batch()
    grassy.classification_loss(model, x, y).backward()
    model.reentrant, model.whole = reentrant, whole
    loss = grassy.classification_loss(model, x, y)
    with pytest.raises(ValueError, match=r"sample=0.5 draws other classes.*leave the head out"):
        loss.backward()


@every_head
@both_kinds
def test_each_of_two_batches_is_computed_again_with_its_own_target(name, options, reentrant):
    model = Checkpointed(grassy.create_head(name, N, C, **options))
    batches = [batch(), batch()]
    expected = gradients(model, *(grassy.classification_loss(model, *each) for each in batches))
    model.reentrant = reentrant
    first, second = (grassy.classification_loss(model, *each) for each in batches)
    assert same(gradients(model, first, second), expected)


@both_kinds
def test_where_it_is_not_clear_which_target_is_meant_the_head_refuses(reentrant):
    """Both losses go through one backward pass. A head that does not look at the target takes part in it."""
    for name, refused in (("arcface", True), ("multi", True), ("grassmann", False)):
        model = Checkpointed(grassy.create_head(name, N, C), reentrant)
        total = grassy.classification_loss(model, *batch()) + grassy.classification_loss(model, *batch())
        if refused:
            with pytest.raises(RuntimeError, match=r"Head is recomputed in the backward.*several losses"):
                total.backward()
        else:
            total.backward()


def test_a_reentrant_checkpoint_inside_another_is_refused_and_one_that_is_not_works():
    model, (x, y) = Checkpointed(grassy.create_head("arcface", N, C)), batch()
    expected = gradients(model, grassy.classification_loss(model, x, y))
    model.nested, model.reentrant = True, False
    assert same(gradients(model, grassy.classification_loss(model, x, y)), expected)
    model.reentrant = True
    with pytest.raises(RuntimeError, match=r"ArcFaceHead is recomputed.*a reentrant checkpoint inside another one"):
        grassy.classification_loss(model, x, y).backward()


@pytest.mark.slow
@both_kinds
def test_a_compiled_model_may_checkpoint_its_head_and_a_compiled_head_may_not_be_checkpointed(reentrant):
    torch._dynamo.reset()
    model, (x, y) = Checkpointed(grassy.create_head("arcface", N, C)), batch()
    expected = gradients(model, grassy.classification_loss(model, x, y))
    model.reentrant = reentrant
    whole = torch.compile(model, backend="aot_eager")
    assert same(gradients(model, grassy.classification_loss(whole, x, y)), expected)
    model.head = torch.compile(model.head, backend="aot_eager")
    # The other kind compares what it recomputes, and raises itself.
    said = "ArcFaceHead is compiled inside a reentrant checkpoint" if reentrant else "A different number of tensors"
    with pytest.raises((ValueError, CheckpointError), match=said):
        grassy.classification_loss(model, x, y).backward()
    model.reentrant = None
    assert same(gradients(model, grassy.classification_loss(model, x, y)), expected)


def test_a_compiled_head_inside_a_reentrant_checkpoint_is_refused_also_if_it_is_frozen():
    torch._dynamo.reset()
    head, (x, y) = grassy.create_head("arcface", N, C).requires_grad_(False), batch()
    model = Checkpointed(torch.compile(head, backend="aot_eager"), True)
    with pytest.raises(ValueError, match="ArcFaceHead is compiled inside a reentrant checkpoint"):
        grassy.classification_loss(model, x, y)
    with torch.no_grad():
        assert grassy.classification_loss(model, x, y).isfinite()


class MainAndAuxiliary(nn.Module):
    """Two heads, of which the second takes part in training only, on a layer that may be computed again."""

    def __init__(self, reentrant):
        super().__init__()
        self.fc, self.reentrant = nn.Linear(3, N), reentrant
        self.head, self.auxiliary = (grassy.create_head("arcface", N, C) for _ in range(2))

    def forward(self, x):
        features = checkpoint(self.fc, x, use_reentrant=True) if self.reentrant else self.fc(x)
        return (self.head(features), self.auxiliary(features)) if self.training else self.head(features)


@both_kinds
@pytest.mark.parametrize("whole", [True, False])
def test_a_compiled_head_need_not_take_part_in_every_forward(reentrant, whole):
    torch._dynamo.reset()
    model, (x, y) = MainAndAuxiliary(reentrant), batch()
    expected = [grassy.classification_loss(model.train(mode), x, y) for mode in (True, False)]
    for each in [model] if whole else [model.head, model.auxiliary]:
        each.compile(backend="aot_eager")
    found = [grassy.classification_loss(model.train(mode), x, y) for mode in (True, False)]
    assert same(found, expected)


def test_a_compiled_model_may_be_sharded(tmp_path):
    """The graph of the loss ends in other tensors than the parameters of the head."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch._dynamo.reset()
    model, (x, y) = Checkpointed(grassy.create_head("arcface", N, C)), batch()
    expected = grassy.classification_loss(model, x, y).item()
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        fully_shard(model.head, mesh=mesh)
        fully_shard(model, mesh=mesh)
        model.compile(backend="eager")
        assert grassy.classification_loss(model, x, y).item() == pytest.approx(expected)
    finally:
        torch.distributed.destroy_process_group()


@both_kinds
@pytest.mark.filterwarnings("ignore:ArcFaceHead got no target")
@pytest.mark.parametrize("earlier", ["not used", "used", "failed"])
def test_a_plain_backward_finds_no_target_while_an_earlier_loss_is_kept(reentrant, earlier):
    """Whether the backward of that loss did not run, or did, or raised an error."""
    model, (x, y) = Checkpointed(grassy.create_head("arcface", N, C)), batch()
    expected = gradients(model, nn.functional.cross_entropy(model(x), y))
    model.reentrant = reentrant
    kept = grassy.classification_loss(model, x, y)
    if earlier == "used":
        kept.backward()
    elif earlier == "failed":
        kept = kept + grassy.classification_loss(model, x, y)
        with pytest.raises(RuntimeError, match="several losses in one backward"):
            kept.backward()
    assert same(gradients(model, nn.functional.cross_entropy(model(x), y)), expected)
    assert kept.isfinite()


@both_kinds
def test_the_backward_may_run_in_another_thread_as_it_does_on_a_gpu(reentrant):
    model, (x, y) = Checkpointed(grassy.create_head("arcface", N, C)), batch()
    expected = gradients(model, grassy.classification_loss(model, x, y))
    model.reentrant = reentrant
    model.zero_grad()
    backward = threading.Thread(target=grassy.classification_loss(model, x, y).backward)
    backward.start()
    backward.join()
    assert same([p.grad for p in model.parameters()], expected)


def test_a_model_that_gives_the_target_to_its_head_itself_may_checkpoint_it():
    head, (_, y) = grassy.create_head("arcface", N, C), batch()
    features = torch.randn(B, N, requires_grad=True)
    plain = nn.functional.cross_entropy(head(features, y), y)
    again = nn.functional.cross_entropy(checkpoint(head, features, y, use_reentrant=True), y)
    assert same(gradients(head, again), gradients(head, plain))


def test_a_head_that_overrides_the_logits_of_another_may_look_at_the_target():
    class Margin(grassy.LinearHead):
        def logits(self, features, target=None):
            logits = super().logits(features)
            return logits if target is None else logits - nn.functional.one_hot(target, C)

    assert not grassy.LinearHead.logits_use_target
    model, (x, y) = Checkpointed(Margin(N, C)), batch()
    expected = gradients(model, grassy.classification_loss(model, x, y))
    model.reentrant = True
    assert same(gradients(model, grassy.classification_loss(model, x, y)), expected)


def test_nothing_of_a_target_stays_once_its_loss_is_gone():
    model, (x, y) = Checkpointed(grassy.create_head("arcface", N, C), True), batch()
    grassy.classification_loss(model, x, y).backward()
    references = sys.getrefcount(y)
    for _ in range(5):
        grassy.classification_loss(model, x, y).backward()
    assert sys.getrefcount(y) == references


class Meeting(nn.Module):
    """Lets a number of threads go on once all of them are inside the forward."""

    def __init__(self, threads):
        super().__init__()
        self.barrier = threading.Barrier(threads)

    def forward(self, x):
        self.barrier.wait(timeout=30)
        return x


def test_threads_that_share_a_model_do_not_mix_their_targets():
    """Each thread has targets of one class, so a mixed-up one shows; some only want logits."""
    head = grassy.create_head("multi", N, C, layers=2)
    model, x = nn.Sequential(Meeting(C + 1), head), torch.randn(B, N)
    expected = [head.loss(x, torch.full((B,), c), nn.functional.cross_entropy).item() for c in range(C)]
    found = [None] * (C + 1)

    def ask(c):
        found[c] = grassy.classification_loss(model, x, torch.full((B,), c)).item()

    def call():
        found[C] = model(x).shape

    threads = [threading.Thread(target=ask, args=(c,)) for c in range(C)] + [threading.Thread(target=call)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [*expected, (B, C)]


def test_a_copy_made_inside_a_forward_has_no_request():
    head, (x, y) = grassy.create_head("multi", N, C), batch()
    copies = []
    model = nn.Sequential(nn.Linear(3, N), head)
    model[0].register_forward_hook(lambda *_: copies.extend([copy.deepcopy(head), pickle.loads(pickle.dumps(head))]))
    grassy.classification_loss(model, x, y)
    assert [each(torch.randn(2, N)).shape for each in copies] == [(2, C)] * 2


def test_data_parallel_which_would_lose_the_target_is_refused():
    model, (x, y) = nn.DataParallel(nn.Sequential(nn.Linear(3, N), grassy.create_head("arcface", N, C))), batch()
    assert grassy.classification_loss(model, x, y).isfinite()
    model.device_ids = [0, 1]
    with pytest.raises(ValueError, match=r"ArcFaceHead needs the target, which nn.DataParallel does not split"):
        grassy.classification_loss(model, x, y)
