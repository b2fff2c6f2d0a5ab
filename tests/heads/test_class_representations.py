"""The paper's baselines against pytorch-metric-learning, against each other, and against their formulas."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import grassy
from grassy import geometry as g
from grassy.criteria import CRITERIA, BinaryCrossEntropy, create_criterion
from grassy.heads import create_head
from grassy.heads.arcface import with_margin

F64 = torch.float64
cross_entropy = nn.functional.cross_entropy


def compare(head, oracle, oracle_weight, x, y):
    """Value and gradients, with the head's weight copied into the oracle, whose weight is (N, classes)."""
    with torch.no_grad():
        oracle_weight.copy_(head.weight.flatten(0, -2).mT)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    loss, expected = head.train().loss(ours, y, cross_entropy), oracle(theirs, y)
    loss.backward()
    expected.backward()
    assert torch.allclose(loss, expected, atol=1e-5)
    assert torch.allclose(ours.grad, theirs.grad, atol=1e-5)
    assert torch.allclose(head.weight.grad.flatten(0, -2).mT, oracle_weight.grad, atol=1e-5)


def random_case(seed, classes, n, batch):
    torch.manual_seed(seed)
    x, y = torch.randn(batch, n, dtype=F64), torch.randint(0, classes, (batch,))
    return x, y, {"num_classes": classes, "embedding_size": n}


cases = given(st.integers(0, 10**6), st.integers(2, 9), st.integers(2, 12), st.integers(1, 8))


@cases
def test_cosine_agrees_with_normalised_softmax(seed, classes, n, batch):
    losses = pytest.importorskip("pytorch_metric_learning.losses")
    x, y, sizes = random_case(seed, classes, n, batch)
    oracle = losses.NormalizedSoftmaxLoss(temperature=1 / 25, **sizes).double()  # which leaves features as they are
    head = create_head("cosine", n, classes, dtype=F64)
    compare(head, lambda features, labels: oracle(nn.functional.normalize(features), labels), oracle.W, x, y)


@cases
def test_arcface_agrees_with_pytorch_metric_learning(seed, classes, n, batch):
    losses = pytest.importorskip("pytorch_metric_learning.losses")
    x, y, sizes = random_case(seed, classes, n, batch)
    oracle = losses.ArcFaceLoss(margin=math.degrees(0.5), scale=64, **sizes).double()
    compare(create_head("arcface", n, classes, dtype=F64), oracle, oracle.W, x, y)


@cases
def test_subcenter_arcface_agrees_with_pytorch_metric_learning(seed, classes, n, batch):
    losses = pytest.importorskip("pytorch_metric_learning.losses")
    x, y, sizes = random_case(seed, classes, n, batch)
    oracle = losses.SubCenterArcFaceLoss(margin=math.degrees(0.5), scale=64, sub_centers=8, **sizes).double()
    compare(create_head("subcenter-arcface", n, classes, dtype=F64), oracle, oracle.W, x, y)


@cases
def test_softtriple_without_its_regulariser_agrees_with_pytorch_metric_learning(seed, classes, n, batch):
    losses = pytest.importorskip("pytorch_metric_learning.losses")
    x, y, sizes = random_case(seed, classes, n, batch)
    oracle = losses.SoftTripleLoss(centers_per_class=8, la=20, gamma=0.1, margin=0.01, **sizes).double()
    compare(create_head("softtriple", n, classes, tau=0.0, dtype=F64), oracle, oracle.fc, x, y)


def test_the_regulariser_of_softtriple_is_the_published_one():
    head = create_head("softtriple", 6, 4, centers=3, tau=0.2, dtype=F64).train()
    x, y = torch.randn(5, 6, dtype=F64), torch.randint(0, 4, (5,))
    total = 0.0
    for centers in head.weight.detach():
        centers = centers / centers.norm(dim=-1, keepdim=True)
        for s in range(3):
            for t in range(s + 1, 3):
                total += math.sqrt(2 - 2 * float(centers[s] @ centers[t]))
    expected = total / (4 * 3 * 2)
    assert head.regularizer().item() == pytest.approx(expected, abs=1e-5)
    without = create_head("softtriple", 6, 4, centers=3, tau=0.0, dtype=F64).train()
    without.load_state_dict(head.state_dict())
    difference = head.loss(x, y, cross_entropy) - without.loss(x, y, cross_entropy)
    assert difference.item() == pytest.approx(0.2 * expected, abs=1e-5)
    assert torch.equal(head.eval().loss(x, y, cross_entropy), without.eval().loss(x, y, cross_entropy))
    assert create_head("softtriple", 6, 4, centers=1).regularizer() == 0
    with torch.no_grad():
        head.weight.copy_(head.weight[:, :1].expand_as(head.weight))  # all centres of a class coincide
    head.regularizer().backward()
    assert head.weight.grad.isfinite().all()


