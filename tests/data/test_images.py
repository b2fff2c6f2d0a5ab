"""Where images come from: folders, tars, arrays, the digits and readers of timm."""

import gc
import os
import tarfile
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from PIL import Image

from grassy.data import worker_processes
from grassy.data.batch import Batch, on_device
from grassy.data.compact_lists import Place, Places, Strings
from grassy.data.decode import to_rgb
from grassy.data.images import open_images
from grassy.data.layout import split_place
from grassy.data.run_data import open_data, open_validation
from grassy.data.worker_processes import processors
from grassy.distributed.processes import Process
from grassy.recipes.recipe import Recipe
from training_cases import tiny_arrays, tiny_folders, tiny_recipe

CPU = Process(torch.device("cpu"))


def test_class_folders_give_images_labels_and_names(tmp_path):
    images = open_images("", tiny_folders(tmp_path), "train")
    assert images.class_names == ["cat", "dog", "owl"]
    assert len(images) == 18
    assert np.bincount(images.labels()).tolist() == [6, 6, 6]
    image, label = images.load(17)
    assert (image.shape, image.dtype, label) == ((12, 12, 3), np.uint8, 2)
    assert images.name(17).endswith("train/owl/5.png")


def test_images_of_all_usual_formats_are_taken(tmp_path):
    folder = tiny_folders(tmp_path)
    for number, suffix in enumerate(("webp", "bmp", "tif", "jpeg")):
        file = folder / "train" / "owl" / f"{number}.png"
        Image.open(file).save(file.with_suffix(f".{suffix}"))
        file.unlink()
    images = open_images("", folder, "train")
    assert len(images) == 18
    assert {Path(images.name(i)).suffix for i in range(12, 18)} == {".webp", ".bmp", ".tif", ".jpeg", ".png"}
    assert all(images.load(i)[0].shape[2] == 3 for i in range(12, 18))
    notes = open_data(tiny_recipe(), folder, Process(torch.device("cpu"))).notes
    assert "among 18 training images there are 1 .bmp, 1 .tif, 1 .webp: if they are not meant, move them away" in notes


def test_a_validation_set_that_lacks_a_class_keeps_the_numbers_of_the_training_set(tmp_path):
    folder = tiny_folders(tmp_path)
    for file in (folder / "val" / "cat").iterdir():
        file.unlink()
    (folder / "val" / "cat").rmdir()
    train = open_images("", folder, "train")
    assert sorted(set(open_images("", folder, "validation", train.class_names).labels())) == [1, 2]


def test_a_tar_of_class_folders_is_read_like_the_folders(tmp_path):
    folder = tiny_folders(tmp_path / "tree")
    for split in ("train", "val"):
        with tarfile.open(tmp_path / f"{split}.tar", "w") as tar:
            tar.add(folder / split, arcname=".")
    train = open_images("", tmp_path, "train")
    assert (len(train), train.class_names) == (18, ["cat", "dog", "owl"])
    assert train.load(0)[0].tobytes() == open_images("", folder, "train").load(0)[0].tobytes()
    assert len(open_images("", tmp_path, "validation", train.class_names)) == 9


def make_tar(path, folder, arcname="."):
    with tarfile.open(path, "w") as tar:
        tar.add(folder, arcname=arcname)


def test_tars_of_one_class_each_are_named_after_their_class_whatever_their_paths_begin_with(tmp_path):
    folder = tiny_folders(tmp_path / "tree")
    (tmp_path / "train").mkdir()
    for name, arcname in (("cat", "."), ("dog", ""), ("owl", "owl")):
        make_tar(tmp_path / "train" / f"{name}.tar", folder / "train" / name, arcname)
    (tmp_path / "train" / "._cat.tar").write_bytes(b"not a tar")
    train = open_images("", tmp_path, "train")
    assert train.class_names == ["cat", "dog", "owl"]
    assert np.bincount(train.labels()).tolist() == [6, 6, 6]
    assert train.load(17)[1] == 2


def test_a_class_in_a_validation_tar_that_the_training_tar_lacks_is_refused(tmp_path):
    folder = tiny_folders(tmp_path / "tree")
    make_tar(tmp_path / "train.tar", folder / "train")
    (folder / "val" / "dog").rename(folder / "val" / "zebra")
    make_tar(tmp_path / "val.tar", folder / "val")
    with pytest.raises(ValueError, match=r"zebra of .*val\.tar is a class that the training set does not have"):
        open_data(tiny_recipe(), tmp_path, CPU)


