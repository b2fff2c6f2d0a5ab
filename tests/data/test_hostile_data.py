"""Data that is not what it seems: read as it should be, or named in one line, and never a hang."""

import bz2
import gzip
import io
import lzma
import os
import shutil
import tarfile
import time
import zipfile

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from PIL import Image

from grassy.data.class_folders import open_files
from grassy.data.decode import read_rgb, reason_for
from grassy.data.image_files import walk
from grassy.data.images import open_images
from grassy.data.run_data import open_data
from grassy.data.worker_loader import Samples
from grassy.distributed.processes import Process
from grassy.spelling import natural_key
from grassy.torchvision_import import import_torchvision
from training_cases import tiny_recipe

POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n{} loop\n"


def tiny_folders(folder, images=6):
    """Class folders of noise in train and val."""
    rng = np.random.default_rng(0)
    for split in ("train", "val"):
        for name in ("cat", "dog", "owl"):
            (folder / split / name).mkdir(parents=True)
            for number in range(images):
                pixels = rng.integers(0, 256, (12, 12, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / split / name / f"{number}.png")
    return folder


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    """A tar of three classes with four images each, and where its members end."""
    folder = tiny_folders(tmp_path_factory.mktemp("tree"), images=4)
    path = folder / "all.tar"
    with tarfile.open(path, "w") as tar:
        tar.add(folder / "train", arcname=".")
    return path


def read_all(path):
    images = open_files(path)
    return [images.load(index) for index in range(len(images))]


# ------------------------------------------------------------------------------------------------ tars


def test_a_tar_is_read_as_the_folders_it_was_made_of(archive):
    inside, beside = read_all(archive), read_all(archive.parent / "train")
    assert len(inside) == 12
    key = lambda image: (image[1], image[0].tobytes())
    for one, other in zip(sorted(inside, key=key), sorted(beside, key=key), strict=True):
        assert one[1] == other[1]
        assert (one[0] == other[0]).all()


def test_a_tar_that_is_cut_short_is_refused_wherever_the_cut_is(archive, tmp_path):
    content = archive.read_bytes()
    with tarfile.open(archive) as tar:
        end = tar.getmembers()[-1]
    whole = end.offset_data + -(-end.size // 512) * 512  # then come zeros, of which one block will do
    cuts = [*range(512, whole + 1, 256), 1, 511, whole + 511, whole - 1]
    for cut in cuts:
        (tmp_path / "train.tar").write_bytes(content[:cut])
        with pytest.raises(ValueError, match=r"train\.tar is not a tar, or a damaged one"):
            open_files(tmp_path / "train.tar")
    (tmp_path / "train.tar").write_bytes(content[: whole + 512])
    assert len(open_files(tmp_path / "train.tar")) == 12


@pytest.mark.parametrize("size", [10 * 2**40, 8 * 2**30, 10**6])
def test_a_member_that_claims_more_than_there_is_is_refused_at_once(tmp_path, size):
    info = tarfile.TarInfo("cat/0.png")
    info.size = size
    (tmp_path / "train.tar").write_bytes(info.tobuf(tarfile.GNU_FORMAT) + bytes(4096))
    begin = time.monotonic()
    with pytest.raises(ValueError, match="a damaged one"):
        open_files(tmp_path / "train.tar")
    assert time.monotonic() - begin < 5


def test_a_tar_of_tars_is_read_and_one_that_is_cut_short_inside_is_refused(archive, tmp_path):
    def pack(content):
        with tarfile.open(tmp_path / "train.tar", "w") as tar:
            info = tarfile.TarInfo("animals.tar")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))

    pack(archive.read_bytes())
    assert [label for _, label in read_all(tmp_path / "train.tar")].count(2) == 4
    pack(archive.read_bytes()[:5000])
    with pytest.raises(ValueError, match="a damaged one"):
        open_files(tmp_path / "train.tar")


def add(tar, name, content):
    info = tarfile.TarInfo(name)
    info.size = len(content)
    tar.addfile(info, io.BytesIO(content))


