"""Who may import whom, inside functions too, and what importing grassy costs."""

import ast
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

import grassy

PACKAGE = Path(grassy.__file__).parent

# A part may import the parts of earlier layers, and itself. Parts of one layer do not import each other.
LAYERS = [
    {"_version", "arguments", "atomic", "extras", "mixed_labels", "precision", "schema", "shards", "spelling"}
    | {"subspaces", "terminal", "torchvision_import"},
    {"criteria", "geometry", "paper"},
    {"kernels"},
    {"heads", "optim"},
    {"loss", "surgery", "analysis", "sklearn", "transfer.solvers"},
    {"models", "distributed"},
    {"recipes"},
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

ALONE = {"transfer.solvers"}  # imports no other part at all, so that it can be used without grassy

# What a function may import, because the module has to load where it is missing.
OPTIONAL = {
    *("PIL", "matplotlib", "rich", "scipy", "simplejpeg", "sklearn", "tensorboard", "timm", "torchvision", "yaml"),
    *("onnx_ir", "onnxruntime", "onnxscript", "triton"),
    *("huggingface_hub", "peft", "transformers"),
    "torch.utils.tensorboard",  # needs the package tensorboard
    "grassy.kernels.triton",  # its modules need the package triton
    *(
        "torch.distributed.checkpoint",
        "torch.distributed.fsdp",
        "torch.distributed.tensor",
    ),  # take a second to import, which one process need not wait
    "fcntl",  # part of Python, but not on Windows
}
LAZY = {
    "cli",
    "__init__",
}  # start fast: a command, or a name of the root package, imports what it needs when it is used


class Import(NamedTuple):
    module: str  # "grassy" if the file takes a name from the root package
    line: int
    in_function: bool


def imports_of(path, package):
    """Every import of a file: at its top, in functions, relative, and by name through importlib."""
    name = ".".join([package.name, *path.relative_to(package).with_suffix("").parts]).removesuffix(".__init__")
    here = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]

    def is_module(dotted):
        folder = package.parent.joinpath(*dotted.split("."))
        return folder.is_dir() or folder.with_suffix(".py").is_file()

    def modules_of(node):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = here[: len(here) + 1 - node.level] if node.level else []
            base = ".".join([*start, *([node.module] if node.module else [])])
            names = (f"{base}.{alias.name}" for alias in node.names)
            yield from dict.fromkeys(name if is_module(name) else base for name in names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
            what = node.args[0]
            yield what.value if isinstance(what, ast.Constant) else ast.unparse(what)

    functions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)

    def walk(node, in_function):
        for child in ast.iter_child_nodes(node):
            yield from (Import(module, child.lineno, in_function) for module in modules_of(child))
            yield from walk(child, in_function or isinstance(child, functions))

    return list(walk(ast.parse(path.read_text(encoding="utf-8")), False))


def part_of(module):
    """The part of grassy that a module belongs to, or "" for the root package itself."""
    names = module.split(".")[1:]
    return "transfer.solvers" if names[:2] == ["transfer", "solvers"] else ".".join(names[:1])


def violations(package):
    """One sentence for each import that the rules above forbid."""
    found = []
    for path in sorted(package.rglob("*.py")):
        relative = path.relative_to(package)
        part = part_of(".".join([package.name, *relative.with_suffix("").parts]))
        if part != "__init__" and part not in RANK:
            found.append(f"{relative} has no place in LAYERS")
            continue
        for module, line, in_function in imports_of(path, package):
            where = f"{relative}:{line}"
            optional = any(module == name or module.startswith(f"{name}.") for name in OPTIONAL)
            if in_function and not optional and part not in LAZY:
                found.append(f"{where} imports {module} in a function")
            if module.split(".")[0] != package.name or part == "__init__":
                continue
            other = part_of(module)
            if not other:
                found.append(f"{where} imports a name from the root package")
            elif other != part and (other not in RANK or RANK[other] >= RANK[part] or part in ALONE):
                found.append(f"{where} imports {module}, which is not below {part}")
    return found


