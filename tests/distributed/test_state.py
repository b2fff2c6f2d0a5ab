"""Saved on some ranks, loaded on others: to the bit, or not at all."""

import hashlib
import json
import os
import pickle
import shutil

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from grassy.distributed import state as state_module
from grassy.distributed.saves import MANIFEST, newest, open_state
from grassy.distributed.state import load_state, read_tensors, save_state
from ranks import on_ranks

pytestmark = pytest.mark.distributed

CLASSES, K, N = 9, 2, 4  # of 4 ranks the last has no class, of 8 three have none


class Model(nn.Module):
    """A backbone that every rank has, with counters and batch statistics, and a weight of which each has some rows."""

    def __init__(self, sharded):
        super().__init__()
        torch.manual_seed(0)
        self.backbone = nn.Sequential(nn.Linear(3, N), nn.BatchNorm1d(N))
        self.convolution = nn.Conv2d(2, 2, 3).to(memory_format=torch.channels_last)
        self.scale = nn.Parameter(torch.tensor(1.5))
        weight = torch.randn(CLASSES, K, N)
        if sharded:
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            rows = list(weight.split(-(-CLASSES // dist.get_world_size())))
            own = rows[dist.get_rank()] if dist.get_rank() < len(rows) else weight[:0]
            shape = {"shape": weight.shape, "stride": weight.stride()}
            weight = DTensor.from_local(own.clone(), mesh, [Shard(0)], run_check=False, **shape)
        self.weight = nn.Parameter(weight)

    def forward(self, x):
        weight = self.weight.to_local() if isinstance(self.weight, DTensor) else self.weight
        found = torch.einsum("bn,ckn->", self.backbone(x) + self.convolution(x.new_ones(1, 2, 3, 3)).sum(), weight)
        return self.scale * found


def build(sharded):
    model = Model(sharded)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.8, 0.9), foreach=False)


def train(model, optimizer, updates):
    for update in updates:
        torch.manual_seed(update)
        optimizer.zero_grad()
        (model(torch.randn(5, 3)).sin() + update * model.scale).backward()
        if isinstance(model.weight, DTensor):  # as a sharded cross-entropy leaves the others
            for p in (p for p in model.parameters() if p is not model.weight):
                dist.all_reduce(p.grad)
        optimizer.step()


def whole(model, optimizer):
    """All values, as plain tensors."""
    full = lambda tensor: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    values = {name: full(value).detach().clone() for name, value in model.state_dict().items()}
    for name, p in model.named_parameters():
        for key, value in optimizer.state[p].items():
            values[f"{name}.{key}"] = full(value).detach().clone()
    return values


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value), name


def saved_on_four(folder):
    """The whole state that four ranks save in `folder`, and the one that they come to after two further updates."""

    def work(rank):
        model, optimizer = build(sharded=True)
        train(model, optimizer, range(3))
        optimizer.state[model.weight]["exp_avg"] = optimizer.state[model.weight]["exp_avg"].bfloat16()
        optimizer.state[model.weight]["counts"] = torch.tensor([rank, 1])
        before = whole(model, optimizer)
        save_state(
            folder, model, optimizer, {"rows": [1.5, None], "best": -float("inf")}, own={"seen": torch.tensor(rank)}
        )
        optimizer.state[model.weight]["exp_avg"] = optimizer.state[model.weight]["exp_avg"].float()
        train(model, optimizer, range(3, 5))
        return before, whole(model, optimizer)

    states, ends = zip(*on_ranks(4, folder.parent, work), strict=True)
    states[0]["weight.counts"] = torch.tensor([0 + 1 + 2 + 3, 4])  # the sum over the shards
    return states[0], ends[0]


@pytest.mark.slow
def test_four_ranks_save_and_any_number_of_ranks_loads_the_same_bits_and_goes_on(tmp_path):
    expected, end = saved_on_four(tmp_path / "state")

    def work(rank):
        model, optimizer = build(sharded=True)
        with torch.no_grad():
            model.weight.to_local().fill_(7)  # what is loaded must not have been there
        seen = torch.tensor(-1)
        plain = load_state(tmp_path / "state", model, optimizer, own={"seen": seen})
        assert plain == {"rows": [1.5, None], "best": -float("inf")}
        counts = optimizer.state[model.weight]["counts"].clone()
        dist.all_reduce(counts)  # of all shards
        found = whole(model, optimizer) | {"weight.counts": counts}
        assert optimizer.param_groups[0]["betas"] == (0.8, 0.9)
        optimizer.state[model.weight]["exp_avg"] = optimizer.state[model.weight]["exp_avg"].float()
        train(model, optimizer, range(3, 5))
        return found, int(seen), whole(model, optimizer)

    for world in (1, 2, 3, 4, 8):
        answers = on_ranks(world, tmp_path, work)
        for found, _, _ in answers:
            assert_same(found, expected)
        assert [seen for _, seen, _ in answers] == (list(range(4)) if world == 4 else [-1] * world)
        if world == 4:  # as if it had never stopped
            for _, _, after in answers:
                del after["weight.counts"]
                assert_same(after, {name: value for name, value in end.items() if name != "weight.counts"})

    model, optimizer = build(sharded=False)  # one process, without a group
    load_state(tmp_path / "state", model, optimizer)
    assert_same(whole(model, optimizer), expected)
    assert torch.equal(read_tensors(open_state(tmp_path / "state"), "model")["weight"], expected["weight"])


