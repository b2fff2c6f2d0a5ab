"""An exponential moving average of a model whose subspaces stay subspaces.

The average of two bases is not a basis of anything: one subspace in two bases may even average to zero. So the
averaged basis is first rotated, within its subspace, to lie as close to the current one as it can (Procrustes), then
averaged with it like any other parameter, and the result made orthonormal again (its polar factor).
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
    """`torch.optim.swa_utils.AveragedModel` for models with subspaces, and a stand-in for timm's `ModelEmaV3`.

    decay: weight of the old average in an update. None makes it the plain mean of all updates (SWA).
    use_buffers: average floating point buffers, such as batch statistics, too (as timm does); else copy them.
    use_warmup, warmup_gamma, warmup_power, update_after_step: as in timm, for `update(model, step)`.

    `update_parameters(model)` and `update(model, step)` are torch's and timm's names for the same thing.
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
        """The weight of the old average in update number `step`, counted from 1 as timm does."""
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
        averages, currents = _subspaces(self.module), _subspaces(model)
        if [w.shape for w in averages] != [w.shape for w in currents]:
            raise ValueError("the model's subspaces differ in number or shape from those that are being averaged")
        for average, current in zip(averages, currents, strict=True):
            average.copy_(geometry.align(average, current.to(average)))
        super().update_parameters(model)
        for average in averages:
            average.copy_(_polar_factor(average))

    def update(self, model: nn.Module, step: int | None = None) -> None:
        """`update_parameters` under timm's name, with the number of the update for the warm-up."""
        self._step = step
        try:
            self.update_parameters(model)
        finally:
            self._step = None

    @torch.no_grad()
    def set(self, model: nn.Module) -> None:
        """Forget the average and start again from the model."""
        self.module.load_state_dict(model.state_dict())
        self.n_averaged.zero_()  # the next update copies

    def _lerp(self, averages: list[Tensor], currents: list[Tensor], _: Any) -> None:
        # Of weights that are divided over processes, each averages its own; torch does not take them with others.
        averages, currents = ([local(tensor) for tensor in tensors] for tensors in (averages, currents))
        if averages[0].is_floating_point():
            torch._foreach_lerp_(averages, currents, 1 - self.get_decay(self._step))
        else:  # counters are not averaged
            torch._foreach_copy_(averages, currents)


def _subspaces(model: nn.Module) -> list[Tensor]:
    return [local(weight.detach()) for _, weight in named_subspaces(model)]


def _polar_factor(m: Tensor) -> Tensor:
    """The polar factor of an average of two aligned bases, by Newton–Schulz iterations; zero rows stay.

    Aligned bases are nowhere more than 90° apart, so no singular value is below 1/√2, and six iterations converge.
    """
    with exact_products(m):
        for _ in range(6):
            m = 1.5 * m - 0.5 * (m @ m.mT) @ m
    return m
