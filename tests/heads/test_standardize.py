"""Standardised features in front of any head: what they are, and that they go wherever a head goes."""

import copy
import json
import warnings

import pytest
import torch
from torch import nn

import grassy
from grassy.heads import HEADS, create_head
from grassy.inference.export import export
from grassy.inference.layer_inputs import LayerInputs
from grassy.optim import AveragedModel
from grassy.recipes.changes import with_changes
from grassy.runs.weights import LAST, read_description
from grassy.surgery import HeadOnMap
from grassy.train.loop import train
from grassy.train.model import start_from
from training_cases import tiny_arrays, tiny_recipe, weights

N, C, B = 12, 5, 40
F64 = torch.float64

every_head = pytest.mark.parametrize("name", sorted(HEADS))


def skewed(*leading, dtype=torch.float32):
    """Features with a large common mean, as those behind a ReLU have, and very different scales."""
    return (5 + torch.randn(*leading, N, dtype=dtype)) * torch.logspace(-1, 1, N, dtype=dtype)


def trained(name="grassmann", **options):
    """A head that has seen enough batches for its running statistics to be right."""
    options = {"k": 3, **options} if name == "grassmann" else options
    head = create_head(name, N, C, standardize=True, **options)
    for _ in range(100):
        head.prepare(skewed(B, dtype=options.get("dtype", torch.float32)))
    return head


def statistics(head):
    return {key: value.clone() for key, value in head.state_dict().items() if key.startswith("batch_norm")}


def unchanged(head, before):
    return all(torch.equal(value, before[key]) for key, value in statistics(head).items())


@every_head
def test_in_training_each_feature_has_mean_0_and_variance_1_and_any_leading_shape_will_do(name):
    head = create_head(name, N, C, standardize=True)
    x = skewed(4, 50)
    standard = head.prepare(x)
    assert standard.shape == x.shape
    assert torch.allclose(standard.flatten(0, 1).mean(0), torch.zeros(N), atol=1e-5)
    assert torch.allclose(standard.flatten(0, 1).var(0, correction=0), torch.ones(N), atol=2e-3)
    assert torch.equal(standard, head.prepare(x.flatten(0, 1)).unflatten(0, (4, 50)))


@every_head
def test_it_is_the_plain_head_on_standardised_features(name):
    head = trained(name).eval()
    norm = nn.BatchNorm1d(N, affine=False).eval()
    norm.load_state_dict(head.batch_norm.state_dict())
    plain = create_head(name, N, C, **({"k": 3} if name == "grassmann" else {})).eval()
    plain.load_state_dict(dict(head.named_parameters()))
    x = skewed(B)
    assert torch.allclose(head(x), plain(norm(x)), atol=1e-5)
    assert torch.allclose(head.scores(x), plain.scores(norm(x)), atol=1e-5)
    assert torch.allclose(head.outlier_score(x), plain.outlier_score(norm(x)), atol=1e-5)
    for shape in ((), (1,), (0,), (2, 3)):
        assert head(skewed(*shape)).shape == (*shape, C)


@every_head
def test_losses_count_a_batch_once_and_scores_never(name):
    head, x, y = create_head(name, N, C, standardize=True), skewed(B), torch.randint(0, C, (B,))
    for calls, loss in enumerate(
        (
            lambda: head.loss(x, y, nn.functional.cross_entropy),
            lambda: grassy.classification_loss(head, x, y),
            lambda: head(x, y),
        ),
        start=1,
    ):
        loss().sum().backward()
        assert int(head.batch_norm.num_batches_tracked) == calls
    before = statistics(head)
    head.scores(x)
    head.outlier_score(x)
    assert unchanged(head, before)
    assert head.training
    assert head.batch_norm.training


def test_a_fused_loss_is_that_of_the_standardised_features_too():
    head = create_head("grassmann", N, C, k=3, standardize=True, fuse_loss=True)
    x, y = skewed(B), torch.randint(0, C, (B,))
    loss = grassy.classification_loss(head, x, y)
    assert int(head.batch_norm.num_batches_tracked) == 1
    assert torch.allclose(loss, nn.functional.cross_entropy(head(x), y), atol=1e-5)


