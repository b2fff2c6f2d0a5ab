"""The page on a phone: nothing is cut off, and what is asked for is scrolled to."""

import json

import pytest

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


def test_on_a_phone_find_scrolls_to_its_result(phone):
    phone.run("document.getElementById('search-form').scrollIntoView()")
    phone.type("#search", "owl")
    phone.type("#search", "\ue007")  # Enter
    assert phone.text("#class-panel h3") == "class snowy owl"
    at = "document.querySelector('#class-panel h3').getBoundingClientRect()"
    phone.wait(f"{at}.top >= 0 && {at}.bottom <= innerHeight")


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
