"""Runs that are stopped, killed and resumed, and the folder they write to."""

import io
import json
import multiprocessing
import os
import signal
import tarfile

import numpy as np
import pytest
import torch
from PIL import Image

from grassy import atomic
from grassy.recipes.changes import with_changes
from grassy.runs import folder, records, state
from grassy.runs import weights as weights_module
from grassy.runs.folder import RunFolder
from grassy.runs.state import STATE, read_torch
from grassy.runs.weights import BEST, LAST, read_weights
from grassy.train import loop
from grassy.train.checkpoints import Checkpoints
from grassy.train.loop import train
from grassy.train.opening import opened_run
from training_cases import assert_same_weights, tiny_arrays, tiny_recipe


class StopAfter:
    """Stops a run after some updates, as SIGTERM does."""

    def __init__(self, monkeypatch, updates):
        original = loop.stop_or_save

        def stop_or_save(run, *others):
            if run.position.done == updates:
                os.kill(os.getpid(), signal.SIGTERM)
            return original(run, *others)

        monkeypatch.setattr(loop, "stop_or_save", stop_or_save)


@pytest.mark.slow
@pytest.mark.parametrize("updates", [3, 5, 7], ids=["in an epoch", "at its end", "in the next"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"mixup": 0.3, "reprob": 0.5, "opt": "adamw", "lr": 1e-3, "drop_path": 0.2, "model_ema": True},
        {"head": {"name": "linear", "dropout": 0.2}, "opt": "lamb", "loader": "workers", "crop": "resized"},
        {"head.standardize": True, "head.gamma": "auto", "transport": "parallel", "head_lr": 0.02},
    ],
    ids=["plain", "adamw and mixing", "lamb and workers", "standardised and parallel"],
)
def test_a_run_that_was_stopped_and_resumed_ends_as_if_it_never_was(tmp_path, monkeypatch, changes, updates):
    recipe = tiny_recipe(**changes)
    data = tiny_arrays(tmp_path / "data")
    whole = train(recipe, data, tmp_path / "whole")
    with monkeypatch.context() as patch:
        StopAfter(patch, updates)
        stopped = train(recipe, data, tmp_path / "parts")
    assert stopped.stopped_by == signal.SIGTERM
    assert stopped.epoch < recipe.epochs
    resumed = train(recipe, data, tmp_path / "parts", resume="auto")
    assert_same_weights(tmp_path / "whole", tmp_path / "parts")
    first, second = (read_torch(tmp_path / name / STATE) for name in ("whole", "parts"))
    for one, other in zip(first["optimizer"]["state"].values(), second["optimizer"]["state"].values(), strict=True):
        for key in one:
            assert torch.equal(torch.as_tensor(one[key]), torch.as_tensor(other[key])), key
    timeless = [{key: row[key] for key in row if key not in ("seconds", "input_share")} for row in whole.rows]
    assert [{key: row[key] for key in row if key not in ("seconds", "input_share")} for row in resumed.rows] == timeless


def make_shards(folder, shards=3, images=8):
    """A WebDataset with `images` images in each shard."""
    splits = {}
    for split in ("train", "validation"):
        files = [f"{split}-{shard:04}.tar" for shard in range(shards)]
        for shard, name in enumerate(files):
            with tarfile.open(folder / name, "w") as tar:
                for i in range(images):
                    file = io.BytesIO()
                    Image.new("RGB", (8, 8), (10 * shard, 10 * i, 9)).save(file, "png")
                    for suffix, data in (("png", file.getvalue()), ("cls", str(i % 3).encode())):
                        info = tarfile.TarInfo(f"{shard}{i:04}.{suffix}")
                        info.size = len(data)
                        tar.addfile(info, io.BytesIO(data))
        lengths = {"num_samples": shards * images, "shard_lengths": [images] * shards}
        splits[split] = {"name": split, "filenames": files, **lengths}
    (folder / "_info.json").write_text(json.dumps({"splits": splits}))
    return folder


