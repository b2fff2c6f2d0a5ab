"""Products in the precision of their operands: geometry survives neither autocast nor TF32."""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor


def without_autocast(tensor: Tensor) -> AbstractContextManager[None]:
    """Within this, autocast is off for the device of the tensor."""
    kind = tensor.device.type
    return nullcontext() if kind == "meta" else torch.autocast(kind, enabled=False)


def exact_products(tensor: Tensor) -> AbstractContextManager[None]:
    """Within this, autocast is off, and products of float32 are not reduced to TF32 or bfloat16 either.

    The latter is one setting for the whole process. Compiled code keeps the precision that it was compiled with, and a
    backward that runs later has that of its time.
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
    """While anybody is inside, in any thread, products of float32 are taken as they are; the last one out restores."""

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
    """Have products of float32 taken as they are; returns what restores how they were taken before.

    Two interfaces of torch set it, an older one for all products and a newer one for each kind. The older one refuses
    to answer if the newer one has been used.
    """
    kinds = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
    before = [kind.fp32_precision for kind in kinds]
    try:
        of_all = torch.get_float32_matmul_precision()
    except RuntimeError:
        of_all = "highest"  # as far as the older one knows, since the newer one is in use
    if of_all == "highest" and all(each in ("none", "ieee") for each in before):
        return lambda: None
    torch.set_float32_matmul_precision("highest")

    def restore() -> None:
        torch.set_float32_matmul_precision(of_all)
        for kind, each in zip(kinds, before, strict=True):
            kind.fp32_precision = "none"
            if kind.fp32_precision != each:  # else it follows what is set for all kinds
                kind.fp32_precision = each

    return restore


def amp_dtype(amp: str, device: torch.device) -> torch.dtype | None:
    """The dtype of autocast for a recipe's `amp`, None for no autocast: "auto" is bfloat16 on a GPU, else off."""
    if amp == "off" or (amp == "auto" and device.type != "cuda"):
        return None
    if amp == "float16" and device.type != "cuda":
        raise ValueError("amp=float16 needs a GPU; on a CPU there are off and bfloat16")
    return torch.float16 if amp == "float16" else torch.bfloat16