def test_tars_that_are_none_or_hold_nothing_are_named(tmp_path):
    file = tmp_path / "train.tar"
    for content in (b"", b"not a tar" * 100):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=r"train\.tar is not a tar, or a damaged one"):
            open_images("", tmp_path, "train")
    (tmp_path / "nothing").mkdir()
    make_tar(file, tmp_path / "nothing")
    with pytest.raises(ValueError, match=r"train\.tar holds no images"):
        open_images("", tmp_path, "train")
    make_tar(file, tiny_folders(tmp_path / "tree") / "train" / "cat")
    with pytest.raises(ValueError, match=r"0\.png of .*train\.tar lies in no class folder"):
        open_images("", tmp_path, "train")


def test_images_beside_the_class_folders_are_refused_by_name(tmp_path):
    folder = tiny_folders(tmp_path)
    Image.new("RGB", (4, 4)).save(folder / "train" / "overview.png")
    with pytest.raises(ValueError, match=r"train/overview\.png lies in no class folder"):
        open_images("", folder, "train")


def test_training_and_packing_choose_the_same_of_two_places_of_a_split(tmp_path):
    folder = tiny_folders(tmp_path)
    tiny_arrays(folder, images=5)
    train = open_images("", folder, "train")
    assert len(train) == 18
    assert split_place(folder, ["train"]) == folder / "train"


def test_hidden_folders_and_files_are_not_looked_at(tmp_path):
    folder = tiny_folders(tmp_path / "tree")
    for hidden in (".ipynb_checkpoints", "cat/.ipynb_checkpoints", ".trash/cat", ".trash/yak"):
        for split in ("train", "val"):
            (folder / split / hidden).mkdir(parents=True)
            Image.new("RGB", (4, 4)).save(folder / split / hidden / "copy.png")
    (folder / "train" / "dog" / "._0.png").write_bytes(b"what some systems leave")
    (folder / "train" / "dog" / ".empty").mkdir()
    for split in ("train", "val"):
        make_tar(tmp_path / f"{split}.tar", folder / split)
    for place in (folder, tmp_path):
        train = open_images("", place, "train")
        assert (len(train), train.class_names) == (18, ["cat", "dog", "owl"])
        assert np.bincount(train.labels()).tolist() == [6, 6, 6]
        assert len(open_images("", place, "validation", train.class_names)) == 9


def test_labels_of_arrays_follow_the_names_of_the_training_set(tmp_path):
    folder = tiny_arrays(tmp_path)
    with np.load(folder / "test.npz") as arrays:
        x, y, names = (arrays[key] for key in ("x", "y", "classes"))
    train = open_images("", folder, "train")
    np.savez(folder / "test.npz", x=x, y=2 - y, classes=names[::-1])
    held_out = open_images("", folder, "validation", train.class_names)
    assert held_out.class_names == train.class_names
    assert (held_out.labels() == y).all()
    np.savez(folder / "test.npz", x=x, y=y, classes=["class 0", "class 1", "zebra"])
    with pytest.raises(ValueError, match=r"test\.npz has the class 'zebra', which the training set does not have"):
        open_data(tiny_recipe(), folder, CPU)
    np.savez(folder / "test.npz", x=x, y=y, classes=["class 1", "class 0"])
    with pytest.raises(ValueError, match=r"test\.npz has the label 2, but names only 2 classes"):
        open_data(tiny_recipe(), folder, CPU)


def test_training_on_one_file_is_refused_since_it_would_be_validated_on_as_well(tmp_path):
    folder = tiny_arrays(tmp_path)
    with pytest.raises(ValueError, match=r"one file, .*: give a folder with train\.npz and validation\.npz"):
        open_data(tiny_recipe(), folder / "train.npz", CPU)
    make_tar(tmp_path / "all.tar", tiny_folders(tmp_path / "tree") / "train")
    with pytest.raises(ValueError, match=r"all\.tar is one file, .* with train\.tar and validation\.tar"):
        open_data(tiny_recipe(), tmp_path / "all.tar", CPU)
    images = open_images("", folder / "test.npz", "val")
    assert sum(len(batch.labels) for batch in open_validation(tiny_recipe(), None, images, 3, CPU)[0]) == 20


def test_an_image_of_sixteen_bits_is_scaled_to_eight_and_not_clipped(tmp_path):
    folder = tiny_folders(tmp_path)
    grey = np.arange(144, dtype=np.uint16).reshape(12, 12)
    Image.fromarray(grey * 257).save(folder / "train" / "cat" / "0.png")
    image, _ = open_images("", folder, "train").load(0)
    assert image.shape == (12, 12, 3)
    assert (image == grey[..., None]).all()


@pytest.mark.parametrize("suffix", ["png", "tif", "pgm"])
def test_formats_differ_in_what_pillow_makes_of_sixteen_bits(tmp_path, suffix):
    grey = np.arange(144, dtype=np.uint16).reshape(12, 12)
    Image.fromarray(grey * 257).save(tmp_path / f"deep.{suffix}")
    assert (np.asarray(to_rgb(Image.open(tmp_path / f"deep.{suffix}"))) == grey[..., None]).all()


