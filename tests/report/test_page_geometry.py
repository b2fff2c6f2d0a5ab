"""The page in a real browser: the angles between classes, of one run or of two."""

import pytest
import torch

from grassy.report.packing import unpack_angles
from grassy.report.page import write_page

from .report_page_actions import NAMES, analysis_of, click_on_pair, picture, set_value, shown_angles, table

pytestmark = [pytest.mark.browser, pytest.mark.slow]


def test_the_slider_changes_the_picture(page):
    pictures = [picture(page)]
    for angle in ("2", "3"):
        set_value(page, "angle", angle)
        pictures.append(picture(page))
    assert len(set(pictures)) == 3
    assert page.text("#angle-label") == "3rd of 3, largest"


@pytest.mark.parametrize("order", ["cluster", "index"])
def test_a_click_on_a_pair_shows_the_angles_of_analysis_json(page, runs, order):
    analysis = analysis_of(runs[0])
    if order != "cluster":
        set_value(page, "order", order)
    assert page.run("return document.getElementById('details').dataset.kind") == "class"  # of the worst class
    click_on_pair(page, 3, 0, analysis["orders"][order])
    page.wait("document.querySelector('.pair-angles')")
    expected = unpack_angles(analysis["angles"])[3, 0]
    assert shown_angles(page) == pytest.approx(expected, abs=0.0051)
    heading = page.text("#details h3")
    assert "snowy owl" in heading
    assert "cat" in heading


def test_two_runs_can_be_compared(page, runs):
    alone = picture(page)
    set_value(page, "run-b", "1")
    both = picture(page)
    set_value(page, "view", "difference")
    assert len({alone, both, picture(page)}) == 3
    a, b = (analysis_of(run) for run in runs[:2])
    click_on_pair(page, 2, 4, a["orders"]["cluster"])
    page.wait("document.querySelectorAll('.pair-angles').length === 2")
    angles = [unpack_angles(analysis["angles"])[2, 4] for analysis in (a, b)]
    for part in (0, 1):
        assert shown_angles(page, part) == pytest.approx(angles[part], abs=0.0051)
    under_the_pointer = page.text("#angles-tip").split(": ")[1].rstrip("°").replace("−", "-")
    assert float(under_the_pointer) == pytest.approx(angles[0][0] - angles[1][0], abs=0.0052)
    assert page.text("#notice") == ""
    set_value(page, "run-b", "2")  # class vectors: one angle per pair
    page.wait("document.querySelectorAll('.pair-angles')[1].children.length === 1")
    assert page.run("return document.getElementById('view').value") == "difference"
    assert "3 angles per pair" in page.text("#notice")
    assert "larger subspaces have a smaller one by construction" in page.text("#notice")


def test_labels_of_the_matrix_keep_what_tells_names_apart(odd_page):
    script = """
        const written = [], pen = CanvasRenderingContext2D.prototype, before = pen.fillText;
        pen.fillText = function (text, ...rest) { written.push(text); before.call(this, text, ...rest); };
        document.getElementById("angles-all").click();
        pen.fillText = before;
        return written;
    """
    odd_page.emulate(390, 800)  # where names have little room
    try:
        odd_page.wait("document.getElementById('angles-matrix').clientWidth < 390")
        written = odd_page.run(script)
    finally:
        odd_page.emulate(1200, 1600)
    long = [text for text in written if "…" in text and text.startswith("n")]
    assert len(long) == 4
    assert all(text.endswith("row") for text in long)
    owls = [text for text in written if "\U0001f989" in text]
    assert len(owls) == 2
    assert all(set(text) == {"\U0001f989", "…"} for text in owls)  # no half of a letter


def test_a_name_written_from_right_to_left_leaves_the_text_around_it_in_order(odd_page):
    set_value(odd_page, "order", "index")
    box = odd_page.run(
        "const canvas = document.getElementById('angles-matrix'); canvas.scrollIntoView({ block: 'center' });"
        "const b = canvas.getBoundingClientRect(); return [b.left, b.top, b.width]"
    )
    gutter = odd_page.run(
        "const b = document.getElementById('angles-matrix').getBoundingClientRect(); return b.width * 0.22"
    )
    gutter = min(gutter, 16 + 16 * 7)
    cell = (box[2] - gutter) / 6
    odd_page.click_at(box[0] + gutter + 0.5 * cell, box[1] + gutter + 1.5 * cell)
    assert odd_page.run("return document.getElementById('angles-tip').textContent").startswith(
        "\u2068\u05d0\u05d1\u2069 – \u2068crane (0)\u2069: "
    )


def test_a_run_with_other_classes_says_why_it_cannot_be_compared(odd_page):
    options = "return [...document.getElementById('run-b').options].map((option) => option.textContent)"
    assert odd_page.run(options) == ["none", "run 3"]
    set_value(odd_page, "run-b", "1")
    assert odd_page.run("return document.getElementById('view').value") == "split"
    set_value(odd_page, "run-a", "2")
    assert odd_page.run(options) == ["none has the same classes"]
    assert odd_page.run(
        "return [document.getElementById('run-b').disabled, document.getElementById('view').value]"
    ) == [
        True,
        "a",
    ]


def test_the_keyboard_reaches_pairs_and_classes(page, runs):
    order = analysis_of(runs[0])["orders"]["cluster"]
    page.run("document.getElementById('angles-matrix').focus()")
    page.type("#angles-matrix", "\ue014")  # arrow to the right: from the first class to its pair with the second
    page.wait("document.getElementById('details').dataset.kind === 'pair'")
    assert NAMES[order[0]] in page.text("#details h3")
    assert NAMES[order[1]] in page.text("#details h3")
    page.type("#angles-matrix", "\ue007")  # Enter
    page.wait("document.getElementById('details').dataset.kind === 'class'")
    assert page.run("return document.getElementById('details').getAttribute('aria-live')") == "polite"
    before = picture(page)
    page.type("#angles-matrix", "+")
    assert picture(page) != before


def test_a_click_among_a_thousand_classes_is_answered_at_once(random_run, window, tmp_path):
    """In the handler of the event itself, nothing is put off; how long that takes is printed, not judged."""
    torch.manual_seed(0)
    write_page([random_run("large", 1000, k=8, width=64)], tmp_path / "large.html")
    window.open(tmp_path / "large.html")
    assert len(table(window)) == 1000
    script = """
        const canvas = document.getElementById("angles-matrix");
        canvas.scrollIntoView({ block: "center" });
        const box = canvas.getBoundingClientRect(), times = [];
        for (let n = 0; n < 9; n++) {
          const at = { clientX: box.left + 150 + 37 * n, clientY: box.top + 320 - 11 * n, pointerId: 1, bubbles: true };
          const start = performance.now();
          canvas.dispatchEvent(new PointerEvent("pointerdown", at));
          canvas.dispatchEvent(new PointerEvent("pointerup", at));
          canvas.getContext("2d").getImageData(0, 0, 1, 1); // waits until it is drawn
          if (document.getElementById("details").dataset.kind !== "pair") throw new Error("no pair was shown");
          times.push(performance.now() - start);
        }
        return times.sort((a, b) => a - b)[4];
    """
    assert window.errors() == []  # before the script, whose reading of pixels Chromium remarks upon
    print(f"median of nine clicks: {window.run(script):.1f} ms")
