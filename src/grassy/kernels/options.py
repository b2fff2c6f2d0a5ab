"""What a step can be asked to do and what it reports: the same for every implementation."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from grassy.spelling import nearest

#: How a step follows its direction: along the geodesic, or by a QR factorisation.
RETRACTIONS = ("geodesic", "qf")
#: How the momentum follows the weight: the next step projects it, or exact parallel transport.
TRANSPORTS = ("projection", "parallel")


@dataclass(frozen=True)
class StepOptions:
    """The options of a step; a ValueError says what is allowed.

    retraction: "geodesic", or "qf" for the variant of the paper's appendix.
    transport: how the momentum follows the subspace: "projection" as in the paper, or "parallel", exactly.
    max_angle: an upper limit on the rotation of a class in one step, in radians.
    maximize: ascend instead of descend.
    """

    retraction: str = "geodesic"
    transport: str = "projection"
    max_angle: float | None = None
    maximize: bool = False

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("retraction", self.retraction, RETRACTIONS),
            ("transport", self.transport, TRANSPORTS),
        ):
            if value not in allowed:
                raise ValueError(f"{name} must be one of {allowed}, got {value!r}{nearest(value, allowed)}")
        if self.retraction == "qf" and self.transport == "parallel":
            raise ValueError("transport='parallel' follows a geodesic; with retraction='qf' use transport='projection'")
        if self.max_angle is not None and not self.max_angle > 0:
            raise ValueError(f"max_angle must be None or positive, in radians, got {self.max_angle!r}")


class StepCounts(NamedTuple):
    """How many classes a step left alone, their gradient not being finite, and how many it rotated less than asked.

    A gradient so large that its square overflows counts as not finite.
    """

    skipped: Tensor
    capped: Tensor


class NotCompiledYet(RuntimeError):
    """A kernel would have to be compiled while a CUDA graph is captured, which CUDA forbids."""
