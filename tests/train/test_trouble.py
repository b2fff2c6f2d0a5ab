"""Losses that are not finite, broken images, full disks, too little memory: what a run does about them."""

import math
import multiprocessing
import os
import resource
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from grassy.distributed.processes import Process
from grassy.recipes.changes import with_changes
from grassy.runs.state import STATE, read_torch, write_torch
from grassy.runs.weights import LAST
from grassy.train import loop, opening
from grassy.train.loop import TrainingStopped, train
from grassy.train.training_step import TrainingStep
from grassy.train.trouble import NONFINITE, trouble_explained
from training_cases import tiny_arrays, tiny_folders, tiny_recipe, train_command, weights


def poison(folder, recipe):
    """Make the loss infinite: a learning rate beyond all reason."""
    return train(
        with_changes(recipe, {"lr": 1e30, "head": {"name": "linear"}}), tiny_arrays(folder / "data"), folder / "run"
    )


def test_a_loss_that_is_not_finite_stops_with_the_update_the_images_and_the_last_good_checkpoint(tmp_path):
    with pytest.raises(TrainingStopped, match=r"not finite at update \d of epoch 1, on train\.npz\[\d+\] and 7 other"):
        poison(tmp_path, tiny_recipe())
    assert len((tmp_path / "run" / NONFINITE).read_text().splitlines()) == 8
    assert not (tmp_path / "run" / STATE).exists()


def test_the_images_that_are_named_are_those_of_the_batch(tmp_path, monkeypatch):
    data = tiny_arrays(tmp_path / "data")
    recipe = tiny_recipe(epochs=3, checkpoint_interval=0)
    calls = []
    original = TrainingStep.__call__

    def call(step, parts):
        calls.append(parts)
        if len(calls) == 8:  # the third update of the second epoch
            parts = [(images, labels) for images, labels in parts]
            step.prepare.mean.fill_(math.nan)
        original(step, parts)

    monkeypatch.setattr(TrainingStep, "__call__", call)
    with pytest.raises(TrainingStopped, match=r"update 3 of epoch 2.*last good checkpoint is .*resume\.pt"):
        train(recipe, data, tmp_path / "run")
    named = [int(line.split("[")[1][:-1]) for line in (tmp_path / "run" / NONFINITE).read_text().splitlines()]
    labels = np.load(data / "train.npz")["y"]
    assert sorted(labels[named]) == sorted(calls[-1][0][1].tolist())
    assert read_torch(tmp_path / "run" / STATE)["progress"]["epoch"] == 1


def test_such_updates_can_be_skipped(tmp_path, monkeypatch):
    data = tiny_arrays(tmp_path / "data")
    original = TrainingStep.__call__
    seen = []

    def call(step, parts):
        seen.append(0)
        mean = step.prepare.mean.clone()
        if len(seen) == 4:
            step.prepare.mean.fill_(math.nan)
        before = [p.clone() for p in step.model.parameters()]
        original(step, parts)
        changed = any(not torch.equal(p, q) for p, q in zip(before, step.model.parameters(), strict=True))
        assert changed == (len(seen) != 4)
        step.prepare.mean.copy_(mean)

    monkeypatch.setattr(TrainingStep, "__call__", call)
    state = train(tiny_recipe(nonfinite="skip"), data, tmp_path / "run")
    assert state.epoch == 2
    assert math.isfinite(state.rows[0]["train_loss"])


def test_skipping_an_update_leaves_batch_statistics_alone_and_too_many_in_a_row_stop(tmp_path, monkeypatch):
    data = tiny_arrays(tmp_path / "data")
    small = {"model": "resnet18_cifar", "model_kwargs": {"channels": [4, 4, 4, 4]}, "nonfinite": "skip"}
    original, seen = TrainingStep.__call__, []

    def call(step, parts):
        seen.append(0)
        mean = step.prepare.mean.clone()
        if len(seen) == 3:
            step.prepare.mean.fill_(math.nan)
        original(step, parts)
        step.prepare.mean.copy_(mean)

    with monkeypatch.context() as patch:
        patch.setattr(TrainingStep, "__call__", call)
        state = train(tiny_recipe(**small), data, tmp_path / "run", quiet=True)
    assert math.isfinite(state.rows[-1]["eval_loss"])
    assert all(value.isfinite().all() for value in weights(tmp_path / "run").values())
    with pytest.raises(TrainingStopped, match="the last of 20 in a row that were skipped"):
        train(tiny_recipe(lr=1e30, epochs=9, nonfinite="skip"), data, tmp_path / "nan", quiet=True)
    assert not (tmp_path / "nan" / LAST).exists()


def test_a_validation_loss_that_is_not_finite_stops_the_run(tmp_path, monkeypatch):
    from grassy.inference.evaluate import Metrics

    monkeypatch.setattr(loop, "evaluate", lambda *_: (Metrics(math.nan, 50.0, 100.0, 20), []))
    with pytest.raises(TrainingStopped, match="validation loss is not finite after epoch 1"):
        train(tiny_recipe(), tiny_arrays(tmp_path / "data"), tmp_path / "run", quiet=True)


