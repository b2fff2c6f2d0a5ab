"""Where images come from, in which order, and what happens to those that cannot be read."""

import io
import json
import tarfile

import numpy as np
import pytest
import torch
from PIL import Image

from grassy.training import datasets
from grassy.training.data import open_data
from grassy.training.datasets import open_images
from grassy.training.distributed import Process
from grassy.training.loader import EpochBatches, Preparation, Share, epoch_order, seed_of, seeded
from grassy.training.resident import ResidentLoader
from training_cases import tiny_arrays, tiny_folders, tiny_recipe

CPU = Process(torch.device("cpu"))


# ------------------------------------------------------------------------------------------------ sources


def test_class_folders_give_images_labels_and_names(tmp_path):
    images = open_images("", tiny_folders(tmp_path), "train")
    assert images.class_names == ["cat", "dog", "owl"]
    assert len(images) == 18
    assert np.bincount(images.labels()).tolist() == [6, 6, 6]
    image, label = images.load(17)
    assert (image.size, image.mode, label) == ((12, 12), "RGB", 2)
    assert images.name(17).endswith("train/owl/5.png")


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


def test_arrays_are_read_from_a_folder_or_a_file_grey_ones_too(tmp_path):
    folder = tiny_arrays(tmp_path)
    train = open_images("", folder, "train")
    assert (len(train), train.class_names) == (40, ["class 0", "class 1", "class 2"])
    assert len(open_images("", folder, "validation")) == 20
    assert len(open_images("", folder / "train.npz", "train")) == 40
    np.savez(tmp_path / "grey.npz", images=np.full((2, 4, 4), 7, np.uint8), labels=np.array([0, 1]))
    image, label = open_images("", tmp_path / "grey.npz", "train").load(1)
    assert (image.size, image.getpixel((0, 0)), label) == ((4, 4), (7, 7, 7), 1)


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
    with pytest.raises(ValueError, match=r"class folder .*yak holds no images"):
        open_images("", folder, "train")
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


# ------------------------------------------------------------------------------------------------ order


def test_an_epoch_visits_every_image_once_and_another_epoch_in_another_order():
    first, second = epoch_order(100, seed=1, epoch=0), epoch_order(100, seed=1, epoch=1)
    assert sorted(first) == sorted(second) == list(range(100))
    assert first.tolist() != second.tolist() != epoch_order(100, seed=2, epoch=1).tolist()


def test_repeated_augmentation_shows_fewer_images_several_times_with_different_seeds():
    batches = EpochBatches(90, 9, 1, Share(), seed=0, repeats=3)
    batch = next(iter(batches))
    indices = [index for index, _ in batch]
    assert [indices.count(index) for index in dict.fromkeys(indices)] == [3, 3, 3]
    assert len({seed for _, seed in batch}) == 9
    assert len(np.unique(epoch_order(90, 0, 0, repeats=3))) == 30


def test_processes_and_parts_share_each_batch_of_one_process_without_overlap():
    whole = list(EpochBatches(50, 12, 1, Share(), seed=3))
    shares = [list(EpochBatches(50, 12, 2, Share(rank, 3), seed=3)) for rank in range(3)]
    assert len(whole) == 4
    for update, batch in enumerate(whole):
        parts = [sample for share in shares for part in share[2 * update : 2 * update + 2] for sample in part]
        assert sorted(parts) == sorted(batch)


def test_an_interrupted_epoch_goes_on_with_the_batches_that_were_left():
    batches = EpochBatches(50, 10, 1, Share(), seed=0)
    whole = list(batches)
    batches.start = 3
    assert list(batches) == whole[3:]
    assert len(batches) == 2


