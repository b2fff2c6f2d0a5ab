"""Every code block of the README and the docs runs; every command named there exists. For links, see test_site.py."""

import os
import re
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest

from grassy.heads import HEADS
from training_cases import tiny_folders

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=lambda page: page.name)
def test_the_python_blocks_of_a_page_run_in_order(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a page may save files
    namespace = {}
    with patch.dict(HEADS):  # a page may register a head
        for block in blocks(page, "python"):
            exec(compile(block, str(page), "exec"), namespace)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "bash")], ids=lambda page: page.name)
def test_the_make_targets_that_a_page_names_exist(page):
    targets = {t for block in blocks(page, "bash") for t in re.findall(r"^make (\S+)", block, re.MULTILINE)}
    for target in targets:
        subprocess.run(["make", "-n", target], cwd=ROOT, check=True, capture_output=True)
    if page.name == "README.md":
        assert {"demo", "test"} <= targets


@pytest.mark.slow
def test_what_the_readme_installs_fits_together():
    (block,) = [block for block in blocks(PAGES[0], "bash") if "pip install" in block]
    (install,) = [line.split("#")[0] for line in block.splitlines() if line.startswith("pip install")]
    # Everything is installed already: the resolver is asked whether it would all fit.
    dry = f"{sys.executable} -m {install} --dry-run --no-build-isolation --quiet"
    resolved = subprocess.run(dry, shell=True, cwd=ROOT, capture_output=True, text=True)
    if "hatchling" in resolved.stderr:
        pytest.skip("hatchling, which builds the package, is not installed")
    assert resolved.returncode == 0, resolved.stderr


@pytest.mark.slow
def test_the_commands_of_the_readme_lead_from_photos_to_predictions(tmp_path):
    (block,) = [block for block in blocks(PAGES[0], "bash") if "grassy train" in block]
    train, report, predict = block.splitlines()
    assert train == "grassy train finetune --data-dir photos"
    tiny_folders(tmp_path, images=10, classes=("cat", "dog"), size=40)
    (tmp_path / "train").rename(tmp_path / "photos")
    (tmp_path / "val").rename(tmp_path / "holiday")
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    # Pretrained weights would have to be downloaded, and a larger model takes minutes.
    quick = "--from-scratch --epochs 1 model=resnet18 img_size=64"
    for command in (f"{train} {quick}", report, predict):
        run = subprocess.run(command, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
    assert (tmp_path / "runs" / "finetune" / "model_best.safetensors").is_file()
    assert list(tmp_path.rglob("report.html"))
    assert run.stdout.count("holiday/") == 10
