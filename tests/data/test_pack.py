"""Packs: what a run reads from one is what it reads from the files that it was made of."""

import errno
import io
import itertools
import os
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from grassy import atomic
from grassy.atomic import TEMPORARY, remove_torn_files
from grassy.cli import main
from grassy.data import decode
from grassy.data import pack as packing
from grassy.data.decode import Box, plain_file, read_pixels
from grassy.data.held_out import open_with_keys, recorded_keys, split
from grassy.data.images import open_images
from grassy.data.pack import pack, reduced_size
from grassy.data.run_data import open_data
from grassy.data.transforms import train_transform
from grassy.data.worker_loader import Samples
from grassy.distributed.processes import Process
from grassy.recipes.recipe import Recipe
from training_cases import tiny_folders, tiny_recipe


def noise(height, width, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3)).astype(np.uint8)


def photos(folder, size=(60, 45), count=5):
    """JPEG files of two classes, without splits."""
    for number in range(count):
        for name in ("cat", "dog"):
            place = folder / name / f"{number}.jpg"
            place.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(noise(size[1], size[0], number)).save(place, quality=90)
    return folder


class Part:
    """A crop that is always the same."""

    size = (4, 4)

    def __init__(self, box):
        self.wanted = box

    def box(self, height, width):
        return self.wanted


# --------------------------------------------------------------------------------------------------- plain pixels


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 700), st.data())
def test_a_crop_of_plain_pixels_is_that_of_the_image(height, width, before, data):
    pixels = noise(height, width)
    content = plain_file(pixels)
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(content))), pixels)
    top, left = data.draw(st.integers(0, height - 1)), data.draw(st.integers(0, width - 1))
    box = Box(top, left, data.draw(st.integers(1, height - top)), data.draw(st.integers(1, width - left)))
    file = io.BytesIO(bytes(before) + content + b"what follows in a tar")
    file.seek(before)
    assert np.array_equal(
        read_pixels(file, Part(box), len(content)),
        pixels[box.top : box.top + box.height, box.left : box.left + box.width],
    )
    file.seek(before)
    assert np.array_equal(read_pixels(file, size=len(content)), pixels)


def test_only_the_rows_of_a_crop_are_read(monkeypatch):
    read = []

    class Counted(io.BytesIO):
        def readinto(self, buffer):
            read.append(len(buffer))
            return super().readinto(buffer)

    monkeypatch.setattr(decode, "_decoded", lambda *_: pytest.fail("it was decoded"))
    read_pixels(Counted(plain_file(noise(100, 10))), Part(Box(20, 3, 5, 4)))
    assert read == [5 * 10 * 3]


@pytest.mark.parametrize("missing", [1, 30, 290])
def test_plain_pixels_that_are_cut_short_are_refused(missing):
    content = plain_file(noise(10, 10))[:-missing]
    with pytest.raises(OSError, match=r"[Tt]runcated"):
        read_pixels(io.BytesIO(content), size=len(content))


def test_plain_pixels_beyond_the_limit_of_pillow_are_refused(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 40)
    with pytest.raises(Image.DecompressionBombError):
        read_pixels(io.BytesIO(plain_file(noise(10, 10))))


# --------------------------------------------------------------------------------------------------- the same data


@pytest.mark.parametrize("policy", ["", "rand-m7-mstd0.5-inc1"])
def test_a_run_gets_the_same_images_from_a_pack(tmp_path, policy):
    photos(tmp_path / "set" / "train")
    photos(tmp_path / "set" / "val", count=2)
    written = pack(tmp_path / "set", tmp_path / "packed")
    assert [(each.path.name, each.images, len(each.classes)) for each in written] == [
        ("train.tar", 10, 2),
        ("val.tar", 4, 2),
    ]
    transform = train_transform(Recipe(img_size=32, aa=policy))
    for part in ("train", "validation"):
        source, packed = (open_images("", tmp_path / name, part) for name in ("set", "packed"))
        assert source.class_names == packed.class_names
        assert np.array_equal(source.labels(), packed.labels())
        for index in range(len(source)):
            one, other = (Samples(images, transform, training=True)[index, 7] for images in (source, packed))
            assert torch.equal(one[0], other[0])


