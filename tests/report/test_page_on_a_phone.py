"""The page on a phone: nothing is cut off, and what is asked for is scrolled to."""

import json

import pytest

from grassy.report.page import write_page

pytestmark = [pytest.mark.browser, pytest.mark.slow]


@pytest.fixture
def phone(page, runs):
    page.emulate(390, 800)
    page.open(runs[0].parent / "report.html")
    yield page
    page.emulate(1200, 1600)


def test_it_fits_a_phone_and_follows_the_theme(phone):
    light = phone.run("return getComputedStyle(document.body).backgroundColor")
    phone.emulate(390, 800, "dark")
    phone.wait(f"getComputedStyle(document.body).backgroundColor !== {json.dumps(light)}")
    assert phone.run("return document.documentElement.scrollWidth") <= 390


def test_on_a_phone_find_scrolls_to_its_result(random_run, window, tmp_path):
    write_page([random_run("many", 60, k=2, names=[f"kind {i}" for i in range(60)])], tmp_path / "report.html")
    window.emulate(390, 800)
    try:
        window.open(tmp_path / "report.html")
        window.run("document.getElementById('search-form').scrollIntoView()")
        at = "document.querySelector('#class-panel h3').getBoundingClientRect()"
        in_view = f"{at}.top >= 0 && {at}.top <= 0.6 * innerHeight"  # and with it much of what is below
        for typed, expected in (("kind\ue007", "kind 0"), ("\ue007", "kind 1")):  # Enter, and again for the next
            window.type("#search", typed)
            assert window.text("#class-panel h3") == f"class {expected}"
            window.wait(in_view, seconds=3)
        window.run("scrollTo(0, 0); document.querySelectorAll('#class-table tbody button')[5].click()")
        window.wait(in_view, seconds=3)
    finally:
        window.emulate(1200, 1600)


def test_on_a_phone_no_metric_of_any_run_is_cut_off(phone):
    """Of all cells, the text lies within the window, without scrolling sideways."""
    script = """
        const cut = [];
        const cells = "#metrics td, #metrics thead th + th, #run-table td, #run-table th";
        for (const cell of document.querySelectorAll(cells)) {
          if (getComputedStyle(cell.parentElement.parentElement).display === "none") continue;
          const range = document.createRange();
          range.selectNodeContents(cell);
          const box = range.getBoundingClientRect();
          if (box.left < 0 || box.right > innerWidth || (cell.textContent && !box.width)) cut.push(cell.textContent);
        }
        return cut;
    """
    assert phone.run(script) == []
    assert phone.run("return document.querySelectorAll('#metrics tbody:nth-of-type(1) tr:nth-child(2) td').length") == 3
    for table in ("metrics", "run-table"):  # and no box hides what overflows it
        assert phone.run(f"const t = document.getElementById('{table}'); return t.scrollWidth <= t.clientWidth")
