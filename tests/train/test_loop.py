"""A run from its beginning to its end: what it trains, what it writes, and that it can be repeated to the bit."""

import csv
import json
import math
import os
import subprocess

import pytest
import torch
import yaml
from torch.utils._python_dispatch import TorchDispatchMode

import grassy
from grassy.heads import recommended_gamma
from grassy.inference.validate import validate
from grassy.recipes.changes import with_changes
from grassy.recipes.files import load_recipe
from grassy.recipes.recipe import Recipe
from grassy.runs.state import STATE, read_torch, write_torch
from grassy.runs.weights import BEST, LAST, read_description
from grassy.train.loop import train
from training_cases import assert_same_weights, tiny_arrays, tiny_folders, tiny_recipe, train_command, weights


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
    assert all(0 < angle < 90 for angle in scalars["subspaces/rotation"])
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
    from grassy.train.diagnostics import largest_turn

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


def test_a_gradient_that_is_not_finite_does_not_keep_the_turn_from_being_logged():
    from grassy.train.diagnostics import largest_turn

    head = grassy.create_head("grassmann", 6, 4, k=2)
    optimizer = grassy.make_optimizer(head, "sgd", lr=0.05, head_momentum=0.0)
    head.weight.grad = grassy.geometry.project(head.weight.detach(), torch.randn(4, 2, 6))
    whole = largest_turn(optimizer)
    head.weight.grad = torch.cat([head.weight.grad[:3], torch.full((1, 2, 6), 1e30)])  # its square is infinite
    assert 0 < largest_turn(optimizer) <= whole


@pytest.mark.parametrize(
    ("changes", "degrees"), [({"lr": 1e8}, 64), ({"lr": 1e8, "max_angle": 0.5}, 0.5), ({"lr": 1e8, "factor": 1e-20}, 0)]
)
def test_the_turn_that_is_logged_is_capped_as_the_step_is_and_follows_its_rate(changes, degrees):
    from grassy.train.diagnostics import largest_turn

    head = grassy.create_head("grassmann", 6, 4, k=2)
    factor = changes.pop("factor", 1.0)
    optimizer = grassy.make_optimizer(head, "sgd", lr=changes.pop("lr"), head_lr_factor=factor, **changes)
    head(torch.randn(8, 6)).square().sum().backward()
    optimizer.step()
    assert largest_turn(optimizer) == pytest.approx(math.degrees(degrees), abs=0.1)


