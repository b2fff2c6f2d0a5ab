"""One folder of class folders: a part of every class is held out, and every command holds out the same images."""

import json
import shutil
import tarfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import grassy
from grassy.data.held_out import held_out, open_with_keys, set_to_split
from grassy.data.images import ArrayImages
from grassy.data.pack import pack
from grassy.data.run_data import open_data
from grassy.distributed.processes import Process
from grassy.inference.validate import validate
from grassy.models import create_model
from grassy.report.analyze import analyze, open_split
from grassy.runs.records import read_split
from grassy.runs.weights import BEST, LAST, read_description
from grassy.train.loop import train
from training_cases import TINY, tiny_arrays, tiny_folders, tiny_recipe

CPU = Process(torch.device("cpu"))
HEAD = {"name": "grassmann", "k": 2, "gamma": 8.0}


def photos(folder, **classes):
    """One folder of class folders, each with so many images, darker and brighter."""
    rng = np.random.default_rng(0)
    for number, (name, count) in enumerate(classes.items()):
        (folder / name).mkdir(parents=True)
        for i in range(count):
            pixels = rng.integers(0, 80, (12, 12, 3)) + 60 * number
            Image.fromarray(pixels.astype(np.uint8)).save(folder / name / f"{name}-{i}.png")
    return folder


def names(loader):
    images = loader.images
    return {images.name(index) for index in range(len(images))}


def test_a_fifth_of_every_class_is_held_out_and_nothing_is_in_both_parts(tmp_path):
    folder = photos(tmp_path, cat=10, dog=20, owl=5)
    data = open_data(tiny_recipe(val_fraction=0.2), folder, CPU)
    held, trained = names(data.validation), names(data.train)
    assert not held & trained
    assert len(held | trained) == 35
    counts = {name: sum(f"/{name}/" in image for image in held) for name in ("cat", "dog", "owl")}
    assert counts == {"cat": 2, "dog": 4, "owl": 1}
    assert data.held_out == sorted(str(Path(name).relative_to(folder)) for name in held)
    assert data.class_names == ["cat", "dog", "owl"]


def test_the_split_depends_on_its_own_seed_alone(tmp_path):
    folder = photos(tmp_path / "one", cat=10, dog=20)
    split = open_data(tiny_recipe(val_fraction=0.3), folder, CPU).held_out
    assert open_data(tiny_recipe(val_fraction=0.3, seed=9), folder, CPU).held_out == split
    assert open_data(tiny_recipe(val_fraction=0.3, val_seed=1), folder, CPU).held_out != split
    moved = shutil.copytree(folder, tmp_path / "elsewhere")
    shutil.copytree(moved / "cat", moved / "lynx")
    again = open_data(tiny_recipe(val_fraction=0.3), moved, CPU).held_out
    assert [key for key in again if not key.startswith("lynx")] == split


