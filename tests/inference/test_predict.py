"""Predictions of images without labels, from real checkpoints of small models that were not trained."""

import csv
import json
import os
import pickle
import resource
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from timm.data import create_transform, resolve_model_data_config

from grassy.cli import main
from grassy.heads import HEADS, heads_of
from grassy.inference.export import export
from grassy.inference.load import load
from grassy.inference.predict import MANY, Prediction, find_images, predict, write_predictions
from grassy.inference.validate import validate
from grassy.models import create_model
from grassy.runs.weights import BEST, Description, read_weights, save_weights

VIT = {"img_size": 16, "patch_size": 8, "depth": 1, "embed_dim": 32, "num_heads": 2}
NAMES = ["cat", "dog", "tench, Tinca tinca", 'the "fifth"\nclass', "Ärger"]


def write_checkpoint(path, head="grassmann", model="vit_tiny_patch16_224", options=VIT, change=None, **description):
    torch.manual_seed(1)
    described = {"img_size": 16, "class_names": NAMES, "interpolation": "bicubic", "crop_pct": 0.8, **description}
    described = Description(model, 5, {"name": head}, options, mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.1), **described)
    built = create_model(model, 5, {"name": head}, options)
    if change is not None:
        change(built)
    save_weights(built, described, path)
    return path


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("run") / BEST)


def write_image(path, seed=0, size=(23, 31), mode="RGB"):
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)
    Image.fromarray(pixels).convert(mode).save(path)
    return path


@pytest.fixture
def images(tmp_path):
    """Three images and a file that is none, in folders whose order is not that of the names."""
    write_image(tmp_path / "images/b/2.png", 2)
    write_image(tmp_path / "images/b/1.JPG", 1)
    write_image(tmp_path / "images/a.jpeg", 0)
    (tmp_path / "images/b/notes.txt").write_text("not an image")
    return tmp_path / "images"


# ------------------------------------------------------------------------------------------------ the numbers


CASES = [*((head, "center") for head in HEADS), ("grassmann", "squash"), ("grassmann", "border")]


