"""What PyPI will say about grassy."""

import os
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def description():
    """The page of the package: the README, without links that lead nowhere outside of the repository."""
    hatchling = pytest.importorskip("hatchling.metadata.core")
    plugins = pytest.importorskip("hatchling.plugin.manager")
    pytest.importorskip("hatch_fancy_pypi_readme")
    here = os.getcwd()
    os.chdir(ROOT)
    try:
        return hatchling.ProjectMetadata(str(ROOT), plugins.PluginManager()).core.readme
    finally:
        os.chdir(here)


def test_the_page_has_no_link_or_picture_that_leads_nowhere(description):
    assert len(description) > 0.8 * len((ROOT / "README.md").read_text())
    assert [link for link in re.findall(r"\]\(([^)]*)\)", description) if not link.startswith("https://")] == []


def test_the_text_of_a_link_stays(description):
    readme = (ROOT / "README.md").read_text()
    texts = re.findall(r"(?<!!)\[([^\]]+)\]\((?!https?://)[^)]*\)", readme)
    assert len(texts) > 3
    for text in texts:
        assert text in description
