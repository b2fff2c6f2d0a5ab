"""Saves that are damaged or hostile, or of another model: refused in one line, and nothing is loaded."""

import hashlib
import json
import os
import pickle
import shutil

import pytest
import torch
from torch import nn

import grassy
from grassy.distributed.saves import MANIFEST, newest
from grassy.distributed.state import load_state, save_state
from ranks import on_ranks

from .sharded_state import CLASSES, K, Model, N, assert_same, build, put, saved_on_four, shards, train, whole

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A save of four ranks."""
    folder = tmp_path_factory.mktemp("good") / "state"
    saved_on_four(folder)
    return folder


class Pickled:
    """What would leave a file behind, if it were unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def resealed(save, change):
    """Change what state.json says, with a digest that fits."""
    sealed = json.loads((save / MANIFEST).read_text())
    content = json.loads(sealed["content"])
    change(content)
    (save / MANIFEST).unlink()
    text = json.dumps(content)
    digest = hashlib.sha256(text.encode()).hexdigest()
    (save / MANIFEST).write_text(json.dumps({"sha256": digest, "content": text}))


def replaced_by_link(save):
    first = shards(save)[0]
    first.rename(save.parent / "elsewhere")
    first.symlink_to("../elsewhere")


DAMAGE = {
    "a pickle beside them": (
        lambda save: put(save, ".metadata", pickle.dumps(Pickled(save / "ran"))),
        "holds .metadata, which is none of the",
    ),
    "a shard that is a pickle": (
        lambda save: put(save, shards(save)[0].name, pickle.dumps(Pickled(save / "ran"))),
        "is damaged: it has",
    ),
    "a truncated file": (lambda save: os.truncate(shards(save)[1], 40), "is damaged: it has 40 bytes"),
    "one bit": (
        lambda save: put(save, shards(save)[1].name, shards(save)[1].read_bytes()[:-1] + b"!"),
        "is damaged: its SHA-256",
    ),
    "a stale shard of a larger world": (
        lambda save: shutil.copy(shards(save)[0], save / "shard-00007-model-00001-of-00002.safetensors"),
        "holds shard-00007-model-00001-of-00002.safetensors, which is none of the",
    ),
    "a missing shard": (lambda save: shards(save)[2].unlink(), "one of the"),
    "a link instead of a shard": (replaced_by_link, "is not a regular file"),
    "state.json cut off": (lambda save: os.truncate(save / MANIFEST, 100), "state.json is damaged"),
    "state.json changed": (
        lambda save: (save / MANIFEST).write_text((save / MANIFEST).read_text().replace("1.5", "2.5")),
        "its SHA-256 is no longer",
    ),
    "state.json of a path outside": (
        lambda save: resealed(save, lambda content: content["files"].update({"../x.safetensors": {}})),
        "not the name of a tensor file",
    ),
    "a shard left out of state.json": (
        lambda save: (
            resealed(save, lambda content: content["files"].pop(shards(save)[-1].name)),
            shards(save)[-1].unlink(),
        ),
        "rows of",
    ),
    "no word of the optimizer": (
        lambda save: resealed(save, lambda content: content.pop("optimizer")),
        "state.json is damaged",
    ),
    "an optimizer without options": (
        lambda save: resealed(save, lambda content: content["optimizer"]["groups"][0].pop("options")),
        "state.json is damaged",
    ),
    "an optimizer whose state is a list": (
        lambda save: resealed(save, lambda content: content["optimizer"].update(state=[1])),
        "state.json is damaged",
    ),
    "a state that is a number": (
        lambda save: resealed(save, lambda content: content["optimizer"]["state"].update(weight=3)),
        "state.json is damaged",
    ),
    "a learning rate that is a word": (
        lambda save: resealed(save, lambda content: content["optimizer"]["groups"][0]["options"].update(lr="fast")),
        "has lr='fast' where this optimizer has",
    ),
    "a shape that the shards do not fill": (
        lambda save: resealed(save, lambda content: content["tensors"].update({"model.weight": ["F32", 10**9, K, N]})),
        "which has 1000000000",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_or_hostile_shards_are_refused_in_one_line_and_nothing_is_loaded(tmp_path, good, name):
    shutil.copytree(good, tmp_path / "state")
    damage, words = DAMAGE[name]
    damage(newest(tmp_path / "state"))
    model, optimizer = build(sharded=False)
    train(model, optimizer, range(1))
    before = whole(model, optimizer)
    with pytest.raises(ValueError, match="state") as caught:
        load_state(tmp_path / "state", model, optimizer)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert_same(whole(model, optimizer), before)
    assert not list(tmp_path.rglob("ran"))


def test_what_is_wrong_with_one_shard_all_ranks_say(tmp_path, good):
    shutil.copytree(good, tmp_path / "state")
    os.truncate(shards(newest(tmp_path / "state"))[-1], 40)

    def work(_):
        model, optimizer = build(sharded=True)
        with pytest.raises(ValueError, match="state") as caught:
            load_state(tmp_path / "state", model, optimizer)
        return str(caught.value)

    first, second = on_ranks(2, tmp_path, work)
    assert first == second
    assert "is damaged: it has 40 bytes" in first


def test_a_group_of_parameters_never_changes_its_manifold(tmp_path):
    head = grassy.create_head("grassmann", 8, 4, k=2)
    optimizer = grassy.make_optimizer(head, "sgd", lr=0.1)
    save = save_state(tmp_path, head, optimizer)
    resealed(save, lambda content: content["optimizer"]["groups"][0]["options"].update(manifold="euclidean", lr=0.5))
    with pytest.raises(ValueError, match="has manifold='euclidean' where this optimizer has 'grassmann'"):
        load_state(tmp_path, head, optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_another_model_or_optimizer_is_refused(tmp_path, good):
    model, optimizer = build(sharded=False)
    other = nn.Sequential(nn.Linear(3, N))
    with pytest.raises(ValueError, match=r"belongs to another model: it lacks model.0.bias"):
        load_state(good, other)
    del model.scale
    with pytest.raises(ValueError, match=r"belongs to another model: it has model.scale"):
        load_state(good, model)
    model = Model(sharded=False)
    with pytest.raises(ValueError, match="that the model does not have: was it made before sharding"):
        load_state(good, model, optimizer)
    model.weight = nn.Parameter(torch.zeros(CLASSES + 1, K, N))
    with pytest.raises(ValueError, match=r"model.weight of shape \[9, 2, 4\] in torch.float32, not \[10, 2, 4\]"):
        load_state(good, model)
    with pytest.raises(ValueError, match="holds no complete save"):
        load_state(tmp_path, model)