@pytest.mark.parametrize(("head", "crop_mode"), CASES)
def test_probabilities_are_the_softmax_of_the_model_on_what_timms_own_transform_gives(head, crop_mode, tmp_path):
    checkpoint = write_checkpoint(tmp_path / "model.safetensors", head, crop_mode=crop_mode)
    modes = ("RGB", "L", "RGBA", "P", "CMYK")
    sizes = ((23, 31), (31, 23), (16, 16), (5, 90), (200, 120))
    files = [
        write_image(tmp_path / f"{mode}.{'jpg' if mode == 'CMYK' else 'png'}", i, size, mode)
        for i, (mode, size) in enumerate(zip(modes, sizes, strict=True))
    ]
    model = load(checkpoint)
    transform = create_transform(**resolve_model_data_config(model), is_training=False)
    x = torch.stack([transform(Image.open(file).convert("RGB")) for file in files])
    with torch.no_grad():
        expected = model(x).softmax(-1).sort(-1, descending=True)
        features = model.forward_head(model.forward_features(x), pre_logits=True)
        outliers = heads_of(model)[0].outlier_score(features)
    found = list(predict(checkpoint, files, device="cpu"))
    assert [p.path for p in found] == files
    torch.testing.assert_close(torch.tensor([p.probabilities for p in found]), expected.values, atol=1e-5, rtol=1e-4)
    assert [p.labels for p in found] == [tuple(NAMES[i] for i in row) for row in expected.indices.tolist()]
    torch.testing.assert_close(torch.tensor([p.outlier_score for p in found]), outliers, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("batch_size", [1, 2, 3, 64])
def test_the_size_of_a_batch_changes_neither_order_nor_numbers(checkpoint, images, batch_size):
    files = [*sorted(images.rglob("*.*g")), images / "a.jpeg"]
    one_by_one = [next(predict(checkpoint, [file])) for file in files]
    together = list(predict(checkpoint, files, batch_size=batch_size))
    assert [(p.path, p.labels) for p in together] == [(p.path, p.labels) for p in one_by_one]
    for a, b in zip(together, one_by_one, strict=True):
        assert a.probabilities == pytest.approx(b.probabilities, abs=1e-6)


@pytest.mark.parametrize(
    ("names", "labels"), [(None, {"0", "1", "2", "3", "4"}), (["a", "b"], {"a", "b", "2", "3", "4"})]
)
def test_a_class_without_a_name_is_called_by_its_number(tmp_path, images, names, labels):
    checkpoint = write_checkpoint(tmp_path / "model.safetensors", class_names=names)
    assert set(next(predict(checkpoint, [images])).labels) == labels


def test_topk_is_at_most_the_number_of_classes(checkpoint, images):
    for topk, number in ((1, 1), (3, 3), (100, 5)):
        for prediction in predict(checkpoint, [images], topk=topk):
            assert len(prediction.labels) == len(prediction.probabilities) == number
    assert sum(prediction.probabilities) == pytest.approx(1)


@pytest.mark.parametrize(
    ("model", "options", "has_outlier_score"),
    [
        ("resnet18_cifar", {"channels": [8, 8, 8, 8]}, True),
        ("deit_tiny_distilled_patch16_224", VIT, False),  # two heads
        ("resnetv2_18", {"channels": [16, 16, 16, 16], "stem_chs": 16}, True),  # a 1x1 convolution
    ],
)
def test_other_kinds_of_models(tmp_path, images, model, options, has_outlier_score):
    checkpoint = write_checkpoint(tmp_path / "model.safetensors", model=model, options=options)
    for prediction in predict(checkpoint, [images]):
        assert sum(prediction.probabilities) == pytest.approx(1, abs=1e-5)
        assert (prediction.outlier_score is not None) == has_outlier_score


def test_logits_that_are_not_finite_are_an_error_of_the_image(tmp_path, images):
    def spoil(model):
        torch.nn.init.constant_(model.norm.bias, float("nan"))

    checkpoint = write_checkpoint(tmp_path / "model.safetensors", "linear", change=spoil)
    assert all("not finite" in prediction.error for prediction in predict(checkpoint, [images]))


# ------------------------------------------------------------------------------------------------ the images


def test_folders_are_searched_for_images_in_order_and_files_are_taken_as_they_are(images):
    inside = [images / "a.jpeg", images / "b/1.JPG", images / "b/2.png"]
    notes = images / "b/notes.txt"
    assert find_images([images]) == inside
    assert find_images([notes, images, images / "b/2.png"]) == [notes, *inside, images / "b/2.png"]


def test_what_is_hidden_is_not_an_image_unless_it_is_named(images):
    copy = write_image(images / "b/.ipynb_checkpoints/2-checkpoint.png")
    write_image(images / "b/.2.png")
    assert [file.name for file in find_images([images])] == ["a.jpeg", "1.JPG", "2.png"]
    assert find_images([copy]) == [copy]


def test_an_image_of_sixteen_bits_is_predicted_as_the_same_with_eight(checkpoint, tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (20, 20), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "8.png")
    Image.fromarray(pixels.astype(np.uint16) * 257).save(tmp_path / "16.png")
    sixteen, eight = predict(checkpoint, [tmp_path])
    assert (sixteen.labels, sixteen.probabilities) == (eight.labels, eight.probabilities)


def test_the_exit_code_tells_whether_every_image_was_read(checkpoint, images, capsys):
    assert main(["predict", str(checkpoint), str(images), "--device", "cpu"]) == 0
    (images / "b/2.png").write_bytes(b"not an image")
    assert main(["predict", str(checkpoint), str(images), "--device", "cpu"]) == 1
    assert len(capsys.readouterr().out.splitlines()) >= 6
    assert main(["predict", str(checkpoint), str(images / "b/2.png"), "--device", "cpu"]) == 2


def test_links_are_followed_but_not_in_a_circle(images, tmp_path):
    elsewhere = write_image(tmp_path / "elsewhere/c.png")
    (images / "link").symlink_to(elsewhere.parent)
    (images / "b/up").symlink_to(images)
    assert [file.name for file in find_images([images])] == ["a.jpeg", "1.JPG", "2.png", "c.png"]


def test_an_image_that_cannot_be_read_is_named_and_counted_and_the_others_go_on(checkpoint, images, capsys, tmp_path):
    (images / "b/1.JPG").write_bytes(b"\xff\xd8\xff\xe0 this is where the image ends")
    (images / "b/0.png").touch()
    whole = (images / "b/2.png").read_bytes()
    (images / "b/3.png").write_bytes(whole[: len(whole) // 2])
    found = list(predict(checkpoint, [images, images / "b/notes.txt"], batch_size=2))
    assert [p.path.name for p in found] == ["a.jpeg", "0.png", "1.JPG", "2.png", "3.png", "notes.txt"]
    assert [p.error is None for p in found] == [True, False, False, True, False, False]
    assert all(not p.labels and not p.probabilities and p.outlier_score is None for p in found if p.error)
    assert write_predictions(found) == 4
    captured = capsys.readouterr()
    about_outliers, unread = captured.err.splitlines()
    assert about_outliers.startswith("this model has no outlier threshold")
    assert unread == "grassy: 4 of 6 images could not be read"
    assert captured.out.splitlines()[1].startswith(f"{images / 'b/0.png'}")
    assert "error: not an image that Pillow knows" in captured.out.splitlines()[1]
    assert write_predictions(found, tmp_path / "out.csv") == 4
    captured = capsys.readouterr()
    assert captured.err.startswith(f"Saved {tmp_path / 'out.csv'} with predictions for 2 images\n")
    assert captured.err.count("\n") == 7
    assert f"  {images / 'b/3.png'}: " in captured.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"paths": ["missing.png"]}, "there is no image or folder .*missing.png"),
        ({"paths": ["empty"]}, r"empty holds no images \(.avif, .bmp, .*, .webp\)"),
        ({"paths": []}, "which images"),
        ({"topk": 0}, "topk must be at least 1, got 0"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"device": "gpu"}, "unknown device 'gpu'"),
    ],
)
def test_wrong_arguments_raise_before_anything_is_predicted(checkpoint, images, tmp_path, arguments, message):
    (tmp_path / "empty").mkdir()
    given = {"paths": [images], **arguments}
    given["paths"] = [tmp_path / path for path in given["paths"]]
    with pytest.raises(ValueError, match=message):
        predict(checkpoint, **given)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_said_to_be_missing(checkpoint, images):
    with pytest.raises(ValueError, match="torch sees no GPU"):
        predict(checkpoint, [images], device="cuda:1")