def test_a_pack_of_one_folder_holds_out_the_images_that_the_folder_does(tmp_path):
    photos(tmp_path / "set", count=9)
    pack(tmp_path / "set", tmp_path / "packed")
    recipe = tiny_recipe(val_fraction=0.3)
    folder, packed = split(recipe, tmp_path / "set"), split(recipe, tmp_path / "packed" / "train.tar")
    for one, other in zip(folder[:2], packed[:2], strict=True):
        assert len(one) == len(other)
        assert all(np.array_equal(one.load(index)[0], other.load(index)[0]) for index in range(len(one)))


def test_a_pack_has_the_order_and_the_class_indices_of_its_folder(tmp_path):
    names = ["image.jpg", "image.jpg.1.jpg", "a.jpg", "a.jpg.jpg", "A.jpg", "7.jpg", "07.jpg", "b.png", "b.png.ppm"]
    for seed, (folder, name) in enumerate(itertools.product(["1", "01", "A", "a"], names)):
        file = tmp_path / "set" / folder / ("x" + name if folder in "1A" else name)  # which changes who comes first
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(noise(4, 4, seed)).save(file)
    pack(tmp_path / "set", tmp_path / "packed", None)
    folder, packed = (open_with_keys(place) for place in (tmp_path / "set", tmp_path / "packed" / "train.tar"))
    assert folder[0].class_names == packed[0].class_names == ["01", "1", "A", "a"]
    assert folder[1] == packed[1]
    for index in range(len(folder[1])):
        (one, label), (other, of_other) = (images.load(index) for images, _ in (folder, packed))
        assert label == of_other
        assert np.array_equal(one, other)


def nested(folder):
    """Cats in two folders that have the same names, dogs in one."""
    for year in ("2020", "2021"):
        photos(folder / year)
        (folder / year / "cat").rename(folder / f"cat{year}")
    (folder / "2020" / "dog").rename(folder / "dog")
    (folder / "cat").mkdir()
    for year in ("2020", "2021"):
        shutil.rmtree(folder / year)
        (folder / f"cat{year}").rename(folder / "cat" / year)
    return folder


@pytest.mark.parametrize("inside", ["", "train"])
def test_images_of_one_name_in_several_folders_of_a_class_are_all_kept_in_order(tmp_path, inside):
    nested(tmp_path / "set" / inside)
    (part,) = pack(tmp_path / "set", tmp_path / "packed")
    assert (part.images, part.classes) == (15, {"cat", "dog"})
    recipe = tiny_recipe(val_fraction=0.3)
    (*folder, held_out), (*packed, held_out_packed) = (
        split(recipe, tmp_path / place) for place in (f"set/{inside}", "packed/train.tar")
    )
    assert held_out == held_out_packed
    assert any(key.startswith("cat/2021/") for key in held_out)
    for one, other in zip(folder, packed, strict=True):
        assert np.array_equal(one.labels(), other.labels())
        assert all(np.array_equal(one.load(index)[0], other.load(index)[0]) for index in range(len(one)))


def test_the_classes_of_nested_folders_depend_on_what_is_asked_for_and_not_on_packing(tmp_path):
    nested(tmp_path / "set" / "train")
    pack(tmp_path / "set", tmp_path / "packed")
    for place in (tmp_path / "set", tmp_path / "packed"):
        assert open_data(tiny_recipe(val_fraction=0.3), place, Process(torch.device("cpu"))).class_names == [
            "cat",
            "dog",
        ]
        assert open_images("", place, "train").class_names == ["2020", "2021", "dog"]


