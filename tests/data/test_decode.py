"""Pixels of JPEG files: those of Pillow, whoever decodes them."""

import functools
import io
import os
import sys
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from grassy.data import decode
from grassy.data.decode import Box, read_pixels
from grassy.data.transforms import train_transform
from grassy.data.worker_loader import Samples, seeded
from grassy.recipes.recipe import Recipe

simplejpeg = pytest.importorskip("simplejpeg")


def picture(width, height, mode="RGB"):
    """A gradient with noise: smooth parts and detail, as in photos."""
    rng = np.random.default_rng(width * 1000 + height)
    ramp = np.linspace(0, 200, width)[None, :, None] + np.linspace(0, 55, height)[:, None, None]
    pixels = (ramp + rng.integers(0, 30, (height, width, 3))).clip(0, 255).astype(np.uint8)
    return Image.fromarray(pixels).convert(mode)


def encoded(image, **options):
    file = io.BytesIO()
    image.save(file, "JPEG", **options)
    return file.getvalue()


def by_pillow(content):
    return np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))


def without_simplejpeg(monkeypatch):
    monkeypatch.setitem(sys.modules, "simplejpeg", None)  # to import it is an ImportError then
    monkeypatch.setattr(decode, "_simplejpeg", functools.cache(decode._simplejpeg.__wrapped__))
    assert decode._size_of_jpeg(encoded(picture(5, 4))) is None


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.integers(1, 70),
    st.integers(1, 70),
    st.sampled_from(["RGB", "L"]),
    st.sampled_from(["4:4:4", "4:2:2", "4:2:0"]),
    st.booleans(),
    st.integers(20, 98),
)
def test_jpeg_files_give_the_pixels_of_pillow(width, height, mode, subsampling, progressive, quality):
    content = encoded(picture(width, height, mode), subsampling=subsampling, progressive=progressive, quality=quality)
    assert decode._size_of_jpeg(content) == (height, width)
    assert np.array_equal(read_pixels(io.BytesIO(content)), by_pillow(content))


def test_what_is_no_ordinary_jpeg_goes_to_pillow(monkeypatch):
    inks = encoded(picture(20, 10).convert("CMYK"))
    assert decode._size_of_jpeg(inks) is None
    assert np.array_equal(read_pixels(io.BytesIO(inks)), by_pillow(inks))
    plain = encoded(picture(20, 10))
    without_simplejpeg(monkeypatch)
    assert np.array_equal(read_pixels(io.BytesIO(plain)), by_pillow(plain))


def test_a_jpeg_that_claims_enormous_sizes_is_not_decoded(monkeypatch):
    content = bytearray(encoded(picture(20, 10)))
    frame = content.index(b"\xff\xc0")
    content[frame + 5 : frame + 9] = b"\xff\xdc\xff\xdc"  # 65,500 x 65,500
    monkeypatch.setattr(simplejpeg, "decode_jpeg", lambda *_, **__: pytest.fail("it was decoded"))
    with pytest.raises(Image.DecompressionBombError):
        read_pixels(io.BytesIO(bytes(content)))


@pytest.mark.parametrize("share", [0.2, 0.6, 0.99])
def test_a_jpeg_that_is_cut_short_is_refused(share):
    content = encoded(picture(90, 60))
    with pytest.raises(OSError, match=r"[Tt]runcated"):
        read_pixels(io.BytesIO(content[: int(share * len(content))]))


def test_pixels_can_be_handed_to_torch():
    png = io.BytesIO()
    picture(5, 4).save(png, "PNG")
    png.seek(0)
    assert read_pixels(png).flags.writeable
    assert read_pixels(io.BytesIO(encoded(picture(5, 4)))).flags.writeable


# --------------------------------------------------------------------------------------------------- crops


class Part:
    """A crop that is always the same, and remembers the sizes that it was asked about."""

    def __init__(self, box, size):
        self.wanted, self.size, self.asked = Box(*box), (size, size), []

    def box(self, height, width):
        self.asked.append((height, width))
        return self.wanted


