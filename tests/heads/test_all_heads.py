"""One battery for all registered heads."""

import copy
import functools
import json

import numpy as np
import pytest
import torch
from torch import nn

import grassy
from grassy.heads import HEADS, create_head, describe

F64 = torch.float64
N, C, B = 12, 5, 7

every_head = pytest.mark.parametrize("name", sorted(HEADS))


def batch(dtype=torch.float32):
    return torch.randn(B, N, dtype=dtype), torch.randint(0, C, (B,))


class Loss(nn.Module):
    """A head's training loss as a module."""

    def __init__(self, head, criterion):
        super().__init__()
        self.head, self.criterion = head, criterion

    def forward(self, features, target):
        return self.head.loss(features, target, self.criterion)


@every_head
@pytest.mark.parametrize("leading", [(), (1,), (B,), (2, 3)])
def test_logits_have_one_column_a_class(name, leading):
    head = create_head(name, N, C).eval()
    assert head(torch.randn(*leading, N)).shape == (*leading, C)


@every_head
def test_one_class_and_a_batch_of_one_work(name):
    head = create_head(name, N, 1)
    assert head.loss(torch.randn(1, N), torch.tensor([0]), nn.functional.cross_entropy).isfinite()
    assert head.eval()(torch.randn(1, N)).shape == (1, 1)


@every_head
@pytest.mark.parametrize("mode", ["evaluation", "training"])
def test_gradients_are_right(name, mode):
    head = create_head(name, N, C, dtype=F64).train(mode == "training")
    x, y = torch.randn(3, N, dtype=F64, requires_grad=True), torch.tensor([0, 3, 3])
    names, parameters = zip(*head.named_parameters(), strict=True)
    loss_of = Loss(head, nn.functional.cross_entropy)

    def function(features, *values):
        if mode == "evaluation":
            return torch.func.functional_call(head, dict(zip(names, values, strict=True)), (features,))
        prefixed = {f"head.{n}": value for n, value in zip(names, values, strict=True)}
        return torch.func.functional_call(loss_of, prefixed, (features, y))

    assert torch.autograd.gradcheck(function, (x, *parameters))


@every_head
def test_training_lowers_the_loss(name):
    head, (x, y) = create_head(name, N, C), batch()
    optimizer = grassy.make_optimizer(head, "sgd", lr=0.05)
    losses = []
    for _ in range(100):
        optimizer.zero_grad()
        loss = head.loss(x, y, nn.functional.cross_entropy)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


@every_head
def test_a_copy_and_a_saved_state_give_the_same_logits(name, tmp_path):
    head, (x, _) = create_head(name, N, C).eval(), batch()
    torch.save(head.state_dict(), tmp_path / "head.pt")
    other = create_head(name, N, C).eval()
    assert not torch.equal(other(x), head(x))
    other.load_state_dict(torch.load(tmp_path / "head.pt", weights_only=True))
    assert torch.equal(other(x), head(x))
    clone = copy.deepcopy(head)
    assert torch.equal(clone(x), head(x))
    assert [n for n, _ in grassy.subspaces.named_subspaces(clone)] == list(head.subspace_names)


@every_head
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_stays_close_to_float32_and_trains_a_float32_weight(name, dtype):
    head, (x, y) = create_head(name, N, C).eval(), batch()
    exact = head(x).detach()
    with torch.autocast("cpu", dtype=dtype):
        logits = head(x)
        loss = nn.functional.cross_entropy(logits, y)
    assert torch.allclose(logits.float(), exact, rtol=0.03, atol=0.03 * float(exact.abs().max()))
    loss.backward()
    head.train()
    exact = head.loss(x, y, nn.functional.cross_entropy).detach()
    with torch.autocast("cpu", dtype=dtype):
        loss = head.loss(x, y, nn.functional.cross_entropy)
    assert torch.allclose(loss.float(), exact, rtol=0.05, atol=0.05)
    loss.backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in head.parameters())


@every_head
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_features_are_taken_by_a_float32_head(name, dtype):
    head, (x, _) = create_head(name, N, C).eval(), batch()
    assert torch.allclose(head(x.to(dtype)), head(x), rtol=0.03, atol=0.2)


@pytest.mark.slow
@every_head
@pytest.mark.parametrize("mode", ["evaluation", "training"])
def test_it_compiles_without_a_graph_break(name, mode):
    torch._dynamo.reset()
    head, (x, y) = create_head(name, N, C).train(mode == "training"), batch()

    def loss(features, target):
        return head.loss(features, target, nn.functional.cross_entropy)

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    expected = torch.autograd.grad(loss(x, y), tuple(head.parameters()))
    assert torch.allclose(compiled(x, y), loss(x, y), atol=1e-5)
    actual = torch.autograd.grad(compiled(x, y), tuple(head.parameters()))
    assert all(torch.allclose(a, e, atol=1e-5) for a, e in zip(actual, expected, strict=True))


