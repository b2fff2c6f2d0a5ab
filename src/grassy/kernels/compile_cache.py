"""Where kernels are kept that were compiled at first use: $GRASSY_CACHE, or ~/.cache/grassy."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def folder() -> Path:
    """RuntimeError if there is neither $GRASSY_CACHE nor a home."""
    return Path(os.environ.get("GRASSY_CACHE") or Path.home() / ".cache" / "grassy")


@contextmanager
def written_whole(name: str) -> Iterator[Path]:
    """A path to write to; the file then lies in the folder under `name`, whole or not at all, also if two processes
    do this at once.
    """
    folder().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder()) as temporary:
        path = Path(temporary) / name
        yield path
        path.replace(folder() / name)