@pytest.mark.parametrize("installed", [True, False])
@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
@pytest.mark.parametrize(
    ("box", "factor"),
    [
        ((3, 5, 160, 170), 8),
        ((3, 5, 159, 170), 4),
        ((100, 90, 40, 45), 2),
        ((16, 8, 39, 300), 1),
        ((0, 0, 205, 311), 8),
    ],
)
def test_a_crop_is_decoded_at_the_scale_that_it_needs(mode, box, factor, installed, monkeypatch):
    if not installed:
        without_simplejpeg(monkeypatch)
    content = encoded(picture(311, 205, mode))
    crop = Part(box, 10)
    found = read_pixels(io.BytesIO(content), crop)
    assert crop.asked == [(205, 311)]  # once: a crop that is drawn would be another one the next time
    assert np.abs(np.array(found.shape[:2]) - np.array(box[2:]) / factor).max() <= 1
    assert min(found.shape[:2]) >= 20
    reduced = Image.open(io.BytesIO(content))
    reduced.draft(None, (311 // factor, 205 // factor))
    whole = np.asarray(reduced.convert("RGB"))
    top, left = round(box[0] * whole.shape[0] / 205), round(box[1] * whole.shape[1] / 311)
    assert np.array_equal(found, whole[top : top + found.shape[0], left : left + found.shape[1]])


def test_crops_of_other_formats_and_of_rotated_photos_are_those_of_all_pixels():
    large = picture(200, 160)
    exif = large.getexif()
    exif[0x0112] = 6  # to be shown on its side; Pillow and timm leave the pixels as they are
    rotated = encoded(large, exif=exif)
    assert np.array_equal(read_pixels(io.BytesIO(rotated), Part((8, 16, 19, 32), 10)), by_pillow(rotated)[8:27, 16:48])
    png = io.BytesIO()
    large.save(png, "PNG")
    png.seek(0)
    assert np.array_equal(read_pixels(png, Part((8, 16, 100, 90), 10)), np.asarray(large)[8:108, 16:106])


@pytest.mark.parametrize("share", [0.2, 0.6, 0.99])
def test_a_large_jpeg_that_is_cut_short_is_refused(share):
    content = encoded(picture(400, 300))
    with pytest.raises(OSError, match=r"[Tt]runcated"):
        read_pixels(io.BytesIO(content[: int(share * len(content))]), Part((0, 0, 300, 300), 20))


class Files:
    """Images in JPEG files in memory, one after the other."""

    class_names = None

    def __init__(self, contents):
        self.contents = contents

    def __len__(self):
        return len(self.contents)

    def load(self, index, crop=None):
        return read_pixels(io.BytesIO(self.contents[index]), crop), index

    def name(self, index):
        return f"file {index}"


@pytest.fixture(scope="module")
def large_photo():
    """A photo at three times its size, with the grain of a sensor."""
    from sklearn.datasets import load_sample_images

    photo = Image.fromarray(load_sample_images().images[0]).resize((1920, 1280), Image.Resampling.BICUBIC)
    grain = np.random.default_rng(0).normal(0, 4, (1280, 1920, 3))
    return encoded(Image.fromarray((np.asarray(photo) + grain).clip(0, 255).astype(np.uint8)), quality=90)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_crops_of_large_photos_are_drawn_as_ever_and_look_the_same(large_photo, interpolation):
    transform = train_transform(Recipe(img_size=64, crop="resized", interpolation=interpolation))
    samples = Samples(Files([large_photo]), transform, training=True)
    whole = by_pillow(large_photo)
    differences = []
    for seed in range(30):
        image, *_ = samples[0, seed]
        with seeded(seed):
            expected = transform(whole)
        differences.append(np.abs(image.numpy().astype(int) - expected.numpy()).mean())
        with seeded(seed):  # boxes, by timm's own function, of the whole image
            box = transform.box(1280, 1920)
        with seeded(seed):
            assert box == transform.crop.get_params(Image.fromarray(whole), transform.crop.scale, transform.crop.ratio)
    assert 0 < np.median(differences) < 3  # of 255 levels
    assert max(differences) < 6


def test_small_photos_and_their_crops_are_decoded_as_ever(large_photo, monkeypatch):
    small = encoded(Image.open(io.BytesIO(large_photo)).resize((500, 375)))
    transform = train_transform(Recipe(img_size=224, crop="resized"))
    samples = Samples(Files([small]), transform, training=True)
    for seed in range(20):
        with seeded(seed):
            expected = transform(by_pillow(small))
        assert np.array_equal(samples[0, seed][0].numpy(), expected.numpy())


def test_a_damaged_file_gives_way_to_the_crop_that_is_drawn_of_another_one(large_photo):
    transform = train_transform(Recipe(img_size=64, crop="resized"))
    samples = Samples(Files([large_photo[:-3000], large_photo]), transform, training=True)
    image, label, index, failures = samples[0, 5]
    assert (label, index) == (1, 1)
    assert {failure.name for failure in failures} == {"file 0"}
    assert np.array_equal(image.numpy(), samples[1, 5][0].numpy())


# --------------------------------------------------------------------------------------------------- large files


class Counted(io.BytesIO):
    """A file that counts the bytes that are read."""

    count = 0

    def read(self, size=-1):
        content = super().read(size)
        self.count += len(content)
        return content


def test_a_large_file_that_is_no_image_is_not_read():
    file = Counted(bytes(10**7))
    with pytest.raises(OSError, match="cannot identify"):
        read_pixels(file)
    assert file.count < 10**6


def test_a_jpeg_is_in_memory_once(tmp_path):
    (tmp_path / "padded.jpg").write_bytes(encoded(picture(30, 20)) + bytes(10**7))
    tracemalloc.start()
    decode.read_rgb(tmp_path / "padded.jpg")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1.5 * 10**7


def test_a_jpeg_that_would_fill_the_memory_is_refused(monkeypatch, tmp_path):
    content = encoded(picture(30, 20))
    (tmp_path / "large.jpg").write_bytes(content)
    os.truncate(tmp_path / "large.jpg", 2**40)  # a sparse file
    with pytest.raises(ValueError, match="it has 1,099,511,627,776 bytes: more than 536,870,912 are not read"):
        decode.read_rgb(tmp_path / "large.jpg")
    monkeypatch.setattr(decode, "MOST_BYTES", len(content))
    assert read_pixels(io.BytesIO(content)).shape == (20, 30, 3)


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "GIF", "WEBP", "BMP", "JPEG2000"])
def test_an_image_within_a_file_is_that_of_a_file_of_its_own(kind, tmp_path):
    image = picture(40, 30)
    options = {"compression": "tiff_lzw"} if kind == "TIFF" else {}  # libtiff reads from the descriptor of the file
    image.save(tmp_path / "one", kind, **options)
    content = (tmp_path / "one").read_bytes()
    (tmp_path / "many").write_bytes(bytes(100) + content + bytes(100))
    with open(tmp_path / "many", "rb") as many:
        many.seek(100)
        within = read_pixels(many, size=len(content))
    assert np.array_equal(within, decode.read_rgb(tmp_path / "one"))
    assert np.array_equal(within, by_pillow(content))
