"""Pixels of JPEG files: those of Pillow, whoever decodes them."""

import io

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from grassy.data import decode
from grassy.data.decode import read_pixels

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
    assert decode._decode_jpeg(content) is not None
    assert np.array_equal(read_pixels(io.BytesIO(content)), by_pillow(content))


def test_what_is_no_ordinary_jpeg_goes_to_pillow(monkeypatch):
    inks = encoded(picture(20, 10).convert("CMYK"))
    assert decode._decode_jpeg(inks) is None
    assert np.array_equal(read_pixels(io.BytesIO(inks)), by_pillow(inks))
    plain = encoded(picture(20, 10))
    monkeypatch.setattr(decode, "_simplejpeg", lambda: None)  # not installed
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
