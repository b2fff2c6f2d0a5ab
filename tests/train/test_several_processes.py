"""Two processes on one machine: the same weights as one process with the same batch, and what if one of them dies."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml

from grassy.inference.validate import validate
from grassy.runs.state import STATE, read_torch
from grassy.runs.weights import LAST, read_weights
from grassy.train.loop import train
from training_cases import tiny_arrays, tiny_recipe

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def torchrun_command(folder, recipe, data, output, *settings):
    file = folder / f"{output.name}.yaml"
    file.write_text(yaml.safe_dump(recipe.to_dict()))
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return [*launch, "-m", "grassy", "train", str(file), "--data-dir", str(data), "--output", str(output), *settings]


def torchrun(folder, recipe, data, output, *settings):
    command = torchrun_command(folder, recipe, data, output, *settings)
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    return run


def process_of_rank(rank, parent):
    """The process that torchrun, `parent`, has started for a rank."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):
            its_parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if its_parent == parent and f"RANK={rank}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                return int(folder.name)
    raise LookupError(f"no process of rank {rank} below {parent}")


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs /proc")
def test_when_torchrun_loses_the_process_that_saves_nobody_hangs_and_nothing_saved_is_lost(tmp_path):
    recipe, data = tiny_recipe(checkpoint_interval=1e-9, epochs=30), tiny_arrays(tmp_path / "data")
    run = tmp_path / "run"
    command = torchrun_command(tmp_path, recipe, data, run, "--resume", "auto")
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as launcher:
        try:
            while not (run / STATE).exists():
                assert launcher.poll() is None
                time.sleep(0.05)
            os.kill(process_of_rank(0, launcher.pid), signal.SIGKILL)
            launcher.communicate(timeout=60)
        finally:
            launcher.kill()
    assert launcher.returncode == 1
    assert read_torch(run / STATE)["progress"]["epoch"] < 30  # it was killed before its end
    torchrun(tmp_path, recipe, data, run, "--resume", "auto")
    torchrun(tmp_path, recipe, data, tmp_path / "whole")
    ends, expected = read_weights(run / LAST), read_weights(tmp_path / "whole" / LAST)
    assert all(torch.equal(ends[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    "head", [{"name": "linear"}, {"name": "grassmann", "k": 2, "gamma": 8.0}], ids=["linear", "grassmann"]
)
def test_two_processes_end_with_the_weights_of_one_with_the_doubled_batch(tmp_path, head):
    recipe = tiny_recipe(head=head, crop="none", hflip=0.0, batch_size=8, epochs=3)
    data = tiny_arrays(tmp_path / "data")
    one = train(recipe, data, tmp_path / "one")
    run = torchrun(tmp_path, recipe, data, tmp_path / "two")
    first, second = (read_weights(tmp_path / name / LAST) for name in ("one", "two"))
    for key in first:
        torch.testing.assert_close(second[key], first[key], rtol=1e-4, atol=1e-5, msg=key)
    rows = [read_torch(tmp_path / name / STATE)["progress"]["rows"] for name in ("one", "two")]
    assert [row["eval_top1"] for row in rows[1]] == pytest.approx([row["eval_top1"] for row in rows[0]])
    assert run.stdout.count("best top-1") == 1  # one process speaks for both
    assert one.epoch == 3


def test_random_crops_and_uneven_validation_are_shared_as_well(tmp_path):
    recipe = tiny_recipe(loader="workers", crop="resized", color_jitter=0.4, crop_pct=0.9, grad_accum_steps=2)
    data = tiny_arrays(tmp_path / "data", images=42)
    one = train(recipe, data, tmp_path / "one")
    torchrun(tmp_path, recipe, data, tmp_path / "two")
    rows = read_torch(tmp_path / "two" / STATE)["progress"]["rows"]
    assert len(rows) == 2
    for ours, theirs in zip(one.rows, rows, strict=True):
        assert theirs["eval_loss"] == pytest.approx(ours["eval_loss"], rel=1e-3)
        assert theirs["eval_top1"] == pytest.approx(ours["eval_top1"])
        assert theirs["eval_effective_rank"] == pytest.approx(ours["eval_effective_rank"], rel=1e-3)
        assert theirs["train_loss"] == pytest.approx(ours["train_loss"], rel=1e-3)


def test_the_accuracy_of_a_run_is_that_of_the_weights_it_saves_batch_statistics_included(tmp_path):
    small = {"model": "resnet18_cifar", "model_kwargs": {"channels": [4, 4, 4, 4]}, "crop_pct": 0.9, "epochs": 3}
    data = tiny_arrays(tmp_path / "data", images=64)
    for ema in (False, True):
        folder = tmp_path / f"ema-{ema}"
        torchrun(tmp_path, tiny_recipe(**small, model_ema=ema, model_ema_decay=0.5), data, folder)
        row = read_torch(folder / STATE)["progress"]["rows"][-1]
        metrics = validate(folder / LAST, data)
        assert row["eval_loss"] == pytest.approx(metrics.loss, rel=1e-4)
        assert row["eval_top1"] == pytest.approx(metrics.top1)
