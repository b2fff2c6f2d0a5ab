"""The folder of kernels compiled at first use: $GRASSY_CACHE, or ~/.cache/grassy."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def folder() -> Path:
    """Return the folder. Raises RuntimeError if there is neither $GRASSY_CACHE nor a home directory."""
    return Path(os.environ.get("GRASSY_CACHE") or Path.home() / ".cache" / "grassy")


@contextmanager
def written_whole(name: str) -> Iterator[Path]:
    """Yield a path to write to, and move the file to `name` in the folder afterwards.

    The move is atomic, so no process ever sees a partial file.
    """
    folder().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder()) as temporary:
        path = Path(temporary) / name
        yield path
        path.replace(folder() / name)
