"""torchvision imports beside a CPU build of torch."""

import subprocess
import sys

import pytest
import torch

from grassy import torchvision_import


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.skipif(torch.version.cuda is not None, reason="needs a CPU build of torch")
def test_timm_imports_after_it_and_without_it_the_known_error_is_the_only_one():
    bare = run("import torchvision")
    if bare.returncode:  # the very error that it acts on
        assert "operator torchvision::nms does not exist" in bare.stderr
    mended = run(
        "from grassy.torchvision_import import import_torchvision as f; f(); f()\n"
        "import timm, torchvision.transforms as t\n"
        "import torchvision.models; print(timm.create_model('resnet18').num_classes, t.Resize(4))"
    )
    assert mended.returncode == 0, mended.stderr
    assert "1000" in mended.stdout


def test_any_other_error_passes_through(monkeypatch):
    def fail(name):
        raise RuntimeError(f"{name} is broken in another way")

    monkeypatch.setattr(torchvision_import.importlib, "import_module", fail)
    with pytest.raises(RuntimeError, match="another way"):
        torchvision_import.import_torchvision()
