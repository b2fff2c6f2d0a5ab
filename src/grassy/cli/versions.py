"""What `grassy --version` prints: the versions that a bug report needs."""

import argparse
import platform
from importlib import metadata
from typing import Any

from grassy._version import __version__

#: Packages that grassy works with; those that are not installed are left out.
PACKAGES = ("numpy", "safetensors", "timm", "torchvision", "triton", "transformers", "peft", "lightning", "accelerate")


class ShowVersions(argparse.Action):
    def __init__(self, option_strings: Any, dest: str, **options: Any) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, **options)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        print(versions())
        parser.exit()


def versions() -> str:
    """Return one line each for grassy, Python with the platform, torch with its GPU, and the other packages."""
    import torch

    device = "CPU build"
    if torch.version.cuda or torch.version.hip:
        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU found"
        device = f"CUDA {torch.version.cuda}, {gpu}" if torch.version.cuda else f"ROCm {torch.version.hip}, {gpu}"
    lines = [
        f"grassy {__version__}",
        f"Python {platform.python_version()}, {platform.platform()}",
        f"torch {torch.__version__} ({device})",
    ]
    for name in PACKAGES:
        try:
            lines.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return "\n".join(lines)