def test_the_split_of_flat_class_folders_is_that_of_every_version():
    """Weights without a record of their split rely on it."""
    keys = [f"{name}/{name}-{i}.png" for name in ("cat", "dog") for i in range(10)]
    images = ArrayImages(np.zeros((20, 2, 2), np.uint8), np.arange(20) // 10, ["cat", "dog"], "arrays")
    expected = {f"{name}/{name}-{i}.png" for name, i in zip(3 * ["cat"] + 3 * ["dog"], (2, 6, 9, 2, 4, 6), strict=True)}
    assert held_out(images, keys, 0.3, 0) == expected
    assert held_out(images, [f"photos/{key}" for key in keys], 0.3, 0) == {f"photos/{key}" for key in expected}


@pytest.mark.parametrize(("images", "fraction", "held"), [(1, 0.5, 0), (2, 0.01, 1), (2, 0.99, 1), (3, 0.9, 2)])
def test_small_classes_are_in_both_parts_if_they_have_two_images(tmp_path, images, fraction, held):
    found, keys = open_with_keys(photos(tmp_path, few=images, many=10))
    assert sum(key.startswith("few") for key in held_out(found, keys, fraction, 0)) == held


def test_the_one_image_of_a_class_is_trained_on_and_that_is_said(tmp_path):
    data = open_data(tiny_recipe(val_fraction=0.2), photos(tmp_path, cat=10, dog=1), CPU)
    assert any("no validation image has the class dog" in note for note in data.notes)
    assert any("1 class has fewer than 5 training images" in note and "dog (1)" in note for note in data.notes)
    with pytest.raises(ValueError, match=r"no class in .* has two images"):
        open_data(tiny_recipe(val_fraction=0.2), photos(tmp_path / "ones", cat=1, dog=1), CPU)


def test_a_folder_with_train_and_val_is_taken_as_it_is_and_one_with_train_alone_is_split(tmp_path):
    folder, recipe = tiny_folders(tmp_path, images=10), tiny_recipe(val_fraction=0.5)
    assert set_to_split(recipe, folder) is None
    assert open_data(recipe, folder, CPU).held_out is None
    shutil.rmtree(folder / "val")
    data = open_data(recipe, folder, CPU)
    assert (len(data.held_out), data.class_names) == (15, ["cat", "dog", "owl"])
    assert set_to_split(tiny_recipe(), folder) is None


def test_a_class_may_be_called_train(tmp_path):
    folder = photos(tmp_path, plane=5, train=5, test=5)
    assert open_data(tiny_recipe(val_fraction=0.2), folder, CPU).class_names == ["plane", "test", "train"]


def test_one_file_of_arrays_is_split_too(tmp_path):
    data = open_data(tiny_recipe(val_fraction=0.25), tiny_arrays(tmp_path) / "train.npz", CPU)
    assert len(data.held_out) == 10
    assert sorted(int(key) for key in data.held_out)[-1] < 40


# ------------------------------------------------------------------------------------------------ folders in folders


def nested(folder, *places):
    """Three images in each of some folders below one."""
    for place in places:
        (folder / place).mkdir(parents=True, exist_ok=True)
        for i in range(3):
            Image.new("RGB", (12, 12)).save(folder / place / f"{place.replace('/', '-')}-{i}.png")
    return folder


def tar_of(folder):
    file = folder.with_suffix(".tar")
    with tarfile.open(file, "w") as archive:
        archive.add(folder, arcname=".")
    return file


@pytest.mark.parametrize("packed", [False, True], ids=["folders", "tar"])
@pytest.mark.parametrize(
    ("places", "counts"),
    [
        (["cat/2021", "cat/2022", "dog/2021"], {"cat": 6, "dog": 3}),
        (["cat/2021", "dog/2022", "dog/2023"], {"cat": 3, "dog": 6}),
        (["cat", "cat/old", "dog"], {"cat": 6, "dog": 3}),
        (["photos/cat", "photos/dog"], {"cat": 3, "dog": 3}),
        (["photos/cat/2021", "photos/cat/2022", "photos/dog/2021"], {"cat": 6, "dog": 3}),
        (["cat", "cat/old"], {"cat": 6}),
    ],
)
def test_the_classes_of_a_folder_to_split_are_its_topmost_folders(tmp_path, packed, places, counts):
    place = nested(tmp_path / "set", *places)
    images, _ = open_with_keys(tar_of(place) if packed else place)
    labels = Counter(images.class_names[label] for label in images.labels().tolist())
    assert labels == counts
    assert images.class_names == list(counts)
    for index in range(len(images)):
        assert images.class_names[images.labels()[index]] in Path(images.name(index)).parts


@pytest.mark.parametrize("kind", ["folders", "tar", "pack"])
def test_images_of_one_name_in_the_folders_of_a_class_are_drawn_one_by_one(tmp_path, kind):
    folders = [tmp_path / "set" / name / f"p{number:02}" for name in ("chair", "sofa") for number in range(20)]
    for folder in folders:
        folder.mkdir(parents=True)
        for view in ("front", "back", "left"):
            Image.new("RGB", (4, 4)).save(folder / f"{view}.png")
    place = tmp_path / "set"
    if kind == "pack":
        pack(place, tmp_path / "packed")
    found, keys = open_with_keys({"folders": place, "tar": tar_of(place), "pack": tmp_path / "packed/train.tar"}[kind])
    held = held_out(found, keys, 1 / 3, 0)
    views = Counter(key.split("/")[0] + "/" + key.rpartition("/")[2] for key in held)
    assert sum(views.values()) == 40
    assert len(views) == 6  # both classes have every view
    assert max(views.values()) < 14
    assert held == held_out(*open_with_keys(place), 1 / 3, 0)


def test_images_that_lie_deeper_than_their_class_folders_are_mentioned(tmp_path):
    def notes(place):
        return [note for note in open_data(tiny_recipe(val_fraction=0.3), place, CPU).notes if "topmost" in note]

    deep = nested(tmp_path / "deep", "cat/2021", "cat/2022", "dog")
    (note,) = notes(deep)
    assert note.startswith(f"4 training images lie in folders within their class folders, {deep / 'cat' / '2021'}")
    assert not notes(nested(tmp_path / "flat", "cat", "dog"))


def test_an_empty_class_folder_is_refused_and_an_empty_folder_within_one_is_not(tmp_path):
    folder = nested(tmp_path / "set", "cat/2021", "dog")
    (folder / "cat" / "2022").mkdir()
    assert open_with_keys(folder)[0].class_names == ["cat", "dog"]
    (folder / "owl" / "2021").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"class folder .*owl.* holds no images"):
        open_with_keys(folder)


