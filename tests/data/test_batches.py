"""In which order images come, those that stay on the device, and batches."""

import io
import itertools
import json
import tarfile

import numpy as np
import pytest
import torch
from PIL import Image

from grassy.data import class_folders as files
from grassy.data.batch import Failure
from grassy.data.batch_transforms import Preparation
from grassy.data.images import ArrayImages, open_images
from grassy.data.order import EpochBatches, Share, epoch_order, seed_of
from grassy.data.resident_loader import ResidentLoader
from grassy.data.run_data import open_data, open_validation
from grassy.data.worker_loader import Samples, seeded
from grassy.distributed.processes import Process
from grassy.inference.evaluate import evaluate
from grassy.inference.validate import validate
from grassy.recipes.changes import with_changes
from grassy.runs.weights import Description, save_weights
from grassy.train.model import build_model
from training_cases import tiny_arrays, tiny_folders, tiny_recipe

CPU = Process(torch.device("cpu"))


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


def test_each_epoch_draws_the_crop_of_an_image_anew():
    batches = EpochBatches(20, 5, 1, Share(), seed=3)
    drawn = []
    for batches.epoch in range(3):
        drawn.append(dict(pair for batch in batches for pair in batch))
    assert all(len({epoch[index] for epoch in drawn}) == 3 for index in range(20))


def test_runs_with_different_seeds_draw_different_crops():
    drawn = [{seed for batch in EpochBatches(20, 5, 1, Share(), seed) for _, seed in batch} for seed in range(3)]
    assert len(set.union(*drawn)) == 60


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
    assert len(list(batches)) == 2


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


