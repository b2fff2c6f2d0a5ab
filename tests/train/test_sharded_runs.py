"""Runs whose head, or whole model, is sharded over processes: stopped, resumed on other numbers of them, and opened."""

import json
import math
import os
import shutil
import signal
import tarfile

import pytest
import torch
from PIL import Image

import grassy
from grassy import cli
from grassy.distributed.saves import newest, open_state, read_plain
from grassy.distributed.state import read_saved
from grassy.inference import validate as validate_module
from grassy.inference.validate import validate
from grassy.recipes.changes import with_changes
from grassy.recipes.files import load_recipe
from grassy.recipes.recipe import Recipe
from grassy.report.analyze import read_analysis
from grassy.runs.state import SAVES
from grassy.runs.weights import BEST_SAVES, LAST
from grassy.train import loop, sharding
from grassy.train.loop import train
from grassy.train.sharding import has_sharded_weights
from ranks import on_ranks
from training_cases import tiny_arrays, tiny_folders, tiny_recipe

pytestmark = pytest.mark.distributed

CLASSES = 7  # of four ranks the last has one class, the others have two
RESNET = {"model": "resnet18_cifar", "model_kwargs": {"channels": [4, 4, 4, 4]}}
DIVIDED = {"shard_head": True, "crop": "none", "hflip": 0.0}


def run_on(world, recipe, data, output, resume="", stop_after=0):
    """What so many processes say of the run: which signal has stopped it."""

    def work(rank):
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world))
        loop.AGREE_EVERY, original = 1, loop.stop_or_save

        def signal_itself(run, *others):
            assert has_sharded_weights(run.trained.model)
            if rank == 0 and run.position.done == stop_after:
                os.kill(os.getpid(), signal.SIGTERM)
            return original(run, *others)

        loop.stop_or_save = signal_itself
        return train(recipe, data, output, resume, "cpu", quiet=True).stopped_by

    return on_ranks(world, output.parent, work)


def state_of(output, folder=SAVES):
    """All that is saved, without what takes a time."""
    saved = open_state(output / folder)
    tensors = {kind: read_saved(saved, kind) for kind in ("model", "average", "optim", "own")}
    plain = json.loads(json.dumps(saved.plain))
    for row in [plain.get("progress", {}), *plain.get("progress", {}).get("rows", [])]:
        for name in ("seconds", "input_share"):
            row.pop(name, None)
    plain.pop("description", None)
    return tensors, plain, saved.optimizer


def assert_same_state(one, other):
    for folder in (SAVES, BEST_SAVES):
        (tensors, *rest), (expected, *expected_rest) = state_of(one, folder), state_of(other, folder)
        assert rest == expected_rest
        for kind in expected:
            assert tensors[kind].keys() == expected[kind].keys()
            for name in expected[kind]:
                assert torch.equal(tensors[kind][name], expected[kind][name]), f"{folder} {kind} {name}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {**RESNET, "model_ema": True, "model_ema_decay": 0.8},
        {"opt": "adamw", "lr": 1e-3, "clip_grad": 1.0, "fsdp": True, "head": {"name": "arcface", "scale": 8.0}},
        {"head.sample": 0.5, "mixup": 0.4, "cutmix": 1.0, "smoothing": 0.1},
    ],
    ids=["batch statistics and average", "adamw and fsdp", "a sample of the classes, mixed"],
)
def test_a_sharded_run_that_was_stopped_and_resumed_ends_as_if_it_never_was(tmp_path, changes):
    recipe = tiny_recipe(**DIVIDED, **changes)
    data = tiny_arrays(tmp_path / "data", classes=CLASSES)
    assert run_on(2, recipe, data, tmp_path / "whole") == [None, None]
    assert run_on(2, recipe, data, tmp_path / "parts", stop_after=3) == [signal.SIGTERM] * 2
    assert run_on(2, recipe, data, tmp_path / "parts", "auto") == [None, None]
    assert_same_state(tmp_path / "parts", tmp_path / "whole")


