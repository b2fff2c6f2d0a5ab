"""What `import grassy` gives: few names, submodules on demand, types."""

import ast
import subprocess
import sys
from importlib import resources
from pathlib import Path

import pytest

import grassy


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.slow
def test_submodules_need_no_import_of_their_own():
    """In a fresh process, in which nothing else has imported them."""
    first = run("import grassy; print(grassy.analysis.variability.__name__)")
    assert first == ["variability"]
    names = (
        "transfer.LinearSVM, grassy.optim.make_optimizer, grassy.kernels.subspace_logits, grassy.heads.describe, "
        "grassy.geometry.log, grassy.surgery.find_classifiers, grassy.report.__doc__, grassy.data.__name__"
    )
    assert run(f"import grassy; print(None in (grassy.{names}))") == ["False"]
    assert run("import grassy; print(*(getattr(grassy, n).__name__ for n in grassy._SUBMODULES))") == [
        f"grassy.{name}" for name in grassy._SUBMODULES
    ]


def test_all_names_can_be_had_by_attribute_and_by_a_star_and_are_listed():
    code = "from grassy import *; import grassy; print(all(globals()[n] is getattr(grassy, n) for n in grassy.__all__))"
    assert run(code) == ["True"]
    assert run("import grassy; print(*dir(grassy))") == sorted([*grassy.__all__, *grassy._SUBMODULES])
    with pytest.raises(AttributeError, match="module 'grassy' has no attribute 'misspelt'"):
        grassy.misspelt  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'misspelt'"):
        exec("from grassy import misspelt")


def test_importing_grassy_and_asking_the_command_for_help_do_not_wait_for_torch():
    code = "import sys, grassy.cli; grassy.cli.make_parser().format_help(); print('torch' in sys.modules)"
    assert run(code) == ["False"]


def test_type_checkers_see_the_names_that_there_are():
    tree = ast.parse(Path(grassy.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    names = sorted(alias.name for statement in block.body for alias in statement.names)
    assert names == sorted({*grassy.__all__, *grassy._SUBMODULES} - {"__version__"})


def test_type_checkers_are_told_that_grassy_has_types():
    assert resources.files(grassy).joinpath("py.typed").is_file()
