"""Features of images for transfer: extracted once, cached, checked."""

import copy
import os
import tarfile

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import grassy
from grassy.data import held_out
from grassy.data.images import ArrayImages, open_images
from grassy.data.torchvision_images import TorchvisionImages
from grassy.inference import feature_models
from grassy.inference import features as feature_module
from grassy.inference.feature_models import FeatureModel, open_model
from grassy.inference.features import extract
from grassy.transfer import datasets
from training_cases import tiny_folders, tiny_run

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return tiny_run(tmp_path_factory.mktemp("run"))


def extraction(source, images, cache, **options):
    return extract(source, images, cache, CPU, workers=0, **options)


def test_features_are_what_the_classifier_is_given(run, tmp_path):
    source = open_model(str(run))
    images = open_images("", tiny_folders(tmp_path / "images"), "train")
    found = extraction(source, images, tmp_path / "cache", batch_size=5)
    import timm

    model = grassy.load(run)
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
    pixels = torch.stack([transform(Image.fromarray(images.load(i)[0])) for i in range(len(images))])
    with torch.no_grad():
        expected = model.forward_head(model.forward_features(pixels), pre_logits=True)
    torch.testing.assert_close(found.features, expected, rtol=1e-4, atol=1e-4)
    assert found.labels.tolist() == images.labels().tolist()
    torch.testing.assert_close(model.head(found.features), model(pixels), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["timm/resnet18", "torchvision/resnet18", "timm/vgg11", "timm/deit_tiny_distilled_patch16_224"]
)
def test_models_are_opened_by_name_from_both_libraries(name, tmp_path):
    source = open_model(name, pretrained=False)
    images = ArrayImages(np.zeros((2, 40, 40, 3), np.uint8), np.array([0, 1]), None, "black")
    found = extraction(source, images, tmp_path)
    widths = {"timm/resnet18": 512, "torchvision/resnet18": 512, "timm/vgg11": 4096}
    assert found.features.shape == (2, widths.get(name, 192))
    assert (source.img_size, len(source.mean)) == (224, 3)


def test_weights_that_were_not_downloaded_to_their_end_are_named(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    file = tmp_path / "hub" / "checkpoints" / "resnet18-f37072fd.pth"
    file.parent.mkdir(parents=True)
    file.write_bytes(bytes(range(1, 200)))
    with pytest.raises(
        ValueError, match=r"its weights cannot be read .* If the download of .*resnet18-f37072fd\.pth was interr"
    ):
        open_model("torchvision/resnet18")


def test_unknown_models_are_named():
    for name, message in [
        ("timm/resnet81", "timm has no model 'resnet81', did you mean"),
        ("torchvision/resnet51", "torchvision has no image classifier 'resnet51', did you mean"),
        ("nowhere/run", "no checkpoint nowhere/run"),
        ("timm/resnet18.nonsense", "timm/resnet18.nonsense: Invalid pretrained tag"),
        ("timm/test_vit4", "timm/test_vit4: "),
        ("torchvision/deeplabv3_resnet50", "torchvision has no image classifier"),
    ]:
        with pytest.raises(ValueError, match=message):
            open_model(name)


def counted(monkeypatch):
    """How often features are computed."""
    calls = []
    original = feature_module._batches
    monkeypatch.setattr(feature_module, "_batches", lambda *a: calls.append(0) or original(*a))
    return calls


def test_a_batch_of_no_images_is_refused(run, tmp_path):
    images = ArrayImages(np.zeros((2, 8, 8, 3), np.uint8), np.array([0, 1]), None, "black")
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        extraction(open_model(str(run)), images, tmp_path, batch_size=0)


def test_features_are_computed_once_and_again_when_something_has_changed(run, tmp_path, monkeypatch):
    calls = counted(monkeypatch)
    folder = tiny_folders(tmp_path / "images")
    cache = tmp_path / "cache"
    source = open_model(str(run))

    def again():
        return extraction(source, open_images("", folder, "train"), cache)

    first = again()
    assert torch.equal(again().features, first.features)
    assert len(calls) == 1
    file = folder / "train" / "cat" / "0.png"
    (folder / "train" / "cat" / "1.png").replace(file)  # another image under the old name
    again()
    assert len(calls) == 2
    status = os.stat(file)
    file.write_bytes(file.read_bytes())
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns + 1))  # the same size, touched
    again()
    assert len(calls) == 3
    source = open_model(str(run / "last.safetensors"))  # the same weights under another name
    with_other_size = FeatureModel(**{**vars(source), "img_size": 8, "crop_pct": 0.9})
    extraction(with_other_size, open_images("", folder, "train"), cache)
    assert len(calls) == 4
    extraction(source, open_images("", folder, "train"), cache, amp_dtype=torch.bfloat16)
    assert len(calls) == 5