def test_seeds_differ_and_seeded_leaves_the_generators_as_they_were():
    assert len({seed_of(a, b) for a in range(50) for b in range(50)}) == 2500
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    with seeded(1):
        first = torch.rand(2), np.random.rand(2)  # noqa: NPY002 (what timm draws from)
    with seeded(1):
        second = torch.rand(2), np.random.rand(2)  # noqa: NPY002 (what timm draws from)
    assert torch.equal(first[0], second[0])
    assert (first[1] == second[1]).all()
    assert torch.equal(torch.rand(3), expected)


def test_batches_do_not_depend_on_the_number_of_worker_processes(tmp_path):
    folder = tiny_folders(tmp_path)
    epochs = []
    for workers in (0, 2):
        recipe = tiny_recipe(crop="resized", color_jitter=0.4, aa="rand-m9-mstd0.5-inc1", workers=workers, batch_size=4)
        data = open_data(recipe, folder, CPU)
        epochs.append([part.images for parts in data.train.epoch(1, 2) for part in parts])
    assert len(epochs[0]) == 2
    for one, other in zip(*epochs, strict=True):
        assert torch.equal(one, other)


# ------------------------------------------------------------------------------------------------ broken images


def test_a_broken_image_gives_way_to_the_next_in_training_and_does_not_count_in_validation(tmp_path):
    folder = tiny_folders(tmp_path)
    whole = io.BytesIO()
    Image.new("RGB", (12, 12)).save(whole, "png")
    (folder / "train" / "cat" / "0.png").write_bytes(whole.getvalue()[:50])
    (folder / "val" / "dog" / "1.png").write_bytes(b"not an image")
    data = open_data(tiny_recipe(batch_size=18), folder, CPU)
    ((batch,),) = data.train.epoch(0)
    assert [failure.name for failure in batch.failures] == [str(folder / "train" / "cat" / "0.png")]
    assert len(batch.images) == 18
    assert sorted(batch.indices) == [1, *range(1, 18)]
    (batch,) = data.validation
    assert [failure.name for failure in batch.failures] == [str(folder / "val" / "dog" / "1.png")]
    assert batch.labels.tolist().count(-1) == 1


def test_a_set_of_nothing_but_broken_images_is_an_error(tmp_path):
    folder = tiny_folders(tmp_path, classes=("cat",), images=25)
    for file in (folder / "train" / "cat").iterdir():
        file.write_bytes(b"")
    data = open_data(tiny_recipe(), folder, CPU)
    with pytest.raises(ValueError, match="20 images in a row cannot be read"):
        next(data.train.epoch(0))


# ------------------------------------------------------------------------------------------------ resident images


def test_resident_crops_and_flips_are_those_of_the_padded_image(tmp_path):
    recipe = tiny_recipe(padding=2)
    data = open_data(recipe, tiny_arrays(tmp_path), CPU)
    loader = data.train
    assert isinstance(loader, ResidentLoader)
    plan = loader.plan(epoch=3)
    assert set(plan[:, 1]) == set(plan[:, 2]) == set(range(5))
    assert set(plan[:, 3]) == {0, 1}
    images, labels = loader.assemble(torch.from_numpy(plan[:9]))
    for row, image, label in zip(plan, images, labels, strict=False):
        index, top, left, flipped = row
        padded = np.pad(loader.images.images[index], ((2, 2), (2, 2), (0, 0)))
        crop = padded[top : top + 8, left : left + 8]
        expected = crop[:, ::-1] if flipped else crop
        assert (image.permute(1, 2, 0).numpy() == expected).all()
        assert label == loader.images.labels()[index]


def test_resident_batches_are_shared_among_processes_and_go_on_after_an_interruption(tmp_path):
    folder = tiny_arrays(tmp_path)
    whole = open_data(tiny_recipe(), folder, CPU).train
    halves = [
        open_data(tiny_recipe(grad_accum_steps=2), folder, Process(CPU.device, rank, 2)).train for rank in range(2)
    ]
    expected = [parts[0] for parts in whole.epoch(1)]
    for update, parts in enumerate(zip(*(half.epoch(1) for half in halves), strict=True)):
        images = torch.cat([batch.images for share in parts for batch in share])
        assert torch.equal(images.flatten(1).unique(dim=0), expected[update].images.flatten(1).unique(dim=0))
    assert update == 4
    rest = list(whole.epoch(1, start=3))
    assert len(rest) == 2
    assert torch.equal(rest[0][0].images, expected[3].images)