def tree(folder, files):
    """A made-up package grassy with these files."""
    for name, text in files.items():
        path = folder / "grassy" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder / "grassy"


def test_every_part_imports_only_parts_below_it_and_functions_import_only_what_is_optional():
    found = violations(PACKAGE)
    assert not found, "\n".join(found)


def test_every_part_with_a_place_in_the_layers_exists():
    modules = (path.relative_to(PACKAGE.parent).with_suffix("").parts for path in PACKAGE.rglob("*.py"))
    known = {part_of(".".join(names)) for names in modules}
    assert set(RANK) == known - {"__init__"}


ALLOWED = {
    "__init__.py": "from grassy.heads import Head\ndef __getattr__(name):\n    import grassy.analysis\n",
    "geometry.py": "import torch",
    "heads/__init__.py": "from grassy import geometry\nfrom grassy.heads.linear import Head\n",
    "heads/linear.py": "from ..geometry import log\ndef f():\n    import timm.optim\n",
    "optim/__init__.py": "from .. import geometry",
    "transfer/solvers/svm.py": "from grassy.transfer.solvers.folds import folds\n",
    "transfer/solvers/folds.py": "import numpy",
    "transfer/protocol.py": "from grassy.transfer.solvers import svm",
    "cli/train.py": "def run():\n    from grassy.heads import Head\n",
}


def test_a_tree_that_keeps_the_rules_passes(tmp_path):
    assert violations(tree(tmp_path, ALLOWED)) == []


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("heads/linear.py", "from grassy.optim import joint", "imports grassy.optim, which is not below heads"),
        ("heads/linear.py", "import grassy.optim", "imports grassy.optim, which is not below heads"),
        ("heads/linear.py", "from grassy import optim", "imports grassy.optim, which is not below heads"),
        ("heads/linear.py", "from .. import optim", "imports grassy.optim, which is not below heads"),
        ("heads/linear.py", "def f():\n    from grassy.optim import x", "imports grassy.optim, which is not below"),
        ("heads/linear.py", "def f():\n    from grassy.optim import x", "imports grassy.optim in a function"),
        ("heads/linear.py", "async def f():\n    import grassy.optim", "imports grassy.optim, which is not below"),
        (
            "heads/linear.py",
            "f = lambda: importlib.import_module('grassy.optim')",
            "imports grassy.optim, which is not",
        ),
        ("heads/linear.py", "class A:\n    def f(self):\n        from ..optim import x", "imports grassy.optim, which"),
        ("heads/linear.py", "if TYPE_CHECKING:\n    from grassy.optim import x", "imports grassy.optim, which is not"),
        ("heads/linear.py", "import grassy", "imports a name from the root package"),
        ("heads/linear.py", "from grassy import replace_head", "imports a name from the root package"),
        ("heads/linear.py", "def f():\n    from grassy import __version__", "imports a name from the root package"),
        ("heads/linear.py", "def f():\n    from grassy import geometry", "imports grassy.geometry in a function"),
        ("heads/linear.py", "def f():\n    import json", "imports json in a function"),
        ("heads/linear.py", "def f(name):\n    import_module('grassy.' + name)", "imports 'grassy.' + name in a func"),
        ("transfer/solvers/svm.py", "from grassy import geometry", "not below transfer.solvers"),
        ("transfer/solvers/svm.py", "from grassy.transfer.protocol import x", "not below transfer.solvers"),
        ("cli/train.py", "def run():\n    import grassy.__main__", "not below cli"),
        ("helpers.py", "", "helpers.py has no place in LAYERS"),
        ("heads/linear.py", "from grassy import helpers", "imports a name from the root package"),
    ],
)
def test_an_import_that_breaks_a_rule_is_reported(tmp_path, file, text, words):
    found = violations(tree(tmp_path, {**ALLOWED, file: text}))
    assert any(file in sentence and words in sentence for sentence in found), found


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