@pytest.mark.parametrize("content", [b"", b"not a tar", b"x" * 5000])
def test_a_member_that_is_only_called_a_tar_is_left_out(archive, tmp_path, content):
    with tarfile.open(tmp_path / "train.tar", "w") as tar:
        add(tar, "cat/notes.tar", content)
        add(tar, "animals.tar", archive.read_bytes())
    assert len(open_files(tmp_path / "train.tar")) == 12


def test_a_tar_within_a_tar_whose_first_header_is_damaged_is_refused(archive, tmp_path):
    with tarfile.open(tmp_path / "train.tar", "w") as tar:
        add(tar, "animals.tar", archive.read_bytes())
        add(tar, "damaged.tar", b"x" + archive.read_bytes()[1:])
    with pytest.raises(ValueError, match="a damaged one"):
        open_files(tmp_path / "train.tar")


@pytest.mark.parametrize(("kind", "module"), [("gzip", gzip), ("bzip2", bz2), ("xz", lzma)])
def test_a_compressed_tar_is_called_so(archive, tmp_path, kind, module):
    content = module.compress(archive.read_bytes())
    (tmp_path / "train.tar").write_bytes(content)
    with pytest.raises(ValueError, match=rf"train\.tar is compressed with {kind}: decompress it first"):
        open_files(tmp_path / "train.tar")
    with tarfile.open(tmp_path / "train.tar", "w") as tar:
        add(tar, "animals.tar", content)
    with pytest.raises(ValueError, match=rf"animals\.tar of .*train\.tar is compressed with {kind}"):
        open_files(tmp_path / "train.tar")


def test_a_class_whose_name_begins_like_a_compressed_file_is_read(archive, tmp_path):
    with tarfile.open(archive) as whole, tarfile.open(tmp_path / "train.tar", "w") as tar:
        add(tar, "BZh/0.png", whole.extractfile("./cat/0.png").read())
    assert open_files(tmp_path / "train.tar").class_names == ["BZh"]


def test_a_sparse_member_is_called_so(tmp_path):
    info = tarfile.TarInfo("cat/0.png")
    info.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0"}
    info.pax_headers |= {"GNU.sparse.name": "cat/0.png", "GNU.sparse.realsize": "1000000"}
    content = b"1\n0\n3\n".ljust(512, b"\0") + b"png"  # one piece, of three bytes at byte 0
    info.size = len(content)
    with tarfile.open(tmp_path / "train.tar", "w", format=tarfile.PAX_FORMAT) as tar:
        tar.addfile(info, io.BytesIO(content))
    with pytest.raises(ValueError, match=r"^cat/0\.png of .*train\.tar is a sparse file: pack it again without"):
        open_files(tmp_path / "train.tar")


def test_tars_nested_without_end_are_refused(archive, tmp_path):
    content = archive.read_bytes()
    for _ in range(30):
        outer = io.BytesIO()
        with tarfile.open(fileobj=outer, mode="w") as tar:
            info = tarfile.TarInfo("in.tar")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
        content = outer.getvalue()
    (tmp_path / "train.tar").write_bytes(content)
    with pytest.raises(ValueError, match="tars in tars in tars"):
        open_files(tmp_path / "train.tar")


@settings(max_examples=150, deadline=3000, suppress_health_check=list(HealthCheck), derandomize=True)
@given(st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), max_size=8), st.floats(0, 1))
def test_a_tar_with_any_bytes_changed_is_read_or_refused(archive, tmp_path_factory, changes, cut):
    content = bytearray(archive.read_bytes())
    for place, value in changes:
        content[int(place * len(content))] = value
    path = tmp_path_factory.mktemp("damaged") / "train.tar"
    path.write_bytes(content[: int(cut * len(content))])
    try:
        reader = open_files(path)
    except ValueError:
        return
    samples = Samples(open_images("", path.parent, "train"), torch.as_tensor, training=False)
    assert len(samples) == len(reader)


# ------------------------------------------------------------------------------------------------ folders


def test_a_link_back_up_is_not_followed_again_and_again(tmp_path):
    folder = tiny_folders(tmp_path)
    names = open_images("", folder, "train").class_names
    for number in range(3):
        for name in names:
            (folder / "train" / name / f"loop{number}").symlink_to(folder / "train", target_is_directory=True)
    begin = time.monotonic()
    images = open_images("", folder, "train")
    assert time.monotonic() - begin < 5
    assert len(images) == 18
    assert images.class_names == names