# ------------------------------------------------------------------------------------------------ the checkpoint


def test_a_checkpoint_that_is_not_grassys_is_refused_by_name(tmp_path, images):
    foreign, torn, empty = tmp_path / "foreign.safetensors", tmp_path / "torn.safetensors", tmp_path / "empty"
    save_file({"weight": torch.zeros(2)}, foreign)
    torn.write_bytes(write_checkpoint(tmp_path / "whole.safetensors").read_bytes()[:-100])
    empty.mkdir()
    for path in (foreign, torn, empty, tmp_path / "missing.safetensors"):
        with pytest.raises(ValueError, match=str(path)):
            predict(path, [images])


class Intruder:
    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return Path.touch, (self.file,)


@pytest.mark.parametrize("name", ["model.safetensors", "model.pt", "model.pth.tar"])
@pytest.mark.parametrize("write", [torch.save, lambda thing, path: path.write_bytes(pickle.dumps(thing, 2))])
def test_a_pickle_in_the_place_of_a_checkpoint_is_not_run(tmp_path, images, name, write):
    trap, path = tmp_path / "trap", tmp_path / name
    write({"state_dict": Intruder(trap)}, path)
    for read in (load, read_weights, lambda path: predict(path, [images])):
        with pytest.raises(ValueError, match=str(path)):
            read(path)
    assert not trap.exists()
    pickle.loads(pickle.dumps(Intruder(trap)))  # the trap is a working one
    assert trap.exists()


# ------------------------------------------------------------------------------------------------ the output


AWKWARD = [
    Prediction(Path('a,b\n"c"\r;.png'), tuple(NAMES), (0.5, 0.2, 0.15, 0.1, 0.05), 0.25),
    Prediction(Path(os.fsdecode(b"not-utf8-\xff.png")), tuple(NAMES), (0.5, 0.2, 0.15, 0.1, 0.05), None),
    Prediction(Path("\x1b[2Jü.png"), error="broken, badly\nin two places"),
]