# ------------------------------------------------------------------------------------------------ damaged and hostile


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


def shards(save):
    return sorted(save.glob("*.safetensors"))


def put(save, name, data):
    (save / name).write_bytes(data)


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
        "no name of a file of tensors",
    ),
    "a shard left out of state.json": (
        lambda save: (
            resealed(save, lambda content: content["files"].pop(shards(save)[-1].name)),
            shards(save)[-1].unlink(),
        ),
        "rows of",
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


def test_another_model_or_optimizer_is_refused(tmp_path, good):
    model, optimizer = build(sharded=False)
    other = nn.Sequential(nn.Linear(3, N))
    with pytest.raises(ValueError, match=r"is of another model: it lacks model.0.bias"):
        load_state(good, other)
    del model.scale
    with pytest.raises(ValueError, match=r"is of another model: it has model.scale"):
        load_state(good, model)
    model = Model(sharded=False)
    with pytest.raises(ValueError, match="that the model does not have: was it made before sharding"):
        load_state(good, model, optimizer)
    model.weight = nn.Parameter(torch.zeros(CLASSES + 1, K, N))
    with pytest.raises(ValueError, match=r"model.weight of shape \[9, 2, 4\] in torch.float32, not \[10, 2, 4\]"):
        load_state(good, model)
    with pytest.raises(ValueError, match="holds no whole save"):
        load_state(tmp_path, model)


# ------------------------------------------------------------------------------------------------ whole or not at all


def full_disk(*_):
    raise OSError(28, "No space left on device")


def test_a_save_is_there_when_it_is_whole_and_older_ones_go_when_it_is(tmp_path, monkeypatch):
    model, optimizer = build(sharded=False)
    first = save_state(tmp_path, model, optimizer, {"number": 1})
    assert (first, newest(tmp_path)) == (tmp_path / "save-1", first)
    with monkeypatch.context() as patch:
        patch.setattr(state_module, "finish", full_disk)
        with pytest.raises(OSError, match="No space left"):
            save_state(tmp_path, model, optimizer, {"number": 2})
    assert newest(tmp_path) == first
    assert load_state(tmp_path, *build(sharded=False)) == {"number": 1}
    assert save_state(tmp_path, model, optimizer, {"number": 3}, keep=2) == tmp_path / "save-2"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["save-1", "save-2"]  # and no part
    assert save_state(tmp_path, model, optimizer, {"number": 4}) == tmp_path / "save-3"
    assert [entry.name for entry in tmp_path.iterdir()] == ["save-3"]
    assert load_state(tmp_path, *build(sharded=False)) == {"number": 4}


def remove_refused(patch):
    """As NFS does while another process has a file of the folder open."""

    def rmdir(*_, **__):
        raise OSError(39, "Directory not empty")

    patch.setattr(os, "rmdir", rmdir)


def rename_refused(patch):
    rename = os.rename

    def refuse(source, target, **options):
        if str(target).endswith(".gone"):
            raise OSError(16, "Device or resource busy")
        rename(source, target, **options)

    patch.setattr(os, "rename", refuse)


@pytest.mark.parametrize("refuse", [remove_refused, rename_refused])
def test_old_saves_that_cannot_be_removed_stop_no_run(tmp_path, monkeypatch, refuse):
    model, optimizer = build(sharded=False)
    save_state(tmp_path, model, optimizer, {"number": 1})
    with monkeypatch.context() as patch:
        refuse(patch)
        for number in (2, 3):
            assert save_state(tmp_path, model, optimizer, {"number": number}) == tmp_path / f"save-{number}"
            assert load_state(tmp_path, *build(sharded=False)) == {"number": number}
    save_state(tmp_path, model, optimizer, {"number": 4})
    assert [entry.name for entry in tmp_path.iterdir()] == ["save-4"]  # the next save removes them all


def test_a_straggler_of_an_earlier_start_does_not_write_into_the_next_save(tmp_path, monkeypatch):
    model, optimizer = build(sharded=False)
    parts = []

    def killed(part, *_):
        parts.append(part)
        full_disk()

    with monkeypatch.context() as patch:
        patch.setattr(state_module, "finish", killed)
        for _ in range(2):
            with pytest.raises(OSError, match="No space left"):
                save_state(tmp_path, model, optimizer)
            assert list(tmp_path.iterdir()) == []  # a full disk is not left fuller
    assert parts[0] != parts[1]
    parts[0].mkdir()  # what the straggler leaves is removed
    put(parts[0], "shard-00002-model-00001-of-00001.safetensors", b"late")
    save_state(tmp_path, model, optimizer, {"number": 1})
    assert [entry.name for entry in tmp_path.iterdir()] == ["save-1"]
    assert load_state(tmp_path, *build(sharded=False)) == {"number": 1}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda part, written: put(part, "foreign", b""), "holds foreign, which is none of the files"),
        (lambda part, written: shards(part)[0].unlink(), "lacks shard-00001-model-00001-of-00001.safetensors"),
        (lambda part, written: os.truncate(shards(part)[0], 40), "it has 40 bytes"),
        (lambda part, written: written[1].pop(), "rows of model."),
    ],
)
def test_a_save_that_is_not_whole_never_replaces_the_one_before(tmp_path, monkeypatch, change, words):
    model, _ = build(sharded=False)
    save_state(tmp_path, model, plain={"number": 1})
    look = state_module.written_here

    def changed(part, *others):
        written = look(part, *others)
        change(part, written)
        return written

    with monkeypatch.context() as patch:
        patch.setattr(state_module, "written_here", changed)
        with pytest.raises(OSError, match="save-2 could not be written: ") as caught:
            save_state(tmp_path, model)
    assert words in str(caught.value)
    assert [entry.name for entry in tmp_path.iterdir()] == ["save-1"]
    assert load_state(tmp_path, model) == {"number": 1}


