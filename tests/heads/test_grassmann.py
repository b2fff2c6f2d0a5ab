"""What is particular to the Grassmann head."""

import warnings

import numpy
import pytest
import torch
from torch import nn

import grassy
from grassy import geometry as g
from grassy import kernels
from grassy.heads import HEADS, Head

F64 = torch.float64
N, C, B = 12, 5, 7


def batch(dtype=torch.float32):
    return torch.randn(B, N, dtype=dtype), torch.randint(0, C, (B,))


def test_the_logit_is_the_length_of_the_projection_of_the_normalised_feature():
    head, (x, _) = grassy.GrassmannHead(N, C, k=3, gamma=25.0, dtype=F64), batch(F64)
    expected = torch.stack([(25 * (x / x.norm(dim=-1, keepdim=True)) @ w.mT @ w).norm(dim=-1) for w in head.weight], -1)
    assert torch.allclose(head(x), expected, atol=1e-12)
    assert torch.allclose(head(1e-3 * x), expected, atol=1e-12)
    raw = grassy.GrassmannHead(N, C, k=3, gamma=2.0, normalize=False, dtype=F64)
    raw.load_state_dict(dict(head.named_parameters()))
    assert torch.allclose(raw(x), expected * x.norm(dim=-1, keepdim=True) * 2 / 25, atol=1e-12)


def test_k_1_is_the_absolute_cosine_and_k_n_is_gamma():
    x = torch.randn(B, N)
    line = grassy.GrassmannHead(N, C, k=1, gamma=3.0)
    cosine = nn.functional.cosine_similarity(x.unsqueeze(1), line.weight.squeeze(1), dim=-1)
    assert torch.allclose(line(x), 3 * cosine.abs(), atol=1e-6)
    assert torch.allclose(grassy.GrassmannHead(N, C, k=N, gamma=3.0)(x), torch.tensor(3.0))


def test_subspaces_start_uniformly_random_and_orthonormal():
    head = grassy.GrassmannHead(64, 100, k=8)
    assert g.orthonormality_error(head.weight.detach()) < 1e-6
    assert head.dims.tolist() == [8] * 100
    assert abs(head(torch.randn(500, 64)).square().mean().item() - 25**2 * 8 / 64) < 2


def test_a_class_that_is_all_of_the_space_is_warned_of():
    with pytest.warns(UserWarning, match="k = 12 spans the whole feature space"):
        grassy.GrassmannHead(N, C, k=N)


def test_a_learnable_gamma_is_a_euclidean_parameter_that_is_not_decayed():
    head, (x, y) = grassy.GrassmannHead(N, C, learnable_gamma=True, gamma=9.0), batch()
    fixed = grassy.GrassmannHead(N, C, gamma=9.0)
    fixed.load_state_dict({"weight": head.weight.detach()})
    assert torch.allclose(head(x), fixed(x))
    optimizer = grassy.make_optimizer(head, "sgd", lr=0.1, weight_decay=0.1)
    (group,) = [group for group in optimizer.param_groups if group["manifold"] == "euclidean"]
    assert group["weight_decay"] == 0
    head.loss(x, y, nn.functional.cross_entropy).backward()
    optimizer.step()
    assert head.gamma.item() != 9.0


def test_the_sum_of_squares_does_not_overflow_or_vanish_in_half_precision():
    head = grassy.GrassmannHead(N, C, k=2)
    x = torch.randn(B, N)
    with torch.autocast("cpu", dtype=torch.float16):
        for scale in (1e4, 1e-4):
            logits = head((x * scale).half().float() if scale < 1 else x * scale)
            assert logits.dtype == torch.float32
            assert torch.allclose(logits, head(x * scale), atol=0.1)
            assert logits.isfinite().all()
    tiny = head((x * 1e-7).half())  # denormal halves: their squares are zero in half precision
    assert tiny.isfinite().all()
    assert tiny.max() > 1


def test_features_of_extreme_length_are_normalised():
    head = grassy.GrassmannHead(N, C, k=2)
    x = torch.randn(B, N)
    assert torch.allclose(head(x * 1e15), head(x), atol=1e-4)
    assert torch.allclose(head(x * 1e-15), head(x), atol=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": 0}, "k must be a positive integer, got 0"),
        ({"k": 2.5}, "k must be a positive integer, got 2.5"),
        ({"k": "8"}, "k must be a positive integer, got '8'"),
        ({"k": 13}, "k must lie between 1 and in_features = 12"),
        ({"k": [1, 2]}, "one for each of the 5 classes"),
        ({"k": [1, 2, 3, 4, 13]}, "k must lie between"),
        ({"gamma": 0}, "gamma must be positive"),
        ({"gamma": -1.0}, "gamma must be positive"),
    ],
)
def test_bad_options_of_the_grassmann_head_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        grassy.GrassmannHead(N, C, **options)


