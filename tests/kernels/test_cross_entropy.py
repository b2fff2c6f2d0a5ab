"""The fused loss against the plain composition in float64: values, gradients, and what is kept for the backward."""

import functools
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import grassy
from grassy import kernels
from grassy.kernels import cross_entropy

from .cross_entropy_cases import F64, SHAPES, divide, errors, example, gradients, plain


@pytest.fixture(params=[0, 2**15], ids=["nothing kept", "two chunks kept"])
def chunked(monkeypatch, request):
    """Chunks have about seven classes of the largest shape."""
    divide(monkeypatch, 2**14, request.param)


@pytest.mark.parametrize("soft", [False, True], ids=["labels", "soft"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_loss_and_gradients_agree_with_float64(shape, soft):
    assert max(errors(*example(*shape, soft), impl="chunks", label_smoothing=0.1)) < 3e-5


@pytest.mark.parametrize("soft", [False, True], ids=["labels", "soft"])
@pytest.mark.parametrize("shape", SHAPES[1:4], ids=str)
def test_they_do_so_in_chunks(chunked, shape, soft):
    assert max(errors(*example(*shape, soft), impl="chunks", label_smoothing=0.1)) < 3e-5


@given(
    shape=st.tuples(st.integers(1, 6), st.integers(1, 9), st.integers(1, 4), st.integers(4, 9)),
    soft=st.booleans(),
    smoothing=st.sampled_from([0.0, 0.1, 1.0]),
    reduction=st.sampled_from(["mean", "sum", "none"]),
    normalize=st.booleans(),
    chunk=st.sampled_from([1, 40, 2**24]),
    keep=st.sampled_from([0, 100]),
    rows=st.sampled_from([1, 2, 4096]),
    gamma=st.sampled_from([-3.0, 1.0, 25.0]),
    impl=st.sampled_from(["chunks", "reference"]),
)
def test_whatever_the_options(shape, soft, smoothing, reduction, normalize, chunk, keep, rows, gamma, impl):
    x, weight, target = example(*shape, soft)
    if not soft:
        target[1::2] = -100
    with pytest.MonkeyPatch.context() as patch:
        if chunk < 2**24:
            divide(patch, chunk, keep, rows)
        options = {"label_smoothing": smoothing, "reduction": reduction}
        assert max(errors(x, weight, target, impl, gamma, normalize, **options)) < 3e-5


def test_chunks_change_nothing_but_rounding(monkeypatch):
    x, weight, target = example(6, 40, 3, 10)
    whole = gradients(lambda x, w: kernels.subspace_cross_entropy(x, w, target), x, weight)
    for chunk, keep, rows in itertools.product((1, 100, 10 * 3 * 39, 2**24), (0, 600, 2**24), (4, 4096)):
        divide(monkeypatch, chunk, keep, rows)
        parts = gradients(lambda x, w: kernels.subspace_cross_entropy(x, w, target), x, weight)
        assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(whole, parts, strict=True))


def test_above_the_limit_the_coordinates_are_not_kept(monkeypatch):
    x, weight, target = example(6, 40, 3, 10)

    def kept():
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.shape) or t, lambda t: t):
            gradients(lambda x, w: kernels.subspace_cross_entropy(x, w, target), x, weight)
        return sizes

    assert (6 * 120,) in kept()
    divide(monkeypatch, 10 * 30, 10 * 95)
    assert (6 * 90,) in kept()
    divide(monkeypatch, 10 * 30, 0)
    assert (0,) in kept()


@pytest.mark.parametrize("keep", [True, False])
def test_zero_features_and_absent_rows_have_no_gradient(monkeypatch, keep):
    if not keep:
        divide(monkeypatch, 1)
    x, weight, target = example(3, 5, 3, 7)
    x[1] = 0
    loss, dx, dweight = gradients(
        lambda x, w: kernels.subspace_cross_entropy(x, w, target, reduction="none"), x, weight
    )
    assert loss[1] == pytest.approx(torch.tensor(5.0).log().item())
    assert (dx[1] == 0).all()
    assert (dweight[1, 1:] == 0).all()
    assert dx.isfinite().all()
    assert dweight.isfinite().all()


def test_a_nan_stays_where_it_is():
    x, weight, target = example(3, 5, 3, 7)
    x[1, 2] = torch.nan
    loss, dx, _ = gradients(lambda x, w: kernels.subspace_cross_entropy(x, w, target, reduction="none"), x, weight)
    assert loss.isnan().tolist() == [False, True, False]
    assert dx.isnan().any(-1).tolist() == [False, True, False]


def test_labels_that_do_not_count_and_labels_that_are_none():
    x, weight, target = example(4, 5, 3, 7)
    target[0] = 7
    loss, dx, _ = gradients(lambda x, w: kernels.subspace_cross_entropy(x, w, target, ignore_index=7), x, weight)
    assert torch.allclose(loss, plain(x, weight, target, ignore_index=7)[0].float())
    assert (dx[0] == 0).all()
    loss, dx, dweight = gradients(
        lambda x, w: kernels.subspace_cross_entropy(x, w, torch.full_like(target, -100)), x, weight
    )
    assert loss.isnan()  # as in torch
    assert (dx == 0).all()
    assert (dweight == 0).all()
    assert kernels.subspace_cross_entropy(x, weight, target).isnan()


