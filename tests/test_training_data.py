"""Where images come from, in which order, and what happens to those that cannot be read."""

import io
import json
import tarfile

import numpy as np
import pytest
import torch
from PIL import Image

from grassy.training import files
from grassy.training.augment import eval_transform
from grassy.training.checkpoint import Description, save_weights
from grassy.training.data import open_data, open_validation
from grassy.training.datasets import open_images
from grassy.training.decode import to_rgb
from grassy.training.distributed import Process
from grassy.training.evaluate import evaluate
from grassy.training.loader import (
    Batch,
    EpochBatches,
    Failure,
    Share,
    ValidationLoader,
    checked,
    epoch_order,
    on_device,
    processors,
    seed_of,
    seeded,
    worker_options,
)
from grassy.training.models import build_model
from grassy.training.prepare import Preparation
from grassy.training.resident import ResidentLoader
from grassy.training.validate import validate
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
    assert len(open_validation(tiny_recipe(), folder / "test.npz", None, 3, CPU)[0]) == 3  # of batches


def test_an_image_of_sixteen_bits_is_scaled_to_eight_and_not_clipped(tmp_path):
    folder = tiny_folders(tmp_path)
    grey = np.arange(144, dtype=np.uint16).reshape(12, 12)
    Image.fromarray(grey * 257).save(folder / "train" / "cat" / "0.png")
    image, _ = open_images("", folder, "train").load(0)
    assert image.mode == "RGB"
    assert (np.asarray(image) == grey[..., None]).all()


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
    assert batch.failures == [Failure(str(folder / "val" / "dog" / "1.png"), "not an image that Pillow knows")]
    assert batch.labels.tolist().count(-1) == 1


def test_a_set_of_nothing_but_broken_images_is_an_error(tmp_path):
    folder = tiny_folders(tmp_path, classes=("cat",), images=25)
    for file in (folder / "train" / "cat").iterdir():
        file.write_bytes(b"")
    data = open_data(tiny_recipe(), folder, CPU)
    with pytest.raises(ValueError, match="20 images in a row cannot be read"):
        next(data.train.epoch(0))


def test_a_validation_batch_without_a_readable_image_is_passed_over(tmp_path):
    folder = tiny_folders(tmp_path)
    for file in (folder / "val" / "cat").iterdir():
        file.write_bytes(b"")
    recipe = tiny_recipe(val_batch_size=3)
    data = open_data(recipe, folder, CPU)
    prepare = Preparation(recipe.mean, recipe.std, CPU.device)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 8 * 8, 3))  # needs its 8x8 pixels
    metrics, failures = evaluate(model, data.validation, prepare, CPU.device)
    assert (metrics.images, len(failures)) == (6, 3)
    for file in (folder / "val").glob("*/*.png"):
        file.write_bytes(b"")
    with pytest.raises(ValueError, match=r"none of the images could be read, .*png first: not an image that Pillow"):
        evaluate(model, data.validation, prepare, CPU.device)


class Unlabelled:
    """Images whose labels are known only when they are read, as those of Hugging Face's data sets."""

    class_names = None

    def __init__(self, labels):
        self.all = labels

    def __len__(self):
        return len(self.all)

    def load(self, index):
        return Image.new("RGB", (8, 8)), self.all[index]

    def name(self, index):
        return f"image {index}"

    def labels(self):
        return None


@pytest.mark.parametrize("workers", [0, 1])
def test_a_label_beyond_the_head_is_named_when_it_is_first_seen(workers):
    transform = eval_transform(8, 1.0, "bilinear")
    loader = ValidationLoader(Unlabelled([0, 2, 3]), transform, 3, Share(), workers, CPU.device, num_classes=3)
    with pytest.raises(ValueError, match=r"^image 2 has label 3, but the head has 3 classes \(0 to 2\)$"):
        next(iter(loader))
    loader = ValidationLoader(Unlabelled([0, -1, 2]), transform, 3, Share(), workers, CPU.device, num_classes=3)
    (batch,) = loader
    assert batch.labels.tolist() == [0, -1, 2]
    assert batch.failures == [Failure("image 1", "its label is -1")]


def test_a_label_of_a_stream_is_checked_without_a_name():
    def batch(*labels):
        return Batch(torch.zeros(2, 3, 8, 8), torch.tensor(labels))

    assert len(list(checked([batch(0, 1), batch(2, 0)], 3))) == 2
    for label in (3, -1):
        with pytest.raises(ValueError, match=f"an image has label {label}, but the head has 3 classes"):
            list(checked([batch(0, label)], 3))


def test_there_are_no_more_workers_than_processors(tmp_path, recwarn):
    data = open_data(tiny_recipe(workers=processors() + 7), tiny_folders(tmp_path), CPU)
    assert data.train._loader.num_workers == data.validation._loader.num_workers == processors()
    assert not [warning for warning in recwarn if "worker processes" in str(warning.message)]
    assert worker_options(processors() + 1, CPU.device)["num_workers"] == processors() + 1  # a stream's order needs it


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
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


def test_a_mixing_recipe_with_few_images_takes_an_even_number_in_each_part(tmp_path):
    folder = tiny_arrays(tmp_path, images=31)
    assert open_data(tiny_recipe(batch_size=256, mixup=0.2), folder, CPU).batch_size == 30
    assert open_data(tiny_recipe(batch_size=256, mixup=0.2, grad_accum_steps=4), folder, CPU).batch_size == 24
    assert open_data(tiny_recipe(batch_size=256), folder, CPU).batch_size == 31
    with pytest.raises(ValueError, match="31 images are too few for 16 parts of pairs"):
        open_data(tiny_recipe(batch_size=256, mixup=0.2, grad_accum_steps=16), folder, CPU)


