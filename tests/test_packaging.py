"""What PyPI will say about grassy, and what the files beside the code promise."""

import ast
import os
import re
from pathlib import Path

import pytest
import yaml

import grassy

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
    assert not re.search(r"<(picture|source|img)\b", description)


def test_the_text_of_a_link_stays(description):
    readme = (ROOT / "README.md").read_text()
    texts = re.findall(r"(?<!!)\[([^\]]+)\]\((?!https?://)[^)]*\)", readme)
    assert len(texts) > 3
    for text in texts:
        assert text in description


def test_the_citation_is_that_of_the_readme_and_of_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == grassy.__version__
    assert f"## [{grassy.__version__}]" in (ROOT / "CHANGELOG.md").read_text()
    paper = citation["preferred-citation"]
    names = ", ".join(author["family-names"] for author in paper["authors"])
    assert f"{names}, ICCV {paper['year']}" in (ROOT / "README.md").read_text()
    assert "(ICCV)" in paper["collection-title"]


def test_every_limit_of_the_security_policy_names_a_test_that_exists():
    rows = [line for line in (ROOT / "SECURITY.md").read_text().splitlines() if line.startswith("|")][2:]
    assert len(rows) > 10
    for row in rows:
        found = re.search(r"\| `(tests/[\w/]+\.py)::(test_\w+)` \|$", row)
        assert found, row
        tree = ast.parse((ROOT / found[1]).read_text())
        assert found[2] in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, row


def test_constraints_leave_to_torch_what_its_cuda_build_requires():
    pinned = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line]
    assert any(line.startswith("torch==") for line in pinned)
    assert not [line for line in pinned if line.startswith(("triton", "nvidia-", "cuda-"))]
