"""Options that change logits belong to the state of a head: weights do not load into a head with others."""

import copy
import json

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp
from torch.optim import swa_utils

import grassy
from grassy.heads import HEADS, create_head
from grassy.heads.saved_options import KEY, MOST_BYTES, decode, encode, options_in
from grassy.models import import_timm
from grassy.runs.weights import Description, save_weights
from grassy.train.model import start_from

N, C = 12, 5
#: Options that change logits in evaluation for the same weights, by head.
CHANGED = [
    ("cosine", {"scale": 7.5}),
    ("arcface", {"scale": 7.5}),
    ("subcenter-arcface", {"scale": 7.5}),
    ("softtriple", {"scale": 7.5}),
    ("softtriple", {"gamma": 0.75}),
    ("grassmann", {"gamma": 12.98}),
    ("grassmann", {"normalize": False}),
]
#: Options that change nothing in evaluation.
UNCHANGED = [
    ("arcface", {"margin": 0.1}),
    ("softtriple", {"tau": 0.7, "margin": 0.3}),
    ("grassmann", {"riemannian": False, "fuse_loss": True, "dropout": 0.5}),
]


@pytest.mark.parametrize(("name", "options"), CHANGED)
def test_weights_are_refused_by_a_head_that_makes_other_logits_of_them(name, options):
    head, other = create_head(name, N, C).eval(), create_head(name, N, C, **options).eval()
    x = torch.randn(3, N)
    without = {key: value for key, value in head.state_dict().items() if key != KEY}
    twin = copy.deepcopy(other)
    twin.load_state_dict(without)
    assert not torch.allclose(head(x), twin(x))  # the option does change logits
    before = other.weight.clone()
    (option, value), *_ = options.items()
    for strict in (True, False):
        with pytest.raises(ValueError, match=rf"{option} is {getattr(head, option)} there and {value} here\. Build"):
            nn.ModuleDict({"fc": other}).load_state_dict({f"fc.{k}": v for k, v in head.state_dict().items()}, strict)
    assert torch.equal(other.weight, before)  # nothing was copied
    same = create_head(name, N, C, **options).eval()
    same.load_state_dict(other.state_dict())
    assert torch.equal(same(x), other(x))


@pytest.mark.parametrize(("name", "options"), UNCHANGED)
def test_options_of_training_are_not_part_of_the_state(name, options):
    head, other = create_head(name, N, C).eval(), create_head(name, N, C, **options).eval()
    x = torch.randn(3, N)
    other.load_state_dict(head.state_dict())
    assert torch.equal(head(x), other(x))


@pytest.mark.parametrize("name", HEADS)
def test_weights_saved_without_options_load_as_they_always_have(name):
    head, other = create_head(name, N, C).eval(), create_head(name, N, C).eval()
    older = {key: value for key, value in head.state_dict().items() if key != KEY}
    assert other.load_state_dict(older, strict=True) == ([], [])
    x = torch.randn(3, N)
    assert torch.equal(head(x), other(x))


def test_a_state_has_one_key_more_than_weights_and_that_of_a_linear_head_none():
    assert set(grassy.GrassmannHead(N, C).state_dict()) == {"weight", KEY}
    assert set(grassy.LinearHead(N, C).state_dict()) == set(nn.Linear(N, C).state_dict())
    nn.Linear(N, C).load_state_dict(grassy.LinearHead(N, C).state_dict(), strict=True)


def test_weights_of_one_kind_of_head_are_refused_by_another_of_the_same_shape():
    for one, other in (("cosine", "arcface"), ("softtriple", "subcenter-arcface"), ("grassmann", "softtriple")):
        with pytest.raises(ValueError, match=r"head is .*Head there and .*Head here"):
            create_head(other, N, C).load_state_dict(create_head(one, N, C).state_dict())
    with pytest.raises(RuntimeError, match=KEY):
        create_head("linear", N, C, bias=False).load_state_dict(create_head("cosine", N, C).state_dict())


def test_a_gamma_that_was_set_later_is_the_one_that_is_saved():
    head = grassy.GrassmannHead(N, C)
    head.gamma = 11.0
    grassy.GrassmannHead(N, C, gamma=11.0).load_state_dict(head.state_dict())
    with pytest.raises(ValueError, match="gamma is 11"):
        grassy.GrassmannHead(N, C).load_state_dict(head.state_dict())


@pytest.mark.parametrize("scalar", [np.float32(9), np.float64(9), torch.tensor(9.0)])
def test_a_gamma_of_another_library_is_saved_as_a_number(scalar):
    head = create_head("grassmann", 8, 5, k=2)
    head.gamma = scalar
    again = create_head("grassmann", 8, 5, k=2, gamma=9)
    again.load_state_dict(head.state_dict())
    assert json.loads(json.dumps(grassy.heads.describe(head)))["gamma"] == 9


def test_a_learned_gamma_is_a_weight_and_does_not_mix_with_a_fixed_one():
    learned, fixed = grassy.GrassmannHead(N, C, learnable_gamma=True), grassy.GrassmannHead(N, C)
    other = grassy.GrassmannHead(N, C, learnable_gamma=True, gamma=3.0)
    other.load_state_dict(learned.state_dict())
    assert float(other.gamma) == 25.0
    for one, another in ((learned, fixed), (fixed, learned)):
        with pytest.raises(ValueError, match=r"gamma is .*not set"):
            one.load_state_dict(another.state_dict(), strict=False)


def standard() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, N), grassy.GrassmannHead(N, C, k=2, gamma=12.98, standardize=True)).eval()