def test_loaded_weights_are_kept_repaired_or_refused_by_their_distance_from_the_manifold():
    head = grassy.GrassmannHead(N, C, k=3)
    good = head.state_dict()["weight"].clone()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        head.load_state_dict({"weight": good + 1e-7})
    off = good + 1e-3 * torch.randn_like(good)
    with pytest.warns(UserWarning, match="re-orthonormalised"):
        head.load_state_dict({"weight": off})
    assert g.orthonormality_error(head.weight.detach()) < 1e-6
    assert g.distance(head.weight.detach(), g.orthonormalize(off)).max() < 1e-5
    before = head.weight.detach().clone()
    for bad in (good * 1.2, torch.randn_like(good), torch.full_like(good, float("nan"))):
        with pytest.raises(ValueError, match="not a weight of subspaces"):
            nn.Sequential(head).load_state_dict({"0.weight": bad})
        assert torch.equal(head.weight, before)


def test_weights_saved_in_half_precision_are_repaired_when_loaded_into_float32():
    head = grassy.GrassmannHead(N, C, k=3)
    saved = {"weight": head.weight.detach().bfloat16()}
    with pytest.warns(UserWarning, match="re-orthonormalised"):
        head.load_state_dict(saved)
    assert g.orthonormality_error(head.weight.detach()) < 1e-6
    half = grassy.GrassmannHead(N, C, k=3, dtype=torch.bfloat16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        half.load_state_dict(saved)
    assert half(torch.randn(2, N, dtype=torch.bfloat16)).isfinite().all()


def test_a_head_is_built_and_loaded_exactly_inside_autocast():
    with torch.autocast("cpu", torch.bfloat16), warnings.catch_warnings():
        warnings.simplefilter("error")
        head = grassy.GrassmannHead(64, C, k=4)
        head.load_state_dict(head.state_dict())
    assert g.orthonormality_error(head.weight.detach()) < 1e-6


def test_absent_rows_survive_saving_and_loading():
    head = grassy.GrassmannHead(N, C, k=[1, 2, 3, 4, 2])
    other = grassy.GrassmannHead(N, C, k=4)
    other.load_state_dict(head.state_dict())
    assert other.dims.tolist() == [1, 2, 3, 4, 2]


def test_logits_and_their_gradients_agree_with_the_formulas_of_the_design():
    head, (x, _) = grassy.GrassmannHead(N, C, k=3, gamma=7.0, dtype=F64), batch(F64)
    x.requires_grad_()
    grad = torch.randn(B, C, dtype=F64)
    head(x).backward(grad)
    with torch.no_grad():
        length = x.norm(dim=-1, keepdim=True)
        unit = x / length
        t = torch.einsum("ckn,bn->bck", head.weight, unit)
        w = grad.unsqueeze(-1) * 7.0 * t / t.norm(dim=-1, keepdim=True)
        v = torch.einsum("ckn,bck->bn", head.weight, w)
        assert torch.allclose(head.weight.grad, torch.einsum("bck,bn->ckn", w, unit), atol=1e-12)
        assert torch.allclose(x.grad, (v - unit * (unit * v).sum(-1, keepdim=True)) / length, atol=1e-12)


def test_the_reference_can_be_asked_for_by_name():
    w, x = g.random_subspace(C, 2, N), torch.randn(B, N)
    by_hand = 5.0 * torch.einsum("ckn,bn->bck", w, x).norm(dim=-1) / x.norm(dim=-1, keepdim=True)
    torch.testing.assert_close(kernels.subspace_logits(x, w, 5.0, impl="reference"), by_hand)
    assert kernels.choose("auto", w) == "reference"


def test_a_head_without_logits_says_what_is_missing():
    class Empty(Head):
        pass

    with pytest.raises(NotImplementedError, match="Empty must define logits"):
        Empty(N, C)(torch.randn(1, N))


@pytest.mark.parametrize("name", sorted(HEADS))
def test_a_feature_that_is_not_finite_shows_in_the_logits(name):
    features = torch.randn(3, 16)
    features[1, 2] = float("nan")
    logits = grassy.create_head(name, 16, 4).eval()(features)
    assert logits.isfinite().all(-1).tolist() == [True, False, True]


def test_a_weight_with_a_class_that_has_no_direction_is_refused():
    head = grassy.GrassmannHead(16, 5, k=4)
    weight = head.weight.detach().clone()
    weight[2, 1:] = 0  # of one dimension: that is allowed
    head.load_state_dict({"weight": weight})
    weight[3] = 0
    with pytest.raises(ValueError, match=r"class 3 has no direction, its rows are zero$"):
        head.load_state_dict({"weight": weight})
    with pytest.raises(ValueError, match=r"class 0 has no direction, its rows are zero \(and 4 more classes\)"):
        head.load_state_dict({"weight": torch.zeros(5, 4, 16)})


@pytest.mark.parametrize("option", ["normalize", "learnable_gamma", "riemannian", "fuse_loss", "standardize"])
@pytest.mark.parametrize("value", ["no", "none", 0, None])
def test_an_option_that_is_true_or_false_is_nothing_else(option, value):
    with pytest.raises(TypeError, match=f"{option} must be True or False, got {value!r}"):
        grassy.GrassmannHead(8, 3, k=2, **{option: value})


def test_numbers_that_make_no_sense_are_refused_and_those_of_numpy_taken():
    for value in (True, None, float("inf"), float("nan"), -1, "large", b"9", 10**400):
        with pytest.raises(ValueError, match=f"gamma must be positive or 'auto', got {value!r}"):
            grassy.GrassmannHead(8, 3, k=2, gamma=value)
    for value in (numpy.array([9.0, 9.5]), torch.tensor(True), numpy.True_, torch.ones(2)):
        with pytest.raises(ValueError, match="gamma must be positive or 'auto', got"):
            grassy.GrassmannHead(8, 3, k=2, gamma=value)
    with pytest.raises(TypeError, match="pass learnable_gamma=True"):
        grassy.GrassmannHead(8, 3, k=2, gamma=nn.Parameter(torch.tensor(9.0)))
    for k in (True, [2, True, 2], 0, 2.0):
        with pytest.raises(ValueError, match="k must be a positive integer, got"):
            grassy.GrassmannHead(8, 3, k=k)
    for value in ("a", None, True, 1.0):
        with pytest.raises(ValueError, match=rf"dropout must lie in \[0, 1\), got {value!r}"):
            grassy.GrassmannHead(8, 3, k=2, dropout=value)
    head = grassy.GrassmannHead(8, 3, k=numpy.array([1, 2, 2]), gamma=numpy.float32(20))
    assert type(head.gamma) is float
    for k in (numpy.array(2), torch.tensor(2), numpy.int64(2)):
        assert grassy.GrassmannHead(8, 3, k=k, normalize=numpy.True_, dropout=numpy.array(0.5)).dims.tolist() == [2] * 3


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("cosine", {"learnable_scale": "no"}, "learnable_scale must be True or False, got 'no'"),
        ("linear", {"bias": "no"}, "bias must be True or False, got 'no'"),
        ("multi", {"bias": None}, "bias must be True or False, got None"),
        ("cosine", {"scale": float("inf")}, "scale must be positive, got inf"),
        ("arcface", {"scale": "a"}, "scale must be positive, got 'a'"),
        ("arcface", {"margin": "a"}, "margin must lie in .*, got 'a'"),
        ("softtriple", {"gamma": True}, "gamma must be positive, got True"),
        ("softtriple", {"tau": -0.1}, "tau must be a finite number of at least 0, got -0.1"),
        ("softtriple", {"tau": "a"}, "tau must be a finite number of at least 0, got 'a'"),
        ("softtriple", {"margin": float("nan")}, "margin must be a finite number of at least 0, got nan"),
        ("softtriple", {"margin": True}, "margin must be a finite number of at least 0, got True"),
    ],
)
def test_other_heads_refuse_such_options_too(name, options, said):
    with pytest.raises((TypeError, ValueError), match=said):
        grassy.create_head(name, 8, 3, **options)


def test_rows_that_are_no_longer_orthonormal_still_tell_what_lies_outside_their_span():
    head = grassy.GrassmannHead(8, 3, k=2, riemannian=False).eval()
    x = torch.randn(50, 8)
    before = head.outlier_score(x)
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[3.0, 1.0], [0.0, 5e-4]]) @ head.weight)
    assert torch.allclose(head.outlier_score(x), before, atol=1e-5)
    assert before.min() > 0
    with torch.no_grad():
        head.weight[0, 1] = 2 * head.weight[0, 0]  # one direction is left
        head.weight[1] = 0  # none
        head.weight[2, 1] *= 1e-9  # of no use
    line = [head.weight[c, 0] / head.weight[c, 0].norm() for c in (0, 2)]
    share = torch.stack([(x @ each).square() for each in line]).amax(0) / x.square().sum(-1)
    assert torch.allclose(head.outlier_score(x), 1 - share, atol=1e-5)