@pytest.mark.parametrize(("workers", "note"), [(1, None), (2, "the rest of epoch 1 repeats some images")])
def test_a_stream_that_goes_on_with_other_readers_says_what_that_means(tmp_path, monkeypatch, capsys, workers, note):
    pytest.importorskip("webdataset")
    data = make_shards(tmp_path)
    recipe = tiny_recipe(dataset="wds/shards", num_classes=3, crop="none", batch_size=6, epochs=1, workers=1)
    with monkeypatch.context() as patch:
        StopAfter(patch, 2)
        train(recipe, data, tmp_path / "run")
    capsys.readouterr()
    train(with_changes(recipe, {"workers": workers}), data, tmp_path / "run", resume="auto")
    said = capsys.readouterr().err
    assert ("repeats some images" in said) == (note is not None)
    if note:
        assert f"{note} and leaves out others" in said
        assert "its readers, workers=1 processes=1 before and workers=2 processes=1 now" in said


def test_a_rule_for_gamma_that_has_changed_since_does_not_change_a_run(tmp_path, monkeypatch):
    recipe, data = tiny_recipe(**{"head.gamma": "auto"}), tiny_arrays(tmp_path / "data")
    with monkeypatch.context() as patch:
        StopAfter(patch, 3)
        train(recipe, data, tmp_path / "run")
    monkeypatch.setattr("grassy.heads.grassmann.automatic_gamma", lambda *_: 3.5)
    with pytest.raises(ValueError, match=r"belongs to a run with head .*'gamma': .* makes .*'gamma': 3.5.* of it"):
        train(recipe, data, tmp_path / "run", resume="auto")


def test_a_folder_that_holds_a_run_is_not_written_over(tmp_path):
    data = tiny_arrays(tmp_path / "data")
    train(tiny_recipe(epochs=1), data, tmp_path / "run")
    before = (tmp_path / "run" / LAST).read_bytes()
    with pytest.raises(ValueError, match="holds a run already"):
        train(tiny_recipe(), data, tmp_path / "run")
    assert (tmp_path / "run" / LAST).read_bytes() == before


@pytest.mark.parametrize("left", [[BEST], [LAST], [BEST, LAST]])
@pytest.mark.parametrize("resume", ["", "auto"])
def test_weights_without_a_state_are_not_written_over(tmp_path, left, resume):
    """The state is the largest file of a run: one that a user deletes."""
    data, run = tiny_arrays(tmp_path / "data"), tmp_path / "run"
    train(tiny_recipe(epochs=1), data, run)
    for name in {BEST, LAST, STATE} - set(left):
        (run / name).unlink()
    before = {name: (run / name).read_bytes() for name in left}
    with pytest.raises(ValueError, match="holds weights, but no resume.pt" if resume else "holds a run already"):
        train(tiny_recipe(epochs=1), data, run, resume=resume)
    assert {name: (run / name).read_bytes() for name in left} == before


def test_a_run_killed_while_it_saved_for_the_first_time_begins_again(tmp_path, monkeypatch):
    data, run = tiny_arrays(tmp_path / "data"), tmp_path / "run"

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(folder, "write_torch", killed)
        with pytest.raises(KeyboardInterrupt):
            train(tiny_recipe(epochs=1), data, run, resume="auto")
    assert (run / LAST).exists()
    assert not (run / STATE).exists()
    train(tiny_recipe(epochs=1), data, run, resume="auto")
    assert (run / STATE).exists()
    assert not (run / ".first-checkpoint").exists()


def test_a_run_resumed_elsewhere_and_killed_before_it_saved_can_be_resumed_again(tmp_path):
    data = tiny_arrays(tmp_path / "data")
    train(tiny_recipe(epochs=1), data, tmp_path / "first")
    folder = RunFolder(tmp_path / "second")
    folder.claim()
    folder.adopt_best(tmp_path / "first" / STATE)  # and then it was killed
    folder.release()
    assert (tmp_path / "second" / BEST).exists()
    train(tiny_recipe(epochs=2), data, tmp_path / "second", resume=str(tmp_path / "first"))
    (tmp_path / "second" / STATE).unlink()
    with pytest.raises(ValueError, match=r"holds weights, but no resume\.pt"):
        train(tiny_recipe(epochs=2), data, tmp_path / "second", resume="auto")


def test_another_number_of_images_is_other_data(tmp_path):
    data, run = tiny_arrays(tmp_path / "data", images=40), tmp_path / "run"
    recipe = tiny_recipe(epochs=1, batch_size=16)
    train(recipe, data, run)
    tiny_arrays(data, images=41)
    with pytest.raises(ValueError, match="a run with 40 images, not 41"):
        train(with_changes(recipe, {"epochs": 2}), data, run, resume="auto")