@pytest.mark.slow
def test_any_number_of_processes_goes_on_with_a_sharded_run(tmp_path):
    recipe = tiny_recipe(**DIVIDED, epochs=4, sched="constant", checkpoint_interval=0)
    data = tiny_arrays(tmp_path / "data", classes=CLASSES)
    assert run_on(2, recipe, data, tmp_path / "whole") == [None] * 2
    assert run_on(4, recipe, data, tmp_path / "run", stop_after=3) == [signal.SIGTERM] * 4
    assert run_on(2, recipe, data, tmp_path / "run", "auto", stop_after=8) == [signal.SIGTERM] * 2
    train(with_changes(recipe, {"epochs": 3}), data, tmp_path / "run", resume="auto", quiet=True)  # one process
    assert run_on(4, recipe, data, tmp_path / "run", "auto") == [None] * 4
    rows, expected = (read_plain(tmp_path / name / SAVES)["progress"]["rows"] for name in ("run", "whole"))
    for row, other in zip(rows, expected, strict=True):
        assert row["train_loss"] == pytest.approx(other["train_loss"], rel=1e-4)
        assert row["eval_loss"] == pytest.approx(other["eval_loss"], rel=1e-3)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    """A folder with data and the run of two processes."""
    folder = tmp_path_factory.mktemp("sharded")
    recipe, data = tiny_recipe(**DIVIDED, epochs=1), tiny_arrays(folder / "data", classes=CLASSES)
    assert run_on(2, recipe, data, folder / "run") == [None] * 2
    return folder


@pytest.mark.slow
def test_a_sharded_checkpoint_is_opened_by_load_and_by_all_commands(sharded, tmp_path, capsys):
    run, data = sharded / "run", sharded / "data"
    (row,) = read_plain(run / SAVES)["progress"]["rows"]
    for place in (run, run / BEST_SAVES, newest(run / SAVES)):
        metrics = validate(place, data, device="cpu")
        assert metrics.loss == pytest.approx(row["eval_loss"], rel=1e-5)
        assert metrics.top1 == pytest.approx(row["eval_top1"])
    assert validate(run, None, device="cpu").loss == pytest.approx(row["eval_loss"], rel=1e-5)  # it recorded its data
    assert cli.main(["analyze", str(run), "--cache", str(tmp_path / "features")]) == 0
    assert read_analysis(run)["scalars"]["top1"] == pytest.approx(row["eval_top1"])
    assert cli.main(["report", str(run), "--output", str(tmp_path / "report.html")]) == 0
    model = grassy.load(run)
    assert model.head.weight.shape == (CLASSES, 2, 16)
    assert model.pretrained_cfg["label_names"] == [f"class {number}" for number in range(CLASSES)]
    assert cli.main(["export", "--checkpoint", str(run), "--output", str(tmp_path / "model.onnx")]) == 0
    image = tmp_path / "image.png"
    Image.new("RGB", (8, 8)).save(image)
    assert cli.main(["predict", str(image), "--checkpoint", str(run)]) == 0
    assert "class" in capsys.readouterr().out


def test_a_sharded_run_is_measured_on_the_images_that_it_held_out(tmp_path):
    run, data = tmp_path / "run", tiny_folders(tmp_path / "tree", images=20) / "train"
    recipe = tiny_recipe(epochs=1, batch_size=6, val_fraction=0.2, **DIVIDED)
    assert run_on(2, recipe, data, run) == [None] * 2
    expected = validate(run, None, device="cpu").to_dict()
    assert expected["images"] == 12
    shutil.move(data, tmp_path / "grown")
    more = tiny_folders(tmp_path / "more", images=40, seed=1) / "train"
    for image in more.glob("*/*.png"):
        if not (tmp_path / "grown" / image.relative_to(more)).exists():
            shutil.copy(image, tmp_path / "grown" / image.relative_to(more))
    for place in (run, newest(run / BEST_SAVES)):
        assert validate(place, tmp_path / "grown", device="cpu").to_dict() == expected


def test_other_processes_validate_it_together_with_as_many_images_as_they_like(sharded, tmp_path):
    def work(rank):
        os.environ.update(RANK=str(rank), WORLD_SIZE="3")
        validate_module.load = None  # no process has all of the head
        metrics = validate(sharded / "run", sharded / "data", batch_size=3, device="cpu")
        return None if metrics is None else metrics.to_dict()

    first, *others = on_ranks(3, tmp_path, work)
    alone = validate(sharded / "run", sharded / "data", device="cpu").to_dict()
    for name in ("loss", "top1", "top5", "images"):  # effective ranks nobody has, without the whole weight
        assert first[name] == pytest.approx(alone[name])
    assert others == [None, None]