def test_images_of_one_name_in_several_tars_of_a_set_are_all_kept(tmp_path):
    photos(tmp_path / "set")
    (tmp_path / "tars").mkdir()
    for name in ("a", "b"):
        with tarfile.open(tmp_path / "tars" / f"{name}.tar", "w") as tar:
            tar.add(tmp_path / "set" / "cat", "cat")
    (part,) = pack(tmp_path / "tars", tmp_path / "packed")
    assert (part.images, part.classes) == (10, {"cat"})
    with tarfile.open(part.path) as tar:
        assert {"cat/a:0.jpg.ppm", "cat/b:0.jpg.ppm"} <= set(tar.getnames())


@pytest.mark.parametrize("kind", ["a tar per class", "a tar per part", "a tar of tars"])
def test_tars_and_their_pack_hold_out_the_same_images_in_the_same_order(tmp_path, kind):
    photos(tmp_path / "set", count=9)
    photos(tmp_path / "other", count=6)
    tars = tmp_path / "tars"
    tars.mkdir()
    for part, name in (("set", "cat"), ("set", "dog"), ("other", "cat"), ("other", "dog")):
        if kind == "a tar per part":
            with tarfile.open(tars / f"{part}.tar", "a") as tar:
                tar.add(tmp_path / part / name, name)
        elif part == "set":
            with tarfile.open(tars / f"{name}.tar", "w") as tar:
                tar.add(tmp_path / part / name, ".")
    source = tars
    if kind == "a tar of tars":
        source = tmp_path / "all.tar"
        with tarfile.open(source, "w") as tar:
            tar.add(tars, ".")
    pack(source, tmp_path / "packed")
    (*files, held_out), (*packed, held_out_packed) = (
        split(tiny_recipe(val_fraction=0.3), place) for place in (source, tmp_path / "packed" / "train.tar")
    )
    assert held_out == held_out_packed
    assert [len(part) for part in files] == ([22, 8] if kind == "a tar per part" else [12, 6])
    for one, other in zip(files, packed, strict=True):
        assert np.array_equal(one.labels(), other.labels())
        assert all(np.array_equal(one.load(index)[0], other.load(index)[0]) for index in range(len(one)))


def test_a_run_of_an_earlier_version_finds_what_it_held_out_of_several_tars():
    recorded = ["set.tar:cat/0.jpg", "cat.tar:1.jpg", "part.tar:dog/2.jpg", "dog/3.jpg"]
    expected = {"cat/0.jpg", "cat/1.jpg", "dog/part:2.jpg", "dog/3.jpg"}
    assert recorded_keys(recorded, Path("set.tar")) == expected


@pytest.mark.parametrize("where", [0.3, 0.6])
def test_a_tar_that_lost_a_header_is_refused(tmp_path, where):
    photos(tmp_path / "set")
    (part,) = pack(tmp_path / "set", tmp_path / "packed")
    with tarfile.open(part.path) as tar:
        member = tar.getmembers()[int(where * 10)]
    with part.path.open("r+b") as file:
        file.seek(member.offset)
        file.write(bytes(2 * tarfile.BLOCKSIZE))
    with pytest.raises(ValueError, match="is a damaged tar, or several in one: members follow its end at byte"):
        open_images("", tmp_path / "packed", "train")


def test_a_tar_and_its_pack_hold_out_the_same_images(tmp_path):
    photos(tmp_path / "set", count=9)
    with tarfile.open(tmp_path / "set.tar", "w") as tar:
        tar.add(tmp_path / "set", ".")
    pack(tmp_path / "set.tar", tmp_path / "packed")
    places = [tmp_path / "set", tmp_path / "set.tar", tmp_path / "packed" / "train.tar"]
    keys = [split(tiny_recipe(val_fraction=0.3), place)[2] for place in places]
    assert keys[0] == keys[1] == keys[2]