class Elements(TorchDispatchMode):
    """Within this, the number of elements of the largest tensor that is made is kept."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in args if isinstance(t, torch.Tensor)}
        for made in result if isinstance(result, list | tuple) else [result]:
            if isinstance(made, torch.Tensor) and made.untyped_storage().data_ptr() not in given:
                Elements.largest = max(Elements.largest, made.numel())
        return result


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_diagnostics_of_a_large_head_need_no_copy_of_its_weight(monkeypatch, momentum):
    """A weight that fills the GPU would train one epoch and then run out of memory."""
    from grassy.optim import clipping
    from grassy.train.diagnostics import after_an_update

    head = grassy.create_head("grassmann", 64, 256, k=4)
    optimizer = grassy.make_optimizer(head, "sgd", lr=0.1, head_momentum=momentum)
    grassy.classification_loss(head, torch.randn(8, 64), torch.arange(8)).backward()
    optimizer.step()
    whole = after_an_update(head, optimizer)
    monkeypatch.setattr(clipping, "_BLOCK_BYTES", head.weight.nbytes // 16)
    Elements.largest = 0
    with Elements():
        in_blocks = after_an_update(head, optimizer)
    assert Elements.largest <= head.weight.numel() // 8
    assert in_blocks == pytest.approx(whole, rel=1e-5, abs=1e-7)
    assert whole["gradient/subspaces"] > 0 < whole["subspaces/rotation"]


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


def test_how_often_a_run_is_looked_at_does_not_change_it(tmp_path):
    data = tiny_arrays(tmp_path / "data")
    for interval in (1, 3):
        train(tiny_recipe(epochs=3, val_interval=interval, model_ema=True), data, tmp_path / str(interval))
    assert_same_weights(tmp_path / "1", tmp_path / "3")


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
    state = read_torch(tmp_path / "run" / STATE)
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


@pytest.mark.slow
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
    epochs = [line.split(":")[0] for line in lines if line.startswith("epoch ")]
    assert epochs == ["epoch 1/3", "epoch 2/3", "epoch 3/3"]
    rows = list(csv.DictReader((tmp_path / "again" / "summary.csv").open()))
    best = max(rows, key=lambda row: (float(row["eval_top1"]), -float(row["eval_loss"])))
    assert [row["epoch"] for row in rows] == ["0", "1", "2"]  # as in timm; the lines count from 1, and so does this one
    said = f"best top-1 {float(best['eval_top1']):.2f} after epoch {int(best['epoch']) + 1}; weights, records"
    assert plain.stdout.startswith(said)
    assert plain.stdout.endswith("(summary.csv counts epochs from 0)\n")


def test_the_file_of_the_best_weights_describes_the_epoch_that_they_are_from(tmp_path):
    data = tiny_arrays(tmp_path / "data")
    state = train(tiny_recipe(epochs=12, opt="adamw", lr=0.01), data, tmp_path / "run", quiet=True)
    about = read_description(tmp_path / "run" / BEST)
    rows = [row for row in state.rows if row["eval_top1"] == state.best]
    assert about.epoch == min(rows, key=lambda row: row["eval_loss"])["epoch"] != state.rows[-1]["epoch"]
    metrics = validate(tmp_path / "run" / BEST, data)
    assert about.metrics["eval_loss"] == pytest.approx(metrics.loss)
    assert about.metrics["eval_top1"] == pytest.approx(metrics.top1)


def test_an_average_that_will_not_leave_its_beginning_is_said_so(tmp_path, capsys):
    data = tiny_arrays(tmp_path / "data")
    average = {"model_ema": True, "model_ema_warmup": False, "epochs": 1}
    train(tiny_recipe(**average), data, tmp_path / "slow")
    told = capsys.readouterr().err
    assert "the average of the weights will still hold 100% of the initial weights" in told
    assert "model_ema_warmup=true forgets them" in told
    train(tiny_recipe(**average, model_ema_decay=0.1), data, tmp_path / "fast")
    assert "the average of the weights" not in capsys.readouterr().err


def test_by_default_the_average_of_a_short_run_forgets_what_it_began_with(tmp_path, capsys):
    data = tiny_arrays(tmp_path / "data")
    short = train(tiny_recipe(model_ema=True), data, tmp_path / "short")
    assert "the average of the weights" not in capsys.readouterr().err
    slow = train(tiny_recipe(model_ema=True, model_ema_warmup=False), data, tmp_path / "slow", quiet=True)
    assert short.rows[-1]["eval_loss"] < slow.rows[-1]["eval_loss"] - 0.01


def test_a_run_that_was_begun_without_a_warm_up_of_the_average_goes_on_without(tmp_path):
    """Its states say nothing of one, so the average must stay what it would have been."""
    data = tiny_arrays(tmp_path / "data")
    without = tiny_recipe(model_ema=True, model_ema_decay=0.9, model_ema_warmup=False, sched="constant")
    train(with_changes(without, {"epochs": 3}), data, tmp_path / "whole", quiet=True)
    train(with_changes(without, {"epochs": 1}), data, tmp_path / "old", quiet=True)
    state = read_torch(tmp_path / "old" / STATE)
    del state["recipe"]["model_ema_warmup"]
    write_torch(state, tmp_path / "old" / STATE)
    for epochs in (2, 3):  # what the first continuation saves must not have one either
        again = with_changes(without, {"model_ema_warmup": True, "epochs": epochs})
        train(again, data, tmp_path / "old", "auto", quiet=True)
        assert not load_recipe(tmp_path / "old" / "args.yaml").model_ema_warmup
        assert not read_description(tmp_path / "old" / LAST).recipe["model_ema_warmup"]
    assert_same_weights(tmp_path / "whole", tmp_path / "old")


def test_what_is_worth_knowing_of_a_model_is_said(tmp_path, capsys):
    data, small = tiny_arrays(tmp_path / "data"), {"epochs": 1, "head": {"name": "grassmann", "k": 2, "gamma": 25.0}}
    train(tiny_recipe(**small), data, tmp_path / "run")
    rule = recommended_gamma(3, 2, weights(tmp_path / "run")["head.weight"].shape[-1])
    assert f"gamma 25 is large for 3 classes: head.gamma=auto would use {rule:g}\n" in capsys.readouterr().err
    long = {"standardize": True, "normalize": False}  # then a factor of what is longer than 1 already
    train(tiny_recipe(**small | {"head": small["head"] | long}), data, tmp_path / "long")
    assert "gamma 25 is large for 3 classes: head.gamma=auto would use " in capsys.readouterr().err
    train(tiny_recipe(**small | {"head": small["head"] | {"normalize": False}}), data, tmp_path / "free")
    assert "gamma 25 multiplies features that keep their length" in capsys.readouterr().err
    start = str(tmp_path / "run" / "last.safetensors")
    small["head"]["gamma"] = rule
    for images, taken in (
        (data, "all of it"),
        (tiny_arrays(tmp_path / "four", classes=4), "its classifier does not fit"),
    ):
        train(tiny_recipe(initial_checkpoint=start, **small), images, tmp_path / images.name / "run")
        said = capsys.readouterr().err
        assert f"starts from {start}: {taken}" in said
        assert "is large for" not in said


def test_one_class_is_refused_unless_more_are_to_come(tmp_path):
    data, output = tiny_arrays(tmp_path / "one", classes=1), tmp_path / "run"
    with pytest.raises(ValueError, match="one class only, and a classifier needs two: --data-dir is the folder that"):
        train(tiny_recipe(epochs=1), data, output, quiet=True)
    assert not output.exists()
    train(tiny_recipe(epochs=1, num_classes=2), data, output, quiet=True)
    assert output.exists()


def test_classes_that_are_never_validated_are_named(tmp_path, capsys):
    data = tiny_folders(tmp_path / "data")
    for image in (data / "val" / "dog").iterdir():
        image.unlink()
    train(tiny_recipe(epochs=1), data, tmp_path / "run")
    assert "no validation image has the class dog\n" in capsys.readouterr().err
