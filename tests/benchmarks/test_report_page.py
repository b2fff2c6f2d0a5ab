"""The benchmark of the report page runs, and so does what pictures the page for the docs."""

import json
import sys

import pytest

from benchmarks import report_page, report_screenshots
from grassy.report.page import write_page

pytestmark = [pytest.mark.browser, pytest.mark.slow]


def test_a_small_page_is_measured(tmp_path, monkeypatch):
    output = tmp_path / "result.json"
    monkeypatch.setattr(report_page, "TIMES", 1)
    words = ["report_page", "--classes", "20", "--images", "6", "--k", "2", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", words)
    report_page.main()
    result = json.loads(output.read_text())
    assert result["pictures"] == result["examples"] > 40
    for device in ("desktop", "phone"):
        assert result[device]["readable_ms"] <= result[device]["all_drawn_ms"]
        assert result[device]["scroll_frames"] > 10


def test_the_pictures_of_the_docs_are_made(tmp_path, monkeypatch):
    page = write_page([report_page.make_run(5, 4, 2)], tmp_path / "report.html")
    monkeypatch.setattr(sys, "argv", ["report_screenshots", str(page), "--output", str(tmp_path)])
    report_screenshots.main()
    of_any_page = {name for name, (*_, section) in report_screenshots.PICTURES.items() if section != "idea"}
    assert {path.name for path in tmp_path.glob("*.png")} == of_any_page  # the demo adds the idea