@pytest.mark.slow
def test_a_run_resumes_and_is_validated_on_a_pack_of_its_images(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    photos(tmp_path / "set", count=9)
    assert main(["pack", "set", "packed"]) == 0
    settings = ["--from-scratch", "--output", "run", "model=resnet18", "img_size=32"]
    assert main(["train", "finetune", "--data-dir", "set", "--epochs", "1", *settings]) == 0
    capsys.readouterr()
    assert main(["validate", "run", "--data-dir", "packed"]) == 0
    assert "4 of the 18 images" in capsys.readouterr().err
    resumed = ["train", "--resume", "run", "--data-dir", "packed", "--epochs", "2"]
    assert main(resumed) == 0


def test_few_decoded_images_wait_to_be_written_if_they_are_large(tmp_path, monkeypatch):
    photos(tmp_path / "set", count=60)
    images = open_with_keys(tmp_path / "set")[0]
    monkeypatch.setattr(packing, "processors", lambda: 4)
    monkeypatch.setattr(packing, "MOST_WAITING", 3 * 60 * 45 * 3)  # three images
    decoded, original = itertools.count(), packing._content
    monkeypatch.setattr(packing, "_content", lambda *given: (next(decoded), original(*given))[1])
    found = packing._in_threads(images, None)
    written = [next(found)[0] for _ in range(30)]
    time.sleep(0.3)  # the threads decode what they were given
    assert next(decoded) - 30 <= 3 + 2 * 4  # and those that were being decoded
    assert written + [index for index, _ in found] == list(range(120))


def test_the_same_files_give_the_same_pack(tmp_path):
    photos(tmp_path / "set")
    first, second = (pack(tmp_path / "set", tmp_path / name)[0].path.read_bytes() for name in ("one", "two"))
    assert first == second


def test_large_images_are_reduced_and_small_ones_are_kept(tmp_path):
    photos(tmp_path / "set", size=(120, 60))
    for short_side, size in ((None, (60, 120)), (512, (60, 120)), (60, (60, 120)), (20, (20, 40))):
        (part,) = pack(tmp_path / "set", tmp_path / f"packed{short_side}", short_side)
        pixels, _ = open_images("", part.path, "train").load(0)
        assert pixels.shape[:2] == size
        assert part.reduced == (10 if short_side == 20 else 0)
    original = Image.open(tmp_path / "set" / "cat" / "0.jpg").resize((40, 20), Image.Resampling.BICUBIC)
    assert np.abs(pixels - np.asarray(original).astype(float)).mean() < 1


def test_a_run_that_wants_more_pixels_than_its_pack_has_says_so(tmp_path):
    for name in ("train", "val"):
        photos(tmp_path / "set" / name)

    def notes(place, **changes):
        found = open_data(tiny_recipe(**changes), place, Process(torch.device("cpu"))).notes
        return [note for note in found if "pack" in note]

    pack(tmp_path / "set", tmp_path / "small", 40)
    pack(tmp_path / "set", tmp_path / "whole", 45)  # none of which is reduced
    message = "the pack has images of 40 pixels, and this run wants {0}: pack again with --size {0}"
    assert notes(tmp_path / "small", img_size=41) == [message.format(41)]
    assert notes(tmp_path / "small", img_size=38, crop_pct=0.9) == [message.format(42)]
    assert notes(tmp_path / "small", img_size=28, crop_pct=0.7) == []  # 40.000000000000006
    assert notes(tmp_path / "small", img_size=36, crop_pct=0.9) == []
    assert notes(tmp_path / "small", img_size=36, test_size=44) == [message.format(44)]
    shutil.move(tmp_path / "small" / "val.tar", tmp_path)
    assert len(notes(tmp_path / "small" / "train.tar", img_size=41, val_fraction=0.5)) == 1
    for place in ("set", "whole"):
        assert notes(tmp_path / place, img_size=64) == []
    for content in ("[]", "{", '{"reduced": 1}', '{"reduced": 1, "short_side": "40"}'):  # of another program
        (tmp_path / "whole" / "pack.json").write_text(content)
        assert notes(tmp_path / "whole", img_size=64) == []


@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(1, 600))
def test_a_reduced_image_has_the_short_side_and_the_shape(height, width, short_side):
    new = reduced_size(height, width, short_side)
    assert min(new) == min(height, width, short_side)
    if min(height, width) > short_side:
        assert abs(max(new) / short_side - max(height, width) / min(height, width)) <= 0.5 / short_side + 1e-9