def test_any_layout_and_any_leading_shape():
    x, weight, target = example(6, 5, 3, 7)
    expected = gradients(lambda x, w: kernels.subspace_cross_entropy(x, w, target, reduction="none"), x, weight)
    striped = torch.stack([x, x], -1)[..., 0]
    assert not striped.is_contiguous()
    turned = weight.mT.contiguous().mT
    odd = gradients(lambda x, w: kernels.subspace_cross_entropy(x, w, target, reduction="none"), striped, turned)
    cube = gradients(
        lambda x, w: kernels.subspace_cross_entropy(x, w, target.view(2, 3), reduction="none"), x.view(2, 3, 7), weight
    )
    assert all(torch.equal(a, b) for a, b in zip(expected, odd, strict=True))
    assert all(torch.equal(a, b.view(a.shape)) for a, b in zip(expected, cube, strict=True))
    one = kernels.subspace_cross_entropy(x[0], weight, target[0])
    assert one.shape == ()
    assert torch.allclose(one, expected[0][0])
    loss, dx, dweight = gradients(
        lambda x, w: kernels.subspace_cross_entropy(x, w, target[:0], reduction="sum"), x[:0], weight
    )
    assert loss == 0
    assert dx.shape == (0, 7)
    assert torch.equal(dweight, torch.zeros_like(weight))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
def test_labels_may_be_of_any_integer_type(dtype):
    """In uint8 the number of labels to ignore, -100, would be 156."""
    x, weight, _ = example(4, 200, 2, 7)
    target = torch.tensor([156, 1, 2, 3])
    expected = F.cross_entropy(kernels.subspace_logits(x, weight), target)
    assert torch.allclose(kernels.subspace_cross_entropy(x, weight, target.to(dtype)), expected)
    head = grassy.GrassmannHead(7, 150, k=2, fuse_loss=True)
    with pytest.raises(ValueError, match="between 0 and 149, got 156"):
        grassy.classification_loss(head, x, target.to(dtype), nn.CrossEntropyLoss())


@pytest.mark.parametrize("normalize", [True, False])
def test_a_gamma_that_is_learned_gets_its_gradient_and_little_is_kept(normalize):
    x, weight, target = example(64, 200, 4, 16)
    gamma = torch.tensor(9.0, dtype=F64, requires_grad=True)
    logits = kernels.subspace_logits(x.double(), weight.double(), gamma, normalize=normalize)
    F.cross_entropy(logits, target).backward()
    learned = nn.Parameter(torch.tensor(9.0))
    saved = []
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(cross_entropy, "WHOLE", 0)
        patch.setattr(cross_entropy, "CHUNK", 64 * 4 * 10)
        patch.setattr(cross_entropy, "KEEP", 0)
        loss = kernels.subspace_cross_entropy(x, weight.requires_grad_(), target, learned, normalize=normalize)
    loss.backward()
    assert torch.allclose(learned.grad.double(), gamma.grad, rtol=1e-4)
    assert max(saved) < 64 * 200 * 4  # not the coordinates


def test_a_gamma_of_several_numbers_is_left_to_plain_torch():
    x, weight, target = example(6, 5, 3, 7)
    gammas = torch.rand(5) + 1
    expected = F.cross_entropy(kernels.subspace_logits(x, weight, gammas, impl="reference"), target)
    assert torch.allclose(kernels.subspace_cross_entropy(x, weight, target, gammas), expected)
    one = kernels.subspace_cross_entropy(x, weight, target, gammas[:1].view(1, 1, 1), reduction="none")
    assert one.shape == (6,)


def test_only_what_is_wanted_is_computed(monkeypatch):
    x, weight, target = example(6, 5, 3, 7)
    _, dx, dweight = gradients(lambda x, w: kernels.subspace_cross_entropy(x, w, target), x, weight)
    products = []
    product = cross_entropy.product
    monkeypatch.setattr(cross_entropy, "product", lambda *a, **o: products.append(0) or product(*a, **o))
    _, only_x, _ = gradients(lambda x, _: kernels.subspace_cross_entropy(x, weight, target), x, weight)
    assert len(products) == 1
    _, _, only_weight = gradients(lambda _, w: kernels.subspace_cross_entropy(x, w, target), x, weight)
    assert len(products) == 2
    assert torch.equal(dx, only_x)
    assert torch.equal(dweight, only_weight)