@every_head
def test_it_exports_with_a_dynamic_batch(name):
    head, (x, _) = create_head(name, N, C).eval(), batch()
    exported = torch.export.export(head, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    other = torch.randn(3, N)
    assert torch.allclose(exported.module()(other), head(other), atol=1e-6)


@every_head
def test_zero_features_give_finite_logits_and_gradients(name):
    head = create_head(name, N, C)
    x = torch.zeros(2, N, requires_grad=True)
    logits = head.eval()(x)
    head.train()
    (logits.sum() + head.loss(x, torch.tensor([0, 1]), nn.functional.cross_entropy)).backward()
    assert logits.isfinite().all()
    assert x.grad.isfinite().all()
    assert all(p.grad is None or p.grad.isfinite().all() for p in head.parameters())


@every_head
def test_bad_features_and_sizes_are_refused(name):
    head = create_head(name, N, C)
    with pytest.raises(ValueError, match="width 12"):
        head(torch.randn(2, N + 1))
    with pytest.raises(TypeError, match="floating point"):
        head(torch.ones(2, N, dtype=torch.int64))
    for bad in (C, -1):
        with pytest.raises(ValueError, match=f"labels must lie between 0 and 4, got {bad}"):
            head.loss(torch.randn(2, N), torch.tensor([0, bad]), nn.functional.cross_entropy)
    with pytest.raises(ValueError, match=r"shape \(B, 5\)|class indices"):
        head.loss(torch.randn(2, N), torch.rand(2, C + 1), nn.functional.cross_entropy)
    with pytest.raises(ValueError, match="dropout must lie"):
        create_head(name, N, C, dropout=1.0)
    assert create_head(name, np.int64(N), np.int64(C)).out_features == C
    for sizes in ((0, C), (N, 0), (N, -1), (2.5, C)):
        with pytest.raises(ValueError, match="positive integer"):
            create_head(name, *sizes)


@every_head
def test_soft_targets_are_taken_or_refused_by_name_and_hard_ones_as_probabilities_are_the_same(name):
    head, (x, y) = create_head(name, N, C), batch()
    one_hot = nn.functional.one_hot(y, C).float()
    if head.takes_soft_targets:
        soft, hard = (head.loss(x, target, nn.functional.cross_entropy) for target in (one_hot, y))
        assert torch.allclose(soft, hard, atol=1e-5)
        mixed = grassy.classification_loss(head, x, 0.7 * one_hot + 0.3 * one_hot.roll(1, 0))
        assert mixed.isfinite()
    else:
        with pytest.raises(ValueError, match=f"{type(head).__name__} needs class indices"):
            grassy.classification_loss(head, x, one_hot)


@every_head
def test_an_ignored_label_does_not_count(name):
    head, (x, y) = create_head(name, N, C), batch()
    ignored = y.clone()
    ignored[0] = -100
    loss = head.loss(x, ignored, nn.functional.cross_entropy)
    assert torch.allclose(loss, head.loss(x[1:], y[1:], nn.functional.cross_entropy), atol=1e-5)


@every_head
def test_another_label_may_be_the_one_to_ignore(name):
    head, (x, y) = create_head(name, N, C), batch()
    ignored = y.clone()
    ignored[0] = 255
    criterion = nn.CrossEntropyLoss(ignore_index=255)
    expected = grassy.classification_loss(head, x[1:], y[1:])
    partial = functools.partial(nn.functional.cross_entropy, ignore_index=255)
    for loss in (
        grassy.classification_loss(head, x, ignored, criterion),
        grassy.classification_loss(head, x, ignored, partial),
        head.loss(x, ignored, criterion),
    ):
        assert torch.allclose(loss, expected, atol=1e-5)


@every_head
def test_shapes_can_be_computed_on_the_meta_device(name):
    head = create_head(name, N, C, device="meta").eval()
    assert head(torch.empty(2, N, device="meta")).shape == (2, C)
    assert head.out_features == C


@every_head
def test_dropout_acts_in_training_only(name):
    head, (x, y) = create_head(name, N, C, dropout=0.5), batch()
    losses = {head.loss(x, y, nn.functional.cross_entropy).item() for _ in range(5)}
    assert len(losses) > 1
    assert len({head.outlier_score(x).sum().item() for _ in range(5)}) == 1
    dropped = create_head(name, 1000, 2, dropout=0.3).prepare(torch.ones(1, 1000))
    assert 0.2 < (dropped == 0).float().mean() < 0.4
    head.eval()
    assert len({head.loss(x, y, nn.functional.cross_entropy).item() for _ in range(5)}) == 1
    without = create_head(name, N, C).eval()
    without.load_state_dict(head.state_dict())
    assert torch.equal(head(x), without(x))


@every_head
def test_scores_rank_as_evaluation_does_whatever_the_mode(name):
    head, (x, _) = create_head(name, N, C, dropout=0.5), batch()
    scores = head.train().scores(x)
    assert head.training
    assert not scores.requires_grad
    assert torch.equal(scores, head.eval()(x).detach())


@every_head
def test_the_outlier_score_lies_between_0_and_1(name):
    head, (x, _) = create_head(name, N, C), batch()
    score = head.outlier_score(x)
    assert score.shape == (B,)
    assert ((score >= 0) & (score <= 1)).all()


@pytest.mark.parametrize("name", ["arcface", "cosine", "softtriple", "subcenter-arcface"])
def test_class_vectors_of_any_length_give_the_same_logits_where_only_directions_count(name):
    head, (x, _) = create_head(name, N, C).eval(), batch()
    before, logits = head.weight.detach().clone(), head(x)
    assert torch.equal(head.weight, before)  # forward leaves the parameter's data alone
    with torch.no_grad():
        head.weight.mul_(7)
    assert torch.allclose(head(x), logits, atol=1e-5)


@every_head
def test_it_can_be_built_on_the_meta_device_and_filled_later(name):
    head = create_head(name, N, C, device="meta").to_empty(device="cpu").eval()
    head.reset_parameters()
    assert head(torch.randn(2, N)).isfinite().all()


#: Every option of every head, at another value than its default.
OPTIONS = {
    "linear": {"bias": False},
    "cosine": {"scale": 7.0, "learnable_scale": True},
    "arcface": {"scale": 30.0, "margin": 0.2},
    "multi": {"layers": 3, "bias": False},
    "softtriple": {"centers": 2, "scale": 9.0, "gamma": 0.2, "tau": 0.1, "margin": 0.05},
    "subcenter-arcface": {"centers": 2, "scale": 30.0, "margin": 0.2},
    "grassmann": {
        "k": [1, 2, 3, 3, 2],
        "gamma": 9.0,
        "normalize": False,
        "learnable_gamma": True,
        "riemannian": False,
        "fuse_loss": True,
    },
}
SHARED = {"dropout": 0.25, "standardize": True}


@every_head
def test_a_head_tells_the_options_that_make_it_again(name):
    usual = create_head(name, N, C)
    given = {**OPTIONS[name], **SHARED}
    assert describe(create_head(name, N, C, **given)) == {"name": name, **given}
    assert usual.options.keys() == given.keys()  # none is missing above
    assert all(usual.options[option] != value for option, value in given.items())
    for head in (usual, create_head(name, N, C, **given)):
        again = create_head(in_features=N, num_classes=C, **json.loads(json.dumps(describe(head))))
        again.load_state_dict(head.state_dict())
        assert repr(again) == repr(head)
        assert torch.equal(again.eval()(torch.ones(2, N)), head.eval()(torch.ones(2, N)))


@every_head
def test_options_are_given_by_name(name):
    kind = HEADS[name]
    with pytest.raises(TypeError, match="takes 3 positional arguments but 4 were given"):
        kind(N, C, 3)
    with pytest.raises(TypeError, match="unexpected keyword argument 'widht'"):
        kind(N, C, widht=3)
    assert next(kind(N, C, dtype=F64, device="meta").parameters()).dtype == F64


def test_the_options_of_a_grassmann_head_are_what_it_has_become():
    head = create_head("grassmann", N, C, k=4, gamma="auto")
    assert describe(head)["gamma"] == head.gamma
    head.load_state_dict(create_head("grassmann", N, C, k=[1, 2, 3, 4, 2], gamma=head.gamma).state_dict())
    assert head.options["k"] == [1, 2, 3, 4, 2]
    with torch.no_grad():
        head.weight[:, 3] = 0
    assert head.options["k"] == 4  # of a smaller k the weight would have another shape
    head.gamma = 11.0
    assert head.options["gamma"] == 11.0


def test_a_head_that_is_not_registered_has_no_name():
    class Mine(grassy.LinearHead):
        pass

    with pytest.raises(ValueError, match="Mine is not a registered head"):
        describe(Mine(N, C))


def test_unknown_names_and_options_list_what_is_known():
    with pytest.raises(ValueError, match=r"unknown head 'grasman', did you mean 'grassmann'\?; known heads: .*linear"):
        create_head("grasman", N, C)
    with pytest.raises(
        ValueError, match=r"head 'grassmann' has no option 'gama', did you mean 'gamma'\?; its options: k, gamma.*dtype"
    ):
        create_head("grassmann", N, C, gama=3)


def test_threads_can_evaluate_one_head_at_the_same_time():
    head = grassy.create_head("grassmann", 8, 5, k=2, dropout=0.5).eval()
    object.__setattr__(head, "written", [])
    head.__class__ = type("Watched", (type(head),), {"__setattr__": lambda self, *pair: self.written.append(pair)})
    head.scores(torch.randn(3, 8))
    head.outlier_score(torch.randn(3, 8))
    head.top(torch.randn(3, 8), 2)
    assert head.written == []  # a mode that is written and restored would be seen by the other threads
