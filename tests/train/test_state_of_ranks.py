"""Two processes that see different images: their batch statistics, and that a checkpoint holds the state of both."""

import multiprocessing
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from grassy.data.run_data import open_data
from grassy.distributed.processes import Process
from grassy.recipes.changes import with_changes
from grassy.runs.state import STATE, read_torch
from grassy.runs.weights import BEST, LAST, read_weights
from grassy.train import loop
from grassy.train.loop import TrainingStopped, train
from grassy.train.model import build_model
from grassy.train.training_step import seed_everything
from training_cases import tiny_arrays, tiny_recipe

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

#: A network with batch statistics.
RESNET = {"model": "resnet18_cifar", "model_kwargs": {"channels": [4, 4, 4, 4]}, "crop": "none", "hflip": 0.0}


def train_in_two_processes(recipe, data, output, resume="", stop_after=0, number=signal.SIGTERM):
    """Train in two processes; the second alone gets a signal after some updates. Returns their exit codes."""

    def work(rank):
        torch.set_num_threads(1)
        os.environ.update(RANK=str(rank), WORLD_SIZE="2")
        store = f"file://{output.parent}/{output.name}-{resume}-{stop_after}"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
        loop.AGREE_EVERY, original = 1, loop.stop_or_save

        def signal_itself(run, *others):
            if rank == 1 and run.position.done == stop_after:
                os.kill(os.getpid(), number)
            return original(run, *others)

        loop.stop_or_save = signal_itself
        try:
            os._exit(train(recipe, data, output, resume, "cpu", quiet=True).stopped_by or 0)
        except TrainingStopped as error:
            (output / "why").write_text(str(error))
            os._exit(1)

    processes = [multiprocessing.get_context("fork").Process(target=work, args=(rank,)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    for process in processes:
        process.kill()
    return [process.exitcode for process in processes]


def same(one, other, path=""):
    """Equal to the bit, but for times."""
    if isinstance(one, dict):
        assert one.keys() == other.keys(), path
        for key in one.keys() - {"seconds", "input_share"}:
            same(one[key], other[key], f"{path}.{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), path
        for number, (first, second) in enumerate(zip(one, other, strict=True)):
            same(first, second, f"{path}.{number}")
    else:
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other, path


@pytest.mark.parametrize("ema", [False, True])
def test_batch_statistics_are_the_mean_over_the_processes(tmp_path, ema):
    """Without learning, those of each process follow from its own images alone."""
    changes = {"model_ema": True, "model_ema_decay": 0.0} if ema else {}  # an average that follows the model at once
    recipe = tiny_recipe(**RESNET, lr=0.0, head={"name": "linear"}, epochs=1, **changes)
    data = tiny_arrays(tmp_path / "data")
    assert train_in_two_processes(recipe, data, tmp_path / "run") == [0, 0]
    found = []
    for rank in range(2):
        loader = open_data(recipe, data, Process(torch.device("cpu"), rank, 2)).train
        seed_everything(recipe.seed)
        model = build_model(recipe, 3).train()
        mean, std = (255 * torch.tensor(numbers)[:, None, None] for numbers in (recipe.mean, recipe.std))
        for (batch,) in loader.epoch(0):
            model((batch.images - mean) / std)
        found.append(dict(model.named_buffers()))
    saved = read_weights(tmp_path / "run" / LAST)
    for name in ("bn1.running_mean", "bn1.running_var", "layer4.1.bn2.running_mean"):
        first, second = found[0][name], found[1][name]
        torch.testing.assert_close(saved[name], (first + second) / 2, rtol=1e-4, atol=1e-5)
        assert (first - second).abs().max() > 5e-4  # far more than the tolerance


@pytest.mark.parametrize("changes", [{}, {"model_ema": True, "model_ema_decay": 0.8}], ids=["plain", "average"])
def test_two_processes_stopped_within_an_epoch_end_as_if_they_never_were(tmp_path, changes):
    recipe, data = tiny_recipe(**RESNET, epochs=2, **changes), tiny_arrays(tmp_path / "data")
    assert train_in_two_processes(recipe, data, tmp_path / "whole") == [0, 0]
    assert train_in_two_processes(recipe, data, tmp_path / "parts", stop_after=3) == [signal.SIGTERM] * 2
    assert read_torch(tmp_path / "parts" / STATE)["progress"]["stopped_by"] == signal.SIGTERM
    assert train_in_two_processes(recipe, data, tmp_path / "parts", resume="auto") == [0, 0]
    for name in (LAST, BEST):
        same(read_weights(tmp_path / "whole" / name), read_weights(tmp_path / "parts" / name))
    same(*(read_torch(tmp_path / name / STATE) for name in ("whole", "parts")))


def test_another_number_of_processes_goes_on_with_a_run(tmp_path):
    recipe, data = tiny_recipe(crop="none", hflip=0.0), tiny_arrays(tmp_path / "data")
    whole = train(recipe, data, tmp_path / "whole", quiet=True)
    assert train_in_two_processes(recipe, data, tmp_path / "run", stop_after=3) == [signal.SIGTERM] * 2
    resumed = train(recipe, data, tmp_path / "run", resume="auto", quiet=True)
    for row, expected in zip(resumed.rows, whole.rows, strict=True):
        assert row["train_loss"] == pytest.approx(expected["train_loss"], rel=1e-4)
    train(recipe, data, tmp_path / "one", quiet=True)
    longer = with_changes(recipe, {"epochs": 3})
    assert train_in_two_processes(longer, data, tmp_path / "one", resume="auto") == [0, 0]
    rows = read_torch(tmp_path / "one" / STATE)["progress"]["rows"]
    assert [row["epoch"] for row in rows] == [0, 1, 2]


def test_a_process_that_is_killed_does_not_keep_the_other_waiting_and_nothing_saved_is_lost(tmp_path):
    recipe, data = tiny_recipe(checkpoint_interval=1e-9), tiny_arrays(tmp_path / "data")
    begin, killed = time.monotonic(), {"stop_after": 7, "number": signal.SIGKILL}
    assert train_in_two_processes(recipe, data, tmp_path / "run", **killed) == [1, -signal.SIGKILL]
    assert time.monotonic() - begin < 60
    why = (tmp_path / "run" / "why").read_text()
    assert "another process of this run has ended" in why
    assert f"the last good checkpoint is {tmp_path / 'run' / STATE}" in why
    assert train_in_two_processes(recipe, data, tmp_path / "run", resume="auto") == [0, 0]
    assert train_in_two_processes(recipe, data, tmp_path / "whole") == [0, 0]
    same(read_weights(tmp_path / "whole" / LAST), read_weights(tmp_path / "run" / LAST))