def test_a_changed_checkpoint_and_changed_arrays_are_noticed(run, tmp_path, monkeypatch):
    calls = counted(monkeypatch)
    images = np.random.default_rng(0).integers(0, 255, (4, 8, 8, 3), dtype=np.uint8)
    source = open_model(str(run))
    for pixels in (images, images, images ^ 1):
        extraction(source, ArrayImages(pixels, np.arange(4), None, "a"), tmp_path)
    assert len(calls) == 2
    extraction(source, ArrayImages(images, np.array([0, 1, 2, 2]), None, "a"), tmp_path)
    assert len(calls) == 3
    changed = FeatureModel(**{**vars(source), "fingerprint": "another"})
    extraction(changed, ArrayImages(images, np.arange(4), None, "a"), tmp_path)
    assert len(calls) == 4
    joined = datasets.Joined(
        [ArrayImages(images, np.arange(4), None, "a"), ArrayImages(images, np.arange(4), None, "b")]
    )
    other = datasets.Joined([joined.parts[0], ArrayImages(images ^ 1, np.arange(4), None, "b")])
    extraction(source, joined, tmp_path)
    extraction(source, other, tmp_path)
    assert len(calls) == 6


def test_a_torn_file_is_rebuilt_and_an_interrupted_extraction_leaves_none(run, tmp_path, monkeypatch):
    calls = counted(monkeypatch)
    source = open_model(str(run))
    images = ArrayImages(np.zeros((6, 8, 8, 3), np.uint8), np.arange(6), None, "a")
    first = extraction(source, images, tmp_path).features.clone()  # not the mapped file, which is about to shrink
    (file,) = tmp_path.iterdir()
    for size in (0, 4, 100, file.stat().st_size - 1):
        file.write_bytes(file.read_bytes()[:size])
        assert torch.equal(extraction(source, images, tmp_path).features, first)
    assert len(calls) == 5
    original = source.model.forward

    def failing(x):
        if len(x) == 2:
            raise KeyboardInterrupt
        return original(x)

    monkeypatch.setattr(source.model, "forward", failing)
    with pytest.raises(KeyboardInterrupt):
        extraction(source, images, tmp_path / "other", batch_size=4)
    assert list((tmp_path / "other").iterdir()) == []


def test_files_are_plain_safetensors_and_are_mapped_not_read(run, tmp_path):
    images = ArrayImages(np.zeros((6, 8, 8, 3), np.uint8), np.arange(6), None, "a")
    found = extraction(open_model(str(run)), images, tmp_path)
    (file,) = tmp_path.iterdir()
    plain = load_file(file)
    assert torch.equal(plain["features"], found.features)
    assert torch.equal(plain["labels"], found.labels)


def test_unreadable_images_are_left_out_counted_and_remembered(run, tmp_path):
    folder = tiny_folders(tmp_path / "images")
    (folder / "train" / "dog" / "2.png").write_bytes(b"nothing")
    for _ in range(2):
        found = extraction(open_model(str(run)), open_images("", folder, "train"), tmp_path / "cache")
        assert len(found.labels) == len(found.features) == 17
        assert [failure.name for failure in found.failures] == [str(folder / "train" / "dog" / "2.png")]
        assert found.features.isfinite().all()


