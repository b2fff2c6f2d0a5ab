"""An exponential moving average of a model whose subspaces stay subspaces.

Averaging two bases entry by entry is wrong: two bases of the same subspace may even average to zero. So each update has
three steps. It rotates the averaged basis within its subspace, as close as possible to the current basis (Procrustes).
It averages the two like any other parameter. It orthonormalises the result (polar factor).
"""

from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import swa_utils

from grassy import geometry
from grassy.precision import exact_products
from grassy.shards import local
from grassy.subspaces import named_subspaces


class AveragedModel(swa_utils.AveragedModel):
    """Keeps an exponential moving average (EMA) of a model, in which subspaces stay subspaces.

    It extends `torch.optim.swa_utils.AveragedModel` and can replace timm's `ModelEmaV3`. Torch calls the update
    `update_parameters(model)`, timm calls it `update(model, step)`: both work here.

    Args:
        model: The model to average. It is copied.
        decay: Weight of the old average in an update, in [0, 1). None gives the plain mean of all updates (SWA).
        device: Device of the averaged model. None keeps the device of `model`.
        use_buffers: Average floating-point buffers such as batch statistics too, as timm does. False copies them.
        use_warmup: Increase the decay over the first updates, as timm does. Needs `update(model, step)`.
        warmup_gamma: Parameter γ of the warm-up decay 1 − (1 + step/γ)^−power.
        warmup_power: Exponent of the warm-up decay.
        update_after_step: Copy the model until this step, then start to average. Needs `update(model, step)`.

    Raises:
        ValueError: If `decay` is out of range.

    Examples:
        >>> import torch, grassy
        >>> model = torch.nn.Sequential(torch.nn.Flatten(), grassy.GrassmannHead(64, 10, k=4))
        >>> average = grassy.AveragedModel(model, decay=0.999)
        >>> average.update_parameters(model)  # after each optimizer.step()
        >>> logits = average(torch.randn(8, 64))
    """

    def __init__(
        self,
        model: nn.Module,
        decay: float | None = 0.9999,
        device: torch.device | str | None = None,
        use_buffers: bool = True,
        use_warmup: bool = False,
        warmup_gamma: float = 1.0,
        warmup_power: float = 2 / 3,
        update_after_step: int = 0,
    ) -> None:
        if decay is not None and not (isinstance(decay, Real | Tensor) and 0 <= decay < 1):
            raise ValueError(f"decay must lie in [0, 1) or be None, got {decay!r}")
        super().__init__(model, device, multi_avg_fn=self._lerp, use_buffers=use_buffers)  # type: ignore[arg-type]
        self.decay = decay
        self.use_warmup, self.warmup_gamma, self.warmup_power = use_warmup, warmup_gamma, warmup_power
        self.update_after_step = update_after_step
        self._step: int | None = None

    def get_decay(self, step: int | None = None) -> float:
        """Return the weight of the old average in update number `step`, counted from 1 as in timm."""
        if self.decay is None:
            return 1 - 1 / (int(self.n_averaged) + 1)
        if step is None:
            return self.decay
        step = step - self.update_after_step - 1
        if step <= 0:
            return 0.0
        return (
            min(self.decay, 1 - (1 + step / self.warmup_gamma) ** -self.warmup_power) if self.use_warmup else self.decay
        )

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        """Update the average with the current parameters of the model.

        Args:
            model: The trained model, with the same architecture as the averaged one.

        Raises:
            ValueError: If the subspaces of the model differ in number or shape from the averaged ones.
        """
        averages, currents = _subspaces(self.module), _subspaces(model)
        if [w.shape for w in averages] != [w.shape for w in currents]:
            raise ValueError("the model's subspaces differ in number or shape from the averaged ones")
        for average, current in zip(averages, currents, strict=True):
            average.copy_(geometry.align(average, current.to(average)))
        super().update_parameters(model)
        for average in averages:
            average.copy_(_polar_factor(average))

    def update(self, model: nn.Module, step: int | None = None) -> None:
        """Update the average as in timm.

        Args:
            model: The trained model, with the same architecture as the averaged one.
            step: Number of the update, for the warm-up and `update_after_step`.
        """
        self._step = step
        try:
            self.update_parameters(model)
        finally:
            self._step = None

    @torch.no_grad()
    def set(self, model: nn.Module) -> None:
        """Discard the average and start again from the model."""
        self.module.load_state_dict(model.state_dict())
        self.n_averaged.zero_()  # the next update copies

    def _lerp(self, averages: list[Tensor], currents: list[Tensor], _: Any) -> None:
        # Each process averages its shard, since _foreach functions cannot mix DTensors with plain tensors.
        averages, currents = ([local(tensor) for tensor in tensors] for tensors in (averages, currents))
        if averages[0].is_floating_point():
            torch._foreach_lerp_(averages, currents, 1 - self.get_decay(self._step))
        else:  # integer counters are copied
            torch._foreach_copy_(averages, currents)


def _subspaces(model: nn.Module) -> list[Tensor]:
    return [local(weight.detach()) for _, weight in named_subspaces(model)]


def _polar_factor(m: Tensor) -> Tensor:
    """Return the polar factor of an average of two aligned bases, by Newton–Schulz iterations. Zero rows stay zero.

    Aligned bases differ by at most 90° in every direction. So all singular values are at least 1/√2, for which six
    iterations converge.
    """
    with exact_products(m):
        for _ in range(6):
            m = 1.5 * m - 0.5 * (m @ m.mT) @ m
    return m
