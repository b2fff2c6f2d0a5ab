import dataclasses
import json
import platform
import re
import sys
from pathlib import Path

import pytest
import torch
from benchmarks.browser import browser

import grassy
from grassy.demo import experiment as demo
from grassy.demo import summary

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """One quick run: its result, what it printed, and its folder."""
    folder = tmp_path_factory.mktemp("demo") / "made by the demo"
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch, (folder.parent / "printed").open("w+", encoding="utf-8") as printed:
        patch.setattr(sys, "stdout", printed)
        patch.setenv("COLUMNS", "80")
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
    assert saved["settings"] == dataclasses.asdict(demo.QUICK)
    assert saved["versions"]["grassy"] == grassy.__version__
    assert len(saved["runs"]) == (len(demo.HEADS) + 1) * demo.QUICK.seeds  # and the pixels


def test_the_table_shows_the_means_of_the_saved_runs_on_80_columns(quick):
    _, lines, folder = quick
    runs = json.loads((folder / "demo.json").read_text())["runs"]
    for key, title, digits in summary.MEASURES:
        row = next(line for line in lines if line.startswith(f"{title} "))
        assert len(row) <= 80
        shown = row.removeprefix(title).split()
        for head, cell in zip((*demo.HEADS, "pixels"), shown, strict=False):
            values = [run[key] for run in runs if run["head"] == head and key in run]
            assert cell == (f"{sum(values) / len(values):.{digits}f}" if values else "–")


def test_the_last_lines_name_the_page_and_say_in_three_sentences_what_was_seen(quick):
    result, lines, folder = quick
    assert sum(line.startswith("seed ") for line in lines) == len(demo.HEADS) * demo.QUICK.seeds
    assert not any("\x1b" in line or "\r" in line for line in lines)
    (page,) = [i for i, line in enumerate(lines) if line.startswith(f"Open {folder / 'report.html'} in a browser.")]
    assert " ".join(" ".join(lines[page + 1 :]).split()) == " ".join(result["sentences"])
    assert [sentence.split(":")[0] for sentence in result["sentences"]] == ["Spread", "Kept", "Not seen"]


def test_the_page_begins_with_the_idea_and_nothing_else_is_left_in_the_folder(quick):
    result, _, folder = quick
    assert sorted(path.name for path in folder.iterdir()) == ["demo.json", "report.html"]
    page = (folder / "report.html").read_text()
    assert re.search(r"<section id=\"(\w+)\"", page)[1] == "idea"
    test_images = len(demo.split_digits(0).test[1])
    assert page.count("<image ") == 2 * test_images  # each of them once with softmax and once with subspaces
    assert all(sentence in page for sentence in result["sentences"])
    assert "{{" not in page.split("<script", 1)[0]


@pytest.mark.slow
@pytest.mark.browser
def test_on_a_phone_the_page_fits_and_a_digit_can_be_chosen(quick):
    with browser() as window:
        window.emulate(390, 800)
        window.open(quick[2] / "report.html")
        assert window.run("return document.documentElement.scrollWidth") <= 390
        visible = "[...document.querySelectorAll('#idea figure')].filter((f) => f.offsetParent).map((f) => f.className)"
        assert window.run(f"return {visible}") == ["digit-0", "digit-0"]
        window.run("document.querySelector('#idea label:nth-of-type(3)').click()")
        assert window.run(f"return {visible}") == ["digit-2", "digit-2"]


def test_the_numbers_file_names_the_platform_and_no_folder(quick):
    result, _, folder = quick
    assert result["platform"] == f"{platform.system()} {platform.machine()}"
    assert str(folder.parent) not in (folder / "demo.json").read_text()


def test_a_seed_gives_the_same_numbers_again(quick):
    result, _, _ = quick
    split = demo.split_digits(1)
    name, options = demo.HEADS[summary.OURS]
    torch.manual_seed(1)
    model = demo.build(name, options, demo.QUICK)
    torch.manual_seed(1)
    demo.train(model, split.train, demo.QUICK, lambda loss: None)
    (before,) = [run for run in result["runs"] if run["head"] == summary.OURS and run["seed"] == 1]
    again = demo.measure(model, split, seed=1)
    # The demo runs on one thread, this test on as many as there are: sums may differ in their last digits.
    assert again["angle"] == pytest.approx(before["angle"], rel=1e-2)
    assert again["one_shot"] == pytest.approx(before["one_shot"], abs=2)


def test_trained_and_unseen_classes_share_no_image_and_no_digit():
    split = demo.split_digits(3)
    assert split.held_out == [9, 0, 1]
    assert split.unseen[1].unique().tolist() == [0, 1, 9]
    assert [part[1].unique().tolist() for part in (split.train, split.test)] == [list(range(7))] * 2
    images = torch.cat([part[0] for part in (split.train, split.test, split.unseen)]).flatten(1)
    assert len(images) == len(images.unique(dim=0)) == 1797  # no image of the data set occurs twice


def test_after_ten_seeds_every_digit_was_held_out_three_times():
    held_out = [digit for seed in range(demo.FULL.seeds) for digit in demo.split_digits(seed).held_out]
    assert sorted(held_out) == sorted(3 * list(range(10)))


def runs_with(ours, softmax):
    """Runs of three seeds whose measures are these values, those of the other heads being 50."""
    values = {summary.OURS: ours, summary.SOFTMAX: softmax}
    return [
        {"head": head, "seed": seed, **{key: values.get(head, [50.0] * 3)[seed] for key, _, _ in summary.MEASURES}}
        for head in (*demo.HEADS, "pixels")
        for seed in range(3)
    ]


def test_the_sentences_say_so_when_subspaces_do_not_win():
    *_, better = summary.sentences(runs_with([70.0, 71, 72], [60.0, 61.5, 62]))
    assert "clear gain" not in better
    *_, alike = summary.sentences(runs_with([70.0, 71, 72], [60.0, 75, 80]))
    assert "a clear gain in accuracy on trained digits" in alike
    spread, kept, worse = summary.sentences(runs_with([60.0, 61.5, 62], [70.0, 71, 72]))
    assert "a clear gain in accuracy on unseen digits" in worse
    assert "(-9.8, 95 % CI " in spread
    assert "(-9.8, 95 % CI " in kept


def test_the_results_page_shows_the_figures_of_the_file_beside_it():
    result = json.loads((DOCS / "images" / "demo.json").read_text())
    page = (DOCS / "results.md").read_text()
    for row in summary.rows(result, (summary.SOFTMAX, summary.STANDARDIZED)):
        assert f"| {' | '.join(row)} |" in page
    assert result["sentences"] == summary.sentences(result["runs"])
    assert result["settings"] == dataclasses.asdict(demo.FULL)


def test_one_seed_has_differences_and_no_interval():
    runs = [run for run in runs_with([70.0] * 3, [60.0] * 3) if run["seed"] == 0]
    angle = summary.summarize(runs)["angle"]
    assert angle[f"{summary.OURS} - {summary.SOFTMAX}"] == {"mean": 10, "low": None, "high": None}
    assert "(+10.0; +20.0 over standardised softmax)" in summary.sentences(runs)[0]
    assert summary.caption({"settings": {"seeds": 1}}, summary.STANDARDIZED).startswith("Means over 1 seed, ")