def test_derivatives_in_forward_mode_are_left_to_plain_torch():
    x, weight, target = example(6, 5, 3, 7)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        found = torch.autograd.forward_ad.unpack_dual(kernels.subspace_cross_entropy(dual, weight, target)).tangent
        logits = kernels.subspace_logits(dual, weight, impl="reference")
        expected = torch.autograd.forward_ad.unpack_dual(F.cross_entropy(logits, target)).tangent
    assert found is not None
    assert torch.allclose(found, expected)


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("keep", [True, False])
def test_under_autocast_it_is_as_close_as_the_plain_composition(monkeypatch, keep, x_dtype):
    if not keep:
        divide(monkeypatch, 4000)
    x, weight, target = example(64, 100, 4, 48)
    x = x.to(x_dtype)
    exact = plain(x, weight, target)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = errors(x, weight, target, "chunks")
        composed = plain(x.float(), weight, target, dtype=torch.float32)
    theirs = [float((a - b).abs().max() / b.abs().max()) for a, b in zip(composed, exact, strict=True)]
    assert max(ours) < 0.05
    assert all(a < 2 * b + 1e-3 for a, b in zip(ours, theirs, strict=True))


def test_what_kernels_do_not_take_is_left_to_autograd():
    x, weight, target = example(4, 5, 3, 7)
    gamma = torch.tensor(10.0, requires_grad=True)
    kernels.subspace_cross_entropy(x, weight, target, gamma).backward()
    expected = torch.tensor(10.0, requires_grad=True)
    F.cross_entropy(kernels.subspace_logits(x, weight, expected), target).backward()
    assert torch.allclose(gamma.grad, expected.grad)
    soft = torch.rand(4, 5, dtype=F64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda x, w, t: kernels.subspace_cross_entropy(x, w, t, 3.0),
        (x.double().requires_grad_(), weight.double(), soft),
    )
    assert torch.autograd.gradgradcheck(
        lambda x: kernels.subspace_cross_entropy(x, weight.double(), target, 3.0), (x.double().requires_grad_(),)
    )


def test_functional_transforms_are_left_to_autograd():
    x, weight, target = example(4, 5, 3, 7)
    loss = functools.partial(kernels.subspace_cross_entropy, weight=weight, target=target)
    _, dx, _ = gradients(lambda x, _: loss(x), x, weight)
    assert torch.allclose(torch.func.grad(loss)(x), dx, atol=1e-6)
    along = torch.randn_like(x)
    assert torch.allclose(torch.func.jvp(loss, (x,), (along,))[1], (dx * along).sum(), atol=1e-5)
    each = functools.partial(kernels.subspace_cross_entropy, weight=weight)
    assert torch.allclose(torch.func.vmap(lambda x, t: each(x, target=t))(x, target).mean(), loss(x))


def test_there_is_no_second_derivative():
    x, weight, target = example(4, 5, 3, 7)
    x.requires_grad_()
    (dx,) = torch.autograd.grad(kernels.subspace_cross_entropy(x, weight, target), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        dx.sum().backward()


def test_bad_arguments_are_named():
    x, weight, target = example(4, 5, 3, 7)
    for options, name in [({"reduction": "average"}, "reduction"), ({"label_smoothing": 2}, "label_smoothing")]:
        with pytest.raises(ValueError, match=name):
            kernels.subspace_cross_entropy(x, weight, target, **options)
    for wrong in (target[:3], torch.rand(4, 6), target.unsqueeze(-1)):
        with pytest.raises(ValueError, match="target of shape"):
            kernels.subspace_cross_entropy(x, weight, wrong)
    for features, classes in ((x[:, :5], weight), (x, weight[:0])):
        with pytest.raises(ValueError, match="features"):
            kernels.subspace_cross_entropy(features, classes, target)
    with pytest.raises(ValueError, match="impl"):
        kernels.subspace_cross_entropy(x, weight, target, impl="fast")


@pytest.mark.parametrize("soft", [False, True], ids=["labels", "soft"])
@pytest.mark.parametrize(
    ("dtype", "size", "keep"), [(torch.float32, 5, 5), (torch.float32, 2, 4), (torch.bfloat16, 2, 0)]
)
def test_the_operator_is_well_formed(dtype, size, keep, soft):
    x, weight, target = example(4, 5, 3, 7, soft)
    arguments = (x.requires_grad_(), weight.requires_grad_(), target, dtype, size, keep, 25.0, 0.1, -100, True, False)
    torch.library.opcheck(cross_entropy._forward, arguments, rtol=1e-3, atol=1e-4)


def test_it_compiles_without_a_graph_break_for_any_batch_size():
    compiled = torch.compile(kernels.subspace_cross_entropy, fullgraph=True, backend="aot_eager", dynamic=True)
    for batch in (4, 5, 9):
        x, weight, target = example(batch, 5, 3, 7)
        ours = gradients(lambda x, w: compiled(x, w, target, label_smoothing=0.1), x, weight)  # noqa: B023
        eager = gradients(lambda x, w: kernels.subspace_cross_entropy(x, w, target, 25.0, 0.1), x, weight)  # noqa: B023
        assert all(torch.equal(a, b) for a, b in zip(ours, eager, strict=True))


@pytest.mark.parametrize("keep", [0, 100, 2**24])
def test_what_is_kept_survives_the_backward(monkeypatch, keep):
    """Gradients are the same when they are asked for again."""
    divide(monkeypatch, 40, keep)
    x, weight, target = example(4, 9, 3, 7)
    x, weight = x.requires_grad_(), weight.requires_grad_()
    loss = kernels.subspace_cross_entropy(x, weight, target)
    first, second = (torch.autograd.grad(loss, (x, weight), retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