def test_statistics_that_were_frozen_stay_frozen_after_scores():
    head = trained()
    head.batch_norm.eval()
    head.scores(skewed(B))
    assert head.training
    assert not head.batch_norm.training


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (0,)], ids=str)
def test_a_training_batch_of_one_feature_uses_the_running_statistics_and_says_so(shape):
    head = trained()
    before, features = statistics(head), skewed(*shape)
    with pytest.warns(UserWarning, match="standardised by the running statistics so far"):
        logits = head(features)
    assert torch.allclose(logits, head.scores(features), atol=1e-5)
    assert head.training
    assert unchanged(head, before)


def test_an_epoch_whose_last_batch_has_one_sample_trains_to_its_end():
    head = create_head("subspaces", N, C)
    optimizer = grassy.make_optimizer(head, "sgd", lr=0.1)
    for rows in skewed(2 * B + 1).split(B):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore" if len(rows) == 1 else "error")
            grassy.classification_loss(head, rows, torch.randint(C, (len(rows),))).backward()
        optimizer.step()
    assert head.weight.isfinite().all()


@every_head
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_statistics_are_taken_in_float32_under_autocast(name, dtype):
    head, x = create_head(name, N, C, standardize=True), skewed(B).to(dtype)
    twin = copy.deepcopy(head)
    twin.prepare(x.float())
    with torch.autocast("cpu", dtype=dtype):
        head.loss(x, torch.randint(0, C, (B,)), nn.functional.cross_entropy).backward()
    assert torch.equal(head.batch_norm.running_mean, twin.batch_norm.running_mean)
    assert torch.equal(head.batch_norm.running_var, twin.batch_norm.running_var)
    assert head.batch_norm.running_var.dtype == torch.float32


@every_head
def test_a_head_in_half_precision_keeps_float32_statistics(name):
    head = create_head(name, N, C, standardize=True, dtype=torch.bfloat16)
    assert head.batch_norm.running_mean.dtype == torch.float32
    loss = head.loss(skewed(B).bfloat16(), torch.randint(0, C, (B,)), nn.functional.cross_entropy)
    assert loss.isfinite()
    head = head.to(torch.bfloat16).eval()  # which takes the statistics along
    assert head(skewed(B).bfloat16()).isfinite().all()


@every_head
@pytest.mark.parametrize("mode", ["evaluation", "training"])
def test_gradients_are_right(name, mode):
    head = trained(name, dtype=F64).train(mode == "training")
    x, y = skewed(4, dtype=F64).requires_grad_(), torch.tensor([0, 3, 3, 1])
    assert torch.autograd.gradcheck(lambda features: head.loss(features, y, nn.functional.cross_entropy), (x,))


@pytest.mark.slow
@every_head
@pytest.mark.parametrize("mode", ["evaluation", "training"])
def test_it_compiles_without_a_graph_break(name, mode):
    torch._dynamo.reset()
    head, x, y = trained(name).train(mode == "training"), skewed(B), torch.randint(0, C, (B,))
    compiled = torch.compile(head.loss, fullgraph=True, backend="aot_eager")
    assert torch.allclose(
        compiled(x, y, nn.functional.cross_entropy), head.loss(x, y, nn.functional.cross_entropy), atol=1e-5
    )


@every_head
def test_it_exports_with_a_dynamic_batch(name):
    head = trained(name).eval()
    exported = torch.export.export(head, (skewed(B),), dynamic_shapes=({0: torch.export.Dim("batch")},))
    x = skewed(3)
    assert torch.allclose(exported.module()(x), head(x), atol=1e-5)


@every_head
def test_it_is_saved_loaded_reset_and_built_on_the_meta_device(name):
    head, x = trained(name).eval(), skewed(B)
    options = {"k": 3} if name == "grassmann" else {}
    other = create_head(name, N, C, standardize=True, device="meta", **options).to_empty(device="cpu").eval()
    other.reset_parameters()
    assert (other.batch_norm.running_var == 1).all()
    other.load_state_dict(head.state_dict())
    assert torch.equal(other(x), head(x))
    with pytest.raises((RuntimeError, ValueError), match="batch_norm" if name == "linear" else "standardize is 1e-05"):
        create_head(name, N, C, **options).load_state_dict(head.state_dict())
    assert "standardize=True" in repr(head)


def test_an_option_that_is_not_a_boolean_is_refused():
    with pytest.raises(TypeError, match="standardize must be True or False, got 'yes'"):
        create_head("linear", N, C, standardize="yes")