def test_ranks_that_do_not_share_a_folder_cannot_save(tmp_path):
    def work(rank):
        (tmp_path / f"machine-{rank}").mkdir()
        os.chdir(tmp_path / f"machine-{rank}")
        with pytest.raises(OSError, match=r"state/save-1 could not be written: .* lacks shard-00002-") as caught:
            save_state("state", build(sharded=True)[0])
        return str(caught.value)

    first, second = on_ranks(2, tmp_path, work)
    assert first == second
    assert newest(tmp_path / "machine-0" / "state") is None


# ------------------------------------------------------------------------------------------------ arguments


def test_what_each_rank_had_of_its_own_may_be_left_in_the_save(tmp_path):
    model, _ = build(sharded=False)
    save_state(tmp_path, model, plain={"number": 1}, own={"seen": torch.tensor(3)})
    assert load_state(tmp_path, model) == {"number": 1}
    seen = torch.tensor(-1)
    load_state(tmp_path, model, own={"seen": seen})
    assert seen == 3
    with pytest.raises(ValueError, match=r"it lacks own.other"):
        load_state(tmp_path, model, own={"seen": seen, "other": torch.tensor(0)})


def circular():
    values = []
    values.append(values)
    return values


@pytest.mark.parametrize(
    ("plain", "error", "words"),
    [
        ({"names": {"a"}}, TypeError, "plain must hold only what JSON can: Object of type set"),
        ({(1, 2): 3}, TypeError, "plain must hold only what JSON can: keys must be str"),
        ({"loop": circular()}, ValueError, "plain must hold only what JSON can: Circular reference"),
    ],
)
def test_what_json_cannot_hold_is_refused_before_anything_is_written(tmp_path, plain, error, words):
    with pytest.raises(error, match=words):
        save_state(tmp_path / "state", build(sharded=False)[0], plain=plain)
    assert list(tmp_path.iterdir()) == []


def test_a_dtype_that_is_not_supported_is_refused_on_all_ranks_before_anything_is_written(tmp_path):
    def work(rank):
        model = Model(sharded=True)
        dtype = torch.complex64 if rank == 1 else torch.float32
        model.register_buffer("phase", torch.zeros(2, dtype=dtype))
        with pytest.raises(ValueError, match=r"model\.phase .* got torch\.complex64"):
            save_state(tmp_path / "state", model)

    on_ranks(2, tmp_path, work)
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize("keep", [0, -1, 1.5, True, "2", None])
def test_at_least_one_save_is_kept(tmp_path, keep):
    with pytest.raises(ValueError, match="keep must be an integer of at least 1, got "):
        save_state(tmp_path / "state", build(sharded=False)[0], keep=keep)
    assert list(tmp_path.iterdir()) == []