def test_classes_that_link_to_one_folder_are_all_there(tmp_path):
    pool = tiny_folders(tmp_path / "pool") / "train"
    for name, goal in {"a": "cat", "b": "cat", "c": "dog"}.items():
        (tmp_path / "train").mkdir(exist_ok=True)
        (tmp_path / "train" / name).symlink_to(pool / goal, target_is_directory=True)
    images = open_images("", tmp_path, "train")
    assert images.class_names == ["a", "b", "c"]
    assert np.bincount(images.labels()).tolist() == [6, 6, 6]


def test_folders_that_link_to_each_other_are_visited_once_on_each_way(tmp_path):
    for name, other in ("ab", "ba"):
        (tmp_path / "root" / name).mkdir(parents=True)
        (tmp_path / "root" / name / "other").symlink_to(tmp_path / "root" / other, target_is_directory=True)
    found = [os.path.relpath(folder, tmp_path / "root") for folder, *_ in walk(tmp_path / "root")]
    assert found == [".", "a", "a/other", "b", "b/other"]


@pytest.mark.slow
def test_links_that_make_millions_of_ways_are_refused(tmp_path):
    for depth in range(20):  # twice as many ways at each step
        (tmp_path / f"d{depth}").mkdir()
        for name in "ab":
            (tmp_path / f"d{depth}" / name).symlink_to(tmp_path / f"d{depth + 1}", target_is_directory=True)
    (tmp_path / "d20").mkdir()
    begin = time.monotonic()
    with pytest.raises(ValueError, match=r"links below .*d0 lead to the same folders more than 50,000 times"):
        list(walk(tmp_path / "d0"))
    assert time.monotonic() - begin < 60


def test_what_is_no_file_among_images_is_named_and_the_others_are_read(tmp_path):
    folder = tiny_folders(tmp_path)
    os.mkfifo(folder / "train" / "cat" / "a.png")
    (folder / "train" / "cat" / "b.png").symlink_to(tmp_path / "nowhere")
    images = open_images("", folder, "train")
    samples = Samples(images, lambda image: torch.zeros(3, 1, 1), training=False)
    failures = [failure for index in range(len(images)) for failure in samples[index, 0][3]]
    assert len(images) == 20
    assert [(os.path.basename(name), reason.split("/")[-1]) for name, reason in failures] == [
        ("a.png", "a.png is not a regular file"),
        ("b.png", "No such file or directory"),
    ]


def test_arrays_without_pixels_are_refused(tmp_path):
    np.savez(tmp_path / "train.npz", x=np.zeros((3, 0, 0, 3), np.uint8), y=np.zeros(3, int))
    with pytest.raises(ValueError, match=r"train\.npz: images must be uint8 of shape"):
        open_images("", tmp_path, "train")


def test_an_array_that_claims_terabytes_is_refused(tmp_path):
    header = b"{'descr': '|u1', 'fortran_order': False, 'shape': (99999999999, 32, 32, 3), }"
    header = header.ljust(117) + b"\n"
    with zipfile.ZipFile(tmp_path / "train.npz", "w") as archive:
        archive.writestr("x.npy", b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header)
    with pytest.raises(ValueError, match=r"train\.npz cannot be read as \.npz"):
        open_images("", tmp_path, "train")


@settings(max_examples=150, deadline=3000, suppress_health_check=list(HealthCheck), derandomize=True)
@example([], 1.0)
@given(st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), max_size=6), st.floats(0.5, 1))
def test_arrays_with_any_bytes_changed_are_read_or_refused(tmp_path_factory, changes, cut):
    path = tmp_path_factory.mktemp("damaged") / "train.npz"
    names = np.array(["a", "b"])
    np.savez_compressed(path, x=np.zeros((4, 2, 2, 3), np.uint8), y=np.arange(4) % 2, classes=names)
    content = bytearray(path.read_bytes())
    for place, value in changes:
        content[int(place * len(content))] = value
    path.write_bytes(content[: int(cut * len(content))])
    try:
        images = open_images("", path.parent, "train")
    except ValueError:
        return
    pixels, _ = images.load(0)
    assert (pixels.shape[2:], pixels.dtype) == ((3,), np.uint8)


