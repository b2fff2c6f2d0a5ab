"""The inputs of layers in forward passes, such as the features that reach a head."""

from collections.abc import Iterable
from typing import Any, Self

from torch import Tensor, nn


class LayerInputs:
    """Records inputs: `with LayerInputs(layers) as inputs:`, then `inputs.take()` after each forward pass.

    Models differ in where and under which name features reach the head; a hook works for all of them.
    """

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        self.layers = list(layers)
        self.hooks: list[Any] = []
        self.recorded: list[tuple[nn.Module, Tensor]] = []

    def __enter__(self) -> Self:
        self.hooks = [layer.register_forward_pre_hook(self._record) for layer in self.layers]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self.hooks:
            hook.remove()

    def _record(self, layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        self.recorded.append((layer, inputs[0]))

    def take(self) -> list[tuple[nn.Module, Tensor]]:
        """The layers that were called since the last `take`, in the order of the calls, each with its input."""
        taken, self.recorded = self.recorded, []
        return taken
