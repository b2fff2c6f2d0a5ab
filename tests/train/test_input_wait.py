"""What a run says of the time in which it waits for images."""

import csv
import time
from types import SimpleNamespace

import numpy as np
import pytest

from grassy.data.class_folders import FolderImages, Place
from grassy.data.images import ArrayImages
from grassy.data.stream_loader import StreamLoader
from grassy.data.worker_loader import WorkerLoader
from grassy.data.worker_processes import processors
from grassy.train import input_wait
from grassy.train.input_wait import InputWait, advice_on_waiting
from grassy.train.loop import train
from ranks import on_ranks
from training_cases import tiny_arrays, tiny_folders, tiny_recipe


class Clock:
    """A clock that moves only when it is told to."""

    def __init__(self):
        self.now = 100.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(input_wait, "time", clock)
    return clock


def run_through(wait, clock, loading, working, batches=5):
    def produce():
        for number in range(batches):
            clock.now += loading
            yield number

    seen = []
    for batch in wait.timed(produce()):
        clock.now += working
        seen.append(batch)
    assert seen == list(range(batches))


def test_the_share_is_that_of_the_time_in_which_the_loop_has_no_batch(clock):
    wait = InputWait()
    run_through(wait, clock, loading=3.0, working=1.0)
    assert wait.share == pytest.approx(4 * 3 / (4 * 4 + 1))  # the first batch, for which workers start, is not counted
    run_through(wait, clock, loading=3.0, working=1.0)
    assert wait.share == pytest.approx(3 / 4)  # from the second epoch on it is
    run_through(wait, clock, loading=0.0, working=1.0)
    assert wait.share == 0


def test_the_first_batch_of_an_epoch_counts_as_waiting_but_is_no_reason_for_advice(clock):
    """It takes as long with twice the workers, which advice would ask for."""
    wait = InputWait()
    run_through(wait, clock, loading=1.0, working=1.0)

    def produce():
        clock.now += 6.0  # after the validation, in which the workers had nothing to do
        yield 0
        yield 1

    for _ in wait.timed(produce()):
        clock.now += 1.0
    assert wait.share == pytest.approx(6 / 8)
    assert wait.steady_share == 0


def test_an_epoch_without_batches_has_a_share(clock):
    wait = InputWait()
    run_through(wait, clock, 1.0, 1.0, batches=0)
    assert wait.share == wait.steady_share == 0


def slow_loading(monkeypatch, seconds):
    from grassy.data.worker_loader import Samples

    original = Samples.__getitem__

    def load(self, key):
        time.sleep(seconds)
        return original(self, key)

    monkeypatch.setattr(Samples, "__getitem__", load)


def test_a_run_that_waits_says_so_once_and_records_it(tmp_path, monkeypatch, capsys):
    slow_loading(monkeypatch, 0.02)
    recipe = tiny_recipe(epochs=3, workers=0)
    train(recipe, tiny_folders(tmp_path / "data"), tmp_path / "run")
    said = [line for line in capsys.readouterr().err.splitlines() if "waits for its input" in line]
    assert len(said) == 1
    assert f"try workers={processors()}" in said[0]
    with open(tmp_path / "run" / "summary.csv") as file:
        shares = [float(row["input_share"]) for row in csv.DictReader(file)]
    assert len(shares) == 3
    assert all(0.1 < share < 1 for share in shares)


@pytest.mark.distributed
def test_a_run_waits_for_the_slowest_of_its_processes_and_names_it(tmp_path, monkeypatch, capfd):
    """The others wait inside the sum of gradients, where their own clocks see no input."""
    data = tiny_folders(tmp_path / "data")

    def work(rank):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "2")
        if rank == 1:
            slow_loading(monkeypatch, 0.02)
        return train(tiny_recipe(epochs=2, workers=0), data, tmp_path / "run", device="cpu").rows

    one, other = on_ranks(2, tmp_path, work)
    assert [row["input_share"] for row in one] == [row["input_share"] for row in other]
    assert one[-1]["input_share"] > 0.1
    said = [line for line in capfd.readouterr().err.splitlines() if "waits for its input" in line]
    assert len(said) == 1
    assert said[0].startswith("rank 1 waits for its input")


def test_images_on_the_device_are_not_waited_for(tmp_path, capsys):
    train(tiny_recipe(epochs=1), tiny_arrays(tmp_path / "data"), tmp_path / "run")
    assert "waits for its input" not in capsys.readouterr().err
    with open(tmp_path / "run" / "summary.csv") as file:
        assert all(float(row["input_share"]) < 0.5 for row in csv.DictReader(file))


def files(*names):
    loader = object.__new__(WorkerLoader)
    loader.images = FolderImages(names, [Place(name) for name in names], [0] * len(names), ["a"])
    return SimpleNamespace(train=loader)


def stream(workers):
    loader = object.__new__(StreamLoader)
    loader.images = SimpleNamespace(workers=workers)
    return SimpleNamespace(train=loader)


def arrays():
    loader = object.__new__(WorkerLoader)
    loader.images = ArrayImages(np.zeros((1, 2, 2, 3), np.uint8), np.zeros(1, np.int64), None, "x.npz")
    return SimpleNamespace(train=loader)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (files("a/0.jpg", "a/1.png"), "`grassy pack` decodes them once"),
        (files("a/0.jpg.ppm", "a/1.png.ppm"), "move the pack to a faster disk"),
        (arrays(), "smaller images or less augmentation"),
        (stream(8), "save them in class folders"),
        (stream(3), "its shards allow 3 workers only"),
    ],
)
def test_the_advice_fits_the_images(data, expected, monkeypatch):
    monkeypatch.setattr(input_wait, "processors", lambda: 8)
    recipe = tiny_recipe(workers=8)
    assert advice_on_waiting(0.05, recipe, data) is None
    assert expected in advice_on_waiting(0.5, recipe, data)
    monkeypatch.setattr(input_wait.importlib.util, "find_spec", lambda name: None)
    decodes = ".jpg" in "".join(getattr(data.train.images, "names", [])) and expected.startswith("`grassy")
    assert ("pip install simplejpeg" in advice_on_waiting(0.5, recipe, data)) == decodes


def test_the_advice_fits_the_machine(monkeypatch):
    recipe, data = tiny_recipe(workers=12), files("a/0.jpg")
    monkeypatch.setattr(input_wait, "processors", lambda: 96)
    assert "try workers=96, one per available CPU core" in advice_on_waiting(0.5, recipe, data)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert "try workers=24, one per available CPU core of this process" in advice_on_waiting(0.5, recipe, data)