def test_images_are_transformed_by_one_thread_in_the_main_process_too():
    images = ArrayImages(np.zeros((4, 8, 8, 3), np.uint8), np.arange(4), None, "four")
    seen = []

    def transform(pixels):
        seen.append(torch.get_num_threads())
        if len(seen) == 2:
            raise RuntimeError("a broken transform")
        return torch.from_numpy(pixels).permute(2, 0, 1)

    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        samples = Samples(images, transform, training=True)
        assert samples[0, 0][1] == 0
        with pytest.raises(ValueError, match=r"^four\[1\] cannot be transformed: a broken transform$"):
            samples[1, 0]
        assert torch.get_num_threads() == 3
        assert seen == [1, 1]
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("changes", [{"color_jitter": 0.4}, {"aa": "rand-m9-mstd0.5-inc1"}], ids=["jitter", "aa"])
def test_batches_do_not_depend_on_the_number_of_worker_processes(tmp_path, changes):
    folder = tiny_folders(tmp_path)
    epochs = []
    for workers in (0, 2):
        recipe = tiny_recipe(crop="resized", workers=workers, batch_size=4, **changes)
        data = open_data(recipe, folder, CPU)
        epochs.append([part.images for parts in data.train.epoch(1, 2) for part in parts])
    assert len(epochs[0]) == 2
    for one, other in zip(*epochs, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("loader", ["resident", "workers"])
@pytest.mark.parametrize(("hflip", "flipped"), [(0.0, 0), (1.0, 40), (0.2, 8)])
def test_the_share_of_images_that_the_recipe_says_is_flipped(tmp_path, loader, hflip, flipped):
    recipe = tiny_recipe(crop="none", hflip=hflip, loader=loader, batch_size=40)
    data = open_data(recipe, tiny_arrays(tmp_path), CPU)
    sources = torch.from_numpy(data.train.images.images).permute(0, 3, 1, 2)
    counts = []
    for epoch in range(5):
        ((batch,),) = data.train.epoch(epoch)
        same, mirrored = (
            sum(any(torch.equal(image, source) for source in of) for image in batch.images)
            for of in (sources, sources.flip(-1))
        )
        assert same + mirrored == 40
        counts.append(mirrored)
    assert abs(np.mean(counts) - flipped) <= (4 if 0 < hflip < 1 else 0)


# ------------------------------------------------------------------------------------------------ resident images


def test_resident_crops_and_flips_are_those_of_the_padded_image(tmp_path):
    recipe = tiny_recipe(padding=2)
    data = open_data(recipe, tiny_arrays(tmp_path), CPU)
    loader = data.train
    assert isinstance(loader, ResidentLoader)
    plan = loader.plan(epoch=3)
    assert not np.array_equal(plan[:, 1:], loader.plan(epoch=4)[:, 1:])
    of_another_seed = open_data(tiny_recipe(padding=2, seed=1), tmp_path, CPU).train.plan(epoch=3)
    assert not np.array_equal(plan[:, 1:], of_another_seed[:, 1:])
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
    with pytest.raises(ValueError, match=r"not divisible by 3, .*; 2 or 4 processes can share it"):
        open_data(tiny_recipe(), folder, Process(CPU.device, 0, 3))
    with pytest.raises(ValueError, match="not an even number"):
        open_data(tiny_recipe(mixup=0.2, batch_size=9), folder, CPU)


def test_normalisation_is_that_of_torchvision():
    from torchvision.transforms import functional as F

    images = torch.randint(0, 256, (2, 3, 5, 5), dtype=torch.uint8)
    mean, std = (0.5, 0.4, 0.3), (0.2, 0.3, 0.4)
    prepared, _ = Preparation(mean, std, CPU.device)(images, torch.zeros(2))
    torch.testing.assert_close(prepared, F.normalize(images / 255, mean, std))


def make_shards(folder, replaced=None, sizes=(24,), declared=24):
    """24 images of three classes a split; `replaced` maps (number, suffix) to other bytes."""
    rng = np.random.default_rng(0)
    splits = {}
    for split in ("train", "validation"):
        numbers, files = iter(range(sum(sizes))), [f"{split}-{shard:04}.tar" for shard in range(len(sizes))]
        for name, size in zip(files, sizes, strict=True):
            with tarfile.open(folder / name, "w") as tar:
                for i in itertools.islice(numbers, size):
                    file = io.BytesIO()
                    Image.fromarray(rng.integers(0, 255, (8, 8, 3), dtype=np.uint8)).save(file, "png")
                    for suffix, data in (("png", file.getvalue()), ("cls", str(i % 3).encode())):
                        data = (replaced or {}).get((i, suffix), data)
                        info = tarfile.TarInfo(f"{i:04}.{suffix}")
                        info.size = len(data)
                        tar.addfile(info, io.BytesIO(data))
        splits[split] = {"name": split, "num_samples": declared, "filenames": files, "shard_lengths": list(sizes)}
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


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_of_a_stream_depends_on_nothing_before_it(tmp_path, workers):
    pytest.importorskip("webdataset")
    recipe = with_changes(make_shards(tmp_path, sizes=(12, 12)), {"workers": workers, "hflip": 0.5, "padding": 2})
    recipe = with_changes(recipe, {"crop": "padded"})
    whole = open_data(recipe, tmp_path, CPU).train
    epochs = [[parts[0].images for parts in whole.epoch(epoch)] for epoch in range(2)]
    assert not torch.equal(epochs[0][0], epochs[1][0])
    torch.manual_seed(99)
    resumed = [parts[0].images for parts in open_data(recipe, tmp_path, CPU).train.epoch(1, start=2)]
    assert len(resumed) == 2
    assert all(torch.equal(a, b) for a, b in zip(resumed, epochs[1][2:], strict=True))


def test_one_shard_is_read_in_another_order_in_each_epoch(tmp_path):
    pytest.importorskip("webdataset")
    loader = open_data(with_changes(make_shards(tmp_path), {"workers": 0}), tmp_path, CPU).train
    first, second = (torch.cat([parts[0].images for parts in loader.epoch(epoch)]) for epoch in range(2))
    assert not torch.equal(first, second)
    assert torch.equal(first.flatten(1).unique(dim=0), second.flatten(1).unique(dim=0))


def test_more_workers_than_shards_lose_no_image(tmp_path):
    pytest.importorskip("webdataset")
    recipe = with_changes(make_shards(tmp_path), {"workers": 4})
    seen = torch.cat([parts[0].images for parts in open_data(recipe, tmp_path, CPU).train.epoch(0)])
    assert len(seen.flatten(1).unique(dim=0)) == 24
    with pytest.raises(ValueError, match="wds/shards has too few shards for 2 processes: 1"):
        open_data(recipe, tmp_path, Process(CPU.device, 0, 2))


def test_several_processes_validate_each_image_of_a_stream_once(tmp_path):
    pytest.importorskip("webdataset")
    recipe = with_changes(make_shards(tmp_path, sizes=(17, 7)), {"workers": 0})
    seen = []
    for rank in range(2):
        loader, _ = open_validation(recipe, tmp_path, None, 3, CPU)
        loader._loader.dataset.reader.dist_rank, loader._loader.dataset.reader.dist_num_replicas = rank, 2
        seen += [batch.images for batch in loader]
    assert len(torch.cat(seen)) == len(torch.cat(seen).flatten(1).unique(dim=0)) == 24


def test_readers_of_streams_may_give_images_of_pillow(tmp_path):
    pytest.importorskip("webdataset")
    images = open_data(with_changes(make_shards(tmp_path), {"workers": 0}), tmp_path, CPU).train.images
    images.kind, images.reader = "hfids", [(Image.new(mode, (8, 8), 7), 2) for mode in ("RGB", "L")]
    found = list(images)
    assert [label for _, label in found] == [2, 2]
    assert torch.equal(found[1][0], torch.full((3, 8, 8), 7, dtype=torch.uint8))


def test_a_stream_is_validated_in_batches_as_large_as_a_folder(tmp_path):
    pytest.importorskip("webdataset")
    recipe = with_changes(make_shards(tmp_path), {"batch_size": 5000, "workers": 0})
    loader, _ = open_validation(recipe, tmp_path, None, 3, CPU)
    assert loader._loader.batch_size == 1000


@pytest.mark.parametrize("workers", [0, 1])
def test_unreadable_images_of_shards_are_named_and_those_of_sixteen_bits_are_scaled(tmp_path, workers):
    pytest.importorskip("webdataset")
    grey = np.arange(64, dtype=np.uint16).reshape(8, 8)
    deep = io.BytesIO()
    Image.fromarray(grey * 257).save(deep, "png")
    recipe = with_changes(
        make_shards(tmp_path, {(4, "png"): b"no image", (7, "png"): deep.getvalue()}), {"workers": workers}
    )
    batches = list(open_data(recipe, tmp_path, CPU).validation)
    (failure,) = [failure for batch in batches for failure in batch.failures]
    assert failure == Failure(f"0004 of {tmp_path / 'validation-0000.tar'}", "not an image that Pillow knows")
    images = torch.cat([batch.images for batch in batches])
    assert len(images) == 23
    assert (images[6, 0].numpy() == grey).all()
    train = [part for parts in open_data(recipe, tmp_path, CPU).train.epoch(0) for part in parts]
    assert {failure.name for part in train for failure in part.failures} == {f"0004 of {tmp_path / 'train-0000.tar'}"}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("batch_size", [5, 7, 11, 24])
def test_unreadable_images_at_the_end_of_a_stream_are_named_in_validation(tmp_path, workers, batch_size):
    pytest.importorskip("webdataset")
    recipe = make_shards(tmp_path, {(number, "png"): b"no image" for number in (11, 22, 23)}, sizes=(12, 12))
    recipe = with_changes(recipe, {"workers": workers, "val_batch_size": batch_size})
    loader = open_data(recipe, tmp_path, CPU).validation
    prepare = Preparation(recipe.mean, recipe.std, CPU.device)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 8 * 8, 3))
    for _ in range(2):
        metrics, failures = evaluate(model, loader, prepare, CPU.device)
        assert metrics.images == 21
        assert sorted(failure.name[:4] for failure in failures) == ["0011", "0022", "0023"]