def test_resuming_from_nothing_from_damage_and_from_another_recipe_is_said(tmp_path):
    data = tiny_arrays(tmp_path / "data")
    with pytest.raises(ValueError, match="nothing to resume from"):
        train(tiny_recipe(), data, tmp_path / "run", resume=str(tmp_path / "nowhere"))
    train(tiny_recipe(epochs=1), data, tmp_path / "run", resume="auto")  # nothing there yet: begins
    with pytest.raises(ValueError, match=r"a run with head=.*grassmann.*, not .*linear"):
        train(tiny_recipe(head={"name": "linear"}), data, tmp_path / "run", resume="auto")
    with pytest.raises(ValueError, match=r"a run with lr=0\.05, not 0\.1"):
        train(tiny_recipe(lr=0.1), data, tmp_path / "run", resume="auto")
    with pytest.raises(ValueError, match="5 updates per epoch, not 3"):
        train(tiny_recipe(epochs=3), tiny_arrays(tmp_path / "less", images=24), tmp_path / "run", resume="auto")
    with pytest.raises(ValueError, match="a run with a class 'class 2', which is not here: is this other data"):
        train(
            tiny_recipe(epochs=3), tiny_arrays(tmp_path / "renamed", last="class two"), tmp_path / "run", resume="auto"
        )
    with pytest.raises(ValueError, match="holds weights alone"):
        train(tiny_recipe(), data, tmp_path / "other", resume=str(tmp_path / "run" / LAST))
    whole = (tmp_path / "run" / STATE).read_bytes()
    (tmp_path / "run" / STATE).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"resume\.pt is not a complete torch.save file"):
        train(tiny_recipe(epochs=3), data, tmp_path / "run", resume="auto")


def test_a_resumed_run_remembers_what_it_ran_on_before(tmp_path, monkeypatch):
    data = tiny_arrays(tmp_path / "data")
    facts = lambda: json.loads((tmp_path / "run" / "environment.json").read_text())
    train(tiny_recipe(epochs=1), data, tmp_path / "run", quiet=True)
    first = facts()
    assert "earlier" not in first
    monkeypatch.setattr("grassy.runs.records._commit", lambda: "another")
    for epochs in (2, 3):
        train(tiny_recipe(epochs=epochs), data, tmp_path / "run", resume="auto", quiet=True)
    assert facts()["commit"] == "another"
    assert [each["commit"] for each in facts()["earlier"]] == [first["commit"], "another"]
    assert facts()["earlier"][0] == first


@pytest.mark.parametrize(("edited", "kept"), [("[]", None), ("null", None), ('{"earlier": 3}', [3, {}])])
def test_an_edited_environment_does_not_stop_a_run_from_resuming(edited, kept, tmp_path):
    (tmp_path / "environment.json").write_text(edited)
    records.save_settings(tmp_path, tiny_recipe(), None, False, 1, torch.device("cpu"))
    assert json.loads((tmp_path / "environment.json").read_text()).get("earlier") == kept


def test_a_finished_run_resumed_with_more_epochs_goes_on(tmp_path):
    data = tiny_arrays(tmp_path / "data")
    train(tiny_recipe(epochs=1), data, tmp_path / "run")
    state = train(tiny_recipe(epochs=3), data, tmp_path / "run", resume="auto")
    assert [row["epoch"] for row in state.rows] == [0, 1, 2]


def test_a_finished_run_is_left_as_it_is(tmp_path, capsys):
    data = tiny_arrays(tmp_path / "data")
    train(tiny_recipe(), data, tmp_path / "run", quiet=True)
    before = {file.name: file.read_bytes() for file in (tmp_path / "run").iterdir() if file.is_file()}
    train(tiny_recipe(), data, tmp_path / "run", resume="auto")
    assert "is finished: it has 2 epochs" in capsys.readouterr().err
    assert {file.name: file.read_bytes() for file in (tmp_path / "run").iterdir() if file.is_file()} == before


