"""What a run says of its speed, and that it goes on if that cannot be said."""

import os
import pty
import re
import subprocess

import pytest

from grassy.runs.state import STATE, read_torch
from grassy.train import progress as progress_module
from grassy.train.checkpoints import Checkpoints
from grassy.train.loop import train
from grassy.train.progress import Progress
from grassy.train.training_step import TrainingStep
from training_cases import tiny_arrays, tiny_recipe, train_command


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 100.0

        def __call__(self):
            return self.now

    found = Clock()
    monkeypatch.setattr(progress_module.time, "monotonic", found)
    return found


def test_the_time_of_saving_and_validating_is_not_that_of_updates(clock, capsys):
    progress = Progress(epochs=2, updates_per_epoch=100, batch_size=8)
    clock.now += 10  # 20 updates
    with progress.pause():
        clock.now += 500  # a checkpoint
    clock.now += 10  # 20 more
    progress.report(40, 1.0)
    assert progress.speed == pytest.approx(40 * 8 / 20)
    assert "update 40/100: loss 1.0000, 16 images/s" in capsys.readouterr().err


def test_the_line_of_an_epoch_has_the_speed_of_the_whole_epoch(clock, capsys):
    progress = Progress(epochs=2, updates_per_epoch=100, batch_size=8)
    clock.now += 40
    progress.report(99, 1.0)
    clock.now += 0.001
    progress.report(100, 1.0)  # a last look, right after another one
    progress.end_of_epoch(0, 1.0, None, seconds=50.0)
    assert "epoch 1/2: loss 1.0000, 16 images/s" in capsys.readouterr().err


def test_a_checkpoint_after_every_update_does_not_change_the_speed(tmp_path, capsys, clock, monkeypatch):
    """Of 5 updates of 8 images that take 2 s each, and checkpoints that take 500."""

    calls = []

    def that_takes(seconds, original):
        def call(*arguments):
            original(*arguments)
            clock.now += seconds
            calls.append(seconds)

        return call

    monkeypatch.setattr(TrainingStep, "__call__", that_takes(2, TrainingStep.__call__))
    monkeypatch.setattr(Checkpoints, "save", that_takes(500, Checkpoints.save))
    recipe = tiny_recipe(epochs=2, checkpoint_interval=1e-9)
    state = train(recipe, tiny_arrays(tmp_path / "data"), tmp_path / "run")
    assert calls.count(500) >= 10
    assert [row["seconds"] for row in state.rows] == [10, 10]
    assert set(re.findall(r"([\d,]+) images/s", capsys.readouterr().err)) == {"4"}


@pytest.mark.slow
@pytest.mark.parametrize("stderr", ["full", "closed", "gone", "terminal"])
def test_a_run_goes_on_when_nobody_can_be_told_of_it(tmp_path, stderr):
    """A full disk behind stderr, no stderr at all, a pipe whose reader has left, a terminal that was closed."""
    command = train_command(tiny_arrays(tmp_path / "data"), tmp_path / "run", "epochs=3")
    options = {}
    if stderr == "full":
        options["stderr"] = os.open("/dev/full", os.O_WRONLY)
    elif stderr == "closed":
        options["preexec_fn"] = lambda: os.close(2)
    else:
        ours, options["stderr"] = os.pipe() if stderr == "gone" else pty.openpty()
        os.close(ours)
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=120, **options)
    if "stderr" in options:
        os.close(options["stderr"])
    assert run.returncode == 0
    assert run.stdout.startswith("best top-1")
    assert read_torch(tmp_path / "run" / STATE)["progress"]["epoch"] == 3