def test_a_stream_of_the_wrong_labels_or_of_nothing_is_an_error(tmp_path):
    pytest.importorskip("webdataset")
    recipe = make_shards(tmp_path, {(5, "cls"): b"3"})
    with pytest.raises(ValueError, match="an image has label 3, but the head has 3 classes"):
        list(open_data(recipe, tmp_path, CPU).train.epoch(0))
    make_shards(tmp_path, {(i, "png"): b"no image" for i in range(24)})
    with pytest.raises(ValueError, match="the stream ended after 0 of"):
        next(open_data(recipe, tmp_path, CPU).train.epoch(0))
    with pytest.raises(ValueError, match="3 in a batch is not an even number"):
        open_data(with_changes(recipe, {"mixup": 0.2, "grad_accum_steps": 2}), tmp_path, CPU)


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
    arrays = open_images("", tiny_arrays(tmp_path / "arrays"), "val")
    batches, sharded = open_validation(tiny_recipe(), None, arrays, 3, second)
    assert (sum(len(batch.labels) for batch in batches), sharded) == (20, False)
    folders = open_images("", tiny_folders(tmp_path / "tree"), "val")
    batches, sharded = open_validation(tiny_recipe(), None, folders, 3, second)
    assert (sum(len(batch.labels) for batch in batches), sharded) == (4, True)


def test_the_folders_of_the_reader_are_the_leaves(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / ".hidden").mkdir()
    with pytest.raises(ValueError, match="holds no images"):
        files.open_files(tmp_path)
    Image.new("RGB", (2, 2)).save(tmp_path / "a" / "b" / "0.png")
    with pytest.raises(ValueError, match=rf"class folder {tmp_path / 'c'} holds no images"):
        files.open_files(tmp_path)
    assert files.open_files(tmp_path, ["c", "b"]).class_names == ["c", "b"]