def test_an_image_that_has_become_readable_is_noticed_and_one_that_has_not_costs_nothing(run, tmp_path, monkeypatch):
    calls = counted(monkeypatch)
    images = ArrayImages(np.zeros((5, 8, 8, 3), np.uint8), np.arange(5), None, "a")
    original, broken = images.load, {1, 4}

    def load(index):
        if index in broken:
            raise OSError("the disk is away")
        return original(index)

    monkeypatch.setattr(images, "load", load)
    source = open_model(str(run))
    for _ in range(2):
        found = extraction(source, images, tmp_path, batch_size=2)
        assert found.labels.tolist() == [0, 2, 3]
        assert [failure.name for failure in found.failures] == ["a[1]", "a[4]"]
    assert len(calls) == 1
    assert len(list(tmp_path.iterdir())) == 1  # no second file, which could be lost
    broken.remove(4)
    assert extraction(source, images, tmp_path).labels.tolist() == [0, 2, 3, 4]
    assert len(calls) == 2


def test_nothing_readable_is_an_error_and_leaves_no_file(run, tmp_path, monkeypatch):
    images = ArrayImages(np.zeros((3, 8, 8, 3), np.uint8), np.arange(3), None, "a")
    monkeypatch.setattr(images, "load", lambda _: (tmp_path / "nowhere").read_bytes())
    with pytest.raises(ValueError, match=r"none of the images could be read, a\[0\] first"):
        extraction(open_model(str(run)), images, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_left_is_removed_and_what_a_living_one_writes_is_not(run, tmp_path):
    old, new = tmp_path / ".writing-old", tmp_path / ".writing-new"
    for file in (old, new):
        file.write_bytes(b"half")
    os.utime(old, (0, 0))
    images = ArrayImages(np.zeros((3, 8, 8, 3), np.uint8), np.arange(3), None, "a")
    extraction(open_model(str(run)), images, tmp_path)
    assert not old.exists()
    assert new.exists()


def test_the_key_tells_models_shapes_names_and_tars_apart(tmp_path):
    from torch import nn

    hash_of, key = feature_models._hash_of_tensors, feature_module.fingerprint
    wide, tall = nn.Linear(4, 2, bias=False), nn.Linear(2, 4, bias=False)
    tall.weight.data = wide.weight.data.reshape(4, 2)
    assert hash_of(wide, "a") == hash_of(copy.deepcopy(wide), "a")
    assert hash_of(wide, "a") != hash_of(tall, "a")
    assert hash_of(wide, "a") != hash_of(wide, "b")
    pixels = np.arange(2 * 4 * 6 * 3, dtype=np.uint8)
    shapes = [(2, 4, 6, 3), (2, 6, 4, 3), (2, 8, 3, 3)]
    assert len({key(ArrayImages(pixels.reshape(shape), np.arange(2), None, "a")) for shape in shapes}) == 3
    folder = tmp_path / "data" / "train"
    folder.mkdir(parents=True)

    def pack(shade, name="b.tar"):
        Image.new("RGB", (4, 4), (shade,) * 3).save(tmp_path / "0.png")
        with tarfile.open(folder / name, "w") as tar:
            tar.add(tmp_path / "0.png", arcname="0.png")

    pack(0)
    pack(0, "c.tar")
    before = key(open_images("", tmp_path / "data", "train"))
    assert key(open_images("", tmp_path / "data", "train")) == before
    status = os.stat(folder)
    pack(200)  # a tar in the folder, which itself does not change
    os.utime(folder, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert key(open_images("", tmp_path / "data", "train")) != before


def test_the_key_of_a_part_of_a_tar_changes_with_the_tar_and_with_nothing_else(tmp_path, monkeypatch):
    def pack(shade):
        with tarfile.open(tmp_path / "set.tar", "w") as tar:
            for name in ("a/0.png", "a/1.png", "b/0.png", "b/1.png"):
                Image.new("RGB", (4, 4), (shade,) * 3).save(tmp_path / "0.png")
                tar.add(tmp_path / "0.png", arcname=name)

    def keys():
        images, names = held_out.open_with_keys(tmp_path / "set.tar")
        return [feature_module.fingerprint(held_out.part_of(images, names, names[:1], inside)) for inside in (0, 1)]

    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    pack(0)
    before = keys()
    (tmp_path / "elsewhere" / "another.tar").write_bytes(b"")
    assert keys() == before
    assert before[0] != before[1]
    pack(200)
    assert not set(keys()) & set(before)


def test_images_in_no_file_are_told_apart_by_what_they_show():
    class Shades:
        def __init__(self, shades):
            self.shades = shades

        def __len__(self):
            return len(self.shades)

        def __getitem__(self, index):
            return Image.new("RGB", (4, 4), (self.shades[index],) * 3), 0

    keys = [feature_module.fingerprint(TorchvisionImages(Shades(s), "torch/x")) for s in ([1, 2], [1, 2], [1, 3])]
    assert keys[0] == keys[1] != keys[2]


def test_images_of_a_source_of_your_own_are_told_apart_by_what_they_show():
    class Shade:
        class_names = None

        def __init__(self, shade):
            self.shade = shade

        def __len__(self):
            return 1

        def load(self, index, crop=None):
            return np.full((4, 4, 3), self.shade, np.uint8), 0

        def name(self, index):
            return f"row {index} of a database"

        def labels(self):
            return np.zeros(1, np.int64)

    keys = [feature_module.fingerprint(Shade(shade)) for shade in (1, 1, 2)]
    assert keys[0] == keys[1] != keys[2]


@pytest.mark.parametrize(
    ("name", "options", "width"),
    [
        ("vit_tiny_patch16_224", {"num_classes": 0}, 192),
        ("resnet18", {"num_classes": 0, "global_pool": ""}, 512),
        ("crossvit_tiny_240", {}, 96 + 192),
        ("deit_tiny_distilled_patch16_224", {}, 192),
    ],
)
def test_features_of_models_without_a_classifier_and_with_several(name, options, width, tmp_path):
    import timm

    model = timm.create_model(name, **options).eval()
    size = model.default_cfg["input_size"][-1]
    source = FeatureModel(name, model, size, 1.0, "bilinear", (0.0,) * 3, (1.0,) * 3, name)
    images = ArrayImages(np.full((2, size, size, 3), 255, np.uint8), np.array([0, 1]), None, "white")
    found = extraction(source, images, tmp_path).features
    assert found.shape == (2, width)
    if options:
        with torch.no_grad():
            expected = model(torch.ones(2, 3, size, size))
        expected = expected.mean((2, 3)) if expected.ndim == 4 else expected
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_map_in_front_of_the_classifier_is_averaged(tmp_path):
    source = open_model("torchvision/squeezenet1_1", pretrained=False)
    images = ArrayImages(np.full((2, 224, 224, 3), 99, np.uint8), np.array([0, 1]), None, "grey")
    found = extraction(source, images, tmp_path).features
    pixels = (torch.full((2, 3, 224, 224), 99 / 255) - torch.tensor(source.mean)[:, None, None]) / torch.tensor(
        source.std
    )[:, None, None]
    with torch.no_grad():
        torch.testing.assert_close(found, source.model.features(pixels).mean((2, 3)), rtol=1e-3, atol=1e-4)


def test_images_are_cropped_as_the_model_was_trained(monkeypatch, tmp_path):
    import timm

    config = dict(timm.data.resolve_model_data_config(timm.create_model("resnet18")))
    monkeypatch.setattr(timm.data, "resolve_model_data_config", lambda _: {**config, "crop_mode": "squash"})
    squashed = open_model("timm/resnet18", pretrained=False)
    assert squashed.crop_mode == "squash"
    striped = np.zeros((100, 400, 3), np.uint8)
    striped[:, :60] = 255  # cut away by a crop of the centre, and kept by squashing
    center = FeatureModel(**{**vars(squashed), "crop_mode": "center"})
    assert center.preparation() != squashed.preparation()
    assert np.asarray(feature_module._transform(squashed)(striped)).max() == 255
    assert np.asarray(feature_module._transform(center)(striped)).max() == 0
    monkeypatch.setattr(timm.data, "resolve_model_data_config", lambda _: {**config, "input_size": (3, 128, 256)})
    with pytest.raises(ValueError, match="timm/resnet18 takes images of 128x256: only square"):
        open_model("timm/resnet18", pretrained=False)


def test_a_batch_of_nothing_but_unreadable_images_is_survived(run, tmp_path):
    folder = tiny_folders(tmp_path / "images", images=2)
    for file in (folder / "train" / "cat").iterdir():
        file.write_bytes(b"nothing")
    found = extraction(open_model(str(run)), open_images("", folder, "train"), tmp_path / "cache", batch_size=2)
    assert found.labels.tolist() == [1, 1, 2, 2]