def test_pixels_of_unknown_range_are_refused():
    with pytest.raises(ValueError, match="its pixels are floats of unknown range"):
        to_rgb(Image.fromarray(np.ones((2, 2), np.float32)))
    with pytest.raises(ValueError, match="its pixels are 32-bit integers of unknown range"):
        to_rgb(Image.fromarray(np.full((2, 2), 65536, np.int32)))


def test_arrays_are_read_from_a_folder_or_a_file_grey_ones_too(tmp_path):
    folder = tiny_arrays(tmp_path)
    train = open_images("", folder, "train")
    assert (len(train), train.class_names) == (40, ["class 0", "class 1", "class 2"])
    assert len(open_images("", folder, "validation")) == 20
    assert len(open_images("", folder / "train.npz", "train")) == 40
    np.savez(tmp_path / "grey.npz", images=np.full((2, 4, 4), 7, np.uint8), labels=np.array([0, 1]))
    image, label = open_images("", tmp_path / "grey.npz", "train").load(1)
    assert (image.shape, image[0, 0].tolist(), label) == ((4, 4, 3), [7, 7, 7], 1)


def test_the_digits_need_no_folder_and_their_splits_do_not_overlap():
    train, test = open_images("digits", None, "train"), open_images("digits", None, "validation")
    assert len(train) + len(test) == 1797
    assert len(np.unique(np.concatenate([train.images, test.images]), axis=0)) == 1797


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": np.zeros((2, 4, 4, 3))}, "must hold x"),
        ({"x": np.zeros((2, 4, 4, 3)), "y": np.zeros(2, int)}, "must be uint8"),
        ({"x": np.zeros((2, 4, 4, 3), np.uint8), "y": np.zeros(3, int)}, "must be 2 integers"),
        ({"x": np.zeros((2, 4, 4, 3), np.uint8), "y": np.array([0, -1])}, "must not be negative"),
        ({"x": np.zeros((0, 4, 4, 3), np.uint8), "y": np.zeros(0, int)}, "holds no images"),
        ({"x": np.array([{}], dtype=object), "y": np.zeros(1, int)}, "cannot be read as .npz"),  # would need pickle
    ],
)
def test_arrays_of_the_wrong_kind_are_refused(tmp_path, arrays, message):
    np.savez(tmp_path / "train.npz", **arrays)
    with pytest.raises(ValueError, match=message):
        open_images("", tmp_path, "train")


def test_a_damaged_npz_file_is_named(tmp_path):
    (tmp_path / "train.npz").write_bytes(b"PK\x03\x04 and then nothing")
    with pytest.raises(ValueError, match=r"train\.npz cannot be read"):
        open_images("", tmp_path, "train")