def test_a_run_of_whole_weights_is_not_gone_on_with_sharded_ones_nor_the_other_way_by_accident(sharded, tmp_path):
    recipe = tiny_recipe(epochs=1, crop="none", hflip=0.0)
    train(recipe, sharded / "data", tmp_path / "run", quiet=True)

    def work(rank):
        os.environ.update(RANK=str(rank), WORLD_SIZE="2")
        with pytest.raises(ValueError, match="every process had all weights: go on with shard_head=false fsdp=false"):
            train(
                with_changes(recipe, {"epochs": 2, "shard_head": True}),
                sharded / "data",
                tmp_path / "run",
                "auto",
                "cpu",
            )

    on_ranks(2, tmp_path, work)
    with pytest.raises(ValueError, match="holds a run already: --resume auto resumes it"):
        train(recipe, sharded / "data", sharded / "run", quiet=True)
    with pytest.raises(ValueError, match="belongs to a run with batch_size=8, not 4"):
        train(with_changes(recipe, {"batch_size": 4}), sharded / "data", sharded / "run", "auto", quiet=True)
    assert (tmp_path / "run" / LAST).exists()  # of weights that all processes have, one file, as ever


def test_heads_over_256_megabytes_are_sharded_unless_the_recipe_says(monkeypatch):
    recipe = Recipe(model="resnet18", head={"name": "grassmann", "k": 4})
    classes = math.ceil(256e6 / (4 * 512 * 4))
    assert sharding._is_large(recipe, classes + 1)
    assert not sharding._is_large(recipe, classes - 1)
    assert not sharding._is_large(recipe, 10)
    assert sharding._is_large(with_changes(recipe, {"mixup": 0.2}), classes + 1)
    assert not sharding._is_large(with_changes(recipe, {"head": {"name": "multi", "layers": 4}}), 10**6)
    assert Recipe(shard_head=False).shard_head == "false"
    with pytest.raises(ValueError, match="shard_head must be one of auto, true, false, got 'ture'"):
        Recipe(shard_head="ture")
    with pytest.raises(ValueError, match="mixup and cutmix must be 0"):
        Recipe(shard_head=True, cutmix=1.0, loss="bce")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["folders", "tars"])
def test_the_recipe_for_faces_trains_on_folders_and_on_tars_in_several_processes(tmp_path, kind):
    people, photos = [f"person {number}" for number in range(5)], tmp_path / "photos"
    tiny_folders(photos, images=4, classes=people)
    data = photos / "train" if kind == "folders" else tmp_path / "tars"  # one folder, of which some are held out
    if kind == "tars":
        data.mkdir()
        for split in ("train", "val"):
            with tarfile.open(data / f"{split}.tar", "w") as tar:
                for person in people:
                    tar.add(photos / split / person, person)
    small = ["model=resnet18_cifar", "model_kwargs.channels=[4,4,4,4]", "img_size=12", "workers=0", "shard_head=true"]
    small += ["batch_size=8", "epochs=2", "val_fraction=0.25"]
    recipe = load_recipe("faces-resnet50-grassmann", small)
    assert run_on(2, recipe, data, tmp_path / "run") == [None, None]
    assert len(read_plain(tmp_path / "run" / SAVES)["progress"]["rows"]) == 2
    assert grassy.load(tmp_path / "run").fc.weight.shape == (5, 2, 4)


@pytest.mark.slow
@pytest.mark.parametrize("sharding", [{"shard_head": True}, {"fsdp": True}], ids=["sharded head", "fsdp"])
def test_a_run_that_starts_on_one_process_grows_to_several_that_shard_it(tmp_path, sharding):
    recipe = tiny_recipe(crop="none", hflip=0.0, sched="constant", epochs=3, checkpoint_interval=0, **sharding)
    data = tiny_arrays(tmp_path / "data", classes=CLASSES)
    train(with_changes(recipe, {"epochs": 1}), data, tmp_path / "run", device="cpu", quiet=True)
    assert run_on(2, with_changes(recipe, {"epochs": 2}), data, tmp_path / "run", "auto") == [None] * 2
    train(recipe, data, tmp_path / "run", "auto", "cpu", quiet=True)
    train(recipe, data, tmp_path / "whole", device="cpu", quiet=True)
    rows, expected = (read_plain(tmp_path / name / SAVES)["progress"]["rows"] for name in ("run", "whole"))
    for row, other in zip(rows, expected, strict=True):
        assert row["train_loss"] == pytest.approx(other["train_loss"], rel=1e-4)


def test_a_large_head_under_torchrun_is_saved_so_that_more_processes_can_divide_it(tmp_path, monkeypatch):
    monkeypatch.setattr(sharding, "MUCH", 0)
    recipe, data = tiny_recipe(epochs=1), tiny_arrays(tmp_path / "data", classes=CLASSES)

    def alone(rank):
        os.environ.update(RANK="0", WORLD_SIZE="1")
        train(recipe, data, tmp_path / "run", device="cpu", quiet=True)

    on_ranks(1, tmp_path, alone)
    assert run_on(2, with_changes(recipe, {"epochs": 2}), data, tmp_path / "run", "auto") == [None] * 2
