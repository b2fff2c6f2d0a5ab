"""What the processes of a run decide alike: which weights are the best, what they resume from, what they divide."""

import dataclasses
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch.distributed as dist

from grassy.distributed import saves
from grassy.recipes.changes import with_changes
from grassy.runs import records
from grassy.runs.folder import RunFolder
from grassy.runs.state import SAVES, STATE, state_in
from grassy.train import agreement, checkpoints, loop, opening, sharding
from grassy.train.loop import TrainingStopped, train
from grassy.train.sharding import has_sharded_weights
from ranks import on_ranks
from training_cases import tiny_arrays, tiny_folders, tiny_recipe

pytestmark = pytest.mark.distributed

GLOO = RuntimeError("[/src/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer")


def run_on_two(recipe, data, output, resume="", before=lambda rank: None):
    """What each of two processes returns, or says."""

    def work(rank):
        os.environ.update(RANK=str(rank), WORLD_SIZE="2")
        before(rank)
        try:
            return train(recipe, data, output, resume, "cpu", quiet=True)
        except (ValueError, OSError) as error:
            return str(error)

    return on_ranks(2, output.parent, work)


@pytest.mark.slow
@pytest.mark.parametrize("value", ["top1", "loss"])
def test_the_best_weights_are_those_of_the_main_process_whatever_another_one_measures(tmp_path, value):
    """Saving sharded weights needs both processes: one that thinks otherwise would make the other wait."""

    def measure_differently(rank):
        evaluate, epochs = loop.evaluate, iter(range(9))

        def other(*arguments):
            metrics, failures = evaluate(*arguments)
            better, epoch = rank == 0, next(epochs)
            changed = {"top1": float(epoch * better), "loss": 1.0 if better or value == "top1" else float("nan")}
            return dataclasses.replace(metrics, **changed), failures

        loop.evaluate = other

    data = tiny_arrays(tmp_path / "data")
    recipe = tiny_recipe(shard_head=True, epochs=3)
    main, other = run_on_two(recipe, data, tmp_path / "run", before=measure_differently)
    assert main.best == other.best == 2
    assert main.best_loss == other.best_loss == 1


@pytest.mark.slow
@pytest.mark.parametrize("error", [dist.DistNetworkError("Connection reset by peer"), GLOO], ids=["torch", "gloo"])
def test_a_process_that_dies_during_a_resume_is_not_blamed_on_the_checkpoint(tmp_path, monkeypatch, error):
    recipe, data = tiny_recipe(shard_head=True, epochs=1), tiny_arrays(tmp_path / "data")
    assert all(position.epoch == 1 for position in run_on_two(recipe, data, tmp_path / "run"))

    def load_state(*_, **__):
        raise error

    monkeypatch.setattr(checkpoints, "load_state", load_state)
    with pytest.raises(TrainingStopped, match=r"another process of this run.*last good checkpoint is .*save-"):
        train(with_changes(recipe, {"epochs": 2}), data, tmp_path / "run", "auto", "cpu", quiet=True)


def test_processes_that_find_different_checkpoints_all_say_so_before_anything_is_built(tmp_path):
    recipe, data = tiny_recipe(epochs=1), tiny_arrays(tmp_path / "data")
    train(recipe, data, tmp_path / "run", device="cpu", quiet=True)

    def see_nothing(rank):
        if rank == 1:
            RunFolder.find_state = lambda *_: None

    messages = run_on_two(with_changes(recipe, {"epochs": 2}), data, tmp_path / "run", "auto", see_nothing)
    for message in messages:
        assert message == (
            f"the processes found different checkpoints, {tmp_path / 'run' / STATE} and none: "
            "--output must be one folder for all machines"
        )


def test_what_one_process_finds_wrong_with_the_folder_all_say(tmp_path):
    data = tiny_arrays(tmp_path / "data")

    def raise_on_one(rank):
        if rank == 1:
            RunFolder.find_state = refuse

    def refuse(*_):
        raise ValueError("it holds a run already")

    messages = run_on_two(tiny_recipe(epochs=1), data, tmp_path / "run", before=raise_on_one)
    assert messages == ["rank 1 of 2: it holds a run already"] * 2