@pytest.mark.parametrize("packed", [False, True], ids=["folders", "tar"])
def test_a_class_of_a_given_split_that_lies_in_two_places_is_refused(tmp_path, packed):
    for part in ("train", "val"):
        place = nested(tmp_path / part, "cat/2021", "dog/2021")
        if packed:
            tar_of(place)
            shutil.rmtree(place)
    with pytest.raises(ValueError, match=r"cat/2021 and dog/2021 in .*train.* would be one class '2021'"):
        open_data(tiny_recipe(), tmp_path, CPU)


def test_a_class_may_be_spread_over_several_tars(tmp_path):
    for part in ("train", "val"):
        for shard in ("0", "1"):
            nested(tmp_path / part / shard, "cat", "dog")
            tar_of(tmp_path / part / shard)
            shutil.rmtree(tmp_path / part / shard)
    assert open_data(tiny_recipe(), tmp_path, CPU).class_names == ["cat", "dog"]


# ------------------------------------------------------------------------------------------------ a run


@pytest.fixture
def run(tmp_path):
    """The folder of a run that split its photos itself."""
    folder = photos(tmp_path / "photos", cat=20, dog=10)
    train(tiny_recipe(epochs=1, val_fraction=0.3), folder, tmp_path / "run", quiet=True)
    return tmp_path / "run"


def test_validate_and_analyze_find_the_images_that_the_run_held_out_by_themselves(run):
    about = read_description(run / LAST)
    assert len(read_split(run)) == 9
    metrics = validate(run / LAST, None, device="cpu")
    assert metrics.images == 9
    assert metrics.top1 == pytest.approx(about.metrics["eval_top1"])
    assert analyze(run, device="cpu")["data"]["images"] == 9
    assert validate(run, None, split="train", device="cpu").images == 21


def test_images_that_are_added_later_are_not_validated_on(run, tmp_path, capsys):
    for i in range(30):
        Image.new("RGB", (12, 12)).save(tmp_path / "photos" / "cat" / f"new-{i}.png")
    assert validate(run, None, device="cpu").images == 9
    assert f"9 of the 60 images in {tmp_path / 'photos'} count: those that the run held out" in capsys.readouterr().err
    (tmp_path / "photos" / read_split(run)[0]).unlink()
    assert validate(run, None, device="cpu").images == 8
    assert "1 of the 9 images that the run held out are no longer in" in capsys.readouterr().err


def test_a_folder_that_was_moved_is_given_once_more(run, tmp_path):
    (tmp_path / "photos").rename(tmp_path / "moved")
    with pytest.raises(ValueError, match=r"photos is gone; if it moved, give --data-dir"):
        validate(run, None, device="cpu")
    assert validate(run, tmp_path / "moved", device="cpu").images == 9
    assert analyze(run, device="cpu")["data"] is None


