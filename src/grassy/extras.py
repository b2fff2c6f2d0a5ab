"""Packages that not everyone needs: a missing one is named together with the extra of grassy that brings it."""

from contextlib import ContextDecorator
from types import TracebackType

#: Where the name of a package differs from that of its module.
PACKAGES = {"PIL": "pillow", "sklearn": "scikit-learn", "yaml": "pyyaml", "tensorflow_datasets": "tensorflow-datasets"}
#: Packages that no extra brings: those of some readers of timm, and the libraries whose models grassy changes.
APART = ("datasets", "huggingface-hub", "peft", "tensorflow", "tensorflow-datasets", "transformers", "webdataset")


def sentence(what: str, module: str, extra: str) -> str:
    """What to install for `what`, which stopped because there is no such module."""
    name = module.split(".")[0]
    package = PACKAGES.get(name, name.replace("_", "-"))
    wanted = package if package in APART else f"'grassy[{extra}]'"
    return f"{what} needs {package}: pip install {wanted}"


def is_missing(error: BaseException | None) -> bool:
    """Whether a package is missing, and not a module of grassy, which would be a mistake of ours."""
    return isinstance(error, ModuleNotFoundError) and (error.name or "").split(".")[0] not in ("", "grassy")


class needs(ContextDecorator):
    """Of a function: if a package is missing in it, say which extra brings it.

    >>> @needs("grassy.load", extra="train")
    ... def load(path): ...
    """

    def __init__(self, what: str, extra: str) -> None:
        self.what, self.extra = what, extra

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if is_missing(error) and "pip install" not in str(error):
            assert isinstance(error, ModuleNotFoundError)
            raise ModuleNotFoundError(sentence(self.what, error.name or "", self.extra), name=error.name) from error
