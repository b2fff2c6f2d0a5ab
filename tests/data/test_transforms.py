"""Crops of pixels: those of timm."""

import pickle

import numpy as np
import pytest
from PIL import Image
from timm.data import create_transform

from grassy.data.transforms import eval_transform, train_transform
from grassy.data.worker_loader import seeded
from grassy.recipes.recipe import Recipe


@pytest.fixture(scope="module")
def photo():
    from sklearn.datasets import load_sample_images

    return load_sample_images().images[0].copy()


def both(photo, seed, **changes):
    """The same draw by grassy's transform and by timm's own: two images (3, H, W)."""
    recipe = Recipe(img_size=64, crop="resized", **changes)
    peer = create_transform(
        recipe.img_size,
        is_training=True,
        use_prefetcher=True,
        hflip=recipe.hflip,
        color_jitter=recipe.color_jitter or None,
        auto_augment=recipe.aa or None,
        interpolation=recipe.interpolation,
        scale=recipe.scale,
        ratio=recipe.ratio,
    )
    with seeded(seed):
        ours = train_transform(recipe)(photo)
    with seeded(seed):
        theirs = peer(Image.fromarray(photo))
    return ours.numpy().astype(int), np.asarray(theirs).astype(int)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("crops", [{}, {"scale": (0.3, 0.4), "ratio": (1.5, 2.0)}], ids=["default", "wide"])
def test_crops_and_flips_are_those_of_timm(photo, interpolation, crops):
    for seed in range(40):
        ours, theirs = both(photo, seed, interpolation=interpolation, **crops)
        difference = np.abs(ours - theirs)
        assert difference.max() <= 2
        assert difference.mean() < 0.5  # of 255 levels: both round, in another order


@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (2, 1)])
def test_an_image_of_one_pixel_can_be_cropped(shape):
    transform = train_transform(Recipe(img_size=8, crop="resized"))
    for seed in range(60):
        with seeded(seed):
            assert (transform(np.full((*shape, 3), 7, np.uint8)) == 7).all()


def test_other_interpolations_are_those_of_pillow(photo):
    for seed in range(3):
        ours, theirs = both(photo, seed, interpolation="lanczos")
        assert np.array_equal(ours, theirs)


def test_colors_and_policies_follow_the_crop(photo):
    for changes in ({"color_jitter": 0.4}, {"aa": "rand-m7-mstd0.5-inc1"}):
        distances = [np.abs(np.subtract(*both(photo, seed, **changes))).mean() for seed in range(12)]
        # A policy may threshold or stretch colors, which makes a level of difference larger.
        assert np.median(distances) < 2
        plain = [np.abs(both(photo, seed, **changes)[0] - both(photo, seed)[0]).mean() for seed in range(12)]
        assert np.median(plain) > 5


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"color_jitter": 0.4},
        *({"aa": policy} for policy in ("rand-m9-mstd0.5-inc1", "augmix-m3-w3", "3a", "original")),
        {"crop": "padded", "aa": "rand-m9"},
        {"interpolation": "lanczos", "aa": "rand-m9"},
    ],
    ids=str,
)
def test_a_transform_can_be_sent_to_a_worker_process_that_is_not_forked(photo, changes):
    transform = train_transform(Recipe(img_size=32, **changes))
    images = []
    for each in (transform, pickle.loads(pickle.dumps(transform))):
        with seeded(3):
            images.append(each(photo))
    assert np.array_equal(*images)
    pickle.dumps(eval_transform(32, 0.9, "bicubic"))


def test_evaluation_is_that_of_timm(photo):
    for interpolation in ("bilinear", "bicubic"):
        peer = create_transform(64, crop_pct=0.875, interpolation=interpolation, use_prefetcher=True)
        expected = np.asarray(peer(Image.fromarray(photo)))
        assert np.array_equal(eval_transform(64, 0.875, interpolation)(photo).numpy(), expected)


def test_a_box_has_the_area_and_the_shape_that_the_recipe_allows():
    transform = train_transform(Recipe(img_size=64, crop="resized", scale=(0.3, 0.4), ratio=(1.5, 2.0)))
    for seed in range(60):
        with seeded(seed):
            box = transform.box(600, 800)
        assert 0.29 < box.height * box.width / (600 * 800) < 0.41
        assert 1.49 < box.width / box.height < 2.01


@pytest.mark.parametrize("shape", [(1, 9000), (9000, 3)])
def test_a_strip_needs_no_more_memory_than_a_photo(shape, monkeypatch):
    sizes = []
    original = Image.Image.resize
    monkeypatch.setattr(Image.Image, "resize", lambda image, size, *a, **k: sizes.append(size) or original(image, size))
    pixels = np.zeros((*shape, 3), np.uint8)
    height, width = shape
    pixels[height // 2, width // 2] = 255
    image = eval_transform(64, 1.0, "bilinear")(pixels)
    assert image.shape == (3, 64, 64)
    assert image.max() > 100  # the middle of the strip
    assert max(sizes[0]) <= 21 * 64


@pytest.mark.parametrize("shape", [(3, 400), (400, 3), (1, 9000)])
@pytest.mark.parametrize("crop_pct", [0.9, 1.0, 2.0])
def test_a_strip_of_any_length_is_shown_inside_a_border(shape, crop_pct):
    image = eval_transform(8, crop_pct, "bilinear", "border", (0, 0, 0))(np.full((*shape, 3), 200, np.uint8))
    assert image.shape == (3, 8, 8)
    assert (image == 200).any()
    assert (image == 0).any()  # the border