def test_all_of_a_folder_of_other_photos_counts(run, tmp_path, capsys):
    other = photos(tmp_path / "other", dog=3, cat=4)
    for file in other.glob("*/*.png"):
        file.rename(file.with_name(f"new-{file.name}"))
    assert validate(run, other, device="cpu").images == 7
    assert "is not the data of the run, so all of its 7 images count" in capsys.readouterr().err


def test_moved_photos_are_not_validated_on_training_images_if_a_few_held_out_ones_are_gone(run, tmp_path, capsys):
    moved, held = Path(shutil.copytree(tmp_path / "photos", tmp_path / "moved")), read_split(run)
    (moved / held[0]).unlink()
    assert validate(run, moved, device="cpu").images == 8
    told = capsys.readouterr().err
    assert f"1 of the 9 images that the run held out are no longer in {moved}" in told
    assert f"8 of the 29 images in {moved} count: those that the run held out, by their names" in told
    assert validate(run, moved, split="train", device="cpu").images == 21


@pytest.mark.parametrize("moved", [True, False])
def test_a_folder_with_a_few_of_the_held_out_images_is_refused_and_the_way_out_works(run, tmp_path, moved):
    folder = Path(shutil.copytree(tmp_path / "photos", tmp_path / "moved")) if moved else tmp_path / "photos"
    for key in read_split(run)[3:]:
        (folder / key).unlink()
    with pytest.raises(
        ValueError, match=r"has 3 of the 9 images .* if all are new, give a folder that holds them as val$"
    ):
        validate(run, folder, device="cpu")
    (tmp_path / "new").mkdir()
    folder.rename(tmp_path / "new" / "val")
    assert validate(run, tmp_path / "new", device="cpu").images == 24


def test_training_images_are_not_validated_on_if_all_held_out_ones_are_gone_from_the_folder_of_the_run(run, tmp_path):
    for key in read_split(run):
        (tmp_path / "photos" / key).unlink()
    with pytest.raises(ValueError, match=r"has 0 of the 9 images that the run held out"):
        validate(run, None, device="cpu")


# ------------------------------------------------------------------------------------------------ a run that is resumed


def resume(run, folder):
    return train(tiny_recipe(epochs=2, val_fraction=0.3), folder, run, resume="auto")


def test_a_resumed_run_does_not_validate_on_what_it_was_trained_on_if_a_held_out_image_is_gone(run, tmp_path, capsys):
    record = (run / "split.json").read_bytes()
    held = read_split(run)
    (tmp_path / "photos" / held[0]).unlink()
    resume(run, tmp_path / "photos")
    told = capsys.readouterr().err
    assert f"1 of the 9 images that the run held out are no longer in {tmp_path / 'photos'}, {held[0]} first" in told
    assert "holds out 8 of 29 images" in told
    assert (run / "split.json").read_bytes() == record


def test_a_held_out_image_of_another_name_is_not_trained_on(run, tmp_path):
    record = (run / "split.json").read_bytes()
    file = tmp_path / "photos" / read_split(run)[0]
    file.rename(file.with_name("renamed.png"))
    with pytest.raises(
        ValueError, match=rf"21 training images, and now there are 22, but cat/{file.name}, which it held"
    ):
        resume(run, tmp_path / "photos")
    assert (run / "split.json").read_bytes() == record
    file.with_name("renamed.png").rename(file)
    assert resume(run, tmp_path / "photos").epoch == 2


def test_a_run_is_not_resumed_without_an_image_that_it_held_out(run, tmp_path):
    for key in read_split(run):
        (tmp_path / "photos" / key).unlink()
    with pytest.raises(ValueError, match=r"none of the 9 images that the run held out is in .*photos$"):
        resume(run, tmp_path / "photos")


def test_a_run_that_goes_on_in_another_folder_takes_its_split_along(run, tmp_path):
    held = read_split(run)
    (tmp_path / "photos" / held[0]).unlink()
    recipe = tiny_recipe(epochs=2, val_fraction=0.3)
    train(recipe, tmp_path / "photos", tmp_path / "on", resume=str(run), quiet=True)
    assert read_split(tmp_path / "on") == held


