"""timm's policies on arrays: the pixels of timm's own."""

import os
import platform
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from timm.data import auto_augment, create_transform

from grassy.data.pixel_policies import MOVES, for_pixels
from grassy.data.transforms import train_transform
from grassy.data.worker_loader import seeded
from grassy.recipes.recipe import Recipe

FILL = (124, 116, 104)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    st.sampled_from(sorted(MOVES)),
    st.integers(1, 40),
    st.integers(1, 40),
    st.integers(0, 2**31),
)
def test_moves_are_those_of_timm_to_the_last_bit(name, height, width, seed):
    rng = np.random.default_rng(seed)
    pixels = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
    # Drawn, as a policy draws it: a value that is a whole level but for the rounding of a double could go either way.
    amount = rng.uniform(-1.5, 1.5) * (20 if name.endswith("_abs") else 1)
    expected = getattr(auto_augment, name)(Image.fromarray(pixels), amount, resample=Image.BICUBIC, fillcolor=FILL)
    assert np.array_equal(MOVES[name](pixels, amount, FILL), np.asarray(expected))


@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear", "random"])
@pytest.mark.parametrize("policy", ["rand-m7-mstd0.5-inc1", "rand-m9-n3-p1", "original", "3a"])
def test_policies_draw_and_change_what_those_of_timm_do(policy, interpolation):
    from sklearn.datasets import load_sample_images

    photo = load_sample_images().images[1][100:196, 200:280].copy()

    def policy_of_timm():
        whole = create_transform(64, is_training=True, auto_augment=policy, interpolation=interpolation)
        return whole.transforms[2]  # after crop and flip

    ours, theirs = policy_of_timm(), policy_of_timm()
    assert for_pixels(ours)
    for seed in range(40):
        with seeded(seed):
            expected = np.asarray(theirs(Image.fromarray(photo)))
        with seeded(seed):
            assert np.array_equal(ours(photo), expected), (policy, seed)


def test_the_strongest_posterize_is_black_instead_of_an_error():
    photo = np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    whole = create_transform(16, is_training=True, auto_augment="rand-m9-mstd0.5-inc1")  # the recipe of Swin
    policy = whole.transforms[2]
    assert for_pixels(policy)
    operation = next(each for each in policy.ops if each.name == "PosterizeIncreasing")
    operation.magnitude, operation.magnitude_std, operation.prob = 10, 0, 1
    assert not operation(photo).any()


@pytest.mark.parametrize("interpolation", ["bicubic", "lanczos", "box", "hamming", "nearest"])
@pytest.mark.parametrize("crop", ["resized", "padded", "none"])
@pytest.mark.parametrize("policy", ["rand-m15-mstd0.5-inc1", "v0", "augmix-m10-w2"])
def test_every_policy_crop_and_interpolation_survives_its_strongest_draws(policy, crop, interpolation):
    photo = np.random.default_rng(0).integers(0, 256, (12, 20, 3), dtype=np.uint8)
    transform = train_transform(Recipe(aa=policy, crop=crop, interpolation=interpolation, img_size=8))
    for seed in range(150):
        with seeded(seed):
            assert transform(photo).shape == (3, 8, 8)


def test_other_transforms_are_left_to_pillow():
    assert not for_pixels(auto_augment.augment_and_mix_transform("augmix-m5", {}))


PAGE_FAULTS = """
import resource, sys
import numpy as np
from grassy.data.pixel_policies import shear_x
from grassy.data.worker_loader import keep_memory

if sys.argv[1] == "keep":
    keep_memory()
pixels = np.zeros((224, 224, 3), np.uint8)
for _ in range(20):
    shear_x(pixels, 0.2, (1, 2, 3))
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    shear_x(pixels, 0.2, (1, 2, 3))
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="is about glibc")
def test_workers_keep_the_memory_of_an_image_for_the_next_one():
    command = [sys.executable, "-c", PAGE_FAULTS]
    plain = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    faults = [int(subprocess.check_output([*command, how], text=True, env=plain)) for how in ("keep", "return")]
    assert 3 * faults[0] < faults[1]
