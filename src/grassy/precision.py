"""Full-float32 matmuls, as geometry tolerates neither autocast nor TF32; and the autocast dtype of a recipe."""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor


def without_autocast(tensor: Tensor) -> AbstractContextManager[None]:
    """Return a context in which autocast is off for the device of the tensor."""
    kind = tensor.device.type
    return nullcontext() if kind == "meta" else torch.autocast(kind, enabled=False)


def exact_products(tensor: Tensor) -> AbstractContextManager[None]:
    """Return a context with full-float32 matmuls: no autocast, and neither TF32 nor bfloat16 inside float32 matmuls.

    The precision of float32 matmuls is a setting of the whole process. Compiled code keeps the setting of its
    compilation. A backward that runs later uses the setting of that time.
    """
    return without_autocast(tensor) if torch.compiler.is_compiling() else _exact_products(tensor)


@contextmanager
def _exact_products(tensor: Tensor) -> Iterator[None]:
    _UNREDUCED.enter()
    try:
        with without_autocast(tensor):
            yield
    finally:
        _UNREDUCED.leave()


class _Unreduced:
    """Keeps full-float32 matmuls on while any thread is inside. The last one to leave restores the setting."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.inside = 0
        self.restore: Callable[[], None] = lambda: None

    def enter(self) -> None:
        with self.lock:
            if self.inside == 0:
                self.restore = _reduce_nothing()
            self.inside += 1

    def leave(self) -> None:
        with self.lock:
            self.inside -= 1
            if self.inside == 0:
                self.restore()


_UNREDUCED = _Unreduced()


def _reduce_nothing() -> Callable[[], None]:
    """Turn on full-float32 matmuls and return a function that restores the previous setting.

    torch has two interfaces: an older one for all matmuls, and a newer one per backend. Reading the older one raises if
    the newer one has been used.
    """
    kinds = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
    before = [kind.fp32_precision for kind in kinds]
    try:
        of_all = torch.get_float32_matmul_precision()
    except RuntimeError:
        of_all = "highest"  # the newer interface is in use
    if of_all == "highest" and all(each in ("none", "ieee") for each in before):
        return lambda: None
    torch.set_float32_matmul_precision("highest")

    def restore() -> None:
        torch.set_float32_matmul_precision(of_all)
        for kind, each in zip(kinds, before, strict=True):
            kind.fp32_precision = "none"
            if kind.fp32_precision != each:  # "none" follows the common setting
                kind.fp32_precision = each

    return restore


def amp_dtype(amp: str, device: torch.device) -> torch.dtype | None:
    """Return the autocast dtype for a recipe's `amp`, or None if it is off. "auto" is bfloat16 on a GPU, else off."""
    if amp == "off" or (amp == "auto" and device.type != "cuda"):
        return None
    if amp == "float16" and device.type != "cuda":
        raise ValueError("amp=float16 needs a GPU; on a CPU use off or bfloat16")
    return torch.float16 if amp == "float16" else torch.bfloat16
