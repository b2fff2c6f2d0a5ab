"""Data sets of torchvision: it says which file an image is in, and grassy reads the file."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from grassy.data.images import number_of_classes, of_torchvision, open_images
from grassy.torchvision_import import import_torchvision

POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n{} loop\n"
CATEGORIES = ["00000_Animalia_a_b_c_d_e_f", "00001_Plantae_a_b_c_d_e_f"]


def image_folder(root, datasets):
    files = [root / name / "0.png" for name in ("cat", "dog")]
    return files, lambda: datasets.ImageFolder(str(root))


def food(root, datasets):
    files = [root / "food-101" / "images" / name / "0.jpg" for name in ("pie", "rice")]
    (root / "food-101" / "meta").mkdir(parents=True)
    listing = {name: [f"{name}/0"] for name in ("pie", "rice")}
    (root / "food-101" / "meta" / "train.json").write_text(json.dumps(listing))
    return files, lambda: datasets.Food101(str(root), "train")


def pets(root, datasets):
    base = root / "oxford-iiit-pet"
    (base / "annotations").mkdir(parents=True)
    (base / "annotations" / "trainval.txt").write_text("Bengal_1 1 1 1\nboxer_1 2 2 1\n")
    files = [base / "images" / f"{name}_1.jpg" for name in ("Bengal", "boxer")]
    return files, lambda: datasets.OxfordIIITPet(str(root), "trainval")


def inaturalist(root, datasets):
    files = [root / "2021_train" / name / "0.jpg" for name in CATEGORIES]
    return files, lambda: datasets.INaturalist(str(root), "2021_train")


def imagenet(root, datasets):
    files = [root / "train" / wnid / "0.JPEG" for wnid in ("n01", "n02")]
    root.mkdir(exist_ok=True)
    names = {"n01": ("crane", "lifting device"), "n02": ("crane",)}
    torch.save((names, []), root / "meta.bin")
    return files, lambda: datasets.ImageNet(str(root), "train")


KINDS = [image_folder, food, pets, inaturalist, imagenet]


def opened(kind, root, content=None):
    """A data set of two images, of class 0 and 1; the first file has other content if any is given."""
    import_torchvision()
    from torchvision import datasets

    files, build = kind(root, datasets)
    for number, file in enumerate(files):
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (6, 4), (100 * number,) * 3).save(file)
    if content is not None:
        files[0].write_bytes(content)
    return files, of_torchvision(build(), "torch/x")


@pytest.mark.parametrize("kind", KINDS)
def test_images_have_their_labels_and_the_names_of_their_files(kind, tmp_path):
    files, images = opened(kind, tmp_path)
    assert [images.name(i) for i in range(len(images))] == list(map(str, files))
    assert images.labels().tolist() == [0, 1]
    assert number_of_classes(images) == 2
    for label in range(2):
        pixels, of_image = images.load(label)
        assert (pixels.shape, pixels.dtype, of_image) == ((4, 6, 3), np.uint8, label)
        assert abs(int(pixels.mean()) - 100 * label) < 5


@pytest.mark.parametrize("kind", KINDS)
def test_postscript_among_them_is_not_run(kind, tmp_path, monkeypatch):
    monkeypatch.setattr("PIL.EpsImagePlugin.Ghostscript", lambda *_: pytest.fail("Ghostscript was started"))
    _, images = opened(kind, tmp_path, POSTSCRIPT)
    with pytest.raises(OSError, match="cannot identify"):
        images.load(0)
    assert images.load(1)[1] == 1


def test_a_recipe_can_name_them(tmp_path):
    opened(image_folder, tmp_path / "train")
    images = open_images("torch/image_folder", tmp_path, "train")
    assert images.class_names == ["cat", "dog"]


def test_images_in_memory_are_read_from_there(tmp_path):
    class Digits:
        targets = torch.tensor([3, 1])

        def __len__(self):
            return 2

        def __getitem__(self, index):
            return Image.new("L", (5, 4), 50 * index), self.targets[index]

    images = of_torchvision(Digits(), "torch/mnist")
    assert images.labels().tolist() == [3, 1]
    assert images.name(1) == "torch/mnist[1]"
    pixels, label = images.load(1)
    assert (pixels.shape, int(pixels[0, 0, 0]), label) == ((4, 5, 3), 50, 1)
