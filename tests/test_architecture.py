"""Who may import whom, and what importing grassy costs."""

import ast
import subprocess
import sys
from pathlib import Path

import grassy

PACKAGE = Path(grassy.__file__).parent

# Each part may use the parts before it, and itself. Parts on one line do not use each other.
LAYERS = [
    {"_version", "precision", "spelling", "subspaces", "torchvision_import"},
    {"criteria", "geometry", "paper"},
    {"kernels"},
    {"heads", "optim"},
    {"loss", "surgery", "analysis"},
    {"models", "distributed"},
    {"runs"},
    {"data"},
    {"inference"},
    {"train"},
    {"transfer", "report"},
    {"demo"},
    {"cli"},
    {"__main__"},
]
RANK = {part: rank for rank, layer in enumerate(LAYERS) for part in layer}


def imported_parts(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "grassy":
            names = node.module.split(".")[1:2] or [alias.name for alias in node.names]
            yield from (name for name in names if (PACKAGE / name).exists() or (PACKAGE / f"{name}.py").exists())
        elif isinstance(node, ast.Import):
            yield from (a.name.split(".")[1] for a in node.names if a.name.startswith("grassy."))


def test_every_part_imports_only_the_parts_below_it():
    seen = 0
    for path in PACKAGE.rglob("*.py"):
        part = path.relative_to(PACKAGE).with_suffix("").parts[0]
        if part == "__init__":
            continue
        for other in imported_parts(path):
            seen += 1
            assert other == part or RANK[other] < RANK[part], f"{path.relative_to(PACKAGE)} imports grassy.{other}"
    assert seen > 10


def test_importing_grassy_imports_torch_and_nothing_heavier():
    code = (
        "import sys, torch; before = set(sys.modules); import grassy; "
        "print(*sorted({m.split('.')[0] for m in set(sys.modules) - before}))"
    )
    added = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    heavy = {"timm", "torchvision", "sklearn", "scipy", "matplotlib", "triton", "transformers", "rich", "yaml", "PIL"}
    assert "grassy" in added
    assert not heavy & set(added)


def test_the_public_names_are_about_a_dozen_and_exist():
    assert len(grassy.__all__) <= 16
    for name in grassy.__all__:
        assert hasattr(grassy, name)
