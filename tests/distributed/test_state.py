"""Saved on some ranks, loaded on others: to the bit, or not at all."""

import os

import pytest
import torch
import torch.distributed as dist
from torch import nn

import grassy
from grassy.distributed import state as state_module
from grassy.distributed.named_tensors import rows_of_ranks
from grassy.distributed.saves import newest, open_state
from grassy.distributed.state import load_state, read_saved, save_state
from ranks import on_ranks

from .sharded_state import Model, assert_same, build, put, saved_on_four, shards, train, whole

pytestmark = pytest.mark.distributed


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
    assert torch.equal(read_saved(open_state(tmp_path / "state"), "model")["weight"], expected["weight"])


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
        ({"names": {"a"}}, TypeError, "plain must be valid JSON: Object of type set"),
        ({(1, 2): 3}, TypeError, "plain must be valid JSON: keys must be str"),
        ({"loop": circular()}, ValueError, "plain must be valid JSON: Circular reference"),
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


def test_a_file_is_on_the_disk_as_a_whole_before_the_save_gets_its_name(tmp_path, monkeypatch):
    """DCP syncs a file while its end is still in a buffer of the process."""
    synced = {}
    fsync = os.fsync

    def noting(descriptor):
        status = os.fstat(descriptor)
        synced[status.st_ino] = status.st_size
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noting)
    save = save_state(tmp_path, *build(sharded=False))
    for file in save.iterdir():
        assert synced[file.stat().st_ino] == file.stat().st_size


class Holder(nn.Module):
    """A model that is no wrapper, but calls a part of it `module`."""

    def __init__(self):
        super().__init__()
        self.module = nn.Linear(2, 3)
        self.weight = nn.Parameter(torch.randn(4))


def test_a_part_may_have_the_name_that_wrappers_give_to_theirs(tmp_path):
    before, after = Holder(), Holder()
    save_state(tmp_path, before)
    load_state(tmp_path, after)
    assert torch.equal(before.weight, after.weight)
    assert torch.equal(before.module.weight, after.module.weight)


def test_wrappers_do_not_change_the_names_in_a_save(tmp_path):
    def work(_):
        model = nn.Linear(2, 3)
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
        save_state(tmp_path / "state", wrapped, average=grassy.AveragedModel(wrapped))
        return whole_of(model)

    (saved, _) = on_ranks(2, tmp_path, work)
    plain, average = nn.Linear(2, 3), grassy.AveragedModel(nn.Linear(2, 3))
    load_state(tmp_path / "state", torch.compile(plain), average=average)
    assert_same(whole_of(plain), saved)
    assert_same(whole_of(average.module), saved)


def whole_of(model):
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def test_two_tensors_of_one_name_are_refused(tmp_path):
    model = nn.Module()
    model.part = nn.Module()
    model.part._orig_mod = nn.Linear(2, 2)
    model.part.weight = nn.Parameter(torch.zeros(1))
    with pytest.raises(ValueError, match=r"has two tensors part\.weight"):
        save_state(tmp_path, model)


def test_rows_of_ranks_need_no_process_groups_of_their_own(tmp_path):
    def work(rank):
        torch.cuda.is_available = lambda: True  # beside a GPU, torch makes a group for each mesh on the CPU
        count = len(dist.distributed_c10d._world.pg_map)
        rows = [rows_of_ranks(torch.tensor([rank])) for _ in range(3)]
        assert rows[0].to_local().tolist() == [[rank]]
        return len(dist.distributed_c10d._world.pg_map) - count

    assert on_ranks(2, tmp_path, work) == [0, 0]


def with_head(name):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 5))
    grassy.replace_head(model, name, **({"k": 2} if name == "grassmann" else {}))
    return model


def step_of(model, base="adamw"):
    optimizer = grassy.make_optimizer(model, base, lr=0.01, weight_decay=0.1)
    torch.manual_seed(1)
    grassy.classification_loss(model, torch.randn(4, 4), torch.arange(4)).backward()
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("name", ["linear", "grassmann"])
def test_a_sharded_head_of_any_kind_goes_on_as_a_whole_one(tmp_path, name):
    """A sharded weight has a parameter group of its own, which a whole one shares with others."""

    def work(_):
        mesh = grassy.distributed.mesh("cpu")
        model = grassy.distributed.shard_head(with_head(name), mesh)
        trained = grassy.distributed.wrap(model, mesh)
        save_state(tmp_path / "state", trained, step_of(trained))

    on_ranks(2, tmp_path, work)
    model = with_head(name)
    optimizer = grassy.make_optimizer(model, "adamw", lr=0.5, weight_decay=0.1)
    load_state(tmp_path / "state", model, optimizer)
    expected = with_head(name)
    its_optimizer = step_of(expected)
    for p, other in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(p, other)
        assert optimizer.state[p].keys() == its_optimizer.state[other].keys()
    assert [group["lr"] for group in optimizer.param_groups] == [group["lr"] for group in its_optimizer.param_groups]


def test_the_state_of_another_optimizer_is_refused(tmp_path):
    model = with_head("linear")
    save_state(tmp_path, model, step_of(model))
    other = grassy.make_optimizer(model, "sgd", lr=0.1, momentum=0.9, weight_decay=0.1)
    with pytest.raises(ValueError, match="holds the state of another optimizer: it has amsgrad, and this one has damp"):
        load_state(tmp_path, model, other)
    assert other.param_groups[0]["lr"] == 0.1