def test_multi_with_one_layer_is_linear_and_with_more_the_mean_of_them():
    x, y = torch.randn(5, 6, dtype=F64), torch.randint(0, 4, (5,))
    linear, one = create_head("linear", 6, 4, dtype=F64), create_head("multi", 6, 4, layers=1, dtype=F64)
    one.load_state_dict({name: value.unsqueeze(0) for name, value in linear.state_dict().items()})
    assert torch.allclose(one.loss(x, y, cross_entropy), linear.loss(x, y, cross_entropy))
    assert torch.allclose(one.eval()(x), linear.eval()(x))
    many = create_head("multi", 6, 4, layers=3, dtype=F64)
    nn.init.normal_(many.bias)
    each = [x @ w.mT + b for w, b in zip(many.weight, many.bias, strict=True)]
    losses = torch.stack([cross_entropy(logits, y) for logits in each])
    assert torch.allclose(many.loss(x, y, cross_entropy), losses.mean())
    assert torch.allclose(many.eval()(x), torch.stack(each).mean(0))
    assert torch.allclose(many.loss(x, y, cross_entropy), cross_entropy(torch.stack(each).mean(0), y))


def test_grassmann_with_k_1_is_the_absolute_cosine_with_the_same_scale():
    x = torch.randn(5, 6, dtype=F64)
    cosine, line = create_head("cosine", 6, 4, dtype=F64), create_head("grassmann", 6, 4, k=1, dtype=F64)
    with torch.no_grad():
        cosine.weight.copy_(3 * line.weight.squeeze(1))
    assert torch.allclose(line(x), cosine(x).abs(), atol=1e-12)


def test_subcenter_arcface_with_one_centre_is_arcface():
    x, y = torch.randn(5, 6, dtype=F64), torch.randint(0, 4, (5,))
    constants = {"scale": 30.0, "margin": 0.3, "dtype": F64}
    plain, one = (
        create_head("arcface", 6, 4, **constants),
        create_head("subcenter-arcface", 6, 4, centers=1, **constants),
    )
    one.load_state_dict({"weight": plain.weight.detach().unsqueeze(1)})
    assert torch.equal(one(x, y), plain(x, y))
    assert torch.equal(one.eval()(x), plain.eval()(x))


def test_the_gradient_of_the_grassmann_logit_is_proposition_1_after_projection():
    head = create_head("grassmann", 9, 4, k=3, gamma=1.0, normalize=False, dtype=F64)
    x = torch.randn(9, dtype=F64)
    for c in range(4):
        logit = head(x)[c]
        (euclidean,) = torch.autograd.grad(logit, head.weight)
        s = head.weight[c].detach().mT  # the paper's n x k columns
        proposition = (torch.eye(9, dtype=F64) - s @ s.mT) @ torch.outer(x, x) @ s / logit.detach()
        riemannian = g.project(head.weight.detach(), euclidean)
        assert torch.allclose(riemannian[c], proposition.mT, atol=1e-12)
        others = [i for i in range(4) if i != c]
        assert (riemannian[others] == 0).all()


def test_the_margin_lowers_the_target_alone_and_always_more_for_larger_angles():
    angles = torch.linspace(0, math.pi, 1001, dtype=F64)
    cosine = torch.stack([angles.cos(), torch.full_like(angles, 0.3)], -1)
    turned = with_margin(cosine, torch.zeros(1001, dtype=torch.int64), 0.5)
    assert torch.equal(turned[:, 1], cosine[:, 1])
    assert (turned[:, 0].diff() < 1e-12).all()
    regular = angles <= math.pi - 0.5
    assert torch.allclose(turned[regular, 0], (angles[regular] + 0.5).cos(), atol=1e-7)


