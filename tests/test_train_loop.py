"""A run from its beginning to its end: what it writes, what it survives, and that it can be repeated to the bit."""

import csv
import json
import math
import multiprocessing
import os
import resource
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
import yaml

import grassy
from grassy.training import checkpoint, loop, parts
from grassy.training import update as update_module
from grassy.training.checkpoint import BEST, LAST, STATE
from grassy.training.loop import Run, TrainingStopped, train
from grassy.training.recipe import Recipe, load_recipe
from grassy.training.validate import validate
from training_cases import tiny_arrays, tiny_folders, tiny_recipe


def weights(folder, name=LAST):
    return checkpoint.read_weights(folder / name)


def assert_same_weights(one, other):
    first, second = weights(one), weights(other)
    assert first.keys() == second.keys()
    for key in first:
        assert torch.equal(first[key], second[key]), key


class StopAfter:
    """Stops a run after some updates, as SIGTERM does."""

    def __init__(self, monkeypatch, updates):
        original = Run._look
        seen = []

        def look(run, told):
            seen.append(run.done)
            if len(seen) == updates:
                os.kill(os.getpid(), signal.SIGTERM)
            return original(run, told)

        monkeypatch.setattr(Run, "_look", look)


# ------------------------------------------------------------------------------------------------ what it does


def test_a_run_learns_and_leaves_its_records(tmp_path):
    recipe = tiny_recipe(epochs=12, opt="adamw", lr=0.01, hflip=0.0)
    state = train(recipe, tiny_arrays(tmp_path / "data"), tmp_path / "run")
    assert state.best >= 70  # chance is 33
    names = {"args.yaml", "environment.json", "summary.csv", "tensorboard", LAST, BEST, STATE}
    assert {entry.name for entry in (tmp_path / "run").iterdir()} == names
    rows = list(csv.DictReader((tmp_path / "run" / "summary.csv").open()))
    assert [int(row["epoch"]) for row in rows] == list(range(12))
    assert float(rows[-1]["train_loss"]) < 0.5 * float(rows[0]["train_loss"])
    assert max(float(row["eval_top1"]) for row in rows) == pytest.approx(state.best)
    assert all(float(row["eval_top5"]) == 100 for row in rows)  # three classes
    facts = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert facts["torch"] == torch.__version__
    assert Recipe(**yaml.safe_load((tmp_path / "run" / "args.yaml").read_text())) == recipe
    assert load_recipe(tmp_path / "run" / "args.yaml") == recipe


