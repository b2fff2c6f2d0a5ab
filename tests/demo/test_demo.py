import json
import platform
import sys

import pytest
import torch
from matplotlib.image import imread

import grassy
from grassy.demo import experiment as demo


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """One quick run: its result, what it printed, and its folder."""
    folder = tmp_path_factory.mktemp("demo") / "made by the demo"
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch, (folder.parent / "printed").open("w+", encoding="utf-8") as printed:
        patch.setattr(sys, "stdout", printed)
        patch.setenv("COLUMNS", "120")
        result = demo.run(folder, demo.QUICK)
        printed.seek(0)
        lines = printed.read().splitlines()
    assert torch.get_num_threads() == threads
    return result, lines, folder


def test_the_numbers_file_is_strict_json_and_holds_the_result(quick):
    result, _, folder = quick

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    saved = json.loads((folder / "demo.json").read_text(), parse_constant=refuse)
    assert saved == json.loads(json.dumps(result))
    assert saved["settings"]["gamma"] == demo.QUICK.gamma
    assert saved["versions"]["grassy"] == grassy.__version__
    assert len(saved["runs"]) == 2 * demo.QUICK.seeds


def test_the_table_shows_the_means_and_deviations_of_the_saved_runs(quick):
    _, lines, folder = quick
    runs = json.loads((folder / "demo.json").read_text())["runs"]
    for head in ("linear", "grassmann k=4"):
        row = next(line for line in lines if line.startswith(head))
        shown = row.removeprefix(head).replace("±", " ").split()
        expected = []
        for key, _, digits in demo.MEASURES:
            values = torch.tensor([run[key] for run in runs if run["head"] == head], dtype=torch.float64)
            expected += [f"{values.mean():.{digits}f}", f"{values.std():.{digits}f}"]
        assert shown == expected


def test_without_a_terminal_every_run_is_one_plain_line_and_the_last_line_says_where_the_files_are(quick):
    _, lines, folder = quick
    assert sum(line.startswith("seed ") for line in lines) == 2 * demo.QUICK.seeds
    assert not any("\x1b" in line or "\r" in line for line in lines)
    assert lines[-2] == f"Saved {folder / 'demo.png'} and {folder / 'demo.json'}"
    assert lines[-1].endswith(f"open {folder / 'report.html'} in a browser")


def test_the_picture_is_one_and_nothing_else_is_left_in_the_folder(quick):
    _, _, folder = quick
    pixels = imread(folder / "demo.png")
    assert pixels.shape[1] >= 1500
    assert pixels.std() > 0.05  # not blank
    assert sorted(path.name for path in folder.iterdir()) == ["demo.json", "demo.png", "report.html"]


def test_the_numbers_file_names_the_platform_and_no_folder(quick):
    result, _, folder = quick
    assert result["platform"] == f"{platform.system()} {platform.machine()}"
    assert str(folder.parent) not in (folder / "demo.json").read_text()


def test_a_seed_gives_the_same_numbers_again(quick):
    result, _, _ = quick
    split = demo.split_digits(1)
    torch.manual_seed(1)
    model = demo.build("grassmann", {"k": 4, "gamma": demo.QUICK.gamma}, demo.QUICK)
    torch.manual_seed(1)
    demo.train(model, split.train, demo.QUICK, lambda loss: None)
    (before,) = [run for run in result["runs"] if run["head"] == "grassmann k=4" and run["seed"] == 1]
    again = demo.measure(model, split, seed=1)
    # The demo runs on one thread, this test on as many as there are: sums may differ in their last digits.
    assert again["variability"] == pytest.approx(before["variability"], rel=1e-2)
    assert again["accuracy"] == pytest.approx(before["accuracy"], abs=2)


def test_trained_and_held_out_classes_share_no_image_and_no_digit():
    split = demo.split_digits(3)
    assert split.held_out == [9, 0, 1]
    parts = [split.train, split.test, split.held_out_fit, split.held_out_score]
    assert [sorted(labels.unique().tolist()) for _, labels in parts] == [list(range(7))] * 2 + [list(range(3))] * 2
    images = torch.cat([images for images, _ in parts]).flatten(1)
    assert len(images) == 1797
    assert len(images.unique(dim=0)) == 1797  # no image of the data set occurs twice


def test_the_pixels_that_features_are_compared_with_are_in_the_caption(quick):
    result, lines, _ = quick
    pixels = torch.tensor(result["held_out_accuracy_of_pixels"], dtype=torch.float64)
    assert f"pixels themselves: {pixels.mean():.1f} ± {pixels.std():.1f}." in " ".join(" ".join(lines).split())


def test_one_seed_has_a_mean_and_no_deviation():
    run = {"head": "linear", "seed": 0, **{key: 12.0 for key, _, _ in demo.MEASURES}}
    assert demo.summarize([run])["linear"]["accuracy"] == {"mean": 12.0, "std": None}
    assert demo._plus_minus({"mean": 12.0, "std": None}, 1) == "12.0"