def test_a_run_without_the_record_of_its_split_says_that_it_draws_again(run, tmp_path, capsys):
    held = read_split(run)
    (run / "split.json").unlink()
    resume(run, tmp_path / "photos")
    assert f"{run} has no split.json: the images to hold out are drawn again" in capsys.readouterr().err
    assert read_split(run) == held


def test_a_run_that_was_given_both_parts_holds_out_nothing_of_another_folder(tmp_path, capsys):
    place = tmp_path / "photos"
    for part in ("train", "val"):
        photos(place / part, cat=10, dog=10)
    train(tiny_recipe(epochs=1, val_fraction=0.3), place, tmp_path / "run", quiet=True)
    assert validate(tmp_path / "run", place / "val", device="cpu").images == 20
    assert "all 20 images in" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"the run was trained on all images in .*train: give a folder with others"):
        validate(tmp_path / "run", place / "train", device="cpu")
    shutil.copytree(place / "train", tmp_path / "copy")
    assert validate(tmp_path / "run", tmp_path / "copy", device="cpu").images == 20
    assert "copy count: make sure that the run was not trained on them" in capsys.readouterr().err
    (place / "val").rename(tmp_path / "moved")
    with pytest.raises(ValueError, match=r"the run was trained on all images in .*train"):
        validate(tmp_path / "run", None, device="cpu")
    assert validate(tmp_path / "run", None, split="train", device="cpu").images == 20


def test_weights_without_their_folder_are_validated_on_the_same_images(run, tmp_path):
    alone = shutil.copy(run / BEST, tmp_path / "alone.safetensors")
    images, _ = open_split(read_description(alone), tmp_path / "photos", alone)
    assert {str(Path(images.name(i)).relative_to(tmp_path / "photos")) for i in range(len(images))} == set(
        read_split(run)
    )


def test_a_damaged_record_of_the_split_is_one_sentence(run):
    for content in ("[", "[]", json.dumps({"validation": [3]}), json.dumps({"validation": []})):
        (run / "split.json").write_text(content)
        with pytest.raises(ValueError, match=r"split\.json is damaged"):
            validate(run, None, device="cpu")


# ------------------------------------------------------------------------------------------------ the order of classes


def test_classes_are_not_matched_by_their_place_if_the_weights_do_not_name_them(tmp_path):
    """torchvision numbers the folders 10 and 2 as 0 and 1, natural order the other way round."""
    data = tiny_folders(tmp_path / "data", classes=("10", "2"))
    model = create_model(TINY["model"], 2, HEAD, TINY["model_kwargs"])
    view = {"img_size": 8, "crop_pct": 1.0, "model_kwargs": TINY["model_kwargs"]}
    grassy.save(model, tmp_path / "unnamed.safetensors", **view)
    for measure in (
        lambda: validate(tmp_path / "unnamed.safetensors", data, device="cpu"),
        lambda: analyze(tmp_path / "unnamed.safetensors", data, device="cpu"),
    ):
        with pytest.raises(ValueError, match=r"does not say what its classes are called.*class_names=\[...\]"):
            measure()
    grassy.save(model, tmp_path / "named.safetensors", ["10", "2"], **view)
    grassy.save(model, tmp_path / "swapped.safetensors", ["2", "10"], **view)
    right, swapped = (
        validate(tmp_path / f"{name}.safetensors", data, split="train", device="cpu") for name in ("named", "swapped")
    )
    assert right.top1 == pytest.approx(100 - swapped.top1)


def test_numbers_in_training_and_names_in_validation_are_refused(tmp_path):
    tiny_folders(tmp_path, classes=("a", "b", "c"))
    shutil.rmtree(tmp_path / "train")
    np.savez(tmp_path / "train.npz", x=np.zeros((9, 8, 8, 3), np.uint8), y=np.arange(9) % 3)
    with pytest.raises(ValueError, match="numbers for their classes and the validation images have names"):
        open_data(tiny_recipe(), tmp_path, CPU)