def test_tensorboard_shows_losses_angles_and_the_cost_of_the_head(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(tiny_recipe(), tiny_arrays(tmp_path / "data"), tmp_path / "run")
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    scalars = {tag: [event.value for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert len(scalars["train_loss"]) == len(scalars["eval_top1"]) == 2
    assert all(0 <= error < 1e-6 for error in scalars["subspaces/orthonormality_error"])
    assert all(0 < turn < 90 for turn in scalars["subspaces/turn"])
    assert all(norm > 0 for norm in scalars["gradient/subspaces"] + scalars["gradient/others"])
    assert len(scalars["time/head_share"]) == 1
    assert 0 < scalars["time/head_share"][0] < 1


def test_the_best_model_is_rebuilt_from_its_file_alone_and_scores_what_it_scored(tmp_path):
    data = tiny_arrays(tmp_path / "data")
    state = train(tiny_recipe(epochs=5), data, tmp_path / "run")
    assert validate(tmp_path / "run", data).top1 == pytest.approx(state.best)
    model = grassy.load(tmp_path / "run")
    assert not model.training
    assert model.pretrained_cfg["label_names"] == ["class 0", "class 1", "class 2"]
    best = max(state.rows, key=lambda row: row["eval_top1"])
    assert validate(tmp_path / "run" / LAST, data).loss == pytest.approx(state.rows[-1]["eval_loss"])
    assert best["eval_top1"] == state.best


def test_the_turn_that_is_logged_is_the_angle_between_old_and_new_subspaces(tmp_path):
    from grassy.training.diagnostics import largest_turn

    for changes in ({}, {"head_momentum": 0.0}, {"transport": "parallel"}):
        model = torch.nn.Sequential(torch.nn.Linear(6, 6), grassy.create_head("grassmann", 6, 4, k=2))
        optimizer = grassy.make_optimizer(model, "sgd", lr=0.05, **changes)
        for _ in range(3):
            before = model[1].weight.detach().clone()
            optimizer.zero_grad()
            grassy.classification_loss(model, torch.randn(8, 6), torch.randint(4, (8,))).backward()
            optimizer.step()
        angles = grassy.geometry.principal_angles(before, model[1].weight.detach()).rad2deg()
        # Without momentum the gradient is looked at from where the step has led to.
        tolerance = 0.05 if changes.get("head_momentum") == 0 else 1e-3
        assert largest_turn(optimizer) == pytest.approx(float(angles.max()), rel=tolerance)


@pytest.mark.parametrize("head", ["linear", "cosine", "arcface", "multi", "softtriple", "subcenter-arcface"])
def test_every_head_trains(tmp_path, head):
    train(tiny_recipe(head={"name": head}, epochs=1), tiny_arrays(tmp_path / "data"), tmp_path / "run")
    assert type(grassy.load(tmp_path / "run").head) is type(grassy.create_head(head, 4, 2))


@pytest.mark.parametrize(
    "changes",
    [
        {"mixup": 0.2, "cutmix": 1.0, "smoothing": 0.1},
        {"mixup": 0.2, "loss": "bce", "head": {"name": "linear"}},
        {"smoothing": 0.1, "reprob": 0.9, "aug_repeats": 2},
        {"opt": "adamw", "lr": 1e-3, "head_lr": 0.1, "clip_grad": 1.0, "layer_decay": 0.8},
        {"opt": "lamb", "lr": 1e-3, "model_ema": True, "model_ema_decay": 0.9},
        {"sched": "step", "decay_milestones": [1], "warmup_epochs": 0.5, "amp": "bfloat16"},
        {"drop_path": 0.1, "color_jitter": 0.3, "aa": "3a", "crop": "resized", "nonfinite": "skip"},
        {"head": {"name": "grassmann", "k": 2, "riemannian": False}, "channels_last": False, "val_interval": 5},
        {"head": {"name": "grassmann", "k": 1, "normalize": False, "dropout": 0.3}, "retraction": "qf"},
    ],
    ids=lambda changes: "-".join(map(str, changes)),
)
def test_every_option_trains_and_gives_the_same_run_twice(tmp_path, changes):
    data = tiny_arrays(tmp_path / "data")
    for name in ("one", "two"):
        state = train(tiny_recipe(**changes), data, tmp_path / name)
        assert math.isfinite(state.rows[-1]["train_loss"])
        assert math.isfinite(state.rows[-1]["eval_loss"])
    assert_same_weights(tmp_path / "one", tmp_path / "two")


def test_another_seed_is_another_run(tmp_path):
    data = tiny_arrays(tmp_path / "data")
    for seed in (0, 1):
        train(tiny_recipe(seed=seed), data, tmp_path / str(seed))
    with pytest.raises(AssertionError):
        assert_same_weights(tmp_path / "0", tmp_path / "1")


def test_accumulated_parts_equal_one_batch(tmp_path):
    data = tiny_arrays(tmp_path / "data")
    for number in (1, 4):
        train(tiny_recipe(grad_accum_steps=number), data, tmp_path / str(number))
    one, four = weights(tmp_path / "1"), weights(tmp_path / "4")
    for key in one:
        torch.testing.assert_close(four[key], one[key], rtol=1e-4, atol=1e-5)


def test_the_average_is_what_is_validated_and_saved(tmp_path):
    recipe = tiny_recipe(model_ema=True, model_ema_decay=0.9)
    train(recipe, tiny_arrays(tmp_path / "data"), tmp_path / "run")
    state = checkpoint.read_torch(tmp_path / "run" / STATE)
    saved = weights(tmp_path / "run")
    assert torch.equal(saved["head.weight"], state["average"]["module.head.weight"])
    assert not torch.equal(saved["head.weight"], state["model"]["head.weight"])
    assert float(grassy.geometry.orthonormality_error(saved["head.weight"])) < 1e-6


def test_fine_tuning_the_head_alone_leaves_everything_else_as_it_was(tmp_path):
    data = tiny_arrays(tmp_path / "data")
    small = {"model": "resnet18_cifar", "model_kwargs": {"channels": [4, 4, 4, 4]}}
    train(tiny_recipe(head={"name": "linear"}, **small), data, tmp_path / "linear")
    start = str(tmp_path / "linear" / LAST)
    train(tiny_recipe(initial_checkpoint=start, freeze=True, **small), data, tmp_path / "head")
    train(tiny_recipe(initial_checkpoint=start, **small), data, tmp_path / "all")
    old, head, everything = (weights(tmp_path / name) for name in ("linear", "head", "all"))
    for key in old:
        if not key.startswith("fc."):
            assert torch.equal(head[key], old[key]), key  # batch statistics included
    assert not torch.equal(everything["conv1.weight"], old["conv1.weight"])
    assert head["fc.weight"].shape == (3, 2, 4)


def test_weights_that_do_not_fit_are_refused(tmp_path):
    data = tiny_arrays(tmp_path / "data")
    train(tiny_recipe(epochs=1), data, tmp_path / "tiny")
    recipe = tiny_recipe(initial_checkpoint=str(tmp_path / "tiny"), model="resnet18_cifar", model_kwargs={})
    with pytest.raises(ValueError, match=r"does not fit the model: \d+ of \d+ tensors are missing"):
        train(recipe, data, tmp_path / "other")
    assert not (tmp_path / "other").exists()


# ------------------------------------------------------------------------------------------------ resuming


@pytest.mark.parametrize("updates", [3, 5, 7], ids=["in an epoch", "at its end", "in the next"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"mixup": 0.3, "reprob": 0.5, "opt": "adamw", "lr": 1e-3, "drop_path": 0.2, "model_ema": True},
        {"head": {"name": "linear", "dropout": 0.2}, "opt": "lamb", "loader": "workers", "crop": "resized"},
    ],
    ids=["plain", "adamw and mixing", "lamb and workers"],
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
    first, second = (checkpoint.read_torch(tmp_path / name / STATE) for name in ("whole", "parts"))
    for one, other in zip(first["optimizer"]["state"].values(), second["optimizer"]["state"].values(), strict=True):
        for key in one:
            assert torch.equal(torch.as_tensor(one[key]), torch.as_tensor(other[key])), key
    timeless = [{key: row[key] for key in row if key != "seconds"} for row in whole.rows]
    assert [{key: row[key] for key in row if key != "seconds"} for row in resumed.rows] == timeless


def test_a_folder_that_holds_a_run_is_not_written_over(tmp_path):
    data = tiny_arrays(tmp_path / "data")
    train(tiny_recipe(epochs=1), data, tmp_path / "run")
    before = (tmp_path / "run" / LAST).read_bytes()
    with pytest.raises(ValueError, match="holds a run already"):
        train(tiny_recipe(), data, tmp_path / "run")
    assert (tmp_path / "run" / LAST).read_bytes() == before


def test_resuming_from_nothing_from_damage_and_from_another_recipe_is_said(tmp_path):
    data = tiny_arrays(tmp_path / "data")
    with pytest.raises(ValueError, match="nothing to resume from"):
        train(tiny_recipe(), data, tmp_path / "run", resume=str(tmp_path / "nowhere"))
    train(tiny_recipe(epochs=1), data, tmp_path / "run", resume="auto")  # nothing there yet: begins
    with pytest.raises(ValueError, match=r"a run with head=.*grassmann.*, not .*linear"):
        train(tiny_recipe(head={"name": "linear"}), data, tmp_path / "run", resume="auto")
    with pytest.raises(ValueError, match=r"a run with lr=0\.05, not 0\.1"):
        train(tiny_recipe(lr=0.1), data, tmp_path / "run", resume="auto")
    with pytest.raises(ValueError, match="5 updates an epoch, not 3"):
        train(tiny_recipe(epochs=3), tiny_arrays(tmp_path / "less", images=24), tmp_path / "run", resume="auto")
    with pytest.raises(ValueError, match="holds weights alone"):
        train(tiny_recipe(), data, tmp_path / "other", resume=str(tmp_path / "run" / LAST))
    whole = (tmp_path / "run" / STATE).read_bytes()
    (tmp_path / "run" / STATE).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"resume\.pt is not a whole file"):
        train(tiny_recipe(epochs=3), data, tmp_path / "run", resume="auto")


def test_a_finished_run_resumed_with_more_epochs_goes_on(tmp_path):
    data = tiny_arrays(tmp_path / "data")
    train(tiny_recipe(epochs=1), data, tmp_path / "run")
    state = train(tiny_recipe(epochs=3), data, tmp_path / "run", resume="auto")
    assert [row["epoch"] for row in state.rows] == [0, 1, 2]


def train_command(data, output, *settings):
    script = (
        "import sys, torch; from grassy.cli import main; from grassy.torchvision_import import import_torchvision; "
        "import_torchvision(); torch.set_num_threads(1); sys.exit(main(sys.argv[1:]))"
    )
    recipe = output.parent / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(tiny_recipe().to_dict()))
    words = ["train", str(recipe), "--data-dir", str(data), "--output", str(output), "--resume", "auto", *settings]
    return [sys.executable, "-c", script, *words]


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
        Doomed.budget, write = budget, checkpoint.write_atomically
        checkpoint.write_atomically = lambda path, put: write(path, lambda file: put(Doomed(file)))
        train(recipe, data, output, resume="auto", quiet=True)

    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join()
    return process.exitcode


def test_killed_ten_times_while_saving_it_always_finds_a_whole_checkpoint_and_ends_the_same(tmp_path):
    """Killed after a random number of bytes of the files that a run writes, up to two and a half savings."""
    data = tiny_arrays(tmp_path / "data")
    recipe = tiny_recipe(epochs=16, checkpoint_interval=0)
    train(recipe, data, tmp_path / "whole")
    run = tmp_path / "run"
    one_saving = sum((tmp_path / "whole" / name).stat().st_size for name in (BEST, LAST, STATE))
    rng = np.random.default_rng(0)
    resumed_at, torn = set(), 0
    for _ in range(10):
        code = train_in_a_process_of_its_own(recipe, data, run, int(rng.integers(0, 2.5 * one_saving)))
        assert code == -signal.SIGKILL
        torn += len(list(run.glob(".writing-*")))
        for name in (LAST, BEST):
            if (run / name).exists():
                checkpoint.read_weights(run / name)
        if (run / STATE).exists():
            resumed_at.add(checkpoint.read_torch(run / STATE)["progress"]["epoch"])
    assert torn >= 5  # it was in the middle of writing
    assert len(resumed_at) >= 3
    assert train_in_a_process_of_its_own(recipe, data, run, 10**12) == 0
    assert_same_weights(tmp_path / "whole", run)
    assert not list(run.glob(".writing-*"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_finishes_the_update_saves_and_exits_cleanly(tmp_path, number):
    data = tiny_arrays(tmp_path / "data")
    command = train_command(data, tmp_path / "run", "epochs=100000", "loader=workers", "workers=1")
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    while "epoch 3/" not in process.stderr.readline():
        assert process.poll() is None
    os.killpg(process.pid, number)  # as a terminal, Slurm and timeout do: the workers get it too
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert "and saved; --resume auto goes on" in errors
    assert "Traceback" not in errors
    progress = checkpoint.read_torch(tmp_path / "run" / STATE)["progress"]
    assert progress["epoch"] >= 3


# ------------------------------------------------------------------------------------------------ trouble


def poison(folder, recipe):
    """Make the loss infinite: a learning rate beyond all reason."""
    return train(recipe.changed({"lr": 1e30, "head": {"name": "linear"}}), tiny_arrays(folder / "data"), folder / "run")


def test_a_loss_that_is_not_finite_stops_with_the_update_the_images_and_the_last_good_checkpoint(tmp_path):
    with pytest.raises(TrainingStopped, match=r"not finite at update \d of epoch 1, on train\.npz\[\d+\] and 7 other"):
        poison(tmp_path, tiny_recipe())
    assert len((tmp_path / "run" / loop.NONFINITE).read_text().splitlines()) == 8
    assert not (tmp_path / "run" / STATE).exists()


def test_the_images_that_are_named_are_those_of_the_batch(tmp_path, monkeypatch):
    data = tiny_arrays(tmp_path / "data")
    recipe = tiny_recipe(epochs=3, checkpoint_interval=0)
    calls = []
    original = update_module.Update.__call__

    def call(update, parts):
        calls.append(parts)
        if len(calls) == 8:  # the third update of the second epoch
            parts = [(images, labels) for images, labels in parts]
            update.prepare.mean.fill_(math.nan)
        original(update, parts)

    monkeypatch.setattr(update_module.Update, "__call__", call)
    with pytest.raises(TrainingStopped, match=r"update 3 of epoch 2.*last good checkpoint is .*resume\.pt"):
        train(recipe, data, tmp_path / "run")
    named = [int(line.split("[")[1][:-1]) for line in (tmp_path / "run" / loop.NONFINITE).read_text().splitlines()]
    labels = np.load(data / "train.npz")["y"]
    assert sorted(labels[named]) == sorted(calls[-1][0][1].tolist())
    assert checkpoint.read_torch(tmp_path / "run" / STATE)["progress"]["epoch"] == 1


def test_such_updates_can_be_skipped(tmp_path, monkeypatch):
    data = tiny_arrays(tmp_path / "data")
    original = update_module.Update.__call__
    seen = []

    def call(update, parts):
        seen.append(0)
        mean = update.prepare.mean.clone()
        if len(seen) == 4:
            update.prepare.mean.fill_(math.nan)
        before = [p.clone() for p in update.model.parameters()]
        original(update, parts)
        changed = any(not torch.equal(p, q) for p, q in zip(before, update.model.parameters(), strict=True))
        assert changed == (len(seen) != 4)
        update.prepare.mean.copy_(mean)

    monkeypatch.setattr(update_module.Update, "__call__", call)
    state = train(tiny_recipe(nonfinite="skip"), data, tmp_path / "run")
    assert state.epoch == 2
    assert math.isfinite(state.rows[0]["train_loss"])


def test_broken_images_are_named_counted_and_survived(tmp_path, capsys):
    folder = tiny_folders(tmp_path / "data")
    (folder / "train" / "cat" / "3.png").write_bytes(b"nothing")
    (folder / "val" / "owl" / "0.png").write_bytes(b"nothing")
    state = train(tiny_recipe(batch_size=6), folder, tmp_path / "run")
    assert len(state.unreadable) == 2
    said = capsys.readouterr().err
    assert said.count("cannot read") == 2
    assert "(2 skipped so far)" in said


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
    checkpoint.save_state({"a": torch.ones(3)}, path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
        with pytest.raises(OSError, match="could not be written"):
            checkpoint.save_state({"a": torch.ones(10000)}, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)
    assert checkpoint.read_torch(path)["a"].tolist() == [1, 1, 1]
    assert [entry.name for entry in tmp_path.iterdir()] == ["state.pt"]


def test_out_of_memory_is_one_line_with_advice(tmp_path, monkeypatch):
    def call(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

    monkeypatch.setattr(update_module.Update, "__call__", call)
    with pytest.raises(TrainingStopped, match=r"out of memory with 8 images of 8 pixels .* raise grad_accum_steps"):
        train(tiny_recipe(), tiny_arrays(tmp_path / "data"), tmp_path / "run")


def test_a_terminal_sees_a_bar_and_a_file_sees_lines(tmp_path):
    import pty

    data = tiny_arrays(tmp_path / "data")
    command = train_command(data, tmp_path / "run", "epochs=3")
    leader, follower = pty.openpty()
    process = subprocess.Popen(command, stderr=follower, stdout=subprocess.PIPE, text=True)
    os.close(follower)
    shown = b""
    while True:
        try:
            chunk = os.read(leader, 4096)
        except OSError:
            break
        if not chunk:
            break
        shown += chunk
    assert process.wait() == 0
    text = shown.decode()
    for word in ("epoch", "loss", "top-1", "images/s", "\x1b["):
        assert word in text
    plain = subprocess.run(train_command(data, tmp_path / "again", "epochs=3"), capture_output=True, text=True)
    assert "\x1b[" not in plain.stderr
    first, *lines = plain.stderr.splitlines()
    assert first.startswith("vit_tiny_patch16_224 with head grassmann")
    assert [line.split(":")[0] for line in lines] == ["epoch 1/3", "epoch 2/3", "epoch 3/3"]
    assert plain.stdout.startswith("best top-1")


# ------------------------------------------------------------------------------------------------ found in review


def test_the_file_of_the_best_weights_describes_the_epoch_that_they_are_from(tmp_path):
    data = tiny_arrays(tmp_path / "data")
    state = train(tiny_recipe(epochs=12, opt="adamw", lr=0.01), data, tmp_path / "run", quiet=True)
    about = checkpoint.read_description(tmp_path / "run" / BEST)
    rows = [row for row in state.rows if row["eval_top1"] == state.best]
    assert about.epoch == min(rows, key=lambda row: row["eval_loss"])["epoch"] != state.rows[-1]["epoch"]
    metrics = validate(tmp_path / "run" / BEST, data)
    assert about.metrics["eval_loss"] == pytest.approx(metrics.loss)
    assert about.metrics["eval_top1"] == pytest.approx(metrics.top1)


def test_skipping_an_update_leaves_batch_statistics_alone_and_too_many_in_a_row_stop(tmp_path, monkeypatch):
    data = tiny_arrays(tmp_path / "data")
    small = {"model": "resnet18_cifar", "model_kwargs": {"channels": [4, 4, 4, 4]}, "nonfinite": "skip"}
    original, seen = update_module.Update.__call__, []

    def call(update, parts):
        seen.append(0)
        mean = update.prepare.mean.clone()
        if len(seen) == 3:
            update.prepare.mean.fill_(math.nan)
        original(update, parts)
        update.prepare.mean.copy_(mean)

    with monkeypatch.context() as patch:
        patch.setattr(update_module.Update, "__call__", call)
        state = train(tiny_recipe(**small), data, tmp_path / "run", quiet=True)
    assert math.isfinite(state.rows[-1]["eval_loss"])
    assert all(value.isfinite().all() for value in weights(tmp_path / "run").values())
    with pytest.raises(TrainingStopped, match="the last of 20 in a row that were skipped"):
        train(tiny_recipe(lr=1e30, epochs=9, nonfinite="skip"), data, tmp_path / "nan", quiet=True)
    assert not (tmp_path / "nan" / LAST).exists()


def test_a_validation_loss_that_is_not_finite_stops_the_run(tmp_path, monkeypatch):
    from grassy.training.evaluate import Metrics

    monkeypatch.setattr(loop, "evaluate", lambda *_: (Metrics(math.nan, 50.0, 100.0, 20), []))
    with pytest.raises(TrainingStopped, match="validation loss is not finite after epoch 1"):
        train(tiny_recipe(), tiny_arrays(tmp_path / "data"), tmp_path / "run", quiet=True)


def test_a_checkpoint_is_written_within_an_epoch_when_it_is_due(tmp_path, monkeypatch):
    data = tiny_arrays(tmp_path / "data")
    saved = []
    original = Run._save

    def save(run):
        saved.append((run.state.epoch, run.state.update))
        original(run)

    monkeypatch.setattr(Run, "_save", save)
    train(tiny_recipe(checkpoint_interval=1e-9), data, tmp_path / "often", quiet=True)
    assert {(0, 1), (0, 2), (1, 3), (2, 0)} <= set(saved)
    saved.clear()
    train(tiny_recipe(), data, tmp_path / "once", quiet=True)
    assert saved == [(2, 0)]
    assert_same_weights(tmp_path / "often", tmp_path / "once")


def test_a_finished_run_is_left_as_it_is(tmp_path, capsys):
    data = tiny_arrays(tmp_path / "data")
    train(tiny_recipe(), data, tmp_path / "run", quiet=True)
    before = {file.name: file.read_bytes() for file in (tmp_path / "run").iterdir() if file.is_file()}
    train(tiny_recipe(), data, tmp_path / "run", resume="auto")
    assert "is finished: 2 epochs of 2" in capsys.readouterr().err
    assert {file.name: file.read_bytes() for file in (tmp_path / "run").iterdir() if file.is_file()} == before


def test_a_run_resumed_into_another_folder_takes_its_best_weights_along_and_writes_over_nothing(tmp_path):
    data = tiny_arrays(tmp_path / "data")
    train(tiny_recipe(), data, tmp_path / "old", quiet=True)
    train(tiny_recipe(epochs=3), data, tmp_path / "new", resume=str(tmp_path / "old"), quiet=True)
    assert (tmp_path / "new" / BEST).is_file()
    with pytest.raises(ValueError, match="holds a run already"):
        train(tiny_recipe(epochs=4), data, tmp_path / "new", resume=str(tmp_path / "old"), quiet=True)


def test_two_runs_cannot_write_to_one_folder(tmp_path):
    from grassy.training.distributed import Process

    data = tiny_arrays(tmp_path / "data")
    first = Run(tiny_recipe(), data, tmp_path / "run", "", Process(torch.device("cpu")), True)
    with pytest.raises(ValueError, match="another process is training into"):
        train(tiny_recipe(), data, tmp_path / "run", quiet=True)
    first.close()
    train(tiny_recipe(), data, tmp_path / "run", quiet=True)


def test_a_frozen_backbone_needs_weights(tmp_path):
    with pytest.raises(ValueError, match="give --initial-checkpoint"):
        train(tiny_recipe(freeze=True), tiny_arrays(tmp_path / "data"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: 1 GB")])
def test_running_out_of_memory_before_the_first_update_is_one_line_too(tmp_path, monkeypatch, error):
    def fail(*_):
        raise error

    monkeypatch.setattr(parts, "build_model", fail)
    with pytest.raises(TrainingStopped, match="out of memory"):
        train(tiny_recipe(), tiny_arrays(tmp_path / "data"), tmp_path / "run")