def test_subspaces_that_are_asked_to_turn_too_far_are_told_of(tmp_path, capsys):
    data = tiny_arrays(tmp_path / "data")
    train(tiny_recipe(epochs=1, head_lr=1e7), data, tmp_path / "run")
    assert "rotations of classes were capped at 64 radians: head_lr is far too large" in capsys.readouterr().err
    train(tiny_recipe(epochs=1), data, tmp_path / "usual")
    assert "radians" not in capsys.readouterr().err


def test_broken_images_are_named_counted_and_survived(tmp_path, capsys):
    folder = tiny_folders(tmp_path / "data")
    (folder / "train" / "cat" / "3.png").write_bytes(b"nothing")
    (folder / "val" / "owl" / "0.png").write_bytes(b"nothing")
    state = train(tiny_recipe(batch_size=6), folder, tmp_path / "run")
    assert len(state.unreadable) == 2
    said = capsys.readouterr().err
    assert said.count("cannot read") == 2
    assert "(2 skipped so far)" in said


def test_names_of_files_that_are_no_text_are_reported_as_text(tmp_path, capsys):
    folder = tiny_folders(tmp_path / "data")
    odd = os.fsencode(folder / "train" / "cat") + b"/\x1b[31mred\xe9\n.png"
    os.rename(folder / "train" / "cat" / "3.png", odd)
    Path(os.fsdecode(odd)).write_bytes(b"nothing")
    train(tiny_recipe(batch_size=6, epochs=1), folder, tmp_path / "run")
    assert r"cat/\x1b[31mred\udce9\n.png" in capsys.readouterr().err


def test_a_loss_that_is_not_finite_is_explained_if_a_name_is_no_utf_8(tmp_path):
    folder = tiny_folders(tmp_path / "data")
    for file in sorted(folder.rglob("*.png")):
        os.rename(file, os.fsencode(file.with_suffix("")) + b"\xe9.png")
    recipe = tiny_recipe(lr=1e30, head={"name": "linear"})
    with pytest.raises(TrainingStopped, match="not finite at update"):
        train(recipe, folder, tmp_path / "run")
    names = (tmp_path / "run" / NONFINITE).read_bytes().splitlines()
    assert all(Path(os.fsdecode(name)).is_file() for name in names)


@pytest.mark.slow
def test_a_full_disk_is_one_line_and_the_old_checkpoint_stays(tmp_path):
    data = tiny_arrays(tmp_path / "data")
    train(tiny_recipe(epochs=1), data, tmp_path / "run")
    before = (tmp_path / "run" / LAST).read_bytes(), (tmp_path / "run" / STATE).read_bytes()
    command = train_command(data, tmp_path / "run", "epochs=2")
    limit = "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
    limit += f"resource.setrlimit(resource.RLIMIT_FSIZE, ({len(before[0]) // 2}, -1)); "
    command[2] = limit + command[2]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 2, run.stderr
    last = run.stderr.strip().splitlines()[-1]
    assert "last.safetensors" in last or "model_best.safetensors" in last
    assert "could not be written" in last
    assert "Traceback" not in run.stderr
    assert (tmp_path / "run" / LAST).read_bytes() == before[0]
    assert (tmp_path / "run" / STATE).read_bytes() == before[1]
    assert not list((tmp_path / "run").glob(".writing-*"))


def test_a_state_that_cannot_be_written_leaves_the_old_one(tmp_path):
    path = tmp_path / "state.pt"
    write_torch({"a": torch.ones(3)}, path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
        with pytest.raises(OSError, match="could not be written"):
            write_torch({"a": torch.ones(10000)}, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)
    assert read_torch(path)["a"].tolist() == [1, 1, 1]
    assert [entry.name for entry in tmp_path.iterdir()] == ["state.pt"]


def test_out_of_memory_is_one_line_with_advice(tmp_path, monkeypatch):
    def call(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

    monkeypatch.setattr(TrainingStep, "__call__", call)
    with pytest.raises(TrainingStopped, match=r"out of memory with 8 images of 8 pixels .* raise grad_accum_steps"):
        train(tiny_recipe(), tiny_arrays(tmp_path / "data"), tmp_path / "run")


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: 1 GB")])
def test_running_out_of_memory_before_the_first_update_is_one_line_too(tmp_path, monkeypatch, error):
    def fail(*_):
        raise error

    monkeypatch.setattr(opening, "build_model", fail)
    with pytest.raises(TrainingStopped, match="out of memory"):
        train(tiny_recipe(), tiny_arrays(tmp_path / "data"), tmp_path / "run")


@pytest.mark.parametrize("setting", ["freeze", "finetune"])
def test_a_frozen_backbone_and_fine_tuning_need_weights(setting, tmp_path):
    with pytest.raises(ValueError, match=f"{setting}=true .* give --initial-checkpoint"):
        train(tiny_recipe(**{setting: True}), tiny_arrays(tmp_path / "data"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_pipe_that_a_dead_worker_leaves_behind_is_explained_and_other_lost_connections_are_not(tmp_path):
    process = Process(torch.device("cpu"))
    receiver, sender = multiprocessing.Pipe()
    sender.close()
    with (
        pytest.raises(TrainingStopped, match=r"a process that loads images has died .*there is no checkpoint yet"),
        trouble_explained(tiny_recipe(), process, tmp_path),
    ):
        receiver.recv()
    with pytest.raises(ConnectionResetError), trouble_explained(tiny_recipe(), process, tmp_path):
        raise ConnectionResetError("a download")