@pytest.mark.parametrize("name", ["train.tar", "train.npz"])
def test_a_fifo_in_place_of_the_data_is_not_opened(tmp_path, name):
    os.mkfifo(tmp_path / name)
    with pytest.raises(ValueError, match="train"):
        open_images("", tmp_path, "train")
    with pytest.raises(ValueError, match=r"train.* is not a regular file"):
        open_images("", tmp_path / name, "train")


# ------------------------------------------------------------------------------------------------ images


def test_postscript_is_not_run_whatever_it_is_called(tmp_path, monkeypatch):
    monkeypatch.setattr("PIL.EpsImagePlugin.Ghostscript", lambda *_: pytest.fail("Ghostscript was started"))
    (tmp_path / "0.jpg").write_bytes(POSTSCRIPT)
    with pytest.raises(OSError, match="cannot identify") as error:
        read_rgb(tmp_path / "0.jpg")
    assert reason_for(error.value) == "not an image that Pillow knows"


def test_postscript_in_a_class_folder_or_a_tar_is_not_run(tmp_path, monkeypatch):
    monkeypatch.setattr("PIL.EpsImagePlugin.Ghostscript", lambda *_: pytest.fail("Ghostscript was started"))
    folder = tiny_folders(tmp_path)
    (folder / "train" / "cat" / "0.png").write_bytes(POSTSCRIPT)
    with tarfile.open(tmp_path / "val.tar", "w") as tar:
        tar.add(folder / "train", arcname=".")
    shutil.rmtree(folder / "val")
    for split in ("train", "validation"):
        with pytest.raises(OSError, match="cannot identify"):
            open_images("", folder, split).load(0)


@pytest.mark.parametrize("kind", ["jpg", "png", "gif", "bmp", "ppm", "tif", "webp", "jp2"])
def test_the_usual_formats_are_read(tmp_path, kind):
    Image.new("RGB", (4, 3), (200, 100, 50)).save(tmp_path / f"x.{kind}")
    assert read_rgb(tmp_path / f"x.{kind}").shape == (3, 4, 3)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.lists(st.text(max_size=12), max_size=6))
def test_classes_are_numbered_in_the_order_of_timm(names):
    import_torchvision()
    from timm.utils.misc import natural_key as of_timm

    try:
        expected = sorted(names, key=of_timm)
    except ValueError:  # it takes some signs for digits that are none
        expected = sorted(names, key=natural_key)
    assert sorted(names, key=natural_key) == expected


def test_a_recipe_cannot_name_a_command_in_place_of_a_tar(tmp_path):
    pytest.importorskip("webdataset")  # whose addresses may begin with "pipe:"
    (tmp_path / "data").mkdir()
    split = f"pipe:touch {tmp_path / 'ran'}; echo .tar|40"
    recipe = tiny_recipe(dataset="wds/tars", train_split=split, val_split=split, num_classes=3, workers=0)
    for folder in (tmp_path / "data", None):
        with pytest.raises((ValueError, TypeError)):
            list(open_data(recipe, folder, Process(torch.device("cpu"))).train.epoch(0))
    assert not (tmp_path / "ran").exists()


def test_shards_of_a_webdataset_are_no_classes(tmp_path):
    """Their labels are in files, and the names of the tars would be the classes."""
    for shard in range(2):
        with tarfile.open(tmp_path / f"faces-{shard:04}.tar", "w") as tar:
            for name in ("0.png", "0.cls"):
                tar.addfile(tarfile.TarInfo(name), io.BytesIO())
    message = r"faces-0000\.tar is a shard of a WebDataset, .*0\.cls\): give dataset=wds/NAME num_classes=N"
    with pytest.raises(ValueError, match=message):
        open_files(tmp_path)


@pytest.mark.parametrize("info", ['{"splits": {"train": {"filenames": ["a.tar"]}}}', "[]"])
def test_an_info_file_that_timm_cannot_read_is_named(tmp_path, info):
    pytest.importorskip("webdataset")
    (tmp_path / "_info.json").write_text(info)
    with pytest.raises(ValueError, match="wds/faces: "):
        open_data(tiny_recipe(dataset="wds/faces", num_classes=3), tmp_path, Process(torch.device("cpu")))
