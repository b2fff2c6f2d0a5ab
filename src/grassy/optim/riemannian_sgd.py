"""Riemannian SGD with momentum on a product of Grassmannians (paper, Algorithm 1)."""

import dataclasses
import math
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from grassy import geometry, shards
from grassy.arguments import check_booleans, number
from grassy.kernels import StepOptions
from grassy.kernels.sampling import forget_gradient, gradient_of_some
from grassy.kernels.step import add_steps
from grassy.kernels.step_options import Retraction, Transport
from grassy.subspaces import REFUSE_ABOVE, REPAIR_ABOVE

#: Keys of a parameter group that are fields of `StepOptions`.
STEP_OPTIONS = tuple(field.name for field in dataclasses.fields(StepOptions))
#: Key of a parameter group: a factor on its learning rate in every step.
LR_FACTOR = "lr_factor"


class RiemannianSGD(Optimizer):
    """SGD with momentum on the Grassmann manifold: moves subspaces (C, K, N) along geodesics (paper, Algorithm 1).

    Most users call `make_optimizer`, which combines it with an optimizer for all other parameters. There is no weight
    decay, since a subspace has no scale. It skips classes with a non-finite gradient and counts them in
    `skipped_classes`.

    Args:
        params: Parameters (C, K, N) with orthonormal rows, float32 or float64, or parameter groups of them.
        lr: Learning rate. Each step moves a subspace by lr times the norm of its momentum, in radians.
        momentum: Momentum factor in [0, 1), without dampening. 0 keeps no buffer.
        retraction: "geodesic", or "qf" for the variant in the paper's appendix. With momentum, "qf" depends on the
            choice of basis at second order in lr.
        transport: How the momentum follows the subspace: "projection" as in the paper, or exact "parallel" transport.
        max_angle: Largest rotation angle of a class per step, in radians. None means no limit below 64 radians.
        maximize: Ascend instead of descend.
        bfloat16_momentum: Store the momentum in bfloat16, which halves its memory.

    Raises:
        ValueError: If an option is out of range, or a parameter is not a weight of subspaces.
        TypeError: If a parameter is neither float32 nor float64, or a boolean option is not a boolean.

    Examples:
        >>> import torch, grassy
        >>> weight = torch.nn.Parameter(grassy.geometry.random_subspace(10, 4, 64))
        >>> optimizer = grassy.RiemannianSGD([weight], lr=0.1)
        >>> (weight @ torch.randn(64)).square().sum().backward()
        >>> optimizer.step()
        >>> bool(grassy.geometry.orthonormality_error(weight) < 1e-6)
        True
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor,
        momentum: float = 0.9,
        retraction: Retraction = "geodesic",
        transport: Transport = "projection",
        max_angle: float | None = None,
        maximize: bool = False,
        *,
        bfloat16_momentum: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "retraction": retraction,
            "transport": transport,
            "max_angle": max_angle,
            "maximize": maximize,
            "bfloat16_momentum": bfloat16_momentum,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters (C, K, N) after checking its options and that its rows are orthonormal."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            _check_options(group)
            for p in group["params"]:
                _check_subspaces(p)
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Perform one step.

        Args:
            closure: A function that evaluates the model again and returns the loss.

        Returns:
            The result of the closure, or None without one.

        Raises:
            TypeError: If a gradient is sparse.
            RuntimeError: If a parameter has gradients of a sample and of all classes.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # Set by a GradScaler if JointOptimizer supports it: see JointOptimizer._step_supports_amp_scaling.
        grad_scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        for group in self.param_groups:
            heads, counts, samples = [], [], []
            for p in group["params"]:
                grad, places = _gradient(p)
                if grad is None:
                    continue
                state = self._create_state(p, group)
                # Each process updates its own shard, without communication.
                buffer = state.get("momentum_buffer")
                weight, buffer = shards.local(p), None if buffer is None else shards.local(buffer)
                if places is not None:
                    # The other classes keep weight and momentum. Their subspaces do not move, so it needs no transport.
                    whole, weight = weight, weight[places]
                    samples.append((p, places, whole, weight))
                    if buffer is not None:
                        whole, buffer = buffer, buffer[places]
                        samples.append((p, places, whole, buffer))
                if grad_scale is not None:  # not in place, so that p.grad stays as it is
                    grad = grad / grad_scale.to(grad.device, non_blocking=True)
                heads.append((weight, grad, buffer))
                counts.append(state["counts"])
            if not heads:
                continue
            add_steps(
                heads,
                rate(group),
                group["momentum"],
                counts,
                found_inf if isinstance(found_inf, Tensor) else None,  # the int 0 if there are no gradients
                **{name: group[name] for name in STEP_OPTIONS},
            )
            for p, places, whole, updated in samples:
                whole[places] = updated
                forget_gradient(p)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset all gradients, including those of sampled classes."""
        super().zero_grad(set_to_none)
        for group in self.param_groups:
            for p in group["params"]:
                forget_gradient(p)

    def _create_state(self, p: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        state = self.state[p]
        if group["momentum"] and "momentum_buffer" not in state:
            dtype = torch.bfloat16 if group["bfloat16_momentum"] else p.dtype
            state["momentum_buffer"] = torch.zeros_like(p, dtype=dtype, memory_format=torch.preserve_format)
        _counts(state, p.device)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        before = getattr(self, "param_groups", [])
        refuse_spectral_steps(state["param_groups"])
        super().__setstate__(state)
        for index, group in enumerate(self.param_groups):
            group.pop("direction", None)  # an option of older versions
            # Older states lack this option: keep the setting of this optimizer.
            now = before[index] if index < len(before) else {}
            group.setdefault("bfloat16_momentum", now.get("bfloat16_momentum", False))
            for own in (self.state[p] for p in group["params"] if p in self.state):
                if "skipped_classes" in own:  # older states hold two tensors
                    own["counts"] = torch.stack([own.pop("skipped_classes"), own.pop("capped_classes")])
                if "counts" in own:  # load_state_dict casts tensors to the parameter's dtype
                    own["counts"] = own["counts"].to(torch.int64)
                if "momentum_buffer" in own and group["bfloat16_momentum"]:
                    own["momentum_buffer"] = own["momentum_buffer"].bfloat16()

    @property
    def skipped_classes(self) -> int:
        """How often a class was skipped so far because its gradient held a NaN or an Inf.

        For sharded classes, it counts those of this process.
        """
        return self._total(0)

    @property
    def capped_classes(self) -> int:
        """How often the rotation angle of a class was limited so far, by `max_angle` or by 64 radians."""
        return self._total(1)

    def _total(self, which: int) -> int:
        counts = [self.state[p].get("counts") for g in self.param_groups for p in g["params"] if p in self.state]
        return sum(int(each[which]) for each in counts if each is not None)


def refuse_spectral_steps(groups: Iterable[dict[str, Any]]) -> None:
    """Raise ValueError if a saved optimizer used the removed option `direction="spectral"`."""
    if any(group.get("direction", "gradient") != "gradient" for group in groups):
        raise ValueError("the saved optimizer made spectral steps (direction='spectral'), which were removed")


def _gradient(p: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradient of a parameter in this process and, if that is of a sample, the indices of its classes."""
    grad, sampled = p.grad, gradient_of_some(p)
    if sampled is None:
        if grad is not None and grad.is_sparse:
            raise TypeError("RiemannianSGD does not support sparse gradients")
        return None if grad is None else shards.local(grad), None
    if grad is not None:
        raise RuntimeError("a weight has gradients of a sample and of all classes: use one of the two losses")
    places, of_sample = sampled
    return of_sample, places


def rate(group: dict[str, Any]) -> Any:
    """Return the effective learning rate of a group: a float, or a tensor on the device."""
    return group["lr"] * group.get(LR_FACTOR, 1)


def _counts(state: dict[str, Any], device: torch.device) -> Tensor:
    """Return the numbers of skipped and capped classes, (2,), on the device, where the kernels update them."""
    if "counts" not in state or state["counts"].device != device:
        state["counts"] = state.get("counts", torch.zeros(2, dtype=torch.int64)).to(device)
    counts: Tensor = state["counts"]
    return counts


def _check_options(group: dict[str, Any]) -> None:
    lr = group["lr"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(f"lr must be one number, got a tensor of shape {tuple(lr.shape)}")
    if not isinstance(lr, Tensor) and not 0 <= number(lr) < math.inf:
        raise ValueError(f"lr must be a finite number >= 0, got {lr!r}")
    if not 0 <= number(group["momentum"]) < 1:
        raise ValueError(f"momentum must lie in [0, 1), got {group['momentum']!r}")
    check_booleans(bfloat16_momentum=group["bfloat16_momentum"])
    StepOptions(**{name: group[name] for name in STEP_OPTIONS})  # raises if one is invalid


def _check_subspaces(p: Tensor) -> None:
    if p.ndim != 3:
        raise ValueError(f"RiemannianSGD takes subspaces of shape (C, K, N), got a parameter of shape {tuple(p.shape)}")
    if p.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"subspaces are trained in float32 or float64, got {p.dtype}: use autocast on float32 weights")
    if shards.is_dtensor(p) and not shards.is_sharded(p) and shards.groups_of(p):
        raise ValueError("subspaces must be sharded by class, Shard(0), got placements " + str(p.placements))  # type: ignore[attr-defined]
    w = shards.local(p.detach())
    if w.is_meta:
        return
    here = geometry.orthonormality_error(w) if w.shape[0] else w.new_zeros(())
    error = float(shards.largest_of_all(here, p))  # so that all processes agree
    what = f"a parameter of shape {tuple(p.shape)} is off the manifold: its rows are orthonormal only to {error:.2g}"
    if not error <= REFUSE_ABOVE:
        raise ValueError(f"{what}. Start from grassy.geometry.random_subspace, or use grassy.geometry.orthonormalize")
    if error > REPAIR_ABOVE:
        warnings.warn(f"{what}; it has been re-orthonormalised", stacklevel=5)
        with torch.no_grad():
            w.copy_(geometry.orthonormalize(w))