# --------------------------------------------------------------------------------------------------- trouble


def test_an_unreadable_image_is_left_out_and_named(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    photos(tmp_path / "set")
    (tmp_path / "set" / "dog" / "3.jpg").write_bytes(b"no image")
    assert main(["pack", "set", "packed"]) == 1
    said = capsys.readouterr()
    assert said.out == "packed/train.tar: 9 images of 2 classes, 0.1 MB\n"
    assert "left out set/dog/3.jpg: not an image that Pillow knows" in said.err
    assert len(open_images("", tmp_path / "packed", "train")) == 9


def refused(tmp_path, *arguments):
    """The files are what they were; the message."""
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match=r".") as error:
        pack(*arguments)
    assert sorted(tmp_path.rglob("*")) == before
    return str(error.value)


def test_what_cannot_be_packed_is_refused_in_a_sentence(tmp_path, monkeypatch):
    photos(tmp_path / "set")
    (tmp_path / "there").mkdir()
    (tmp_path / "broken" / "cat").mkdir(parents=True)
    (tmp_path / "broken" / "cat" / "0.png").write_bytes(b"no image")
    np.savez(tmp_path / "arrays.npz", x=noise(4, 4)[None], y=np.zeros(1, int))
    assert "there exists: name another folder" in refused(tmp_path, tmp_path / "set", tmp_path / "there")
    assert "nowhere does not exist" in refused(tmp_path, tmp_path / "nowhere", tmp_path / "packed")
    assert "holds no images" in refused(tmp_path, tmp_path / "there", tmp_path / "packed")
    assert "holds no class folders; its images lie in no class folder" in refused(
        tmp_path, tmp_path / "set" / "cat", tmp_path / "packed"
    )
    assert "no image of" in refused(tmp_path, tmp_path / "broken", tmp_path / "packed")
    assert "holds decoded images already" in refused(tmp_path, tmp_path / "arrays.npz", tmp_path / "packed")
    assert "size must be a positive number" in refused(tmp_path, tmp_path / "set", tmp_path / "packed", -1)
    assert "would lie among the images of" in refused(tmp_path, tmp_path / "set", tmp_path / "set" / "packed")
    for name in ("../set", "", ".", "a/b"):
        assert "a split is the name of a folder or tar in" in refused(
            tmp_path, tmp_path / "set", tmp_path / "packed", 512, [name]
        )
    photos(tmp_path / "odd" / "test")
    photos(tmp_path / "odd")
    assert "has test and cat, but no train: name its --splits" in refused(
        tmp_path, tmp_path / "odd", tmp_path / "packed"
    )
    assert "has no split 'other'" in refused(tmp_path, tmp_path / "set", tmp_path / "packed", 512, ["other"])
    for image in (tmp_path / "set" / "dog").iterdir():
        image.write_bytes(b"no image")
    assert "no image of class dog can be read" in refused(tmp_path, tmp_path / "set", tmp_path / "packed")
    monkeypatch.setattr(packing.shutil, "disk_usage", lambda _: packing.shutil._ntuple_diskusage(2, 2, 0))
    assert "0.0 MB are free" in refused(tmp_path, tmp_path / "set", tmp_path / "packed")


def test_a_split_that_no_recipe_needs_is_left_out_with_a_warning(tmp_path):
    for name in ("train", "val", "test"):
        photos(tmp_path / "set" / name, count=2)
    (tmp_path / "set" / "test" / "cat").rename(tmp_path / "set" / "test" / "unknown")
    with pytest.warns(UserWarning, match=r"set/test is not packed, since .*unknown is a class that the training set"):
        written = pack(tmp_path / "set", tmp_path / "packed")
    assert [part.path.name for part in written] == ["train.tar", "val.tar"]
    (tmp_path / "set" / "val" / "cat").rename(tmp_path / "set" / "val" / "unknown")
    assert "unknown is a class that" in refused(tmp_path, tmp_path / "set", tmp_path / "again")