def test_dropout_does_not_disturb_the_statistics():
    head = create_head("linear", N, C, standardize=True, dropout=0.5)
    for _ in range(200):
        head.prepare(skewed(200))
    scale = torch.logspace(-1, 1, N)
    assert torch.allclose(head.batch_norm.running_mean / scale, torch.full((N,), 5.0), atol=0.1)
    assert torch.allclose(head.batch_norm.running_var / scale**2, torch.ones(N), atol=0.15)
    assert (head.prepare(skewed(200)) == 0).float().mean() > 0.4


def test_a_common_mean_no_longer_makes_all_logits_alike():
    x = skewed(400)
    plain, standard = create_head("grassmann", N, C, k=2), create_head("grassmann", N, C, k=2, standardize=True)
    spread = {head: head(x).std(0).mean().item() for head in (plain, standard)}
    assert spread[standard] > 2 * spread[plain]


def test_a_subspace_on_a_map_and_sync_batch_norm_and_an_average_take_it_along():
    head = create_head("grassmann", N, C, k=3, standardize=True)
    on_map = HeadOnMap(head)
    x = skewed(2, 4, 4).movedim(-1, 1)
    assert on_map(x).shape == (2, C, 4, 4)
    converted = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(on_map))
    assert isinstance(converted.head.batch_norm, nn.SyncBatchNorm)
    assert torch.equal(converted.head.batch_norm.running_mean, head.batch_norm.running_mean)
    assert torch.allclose(converted.eval()(x), on_map.eval()(x), atol=1e-5)
    average = AveragedModel(on_map.train(), decay=0.5)
    average.update_parameters(on_map)  # the first one copies
    before = head.batch_norm.running_mean.clone()
    on_map(x + 3)
    average.update_parameters(on_map)
    expected = (before + head.batch_norm.running_mean) / 2
    assert torch.allclose(average.module.head.batch_norm.running_mean, expected, atol=1e-5)


@pytest.mark.parametrize("name", ["grassmann", "linear", "cosine"])
def test_replaced_in_a_model_it_learns_and_features_are_those_before_it(name):
    model = nn.Sequential(nn.Flatten(), nn.Linear(6, N), nn.ReLU(), nn.Linear(N, C))
    head = grassy.replace_head(model, name, standardize=True, **({"k": 2} if name == "grassmann" else {}))
    x = torch.randn(60, 6)
    y = (x[:, :C] + 1).argmax(-1)
    optimizer = grassy.make_optimizer(model, "sgd", lr=0.1, momentum=0.9)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = grassy.classification_loss(model, x, y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.6 * losses[0]
    with LayerInputs([head]) as inputs:
        model.eval()(x)
    assert torch.equal(inputs.take()[0][1], model[:3](x))


@pytest.mark.slow
def test_a_run_saves_resumes_exports_and_is_fine_tuned_with_its_statistics(tmp_path):
    data = tiny_arrays(tmp_path / "data")
    recipe = tiny_recipe(**{"head.standardize": True, "head.gamma": "auto", "model_ema": True, "model_ema_decay": 0.5})
    train(recipe, data, tmp_path / "run")
    model = grassy.load(tmp_path / "run" / LAST)
    assert isinstance(model.head.batch_norm, nn.BatchNorm1d)
    assert model.head.batch_norm.running_mean.abs().max() > 0.01
    described = read_description(tmp_path / "run" / LAST)
    assert described.head["standardize"] is True
    assert described.head["gamma"] == model.head.gamma == grassy.heads.recommended_gamma(3, 2, 16)
    json.dumps(described.head)
    for suffix in (".pt2", ".onnx"):
        assert export(tmp_path / "run" / LAST, tmp_path / f"model{suffix}").is_file()  # which checks the logits
    frozen = with_changes(
        recipe, {"initial_checkpoint": str(tmp_path / "run" / LAST), "freeze": True, "model_ema": False}
    )
    train(frozen, data, tmp_path / "tuned")
    before, after = weights(tmp_path / "run"), weights(tmp_path / "tuned")
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    assert changed == {key for key in before if key.startswith("head.") and not key.endswith("_extra_state")}


def test_subspaces_are_not_taken_over_without_the_statistics_that_belong_to_them(tmp_path):
    for own, other in ((True, False), (False, True)):
        model, source = (
            nn.Sequential(nn.Linear(6, N), create_head("grassmann", N, C, k=2, standardize=flag))
            for flag in (own, other)
        )
        torch.save(source.state_dict(), tmp_path / "weights.pt")
        fresh = model[1].weight.clone()
        start_from(model, tmp_path / "weights.pt")
        assert torch.equal(model[1].weight, fresh)
        assert torch.equal(model[0].weight, source[0].weight)