@pytest.mark.parametrize("order", [slice(None), slice(None, None, -1)])
def test_a_csv_file_gives_awkward_names_back(tmp_path, order):
    output = tmp_path / "new/folder/out.csv"
    write_predictions(iter(AWKWARD[order]), output)
    with output.open(encoding="utf-8", errors="surrogateescape", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 3
    for row, expected in zip(rows, AWKWARD[order], strict=True):
        assert row["path"] == str(expected.path)
        assert (row["error"] or None) == expected.error
        assert (float(row["outlier_score"]) if row["outlier_score"] else None) == expected.outlier_score
        ranks = range(1, 6) if expected.error is None else ()
        assert tuple(row[f"label_{rank}"] for rank in ranks) == expected.labels
        assert tuple(float(row[f"probability_{rank}"]) for rank in ranks) == expected.probabilities


def test_a_file_of_json_lines_gives_awkward_names_back(tmp_path):
    output = tmp_path / "out.jsonl"
    write_predictions(iter(AWKWARD), output)
    rows = [json.loads(line) for line in output.read_text("utf-8").splitlines()]
    for row, expected in zip(rows, AWKWARD, strict=True):
        assert row["path"] == str(expected.path)
        assert row.get("error") == expected.error
        assert tuple(row.get("labels", ())) == expected.labels
        assert tuple(row.get("probabilities", ())) == expected.probabilities
        assert row.get("outlier_score") == expected.outlier_score


def test_on_a_terminal_an_image_is_one_line_in_columns(capsys):
    write_predictions(iter(AWKWARD))
    lines = capsys.readouterr().out.split("\n")
    assert len(lines) == 4
    assert lines[0].startswith(r'a,b\n"c"\r;.png ')
    assert lines[1].startswith(r"not-utf8-\udcff.png ")
    assert lines[2].startswith(r"\x1b[2Jü.png ")
    assert lines[0].index("50.00% cat") == lines[1].index("50.00% cat")
    assert lines[0].index("20.00% dog") == lines[1].index("20.00% dog")
    assert lines[0].endswith("outlier 0.250")


def test_everything_unreadable_still_makes_a_whole_file(tmp_path):
    for suffix, lines in ((".csv", 2), (".jsonl", 1)):
        assert write_predictions([Prediction(Path("x.png"), error="no")], tmp_path / f"out{suffix}") == 1
        assert len((tmp_path / f"out{suffix}").read_text().splitlines()) == lines


@pytest.mark.parametrize("name", ["out.json", "out.txt", "out", "folder.csv"])
def test_another_suffix_or_a_folder_is_refused_before_the_work(tmp_path, name):
    (tmp_path / "folder.csv").mkdir()

    def work():
        raise AssertionError("worked")
        yield

    with pytest.raises(ValueError, match=rf"must be a .csv or .jsonl file, got '.*{name}'|{name} is a folder"):
        write_predictions(work(), tmp_path / name)
    assert [path.name for path in tmp_path.rglob("*")] == ["folder.csv"]


def test_a_full_disk_or_an_interruption_leaves_the_old_file_and_nothing_else(tmp_path):
    output = tmp_path / "out.csv"
    output.write_text("old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(OSError, match="could not be written") as caught:
            write_predictions(AWKWARD * 1000, output)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.filename == str(output)

    def interrupted():
        yield AWKWARD[0]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_predictions(interrupted(), output)
    assert output.read_text() == "old"
    assert list(tmp_path.iterdir()) == [output]


def test_a_bar_on_stderr_leaves_stdout_alone(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    predictions = AWKWARD[:2] * MANY
    write_predictions(iter(predictions), total=len(predictions))
    captured = capsys.readouterr()
    assert captured.out.count("\n") == len(predictions)
    assert "\x1b" not in captured.out
    assert "images" in captured.err
    write_predictions(iter(predictions[:5]), total=5)
    assert "\x1b" not in capsys.readouterr().err  # no bar for a few


def test_a_file_that_no_recipe_made_is_validated_as_it_is_predicted(tmp_path):
    """Of weights from a loop of one's own the description alone says how images are prepared."""
    checkpoint = write_checkpoint(tmp_path / BEST, class_names=["a", "b", "c", "d", "e"])
    files = [write_image(tmp_path / "data" / "val" / name / "0.png", seed) for seed, name in enumerate("abcde")]
    predicted = [each.labels[0] for each in predict(checkpoint, files, device="cpu")]
    expected = 100 * sum(name == file.parent.name for name, file in zip(predicted, files, strict=True)) / 5
    metrics = validate(checkpoint, tmp_path / "data", split="val", device="cpu", workers=0)
    assert (metrics.images, metrics.top1) == (5, pytest.approx(expected))


def test_a_model_of_other_channels_loads_and_commands_say_that_they_read_rgb(images, tmp_path):
    file = write_checkpoint(tmp_path / "grey.safetensors", options={**VIT, "in_chans": 1})
    assert load(file)(torch.randn(2, 1, 16, 16)).shape == (2, 5)
    for use in (lambda: list(predict(file, [images])), lambda: validate(file, None), lambda: export(file, "grey.onnx")):
        with pytest.raises(ValueError, match=r"takes images of 1 channels, and grassy reads RGB images only"):
            use()
