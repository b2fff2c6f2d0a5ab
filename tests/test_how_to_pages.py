"""The pages on how to add a head and a data source: whoever follows them ends up with one that works."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

ROOT = Path(__file__).parent.parent

pytestmark = pytest.mark.slow


def blocks(page, language):
    text = (ROOT / "docs" / page).read_text()
    found = re.findall(rf"^( *)```{language}\n(.*?)^\1```", text, re.MULTILINE | re.DOTALL)
    return [re.sub(f"^{indent}", "", block, flags=re.MULTILINE) for indent, block in found]


def run(*command, **environment):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True)


def test_the_head_of_the_page_passes_the_battery_of_all_heads(tmp_path):
    register = "\nfrom grassy.heads import HEADS\nHEADS['bilinear'] = BilinearHead\n"
    (tmp_path / "own_head.py").write_text(blocks("add-a-head.md", "python")[0] + register)
    # Its row of the table OPTIONS is not there, so the tests that read it are left out; and the slowest, for time.
    chosen = [
        "-k",
        "bilinear and not options and not compile and not export",
        "-p",
        "own_head",
        "-p",
        "no:cacheprovider",
        "-q",
    ]
    path = os.pathsep.join([str(tmp_path), str(ROOT / "src")])
    battery = run("-m", "pytest", "tests/heads/test_all_heads.py", *chosen, PYTHONPATH=path)
    assert battery.returncode == 0, battery.stdout
    assert int(re.search(r"(\d+) passed", battery.stdout)[1]) > 15


def test_the_data_source_of_the_page_is_opened_like_any_other(tmp_path):
    package = tmp_path / "src" / "grassy"
    shutil.copytree(ROOT / "src" / "grassy", package, ignore=shutil.ignore_patterns("__pycache__"))
    (package / "data" / "listed_images.py").write_text(blocks("add-a-data-source.md", "python")[0])
    files = package / "recipes" / "values.py", package / "data" / "images.py"
    for file, change in zip(files, blocks("add-a-data-source.md", "diff"), strict=True):
        before, after = (
            "".join(line[1:] + "\n" for line in change.splitlines() if line[0] in kinds).rstrip("\n")
            for kinds in ("- ", "+ ")
        )
        text = file.read_text()
        assert text.count(before) == 1, f"{file.name} has no {before!r}"
        file.write_text(text.replace(before, after))
    importing = "from grassy.data.layout import"
    images = (
        files[1]
        .read_text()
        .replace(importing, f"from grassy.data.listed_images import ListedImages\n{importing} split_names, ", 1)
    )
    files[1].write_text(images)

    for split in ("train", "test"):
        Image.new("RGB", (40, 30), "red").save(tmp_path / f"{split}.png")
        (tmp_path / f"{split}.csv").write_text(f"{split}.png,warm\n")
    code = """
import sys
from pathlib import Path
from grassy.data.decode import Box
from grassy.data.images import open_images
class LeftHalf:
    size = 30, 20
    def box(self, height, width):
        return Box(0, 0, height, width // 2)
folder = Path(sys.argv[1])
train = open_images("csv", folder, "train")
test = open_images("csv", folder, "validation", train.class_names)
whole, half = test.load(0)[0].shape, test.load(0, LeftHalf())[0].shape
print(type(test).__name__, test.name(0), whole, half, test.labels().tolist())
"""
    opened = run("-c", code, str(tmp_path), PYTHONPATH=str(tmp_path / "src"))
    expected = f"ListedImages {tmp_path}/test.png (30, 40, 3) (30, 20, 3) [0]\n"
    assert opened.stdout == expected, opened.stderr
