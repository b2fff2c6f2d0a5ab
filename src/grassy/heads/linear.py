"""One vector per class: the softmax baseline, `nn.Linear` under the contract of a head."""

from typing import Any, Unpack

import torch
from torch import Tensor, nn

from grassy.arguments import check_booleans
from grassy.heads.base import HeadOptions, empty_parameter, init_like_linear, linear
from grassy.heads.per_class import PerClassHead


class LinearHead(PerClassHead):
    """Softmax baseline with one vector per class: l_c = w_cᵀ x + b_c.

    Its state_dict has the keys of `nn.Linear`: `weight` (C, N) and `bias` (C,).

    Args:
        in_features: Feature dimension N.
        num_classes: Number of classes C.
        bias: Add a bias per class.
        **options: Options of every head: see `Head`.
    """

    logits_use_target = False
    # No option changes the logits in evaluation, so the state_dict can have the keys of nn.Linear alone.
    get_extra_state = nn.Module.get_extra_state
    set_extra_state = nn.Module.set_extra_state
    class_parameter_names = ("weight", "bias")

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        bias: bool = True,
        **options: Unpack[HeadOptions],
    ) -> None:
        super().__init__(in_features, num_classes, **options)
        check_booleans(bias=bias)
        self.weight = empty_parameter(options, num_classes, in_features)
        self.bias = empty_parameter(options, num_classes) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        init_like_linear(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    @property
    def options(self) -> dict[str, Any]:
        return {"bias": self.bias is not None, **super().options}

    def rows(self, features: Tensor) -> Tensor:
        return features

    def class_logits(self, rows: Tensor, target: Tensor | None, *params: Tensor) -> Tensor:
        return linear(rows, *params)

    def draw_classes(self, name: str, first: int, count: int, generator: torch.Generator) -> Tensor:
        if name == "bias":
            return torch.zeros(count, device=generator.device)
        return super().draw_classes(name, first, count, generator)