def test_the_options_survive_files_copies_casts_and_compilation(tmp_path):
    model, x = standard(), torch.randn(3, 4)
    expected = model(x)
    save_file(model.state_dict(), tmp_path / "weights.safetensors")
    again = standard()
    again.load_state_dict(load_file(tmp_path / "weights.safetensors"))
    assert torch.equal(again(x), expected)
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    again.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True))
    own = options_in(model.state_dict())
    assert own == {"1.": {"head": "GrassmannHead", "gamma": 12.98, "normalize": True, "standardize": 1e-5}}
    for changed in (copy.deepcopy(model), standard().half(), standard().bfloat16(), standard().double()):
        assert options_in(changed.state_dict()) == own
        halves = {key: value.to(torch.bfloat16) for key, value in changed.state_dict().items()}
        assert options_in(halves) == own  # of a tool that casts whatever is in the file
    assert options_in(torch.compile(standard(), backend="eager").state_dict())["_orig_mod.1."] == own["1."]


def test_the_options_survive_averages_of_models_and_of_files():
    import_timm()
    from timm.utils import ModelEmaV3

    model = standard()
    own = options_in(model.state_dict())["1."]
    averages = {
        "grassy": grassy.AveragedModel(model, decay=0.9),
        "torch": swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True),
        "timm": ModelEmaV3(model, decay=0.9),
    }
    for average in averages.values():
        update = average.update if hasattr(average, "update") else average.update_parameters
        for _ in range(5):
            update(model)
        assert options_in(average.state_dict())["module.1."] == own
        again = copy.deepcopy(average)
        again.load_state_dict(average.state_dict())
    states = [standard().state_dict() for _ in range(3)]
    soup = {key: sum(state[key].double() for state in states) / 3 for key in states[0]}
    assert options_in(soup)["1."] == own
    mean = {key: value.clone() for key, value in states[0].items() if value.is_floating_point()}
    for _ in range(50):  # as people write it
        for key, value in mean.items():
            value.mul_(0.99).add_(states[1][key], alpha=0.01)
    assert options_in(mean)["1."] == own
    standard().load_state_dict({**states[0], **mean})


def test_the_options_survive_ddp_and_distributed_checkpoints(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(standard())
        states = model.state_dict(), dcp.get_model_state_dict(model)
        assert options_in(states[0])["module.1."] == options_in(states[1])["1."]
        model.load_state_dict(states[0])
        dcp.set_model_state_dict(model, dict(states[1]))  # which empties it
        other = nn.parallel.DistributedDataParallel(standard())
        other.module[1].gamma = 25.0
        with pytest.raises(ValueError, match=r"gamma is 12\.98 there and 25\.0 here"):
            other.load_state_dict(states[0])
        with pytest.raises(ValueError, match=r"gamma is 12\.98 there and 25\.0 here"):
            dcp.set_model_state_dict(other, dict(states[1]))
    finally:
        dist.destroy_process_group()


NO_RECORDS = {
    "noise": torch.randn(5),
    "no bytes": torch.tensor([300.0]),
    "too long": torch.zeros(MOST_BYTES + 1),
    "not finite": torch.full((3,), float("nan")),
    "cut off": encode({})[:1],
    "nested deeply": torch.tensor(list(b"[" * 9000)).float(),
    "a list": torch.tensor(list(b"[1]")).float(),
    "text": "text",
}


@pytest.mark.parametrize("record", NO_RECORDS.values(), ids=NO_RECORDS)
def test_a_record_that_is_none_is_refused(record):
    with pytest.raises(ValueError, match="_extra_state of a head must hold its options"):
        decode(record)


VIT = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2}


def saved(tmp_path, described: dict, **options) -> grassy.Head:
    model = grassy.models.create_model("vit_tiny_patch16_224", C, {"name": "grassmann", "k": 2, **options}, VIT)
    description = Description("vit_tiny_patch16_224", C, {"name": "grassmann", "k": 2, **described}, VIT, img_size=16)
    save_weights(model.state_dict(), description, tmp_path / "weights.safetensors")
    return model.eval()


@pytest.mark.parametrize("options", [{"gamma": 12.98}, {"normalize": False}, {"gamma": 3.0, "standardize": True}])
def test_an_incomplete_description_is_completed_by_what_is_kept_with_the_weights(tmp_path, options):
    model = saved(tmp_path, {}, **options)
    x = torch.randn(2, 3, 16, 16)
    assert torch.equal(grassy.load(tmp_path / "weights.safetensors")(x), model(x))


def test_a_description_that_contradicts_the_weights_is_refused(tmp_path):
    saved(tmp_path, {"gamma": 25.0}, gamma=12.98)
    with pytest.raises(ValueError, match=r"weights\.safetensors does not hold .* gamma is 12\.98 there and 25\.0 here"):
        grassy.load(tmp_path / "weights.safetensors")


def test_training_takes_over_the_weights_of_a_head_with_another_gamma_and_says_so(tmp_path):
    model = nn.Sequential(nn.Linear(6, N), grassy.GrassmannHead(N, C, k=2))
    for kind, options, said in (
        ("grassmann", {"k": 2}, "all of it"),
        ("grassmann", {"k": 2, "gamma": 12.0}, "all of it, but gamma is 12.0 there and 25.0 here"),
        ("softtriple", {"centers": 2}, "its classifier does not fit, ours is new"),
    ):
        source = nn.Sequential(nn.Linear(6, N), create_head(kind, N, C, **options))
        torch.save(source.state_dict(), tmp_path / "weights.pt")
        assert start_from(model, tmp_path / "weights.pt") == said
        assert torch.equal(model[0].weight, source[0].weight)
        assert torch.equal(model[1].weight, source[1].weight) is (kind == "grassmann")
        assert model[1].gamma == 25.0
    older = {key: value for key, value in model.state_dict().items() if KEY not in key}
    torch.save(older, tmp_path / "older.pt")
    assert start_from(model, tmp_path / "older.pt") == "all of it"
