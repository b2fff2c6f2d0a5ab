"""Options and results of a step, shared by all implementations."""

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from torch import Tensor

from grassy.arguments import check_booleans, number
from grassy.spelling import nearest

Retraction = Literal["geodesic", "qf"]
Transport = Literal["projection", "parallel"]
#: How a step follows its direction: along the geodesic, or by a QR factorisation.
RETRACTIONS = get_args(Retraction)
#: How the momentum follows the weight: the next step projects it, or exact parallel transport.
TRANSPORTS = get_args(Transport)


@dataclass(frozen=True)
class StepOptions:
    """Options of a step.

    Args:
        retraction: "geodesic", or "qf" for the variant in the paper's appendix.
        transport: How the momentum follows the subspace: "projection" as in the paper, or exact "parallel" transport.
            "parallel" needs the retraction "geodesic".
        max_angle: Largest rotation angle of a class per step, in radians, or None.
        maximize: Ascend instead of descend.

    Raises:
        ValueError: If a value is not allowed. The message lists the allowed ones.
        TypeError: If `maximize` is not a boolean.
    """

    retraction: Retraction = "geodesic"
    transport: Transport = "projection"
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
        if self.max_angle is not None and not number(self.max_angle) > 0:
            raise ValueError(f"max_angle must be None or positive, in radians, got {self.max_angle!r}")
        check_booleans(maximize=self.maximize)


class StepCounts(NamedTuple):
    """Numbers of classes that a step skipped or capped, as int64 tensors.

    Attributes:
        skipped: Classes with a non-finite gradient, which did not move. A gradient whose square overflows counts too.
        capped: Classes whose rotation angle was limited.
    """

    skipped: Tensor
    capped: Tensor


class NotCompiledYet(RuntimeError):
    """Raised if a kernel would have to be compiled during CUDA graph capture, which CUDA forbids."""