def test_a_policy_that_timm_does_not_know_is_named(tmp_path):
    folder = tiny_folders(tmp_path)
    for policy in ("nonsense", "rand-x9", "rand-m9-mstdx0.5q"):
        with pytest.raises(ValueError, match=f"timm knows no augmentation aa={policy}"):
            open_data(tiny_recipe(aa=policy), folder, CPU)


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


def make_shards(folder, replaced=None):
    """24 images of three classes a split; `replaced` maps (number, suffix) to other bytes."""
    rng = np.random.default_rng(0)
    for split in ("train", "validation"):
        with tarfile.open(folder / f"{split}-0000.tar", "w") as tar:
            for i in range(24):
                file = io.BytesIO()
                Image.fromarray(rng.integers(0, 255, (8, 8, 3), dtype=np.uint8)).save(file, "png")
                for suffix, data in (("png", file.getvalue()), ("cls", str(i % 3).encode())):
                    data = (replaced or {}).get((i, suffix), data)
                    info = tarfile.TarInfo(f"{i:04}.{suffix}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
    splits = {
        split: {"name": split, "num_samples": 24, "filenames": [f"{split}-0000.tar"], "shard_lengths": [24]}
        for split in ("train", "validation")
    }
    (folder / "_info.json").write_text(json.dumps({"splits": splits}))
    return tiny_recipe(dataset="wds/shards", num_classes=3, batch_size=6, crop="none", hflip=0)


def test_webdataset_shards_are_read_through_timm(tmp_path):
    pytest.importorskip("webdataset")
    recipe = make_shards(tmp_path)
    data = open_data(recipe, tmp_path, CPU)
    first = [parts[0].images for parts in data.train.epoch(0)]
    assert len(first) == data.train.updates == 4
    assert first[0].shape == (6, 3, 8, 8)
    again = open_data(recipe, tmp_path, CPU)
    assert torch.equal(next(again.train.epoch(0, start=1))[0].images, first[1])
    labels = torch.cat([batch.labels for batch in data.validation])
    assert labels.bincount().tolist() == [8, 8, 8]


@pytest.mark.parametrize("workers", [0, 1])
def test_unreadable_images_of_shards_are_named_and_those_of_sixteen_bits_are_scaled(tmp_path, workers):
    pytest.importorskip("webdataset")
    grey = np.arange(64, dtype=np.uint16).reshape(8, 8)
    deep = io.BytesIO()
    Image.fromarray(grey * 257).save(deep, "png")
    recipe = make_shards(tmp_path, {(4, "png"): b"no image", (7, "png"): deep.getvalue()}).changed({"workers": workers})
    batches = list(open_data(recipe, tmp_path, CPU).validation)
    (failure,) = [failure for batch in batches for failure in batch.failures]
    assert failure == Failure(f"0004 of {tmp_path / 'validation-0000.tar'}", "not an image that Pillow knows")
    images = torch.cat([batch.images for batch in batches])
    assert len(images) == 23
    assert (images[6, 0].numpy() == grey).all()
    train = [part for parts in open_data(recipe, tmp_path, CPU).train.epoch(0) for part in parts]
    assert {failure.name for part in train for failure in part.failures} == {f"0004 of {tmp_path / 'train-0000.tar'}"}


def test_a_stream_of_the_wrong_labels_or_of_nothing_is_an_error(tmp_path):
    pytest.importorskip("webdataset")
    recipe = make_shards(tmp_path, {(5, "cls"): b"3"})
    with pytest.raises(ValueError, match="an image has label 3, but the head has 3 classes"):
        list(open_data(recipe, tmp_path, CPU).train.epoch(0))
    make_shards(tmp_path, {(i, "png"): b"no image" for i in range(24)})
    with pytest.raises(ValueError, match="not one batch of images could be read from the stream"):
        next(open_data(recipe, tmp_path, CPU).train.epoch(0))
    with pytest.raises(ValueError, match="3 in a batch is not an even number"):
        open_data(recipe.changed({"mixup": 0.2, "grad_accum_steps": 2}), tmp_path, CPU)


def test_a_model_trained_on_a_stream_is_validated_on_one(tmp_path):
    pytest.importorskip("webdataset")
    (tmp_path / "data").mkdir()
    recipe = make_shards(tmp_path / "data")
    weights = tmp_path / "model.safetensors"
    describe = {name: getattr(recipe, name) for name in ("model_kwargs", "img_size", "crop_pct", "mean", "std")}
    described = Description(recipe.model, 3, recipe.head, recipe=recipe.to_dict(), **describe)
    save_weights(build_model(recipe, 3), described, weights)
    assert validate(weights, tmp_path / "data", device="cpu").images == 24


def test_each_process_counts_the_images_of_a_small_set_alone_and_shares_those_of_others(tmp_path):
    second = Process(CPU.device, 1, 2)
    batches, sharded = open_validation(tiny_recipe(), tiny_arrays(tmp_path / "arrays"), None, 3, second)
    assert (sum(len(batch.labels) for batch in batches), sharded) == (20, False)
    batches, sharded = open_validation(tiny_recipe(), tiny_folders(tmp_path / "tree"), None, 3, second)
    assert (sum(len(batch.labels) for batch in batches), sharded) == (4, True)


def test_the_folders_of_the_reader_are_the_leaves(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / ".hidden").mkdir()
    assert sorted(files.class_folders(tmp_path)) == [str(tmp_path / "a" / "b"), str(tmp_path / "c")]