def test_a_finished_run_that_is_given_elsewhere_is_named(tmp_path, capsys):
    data = tiny_arrays(tmp_path / "data")
    train(tiny_recipe(), data, tmp_path / "old", quiet=True)
    train(tiny_recipe(), data, tmp_path / "new", resume=str(tmp_path / "old"))
    assert f"the run in {tmp_path / 'old'} is finished" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_a_run_resumed_into_another_folder_takes_its_best_weights_along_and_writes_over_nothing(tmp_path):
    data = tiny_arrays(tmp_path / "data")
    train(tiny_recipe(), data, tmp_path / "old", quiet=True)
    train(tiny_recipe(epochs=3), data, tmp_path / "new", resume=str(tmp_path / "old"), quiet=True)
    assert (tmp_path / "new" / BEST).is_file()
    with pytest.raises(ValueError, match="holds a run already"):
        train(tiny_recipe(epochs=4), data, tmp_path / "new", resume=str(tmp_path / "old"), quiet=True)


def test_two_runs_cannot_write_to_one_folder(tmp_path):
    from grassy.distributed.processes import Process

    data = tiny_arrays(tmp_path / "data")
    first = opened_run(tiny_recipe(), data, tmp_path / "run", "", Process(torch.device("cpu")), quiet=True)
    with first, pytest.raises(ValueError, match="another process is writing to"):
        train(tiny_recipe(), data, tmp_path / "run", quiet=True)
    train(tiny_recipe(), data, tmp_path / "run", quiet=True)


def test_a_checkpoint_is_written_within_an_epoch_when_it_is_due(tmp_path, monkeypatch):
    data = tiny_arrays(tmp_path / "data")
    saved = []
    original = Checkpoints.save

    def save(checkpoints):
        saved.append((checkpoints.run.position.epoch, checkpoints.run.position.update))
        original(checkpoints)

    monkeypatch.setattr(Checkpoints, "save", save)
    train(tiny_recipe(checkpoint_interval=1e-9), data, tmp_path / "often", quiet=True)
    assert {(0, 1), (0, 2), (1, 3), (2, 0)} <= set(saved)
    saved.clear()
    train(tiny_recipe(), data, tmp_path / "once", quiet=True)
    assert saved == [(2, 0)]
    assert_same_weights(tmp_path / "often", tmp_path / "once")


class Doomed:
    """A file whose process is killed, as by kill -9, once so many bytes have been written to it and its like."""

    budget = 0

    def __init__(self, file):
        self.file = file

    def write(self, data):
        if len(data) > Doomed.budget:
            self.file.write(bytes(data)[: Doomed.budget])
            self.file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        Doomed.budget -= len(data)
        return self.file.write(data)

    def __getattr__(self, name):
        return getattr(self.file, name)


def train_in_a_process_of_its_own(recipe, data, output, budget):
    """The exit code of a run that is killed after writing so many bytes."""

    def work():
        Doomed.budget, write = budget, atomic.write_atomically
        doomed = lambda path, put: write(path, lambda file: put(Doomed(file)))
        for module in (atomic, state, weights_module):
            module.write_atomically = doomed
        train(recipe, data, output, resume="auto", quiet=True)

    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join()
    return process.exitcode


@pytest.mark.slow
def test_killed_fifteen_times_while_saving_it_always_finds_a_whole_checkpoint_and_ends_the_same(tmp_path):
    """Killed after a random number of bytes of the files that a run writes, up to two and a half savings."""
    data = tiny_arrays(tmp_path / "data")
    recipe = tiny_recipe(epochs=24, checkpoint_interval=0)
    train(recipe, data, tmp_path / "whole")
    run = tmp_path / "run"
    one_saving = sum((tmp_path / "whole" / name).stat().st_size for name in (BEST, LAST, STATE))
    rng = np.random.default_rng(0)
    resumed_at, torn = set(), 0
    for _ in range(15):
        code = train_in_a_process_of_its_own(recipe, data, run, int(rng.integers(0, 2.5 * one_saving)))
        assert code == -signal.SIGKILL
        torn += len(list(run.glob(".writing-*")))
        for name in (LAST, BEST):
            if (run / name).exists():
                read_weights(run / name)
        if (run / STATE).exists():
            resumed_at.add(read_torch(run / STATE)["progress"]["epoch"])
    assert torn >= 7  # it was in the middle of writing
    assert len(resumed_at) >= 5
    assert train_in_a_process_of_its_own(recipe, data, run, 10**12) == 0
    assert_same_weights(tmp_path / "whole", run)
    assert not list(run.glob(".writing-*"))