CHANGES = {
    "another class": (lambda data: (data / "train/cat").rename(data / "train/zebra"), "different classes than rank 0"),
    "a lost image": (lambda data: (data / "train/cat/0.png").unlink(), "17 training images, and rank 0 has 18"),
    "another name": (
        lambda data: (data / "train/cat/0.png").rename(data / "train/cat/9.png"),
        "different training image names than rank 0",
    ),
    "another validation image": (
        lambda data: (data / "val/cat/0.png").rename(data / "val/dog/9.png"),
        "different validation image names than rank 0",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_processes_whose_copies_of_the_data_differ_all_say_so_before_anything_is_trained(tmp_path, change):
    """On machines without a shared disk; each process draws images by their index."""
    apart, words = CHANGES[change]
    for rank in range(2):
        tiny_folders(tmp_path / str(rank) / "data")
    apart(tmp_path / "1" / "data")
    if change == "another class":
        (tmp_path / "1/data/val/cat").rename(tmp_path / "1/data/val/zebra")
    recipe = tiny_recipe(epochs=1, crop="resized")
    messages = run_on_two(recipe, Path("data"), tmp_path / "run", before=lambda rank: os.chdir(tmp_path / str(rank)))
    expected = f"rank 1 of 2 has {words}: all processes must see the same data in data"
    assert messages == [expected] * 2
    assert not (tmp_path / "run").exists()


def test_a_process_whose_folder_is_elsewhere_is_named_with_its_place(tmp_path):
    (tmp_path / "1").mkdir()
    tiny_folders(tmp_path / "0" / "data")
    recipe = tiny_recipe(epochs=1, crop="resized")
    messages = run_on_two(recipe, Path("data"), tmp_path / "run", before=lambda rank: os.chdir(tmp_path / str(rank)))
    assert messages == [f"rank 1 of 2: --data-dir data does not exist in {tmp_path / '1'}"] * 2


@pytest.mark.parametrize("split", ["train", "test"])
def test_arrays_are_compared_by_their_labels_also_if_they_stay_on_the_device(tmp_path, split):
    for rank in range(2):
        tiny_arrays(tmp_path / str(rank) / "data")
    file = tmp_path / "1" / "data" / f"{split}.npz"
    arrays = dict(np.load(file))
    np.savez(file, **{**arrays, "y": arrays["y"][::-1]})
    recipe = tiny_recipe(epochs=1)
    messages = run_on_two(recipe, Path("data"), tmp_path / "run", before=lambda rank: os.chdir(tmp_path / str(rank)))
    kind = {"train": "training", "test": "validation"}[split]
    expected = f"rank 1 of 2 has different {kind} labels than rank 0: all processes must see the same data in data"
    assert messages == [expected] * 2


def test_names_that_only_an_image_tells_are_not_all_read():
    """As those of a Hugging Face data set, which would be read as a whole before training."""

    class Slow:
        read = 0

        def __len__(self):
            return 10_000

        def name(self, index):
            Slow.read += 1
            return str(index)

        def labels(self):
            return None

    loader = SimpleNamespace(images=Slow(), updates=1)
    data = SimpleNamespace(train=loader, validation=loader, class_names=None, num_classes=3, held_out=None)
    agreement._facts(data, None)
    assert Slow.read <= 200


@pytest.mark.slow
def test_equal_copies_of_the_data_in_different_folders_are_the_same_data(tmp_path):
    for rank in range(2):
        tiny_folders(tmp_path / str(rank) / "data")
    recipe = tiny_recipe(epochs=1, crop="resized")
    ends = run_on_two(recipe, Path("data"), tmp_path / "run", before=lambda rank: os.chdir(tmp_path / str(rank)))
    assert [position.epoch for position in ends] == [1, 1]


@pytest.mark.parametrize("method", ["claim", "save", "record"])
def test_what_only_the_main_process_does_with_the_folder_fails_in_all(tmp_path, monkeypatch, method):
    """Otherwise the others would report that they have lost a process."""

    def refuse(*_):
        raise OSError(f"no space to {method}")

    if method == "record":  # what is written when the folder is locked
        monkeypatch.setattr(records, "save_settings", refuse)
    else:
        monkeypatch.setattr(RunFolder, method, refuse)
    data = tiny_arrays(tmp_path / "data")
    messages = run_on_two(tiny_recipe(epochs=1), data, tmp_path / "run")
    assert messages == [f"no space to {method}"] * 2


@pytest.fixture(scope="module")
def saved_runs(tmp_path_factory):
    """A folder with data, a run of whole weights and a sharded one."""
    folder = tmp_path_factory.mktemp("saved")
    data = tiny_arrays(folder / "data")
    for name, shard_head in (("whole", False), ("sharded", True)):
        train(tiny_recipe(epochs=1, shard_head=shard_head), data, folder / name, device="cpu", quiet=True)
    return folder


@pytest.mark.parametrize("kind", ["whole", "sharded"])
@pytest.mark.parametrize("trouble", ["damaged", "of another run", "another save"])
def test_a_state_that_one_process_alone_cannot_use_stops_all_with_a_sentence_that_names_it(saved_runs, kind, trouble):
    """As on machines whose folders of the same name hold different files."""
    recipe = tiny_recipe(epochs=2, shard_head=kind == "sharded")
    state = state_in(saved_runs / kind)
    before = {file: file.read_bytes() for file in sorted(saved_runs.rglob("*")) if file.is_file()}

    def on_another_disk(rank):
        if rank == 0:
            return
        read = checkpoints.read_plain if kind == "sharded" else checkpoints.read_torch

        def other(path):
            if trouble == "damaged":
                raise ValueError(f"{path} is damaged: its SHA-256 is no longer the one that it was saved with")
            found = read(path)
            return {**found, "images": 7} if trouble == "of another run" else found

        checkpoints.read_plain = checkpoints.read_torch = other
        if trouble == "another save":
            read_manifest, read_whole = saves._read_manifest, checkpoints.read_torch
            saves._read_manifest = lambda save: {**read_manifest(save), "ranks": 3}
            checkpoints.read_torch = lambda path: {**read_whole(path), "model": {}}

    messages = run_on_two(recipe, saved_runs / "data", saved_runs / kind, "auto", on_another_disk)
    expected = {
        "damaged": f"rank 1 of 2: {state} is damaged: its SHA-256 is no longer the one that it was saved with",
        "of another run": f"rank 1 of 2: {state} belongs to a run with 7 images, not 40: is this other data?",
        "another save": f"rank 1 of 2: {state} does not belong to this recipe: Error(s) in loading state_dict"
        if kind == "whole"
        else f"rank 1 sees another {state} than rank 0: all must see the same folder",
    }[trouble]
    assert all(isinstance(message, str) and expected in message for message in messages), messages
    assert messages[0] == messages[1]
    assert before == {file: file.read_bytes() for file in before}  # nothing was written


def test_data_that_one_process_alone_does_not_find_stops_all(tmp_path):
    data = tiny_arrays(tmp_path / "data")

    def without_data(rank):
        if rank == 1:
            opening.open_data = refuse

    def refuse(*_):
        raise ValueError("there are no images")

    messages = run_on_two(tiny_recipe(epochs=1), data, tmp_path / "run", before=without_data)
    assert messages == ["rank 1 of 2: there are no images"] * 2


def test_a_run_that_starts_on_one_process_grows_and_keeps_its_large_head_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(sharding, "MUCH", 0)
    recipe, data = tiny_recipe(epochs=1), tiny_arrays(tmp_path / "data")
    assert recipe.shard_head == "auto"
    train(recipe, data, tmp_path / "run", device="cpu", quiet=True)

    def expect_whole(rank):
        train_epochs = loop.train_epochs

        def checked(run, *others):
            assert not has_sharded_weights(run.trained.model)
            train_epochs(run, *others)

        loop.train_epochs = checked

    positions = run_on_two(with_changes(recipe, {"epochs": 2}), data, tmp_path / "run", "auto", expect_whole)
    assert [position.epoch for position in positions] == [2, 2]
    assert (tmp_path / "run" / STATE).is_file()
    run_on_two(recipe, data, tmp_path / "other")  # from the beginning, the same head is sharded
    assert (tmp_path / "other" / SAVES).is_dir()
