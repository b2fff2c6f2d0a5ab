"""One subspace a class: the Grassmann class representation (paper, Section 4.1)."""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from grassy import geometry, ops
from grassy.heads.base import Head, positive_integer

REPAIR_ABOVE = 1e-5
REFUSE_ABOVE = 0.1


class GrassmannHead(Head):
    """l_c = γ‖W_c x‖/‖x‖: how long the projection of the feature onto the subspace of class c is.

    `weight` (C, K, N) holds an orthonormal basis of each class subspace as rows. Train it with `RiemannianSGD` (which
    `make_optimizer` does); an ordinary optimizer would take it off the manifold.

    k: dimension of the subspaces, one for all or one for each class. Classes of a smaller dimension than the largest
        have zero rows, which stay zero.
    gamma: the length that features are scaled to, 25 in the paper for 1,000 classes.
    learnable_gamma: make gamma a parameter, starting from the given value.
    normalize: False keeps the length of the features and multiplies by gamma (an ablation of the paper's).
    riemannian: False makes the weight an ordinary parameter, which loses its orthonormality (another ablation).
    """

    subspace_names: tuple[str, ...] = ("weight",)
    logits_are_nonnegative = True
    gamma: float | nn.Parameter

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        k: int | Sequence[int] = 8,
        gamma: float = 25.0,
        normalize: bool = True,
        learnable_gamma: bool = False,
        riemannian: bool = True,
        dropout: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, num_classes, dropout)
        each: Any = k if _is_sequence(k) else [k] * num_classes
        dims = [positive_integer("k", dim) for dim in each]
        if len(dims) != num_classes:
            raise ValueError(f"k must be one int or one for each of the {num_classes} classes, got {len(dims)} of them")
        if max(dims) > in_features:
            raise ValueError(f"k must lie between 1 and in_features = {in_features}, got {max(dims)}")
        if not gamma > 0:
            raise ValueError(f"gamma must be positive, got {gamma!r}")
        self.normalize = normalize
        if not riemannian:
            self.subspace_names = ()
        start = torch.full((), float(gamma), device=device, dtype=dtype)
        self.gamma = nn.Parameter(start) if learnable_gamma else gamma
        self._initial_gamma = gamma
        self._initial_dims = dims
        self.weight = nn.Parameter(torch.empty(num_classes, max(dims), in_features, device=device, dtype=dtype))
        self.reset_parameters()
        self.register_load_state_dict_pre_hook(_return_to_manifold)

    def reset_parameters(self) -> None:
        """Uniformly random subspaces: the qf factor of a Gaussian matrix."""
        w = self.weight
        rows = torch.arange(w.shape[1], device=w.device)
        present = rows < torch.tensor(self._initial_dims, device=w.device).unsqueeze(-1)
        if isinstance(self.gamma, nn.Parameter):
            nn.init.constant_(self.gamma, self._initial_gamma)
        with torch.no_grad():
            w.copy_(geometry.random_subspace(*w.shape, dtype=w.dtype, device=w.device) * present.unsqueeze(-1))

    @property
    def dims(self) -> Tensor:
        """The dimension k_i of each class (C,), read off the weight."""
        return geometry.present_rows(self.weight.detach()).sum(-1)

    def logits(self, features: Tensor, target: Tensor | None = None) -> Tensor:
        return ops.subspace_logits(features, self.weight, self.gamma, normalize=self.normalize)

    def outlier_score(self, features: Tensor) -> Tensor:
        """The part of a feature's energy that no class subspace holds, (...) in [0, 1]: 1 − max_c ‖W_c x‖²/‖x‖².

        0 means that the feature lies in the subspace of a class; a zero feature has 1.
        """
        with torch.no_grad():
            self.check_features(features)
            inside = ops.subspace_logits(features, self.weight, 1.0)
        return (1 - inside.amax(-1).square()).clamp(0, 1)

    def extra_repr(self) -> str:
        dims = self._initial_dims if self.weight.is_meta else self.dims.tolist()
        k = dims[0] if len(set(dims)) == 1 else f"{min(dims)}..{max(dims)}"
        gamma = "learnable" if isinstance(self.gamma, nn.Parameter) else self.gamma
        return f"{super().extra_repr()}, k={k}, gamma={gamma}, normalize={self.normalize}"


def _is_sequence(k: Any) -> bool:
    return hasattr(k, "__len__") and not isinstance(k, str)


def _return_to_manifold(head: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Repair a loaded weight that is slightly off the manifold, and refuse one that is far off."""
    key = prefix + "weight"
    weight = state_dict.get(key)
    if not isinstance(weight, Tensor) or weight.ndim != 3 or weight.is_meta:
        return  # a missing key or a wrong shape: load_state_dict has its own message
    if not head.subspace_names:
        return  # not meant to be on the manifold
    error = float(geometry.orthonormality_error(weight))
    # Rounding to half precision alone takes a weight this far.
    tolerance = max(REPAIR_ABOVE, 4 * torch.finfo(weight.dtype).eps)
    if not error <= REFUSE_ABOVE:
        raise ValueError(
            f"{key} is not a weight of subspaces: its rows are orthonormal only to {error:.2g}, the limit is "
            f"{REFUSE_ABOVE}. Was it trained by an ordinary optimizer? Use grassy.make_optimizer."
        )
    to_higher_precision = torch.finfo(weight.dtype).eps > torch.finfo(head.weight.dtype).eps  # type: ignore[arg-type]
    if error > tolerance or (to_higher_precision and error > REPAIR_ABOVE):
        warnings.warn(f"{key} was orthonormal only to {error:.2g}; it has been re-orthonormalised", stacklevel=2)
        state_dict[key] = geometry.orthonormalize(weight.to(head.weight.dtype))  # type: ignore[arg-type]