def test_why_images_cannot_stay_on_the_device_is_said(tmp_path):
    folders = tiny_folders(tmp_path / "tree")
    arrays = tiny_arrays(tmp_path / "arrays")
    for folder, changes, message in [
        (folders, {}, "not in one array"),
        (arrays, {"crop": "resized"}, "crop is resized"),
        (arrays, {"aa": "3a"}, "aa and color_jitter"),
        (arrays, {"img_size": 16}, "images have 8x8 pixels"),
    ]:
        with pytest.raises(ValueError, match=message):
            open_data(tiny_recipe(loader="resident", **changes), folder, CPU)


# ------------------------------------------------------------------------------------------------ batches


def test_a_batch_larger_than_the_set_becomes_the_set_and_says_so(tmp_path):
    data = open_data(tiny_recipe(batch_size=256), tiny_arrays(tmp_path), CPU)
    assert data.batch_size == 40
    assert data.train.updates == 1
    assert "256 is more than the 40 images" in data.notes[0]


def test_batches_that_cannot_be_divided_are_refused(tmp_path):
    folder = tiny_arrays(tmp_path)
    with pytest.raises(ValueError, match="not divisible by 3"):
        open_data(tiny_recipe(), folder, Process(CPU.device, 0, 3))
    with pytest.raises(ValueError, match="not an even number"):
        open_data(tiny_recipe(mixup=0.2, batch_size=9), folder, CPU)


def test_normalisation_is_that_of_torchvision():
    from torchvision.transforms import functional as F

    images = torch.randint(0, 256, (2, 3, 5, 5), dtype=torch.uint8)
    mean, std = (0.5, 0.4, 0.3), (0.2, 0.3, 0.4)
    prepared, _ = Preparation(mean, std, CPU.device)(images, torch.zeros(2))
    torch.testing.assert_close(prepared, F.normalize(images / 255, mean, std))


def test_webdataset_shards_are_read_through_timm(tmp_path):
    pytest.importorskip("webdataset")
    rng = np.random.default_rng(0)
    for split in ("train", "validation"):
        with tarfile.open(tmp_path / f"{split}-0000.tar", "w") as tar:
            for i in range(24):
                file = io.BytesIO()
                Image.fromarray(rng.integers(0, 255, (8, 8, 3), dtype=np.uint8)).save(file, "png")
                for suffix, data in (("png", file.getvalue()), ("cls", str(i % 3).encode())):
                    info = tarfile.TarInfo(f"{i:04}.{suffix}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
    splits = {
        split: {"name": split, "num_samples": 24, "filenames": [f"{split}-0000.tar"], "shard_lengths": [24]}
        for split in ("train", "validation")
    }
    (tmp_path / "_info.json").write_text(json.dumps({"splits": splits}))
    recipe = tiny_recipe(dataset="wds/shards", num_classes=3, batch_size=6, crop="none", hflip=0)
    data = open_data(recipe, tmp_path, CPU)
    first = [parts[0].images for parts in data.train.epoch(0)]
    assert len(first) == data.train.updates == 4
    assert first[0].shape == (6, 3, 8, 8)
    again = open_data(recipe, tmp_path, CPU)
    assert torch.equal(next(again.train.epoch(0, start=1))[0].images, first[1])
    labels = torch.cat([batch.labels for batch in data.validation])
    assert labels.bincount().tolist() == [8, 8, 8]


def test_the_folders_of_the_reader_are_the_leaves(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "c").mkdir()
    assert sorted(datasets._class_folders(tmp_path)) == ["b", "c"]