def test_a_missing_folder_a_missing_split_and_an_empty_class_are_named(tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        open_images("", tmp_path / "nowhere", "train")
    with pytest.raises(ValueError, match="give --data-dir"):
        open_images("", None, "train")
    with pytest.raises(ValueError, match="has no folder train or training; it is empty"):
        open_images("", tmp_path, "train")
    folder = tiny_folders(tmp_path / "tree")
    with pytest.raises(ValueError, match="has no folder holdout; found train, val"):
        open_images("", folder, "holdout")
    (folder / "train" / "yak").mkdir()
    with pytest.raises(ValueError, match=r"class folder .*train/yak holds no images"):
        open_images("", folder, "train")
    (folder / "train" / "yak" / "wild").mkdir()
    with pytest.raises(ValueError, match=r"class folder .*train/yak/wild holds no images"):
        open_images("", folder, "train")
    (folder / "train" / "yak" / "wild").rmdir()
    (folder / "train" / "yak").rmdir()
    (folder / "val" / "zebra").mkdir()
    with pytest.raises(ValueError, match=r"zebra is a class that the training set does not have"):
        open_images("", folder, "val", ["cat", "dog", "owl"])


def test_labels_beyond_the_head_are_named_before_training(tmp_path):
    with pytest.raises(ValueError, match=r"train\.npz\[2\] has label 2, but the head has 2 classes"):
        open_data(tiny_recipe(num_classes=2), tiny_arrays(tmp_path), CPU)


def test_an_unknown_reader_of_timm_is_one_line(tmp_path):
    with pytest.raises(ValueError, match="Unknown torchvision dataset"):
        open_images("torch/nonsense", tmp_path, "train")


@pytest.mark.parametrize(
    ("name", "hint"), [("torhc/cifar100", "did you mean 'torch/'"), ("digit", "did you mean 'digits'"), ("foo/bar", ""),
                       ("imagefolder", ""), ("torch/", ""), ("wds", "did you mean 'wds/'")]
)  # fmt: skip
def test_what_is_no_data_set_is_not_taken_for_a_folder(name, hint, tmp_path):
    """timm would, and find training and validation images in the same place."""
    folder = tiny_folders(tmp_path / "data")
    with pytest.raises(ValueError, match=f"empty for folders, tars and .npz files .*{name}.*{hint}"):
        open_images(name, folder, "train")
    with pytest.raises(ValueError, match="dataset must be"):
        Recipe(dataset=name)


def test_a_data_set_of_torchvision_that_is_not_there_is_one_line_without_advice_that_does_not_apply(tmp_path):
    with pytest.raises(ValueError, match=r"torch/cifar100 in .*not found.* grassy downloads nothing"):
        open_images("torch/cifar100", tmp_path, "train")


def test_the_digits_have_no_other_split():
    with pytest.raises(ValueError, match="no split 'tset': it is one of train and val"):
        open_images("digits", None, "tset")


def test_the_digits_have_no_folder(tmp_path):
    with pytest.raises(ValueError, match=r"digits, which has no files: for the images in .* it must be empty"):
        open_images("digits", tmp_path, "train")


def test_there_are_no_more_workers_than_processors(tmp_path, recwarn):
    data = open_data(tiny_recipe(workers=processors() + 7), tiny_folders(tmp_path), CPU)
    assert data.train._loader.num_workers == data.validation._loader.num_workers == processors()
    assert not [warning for warning in recwarn if "worker processes" in str(warning.message)]


@pytest.mark.gpu
def test_a_batch_goes_to_the_device_without_waiting_for_the_next():
    drawn = []

    def batches():
        for number in range(3):
            drawn.append(number)
            yield Batch(torch.full((2, 3, 4, 4), number, dtype=torch.uint8), torch.tensor([number, number]))

    device = torch.device("cuda", 0)
    for number, batch in enumerate(on_device(batches(), device)):
        assert drawn == list(range(number + 1))
        assert batch.images.device == batch.labels.device == device
        assert (batch.images == number).all()


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 8),
        ({"cpu.max": "max 100000\n"}, 8),
        ({"cpu.max": "200000 100000\n"}, 2),
        ({"cpu.max": "150000 100000\n"}, 2),
        ({"cpu.max": "5000 100000\n"}, 1),
        ({"cpu.max": "6400000 100000\n"}, 8),
        ({"cpu.max": "nonsense"}, 8),
        ({"cpu/cpu.cfs_quota_us": "300000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 3),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 8),
    ],
)
def test_a_container_has_as_many_processors_as_its_quota_allows(files, cores, tmp_path, monkeypatch):
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    monkeypatch.setattr(worker_processes, "CGROUP", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8), raising=False)
    assert processors() == cores


def test_batches_of_all_epochs_are_copied_in_one_stream(monkeypatch):
    """torch's allocator keeps memory for each stream."""
    cuda = MagicMock()
    monkeypatch.setattr(torch, "cuda", cuda)
    for _ in range(3):
        assert len(list(on_device([MagicMock(), MagicMock()], torch.device("cuda", 99)))) == 2
    cuda.Stream.assert_called_once()


# ------------------------------------------------------------------------------------------------ memory of workers


PLACES = [Place("a.tar", 512, 7), Place("b.tar", 0, 0), Place("a.tar", 2**40, 1), Place("c/ä\udcff.png")]


def test_compact_lists_hold_what_lists_do():
    names = ["", "cat/0.png", "ä\udcff\n", "cat/0.png"]
    strings, places = Strings(names), Places(PLACES)
    assert (list(strings), list(places), len(strings), len(places)) == (names, PLACES, 4, 4)
    assert [strings[i] for i in range(-4, 4)] == 2 * names
    assert [places[i] for i in range(-4, 4)] == 2 * PLACES
    assert (list(strings[::2]), list(strings[1:])) == (names[::2], names[1:])
    assert list(strings.some([2, 0, 2])) == [names[2], names[0], names[2]]
    assert list(places.some([3, 2, 3])) == [PLACES[3], PLACES[2], PLACES[3]]
    assert (len(Strings([])), len(strings.some([])), len(Places([]))) == (0, 0, 0)
    for each in (strings, places):
        with pytest.raises(IndexError):
            each[4]


def test_images_in_files_are_no_objects_of_python_whose_memory_each_worker_would_copy(tmp_path):
    folder = tiny_folders(tmp_path / "tree", images=50)
    make_tar(tmp_path / "train.tar", folder / "train")
    for place in (folder, tmp_path):
        images = open_images("", place, "train")
        assert len(images) == 150
        assert len(list(objects_of(images))) < 50


def objects_of(root):
    """The objects that an object consists of, and those that they refer to."""
    yield root
    for each in gc.get_referents(root):
        if not isinstance(each, type):
            yield from objects_of(each)