def test_splits_of_other_names_are_packed_by_their_names(tmp_path):
    for name in ("seen", "unseen"):
        photos(tmp_path / "set" / name, count=2)
    written = pack(tmp_path / "set", tmp_path / "packed", splits=["seen/", "unseen"])
    assert [(part.path.name, part.classes) for part in written] == [
        ("seen.tar", {"cat", "dog"}),
        ("unseen.tar", {"cat", "dog"}),
    ]


def test_the_pack_of_a_killed_process_is_removed_by_the_next_and_that_of_a_live_one_stays(tmp_path):
    photos(tmp_path / "set")
    for name in ("killed", "live"):
        (tmp_path / f"{TEMPORARY}{name}").mkdir()
        (tmp_path / f"{TEMPORARY}{name}" / "train.tar").touch()
        for place in (tmp_path / f"{TEMPORARY}{name}" / "train.tar", tmp_path / f"{TEMPORARY}{name}"):
            os.utime(place, (0, 0))
    (tmp_path / f"{TEMPORARY}young").mkdir()
    remove_torn_files(tmp_path)  # packs are not its business
    with atomic.locked(tmp_path / f"{TEMPORARY}live"):
        pack(tmp_path / "set", tmp_path / "packed")
        assert {folder.name for folder in tmp_path.glob(f"{TEMPORARY}*")} == {f"{TEMPORARY}live", f"{TEMPORARY}young"}


@pytest.mark.slow
def test_sigterm_leaves_nothing_of_a_pack(tmp_path):
    photos(tmp_path / "set", size=(600, 500), count=300)
    words = [sys.executable, "-m", "grassy", "pack", "set", "packed"]
    with subprocess.Popen(words, cwd=tmp_path, stderr=subprocess.PIPE) as process:
        while process.poll() is None and not list(tmp_path.glob(f"{TEMPORARY}*/train.tar")):
            time.sleep(0.01)
        process.terminate()
    assert process.returncode == 143
    assert [entry.name for entry in tmp_path.iterdir()] == ["set"]


def test_a_disk_that_is_full_is_reported_with_the_name_of_the_pack(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    photos(tmp_path / "set")
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.setattr(atomic.os, "fsync", full)
    with pytest.raises(OSError, match="could not be written: No space left on device") as error:
        pack(tmp_path / "set", tmp_path / "packed")
    assert error.value.filename == str(tmp_path / "packed")
    assert sorted(tmp_path.rglob("*")) == before


def test_nothing_is_left_of_a_pack_that_was_interrupted(tmp_path, monkeypatch):
    photos(tmp_path / "set")
    before, original, seen = sorted(tmp_path.rglob("*")), packing._content, []

    def interrupted(*given):
        seen.append(given)
        if len(seen) == 4:
            assert list(tmp_path.glob(f"{TEMPORARY}*"))
            raise KeyboardInterrupt
        return original(*given)

    monkeypatch.setattr(packing, "_expected_bytes", lambda *_: 0)
    monkeypatch.setattr(packing, "_content", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pack(tmp_path / "set", tmp_path / "packed")
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.slow
def test_a_run_on_a_pack_ends_as_the_run_on_its_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny_folders(tmp_path / "set")
    assert main(["pack", "set", "packed", "--size", "0"]) == 0
    from grassy.train.loop import train
    from training_cases import assert_same_weights

    for name in ("set", "packed"):
        train(tiny_recipe(), tmp_path / name, tmp_path / f"run-{name}", quiet=True)
    assert_same_weights(tmp_path / "run-set", tmp_path / "run-packed")
