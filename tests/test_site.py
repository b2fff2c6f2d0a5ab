"""The documentation site: it builds strictly, opens from disk, fetches nothing, and has every public name."""

import dataclasses
import importlib
import inspect
import os
import re
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
from benchmarks.browser import browser

import grassy
from grassy.recipes.recipe import Recipe

ROOT = Path(__file__).parent.parent
#: Modules that list their public names, and modules all of whose names are public.
LISTED = ("analysis", "distributed", "heads", "kernels", "optim", "sklearn", "transfer")
WHOLE = ("geometry", "loss", "surgery")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built site. A link to a file or an anchor that is not there is a warning, and every warning an error."""
    pytest.importorskip("mkdocs")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    assert "WARNING" not in built.stderr, built.stderr
    return folder


def public_names():
    """Each public name, by where it can be imported from, with its value."""
    for name in grassy.__all__:
        yield f"grassy.{name}", getattr(grassy, name)
    for module in map(importlib.import_module, (f"grassy.{name}" for name in (*LISTED, *WHOLE))):
        own = (name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__)
        for name in getattr(module, "__all__", own):
            if not name.startswith("_"):
                yield f"{module.__name__}.{name}", getattr(module, name)


def inventory(site):
    """Where the reference describes which name: the file that mkdocstrings writes for other sites to link to."""
    lines = zlib.decompress((site / "objects.inv").read_bytes().split(b"\n", 4)[4]).decode().splitlines()
    return {line.split(" ")[0]: line.split(" ")[3].split("#")[0] for line in lines}


def test_every_public_name_is_on_a_page_of_the_reference_with_a_docstring(site):
    known = inventory(site)
    names = dict(public_names())
    assert len(names) > 80
    overview = (site / "docs/reference/index.html").read_text()
    for path, value in names.items():
        # A function with the name of its own module is found where it is defined.
        pages = {known.get(path), known.get(f"{getattr(value, '__module__', '')}.{path.rpartition('.')[2]}")} - {None}
        assert pages or path == "grassy.__version__", f"{path} is not in the reference"
        assert all(page.startswith("docs/reference/") for page in pages), path
        if inspect.isclass(value) or inspect.isfunction(value):
            assert value.__doc__, f"{path} has no docstring"
    for name in grassy.__all__:
        assert f"<code>{name}</code>" in overview, f"the overview of the reference lacks {name}"


def test_every_field_of_a_recipe_is_in_the_reference(site):
    known = inventory(site)
    fields = [field.name for field in dataclasses.fields(Recipe)]
    assert [name for name in fields if f"grassy.recipes.recipe.Recipe.{name}" not in known] == []


def test_every_page_of_the_docs_is_in_the_navigation(site):
    front = (site / "index.html").read_text()
    for page in (ROOT / "docs").rglob("*.md"):
        address = page.relative_to(ROOT).with_suffix(".html").as_posix()
        assert f'href="{address}"' in front, f"{address} is not in the navigation"


def test_the_page_of_the_notebook_shows_its_pictures(site):
    page = (site / "examples" / "explore_model.ipynb.html").read_text()
    assert page.count('src="data:image/png;base64,') == 4


def test_no_page_fetches_anything_from_another_host(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 40
    for page in pages:
        text = page.read_text()
        tags = re.findall(r"<(?:script|link|img|iframe|source|object|embed|video|audio)\b[^>]*>", text)
        assert [tag for tag in tags if re.search(r'(?:src|href|srcset|data)="(?:https?:)?//', tag)] == [], page
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(?:@import|url\()\s*[\"']?(?:https?:)?//", sheet.read_text()), sheet


def test_formulas_are_mathml_and_those_of_no_page_are_left_over(site):
    pages = [page.read_text() for page in (site / "docs").rglob("*.html")]
    assert any("<math" in page for page in pages)
    assert not any('class="arithmatex"' in page for page in pages)


@pytest.mark.browser
def test_a_page_opens_from_disk_with_search_in_light_and_dark(site):
    with browser() as window:
        window.go_offline()
        for scheme, ground in (("light", "rgb(255, 255, 255)"), ("dark", "rgb(30, 33, 41)")):
            window.emulate(1200, 900, scheme)
            window.go_to(site / "docs" / "method.html")
            window.wait("document.readyState === 'complete'")
            assert window.run("return getComputedStyle(document.body).backgroundColor") == ground
            window.run("document.querySelector('[data-md-component=search-query]').focus()")
            window.type("[data-md-component=search-query]", "geodesic")
            window.wait("document.querySelectorAll('.md-search-result__item').length > 2")
            assert window.errors() == []
