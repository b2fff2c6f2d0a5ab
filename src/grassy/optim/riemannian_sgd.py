"""Riemannian SGD with momentum on a product of Grassmannians (paper, Algorithm 1)."""

import dataclasses
import math
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from grassy import geometry, kernels, shards
from grassy.kernels import StepOptions
from grassy.kernels.sampling import forget_gradient, gradient_of_some

REPAIR_ABOVE, REFUSE_ABOVE = 1e-5, 0.1
#: Keys of a group that are options of its steps.
STEP_OPTIONS = tuple(field.name for field in dataclasses.fields(StepOptions))
#: The key of a parameter group with a number that each step multiplies its learning rate by.
LR_FACTOR = "lr_factor"


class RiemannianSGD(Optimizer):
    """Moves subspaces (C, K, N), with orthonormal rows, along geodesics against the momentum of their gradient.

    lr: learning rate; times the length of the momentum it is the angle, in radians, that a subspace turns by.
    momentum: factor of the momentum, without dampening; 0 keeps no buffer.
    retraction: "geodesic", or "qf" for the variant of the paper's appendix, which depends, at second order in lr,
        on the basis once there is momentum.
    transport: how the momentum follows the subspace: "projection" as in the paper, or "parallel", exactly.
    max_angle: an upper limit on the turn of a class in one step, in radians.
    maximize: ascend instead.
    bfloat16_momentum: keep the momentum in bfloat16, half the memory: for very many classes.

    Weight decay would mean nothing, since a subspace has no scale. Classes whose gradient is not finite are left as
    they are and counted in `skipped_classes`.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor,
        momentum: float = 0.9,
        retraction: str = "geodesic",
        transport: str = "projection",
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
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # Of a GradScaler, if the whole optimizer has asked for them: see JointOptimizer.
        grad_scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        for group in self.param_groups:
            self._step_of_samples(group, grad_scale, found_inf)
            params = [p for p in group["params"] if p.grad is not None]
            if any(p.grad.is_sparse for p in params):
                raise TypeError("RiemannianSGD does not take sparse gradients")
            for p in params:
                self._create_state(p, group)
            # Of subspaces that are divided over processes, each moves those that it holds: nothing is communicated.
            grads = [shards.local(p.grad) for p in params]
            buffers = [self.state[p].get("momentum_buffer") for p in params]
            if grad_scale is not None:  # not in place: whoever looks at p.grad, or steps again, finds what it was
                grads = [grad / grad_scale.to(grad.device, non_blocking=True) for grad in grads]
            kernels.geodesic_steps(
                [shards.local(p) for p in params],
                grads,
                [None if buffer is None else shards.local(buffer) for buffer in buffers],
                _rate(group),
                group["momentum"],
                skip=found_inf if isinstance(found_inf, Tensor) else None,  # 0 if nothing has a gradient
                counts=[_counts(self.state[p], p.device) for p in params],
                **{name: group[name] for name in STEP_OPTIONS},
            )
        return loss

    def _step_of_samples(self, group: dict[str, Any], grad_scale: Tensor | None, found_inf: Any) -> None:
        """The step of the classes that took part in the update: all else keeps its weight and its momentum.

        A momentum that waits needs no transport, since its subspace waits, too.
        """
        for p in group["params"]:
            if (found := gradient_of_some(p)) is None:
                continue
            if p.grad is not None:
                raise RuntimeError("a weight has gradients of a sample and of all classes: use one of the two losses")
            self._create_state(p, group)
            places, grad = found
            buffer = self.state[p].get("momentum_buffer")
            whole = [shards.local(p), *([] if buffer is None else [shards.local(buffer)])]
            parts = [tensor[places] for tensor in whole]
            kernels.geodesic_steps(
                parts[:1],
                [grad if grad_scale is None else grad / grad_scale.to(grad.device, non_blocking=True)],
                [None] if buffer is None else parts[1:],
                _rate(group),
                group["momentum"],
                skip=found_inf if isinstance(found_inf, Tensor) else None,
                counts=[_counts(self.state[p], p.device)],
                **{name: group[name] for name in STEP_OPTIONS},
            )
            for tensor, part in zip(whole, parts, strict=True):
                tensor[places] = part
            forget_gradient(p)

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        for group in self.param_groups:
            for p in group["params"]:
                forget_gradient(p)

    @torch.no_grad()
    def create_state(self) -> None:
        """Create the state that the first step would create, as checkpoints of several processes need it."""
        for group in self.param_groups:
            for p in group["params"]:
                self._create_state(p, group)

    def _create_state(self, p: Tensor, group: dict[str, Any]) -> None:
        state = self.state[p]
        if group["momentum"] and "momentum_buffer" not in state:
            dtype = torch.bfloat16 if group["bfloat16_momentum"] else p.dtype
            state["momentum_buffer"] = torch.zeros_like(p, dtype=dtype, memory_format=torch.preserve_format)
        _counts(state, p.device)

    def __setstate__(self, state: dict[str, Any]) -> None:
        before = getattr(self, "param_groups", [])
        refuse_spectral_steps(state["param_groups"])
        super().__setstate__(state)
        for number, group in enumerate(self.param_groups):
            group.pop("direction", None)  # of a state saved while there was a choice
            # Of a state saved before there was a choice: how this one keeps it.
            now = before[number] if number < len(before) else {}
            group.setdefault("bfloat16_momentum", now.get("bfloat16_momentum", False))
            for own in (self.state[p] for p in group["params"] if p in self.state):
                if "skipped_classes" in own:  # of one saved before both were one tensor
                    own["counts"] = torch.stack([own.pop("skipped_classes"), own.pop("capped_classes")])
                if "counts" in own:  # load_state_dict casts tensors to the parameter's dtype
                    own["counts"] = own["counts"].to(torch.int64)
                if "momentum_buffer" in own and group["bfloat16_momentum"]:
                    own["momentum_buffer"] = own["momentum_buffer"].bfloat16()

    @property
    def skipped_classes(self) -> int:
        """How many times, so far, a class was left as it was because its gradient held a NaN or an Inf.

        Of classes that are divided over processes, those of this process count.
        """
        return self._total(0)

    @property
    def capped_classes(self) -> int:
        """How many times, so far, a class was turned less than asked: by `max_angle`, or by 64 radians."""
        return self._total(1)

    def _total(self, which: int) -> int:
        counts = [self.state[p].get("counts") for g in self.param_groups for p in g["params"] if p in self.state]
        return sum(int(each[which]) for each in counts if each is not None)


def refuse_spectral_steps(groups: Iterable[dict[str, Any]]) -> None:
    """Raise a ValueError if groups of a saved optimizer are of the option `direction="spectral"`, which is gone."""
    if any(group.get("direction", "gradient") != "gradient" for group in groups):
        raise ValueError("the saved optimizer made spectral steps (direction='spectral'), which were removed")


def _rate(group: dict[str, Any]) -> Any:
    """The learning rate of a group: a number, or a tensor on the device."""
    return group["lr"] * group.get(LR_FACTOR, 1)


def _counts(state: dict[str, Any], device: torch.device) -> Tensor:
    """How many classes were skipped, and how many capped: on the device, where a kernel adds to it."""
    if "counts" not in state or state["counts"].device != device:
        state["counts"] = state.get("counts", torch.zeros(2, dtype=torch.int64)).to(device)
    counts: Tensor = state["counts"]
    return counts


def _check_options(group: dict[str, Any]) -> None:
    lr = group["lr"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(f"lr must be one number, got a tensor of shape {tuple(lr.shape)}")
    if not isinstance(lr, Tensor) and not (isinstance(lr, int | float) and 0 <= lr < math.inf):
        raise ValueError(f"lr must be a finite number >= 0, got {lr!r}")
    if not 0 <= group["momentum"] < 1:
        raise ValueError(f"momentum must lie in [0, 1), got {group['momentum']!r}")
    StepOptions(**{name: group[name] for name in STEP_OPTIONS})  # which checks them


def _check_subspaces(p: Tensor) -> None:
    if p.ndim != 3:
        raise ValueError(f"RiemannianSGD takes subspaces of shape (C, K, N), got a parameter of shape {tuple(p.shape)}")
    if p.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"subspaces are trained in float32 or float64, got {p.dtype}: use autocast on float32 weights")
    if shards.is_distributed(p) and not shards.is_sharded(p) and shards.groups_of(p):
        raise ValueError("subspaces are divided over processes by class, Shard(0), got placements " + str(p.placements))  # type: ignore[attr-defined]
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