def test_the_margin_has_finite_gradients_where_feature_and_class_vector_coincide_or_oppose():
    for sign in (1.0, -1.0):
        head = create_head("arcface", 6, 4)
        x = (sign * head.weight.detach()).requires_grad_()
        head.loss(x, torch.arange(4), cross_entropy).backward()
        assert x.grad.isfinite().all()
        assert head.weight.grad.isfinite().all()


@pytest.mark.parametrize("name", ["arcface", "subcenter-arcface"])
def test_a_margin_head_without_a_target_says_so_in_training_and_is_silent_in_evaluation(name, recwarn):
    head = create_head(name, 6, 4)
    with pytest.warns(UserWarning, match="got no target in training.*classification_loss"):
        plain = head(torch.ones(1, 6))
    recwarn.clear()
    assert torch.equal(head.eval()(torch.ones(1, 6)), plain)
    assert not len(recwarn)


def test_a_learnable_scale_starts_where_it_should_and_is_trained_without_decay():
    head = create_head("cosine", 6, 4, learnable_scale=True, scale=9.0)
    optimizer = grassy.make_optimizer(head, "sgd", lr=0.1, weight_decay=0.1)
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert decay[id(head.scale)] == 0
    fixed = create_head("cosine", 6, 4, scale=9.0)
    fixed.load_state_dict({"weight": head.weight.detach()})
    x = torch.randn(5, 6)
    assert torch.allclose(head(x), fixed(x))
    head.loss(x, torch.randint(0, 4, (5,)), cross_entropy).backward()
    optimizer.step()
    assert head.scale.item() != 9.0
    head.reset_parameters()
    assert head.scale.item() == 9.0


def test_only_the_grassmann_head_has_subspaces_and_plain_sgd_on_it_is_an_option():
    for name in grassy.heads.HEADS:
        head = create_head(name, 16, 4)
        manifolds = {group["manifold"] for group in grassy.make_optimizer(head, "sgd", lr=0.1).param_groups}
        assert manifolds == ({"grassmann"} if name == "grassmann" else {"euclidean"})
    head = create_head("grassmann", 16, 4, riemannian=False)
    optimizer = grassy.make_optimizer(head, "sgd", lr=1.0, weight_decay=0.1)
    assert [(group["manifold"], group["weight_decay"]) for group in optimizer.param_groups] == [("euclidean", 0.1)]
    head.loss(torch.randn(5, 16), torch.randint(0, 4, (5,)), cross_entropy).backward()
    optimizer.step()
    assert g.orthonormality_error(head.weight.detach()) > 1e-2
    other = create_head("grassmann", 16, 4, riemannian=False)
    other.load_state_dict(head.state_dict())  # not refused: it is not meant to be on the manifold
    assert torch.equal(other.weight, head.weight)


def test_a_head_that_an_ordinary_optimizer_took_off_the_manifold_says_so_when_training_ends(recwarn):
    head = grassy.heads.GrassmannHead(12, 3, k=2)
    x, y = torch.randn(8, 12), torch.randint(3, (8,))
    for riemannian in (True, False):
        if riemannian:
            optimizer = grassy.make_optimizer(head, "adamw", lr=0.1)
        else:
            optimizer = torch.optim.AdamW(head.parameters(), lr=0.1)
        for _ in range(10):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(head(x), y).backward()
            optimizer.step()
        head.outlier_score(x)  # is not the end of training
        assert not recwarn
        if riemannian:
            head.eval()
            assert not recwarn
            head.train()
    with pytest.warns(UserWarning, match=r"orthonormal only to .*make_optimizer"):
        head.eval()
    recwarn.clear()
    head.eval()
    plain = grassy.heads.GrassmannHead(12, 3, k=2, riemannian=False)
    torch.nn.init.ones_(plain.weight)
    plain.eval()
    torch.nn.Sequential(grassy.heads.GrassmannHead(12, 3, device="meta")).eval()
    assert not recwarn


