"""Optional packages: an error about a missing one names the extra of grassy that installs it."""

from contextlib import ContextDecorator
from types import TracebackType

#: Packages whose name differs from that of their module.
PACKAGES = {"PIL": "pillow", "sklearn": "scikit-learn", "yaml": "pyyaml", "tensorflow_datasets": "tensorflow-datasets"}
#: Packages that no extra installs: those of some timm readers, and libraries whose models grassy modifies.
APART = ("datasets", "huggingface-hub", "peft", "tensorflow", "tensorflow-datasets", "transformers", "webdataset")


def sentence(what: str, module: str, extra: str) -> str:
    """Return the message that tells what to install for `what`, which lacks a module."""
    name = module.split(".")[0]
    package = PACKAGES.get(name, name.replace("_", "-"))
    wanted = package if package in APART else f"'grassy[{extra}]'"
    return f"{what} needs {package}: pip install {wanted}"


def is_missing(error: BaseException | None) -> bool:
    """Whether the error is a missing package other than grassy itself, which would be a bug."""
    return isinstance(error, ModuleNotFoundError) and (error.name or "").split(".")[0] not in ("", "grassy")


class needs(ContextDecorator):
    """Decorator that names the extra to install if a package is missing in the decorated function.

    Examples:
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