def test_the_outlier_score_of_the_grassmann_head_is_the_energy_outside_the_best_subspace():
    head = create_head("grassmann", 16, 4, k=3, dtype=F64)
    inside = torch.randn(3, dtype=F64) @ head.weight[2].detach()
    assert head.outlier_score(inside) < 1e-12
    x = torch.randn(10, 16, dtype=F64)
    energies = torch.stack([(x @ w.mT).square().sum(-1) for w in head.weight.detach()], -1)
    expected = 1 - energies.amax(-1) / x.square().sum(-1)
    assert torch.allclose(head.outlier_score(x), expected, atol=1e-12)
    assert head.outlier_score(torch.zeros(16, dtype=F64)) == 1
    linear = create_head("linear", 16, 4, dtype=F64)
    assert torch.allclose(linear.outlier_score(x), 1 - linear(x).softmax(-1).amax(-1))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("cosine", {"scale": 0}, "scale must be positive"),
        ("arcface", {"margin": 2.0}, "margin must lie"),
        ("arcface", {"scale": -1}, "scale must be positive"),
        ("subcenter-arcface", {"centers": 0}, "centers must be"),
        ("softtriple", {"centers": 2.5}, "centers must be"),
        ("softtriple", {"gamma": 0}, "gamma must be positive"),
        ("multi", {"layers": 0}, "layers must be"),
    ],
)
def test_bad_options_are_refused(name, options, message):
    with pytest.raises(ValueError, match=message):
        create_head(name, 6, 4, **options)


# --- criteria ---------------------------------------------------------------------------------------------------


def test_criteria_by_name_are_what_they_say():
    logits, y = torch.randn(5, 4), torch.randint(0, 4, (5,))
    assert torch.equal(create_criterion("cross-entropy")(logits, y), cross_entropy(logits, y))
    smooth = create_criterion("label-smoothing")(logits, y)
    soft = 0.9 * nn.functional.one_hot(y, 4) + 0.1 / 4
    assert torch.allclose(smooth, -(soft * logits.log_softmax(-1)).sum(-1).mean())
    one_hot = nn.functional.one_hot(y, 4).float()
    p = logits.sigmoid()
    expected = -(one_hot * p.log() + (1 - one_hot) * (1 - p).log())
    assert torch.allclose(create_criterion("bce")(logits, y), expected.sum(-1).mean(), atol=1e-5)
    assert torch.allclose(create_criterion("bce", reduction="mean")(logits, one_hot), expected.mean(), atol=1e-5)
    with pytest.raises(ValueError, match="unknown criterion 'mse'; known: bce, cross-entropy, label-smoothing"):
        create_criterion("mse")
    with pytest.raises(ValueError, match="reduction must be"):
        create_criterion("bce", reduction="max")


@pytest.mark.parametrize("name", sorted(CRITERIA))
def test_criteria_take_soft_targets_and_ignore_what_is_to_be_ignored(name):
    criterion = create_criterion(name)
    logits, y = torch.randn(5, 4), torch.randint(0, 4, (5,))
    hard = nn.functional.one_hot(y, 4).float()
    assert torch.allclose(criterion(logits, hard), criterion(logits, y), atol=1e-5)
    ignored = y.clone()
    ignored[0] = -100
    assert torch.allclose(criterion(logits, ignored), criterion(logits[1:], y[1:]), atol=1e-5)


def test_bce_with_the_grassmann_head_is_warned_about_whoever_wrote_it(recwarn):
    from timm.loss import BinaryCrossEntropy as TimmBinaryCrossEntropy

    x, y = torch.randn(5, 12), torch.randint(0, 4, (5,))
    head = create_head("grassmann", 12, 4)
    one_hot = nn.functional.one_hot(y, 4).float()
    by_torch = nn.functional.binary_cross_entropy_with_logits
    for criterion, target in (
        (BinaryCrossEntropy(), y),
        (TimmBinaryCrossEntropy(), y),
        (nn.BCEWithLogitsLoss(), one_hot),
        (by_torch, one_hot),
    ):
        with pytest.warns(UserWarning, match="never negative"):
            grassy.classification_loss(head, x, target, criterion)
    recwarn.clear()
    grassy.classification_loss(create_head("linear", 12, 4), x, y, BinaryCrossEntropy())
    grassy.classification_loss(head, x, y)
    assert not len(recwarn)
