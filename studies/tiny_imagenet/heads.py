"""The heads of the study that grassy does not have: those of its arms, and those of the paper's open problems.

`register` lets recipes name them. Shapes: B batch, C classes, K subspace dimension,
N feature dimension.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from grassy.arguments import number, positive
from grassy.heads import HEADS, CosineHead, GrassmannHead, Head, LinearHead
from grassy.heads.base import Criterion, init_like_linear, linear, with_classes_last
from grassy.kernels import unit
from grassy.optim.joint import MANIFOLD, JointOptimizer
from grassy.precision import without_autocast

#: Their names in recipes.
SOFTMAX, COSINE, SIGNED = "study-softmax", "study-cosine", "study-signed"
VARIETY, MEAN = "study-variety", "study-mean"


class SoftmaxHead(LinearHead):
    """l_c = β (w_cᵀ x + b_c).

    beta: the inverse temperature.
    decay: weight decay of the classifier alone; None leaves that of the recipe.
    """

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        beta: float = 1.0,
        decay: float | None = None,
        standardize: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, num_classes, standardize=standardize, device=device, dtype=dtype)
        self.beta, self.decay = positive("beta", beta), _decay(decay)

    def logits(self, features: Tensor, target: Tensor | None = None) -> Tensor:
        return self.beta * super().logits(features, target)


class DecayedCosineHead(CosineHead):
    """A cosine head with a weight decay of its own, as `SoftmaxHead` has."""

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        scale: float = 25.0,
        decay: float | None = None,
        standardize: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, num_classes, scale=scale, standardize=standardize, device=device, dtype=dtype)
        self.decay = _decay(decay)


class SignedHead(GrassmannHead):
    """l_c = γ w_cᵀ z, with w_c of length 1: a subspace head with k = 1 that keeps the sign.

    Scale, standardisation and the steps on the manifold are those of subspaces; only the sign and k differ.
    """

    logits_are_nonnegative = False

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        gamma: float = 0.9,
        normalize: bool = False,
        standardize: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        options: dict[str, Any] = {"standardize": standardize, "device": device, "dtype": dtype}
        super().__init__(in_features, num_classes, k=1, gamma=gamma, normalize=normalize, **options)

    def logits(self, features: Tensor, target: Tensor | None = None) -> Tensor:
        return self.gamma * linear(unit(features) if self.normalize else features, self.weight[:, 0])

    def outlier_score(self, features: Tensor) -> Tensor:
        return Head.outlier_score(self, features)


class VarietyHead(GrassmannHead):
    """Subspaces with a reward for variety inside them: two terms on u = t/‖t‖, the direction of the own coordinates t.

    used: weight of uᵀ S u, where S is the running mean of uuᵀ of the class: directions already used cost.
    contrast: weight of InfoNCE between the two views of an image, against recent u of the same class; batches must hold
        the views one after the other, as aug_repeats=2 gives.
    Neither moves the subspaces, and neither changes the own logit to first order.
    """

    RHO, RECENT = 0.9, 16

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        k: int = 8,
        gamma: float = 25.0,
        normalize: bool = True,
        standardize: bool = False,
        used: float = 0.0,
        contrast: float = 0.0,
        temperature: float = 0.3,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        options: dict[str, Any] = {"standardize": standardize, "device": device, "dtype": dtype}
        super().__init__(in_features, num_classes, k=k, gamma=gamma, normalize=normalize, **options)
        self.used, self.contrast, self.temperature = float(used), float(contrast), positive("temperature", temperature)
        self.register_buffer("second_moment", torch.zeros(num_classes, k, k, device=device), persistent=False)
        self.register_buffer("recent", torch.zeros(num_classes, self.RECENT, k, device=device), persistent=False)
        self.register_buffer("place", torch.zeros((), dtype=torch.int64, device=device), persistent=False)

    def loss(self, features: Tensor, target: Tensor, criterion: Criterion) -> Tensor:
        features = self.prepare(features, target, criterion)
        loss = with_classes_last(criterion, self.logits(features, target), target)
        with without_autocast(features):
            own = torch.einsum("bkn,bn->bk", self.weight.detach()[target], features.float())
            u = F.normalize(own, dim=-1)
            if self.used:
                loss = loss + self.used * self._used_already(u, target)
            if self.contrast:
                loss = loss + self.contrast * self._tell_images_apart(u, target)
        return loss

    def _used_already(self, u: Tensor, target: Tensor) -> Tensor:
        cost = torch.einsum("bi,bij,bj->b", u, self.second_moment[target], u).mean()
        with torch.no_grad():
            counts = torch.zeros(self.num_classes, device=u.device).index_add_(0, target, torch.ones_like(u[:, 0]))
            sums = torch.zeros_like(self.second_moment).index_add_(0, target, u[:, :, None] * u[:, None, :])
            mean = sums / counts.clamp(min=1)[:, None, None]
            new = self.RHO * self.second_moment + (1 - self.RHO) * mean
            self.second_moment.copy_(torch.where(counts[:, None, None] > 0, new, self.second_moment))
        return cost

    def _tell_images_apart(self, u: Tensor, target: Tensor) -> Tensor:
        one, other, label = u[0::2], u[1::2], target[0::2]
        recent = self.recent[label].clone()
        losses = []
        for query, positive_view in ((one, other), (other, one)):
            same = (query * positive_view).sum(-1, keepdim=True)
            others = torch.einsum("bk,bqk->bq", query, recent)
            losses.append(torch.cat([same, others], 1) / self.temperature)
        loss = sum((each.logsumexp(1) - each[:, 0]).mean() for each in losses) / 2
        with torch.no_grad():
            self.recent[label, self.place.expand_as(label)] = one.detach()
            self.place.copy_((self.place + 1) % self.RECENT)
        return loss


class MeanSubspaceHead(GrassmannHead):
    """l_c = β⟨m_c, z⟩ + b_c + γ‖W_c(z − m̂_c m̂_cᵀ z)‖: a class as a mean and a subspace. γ = 0 would be softmax."""

    logits_are_nonnegative = False

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        k: int = 8,
        gamma: float = 25.0,
        normalize: bool = True,
        standardize: bool = False,
        beta: float = 1.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        options: dict[str, Any] = {"standardize": standardize, "device": device, "dtype": dtype}
        super().__init__(in_features, num_classes, k=k, gamma=gamma, normalize=normalize, **options)
        self.beta = positive("beta", beta)
        self.mean = nn.Parameter(torch.empty(num_classes, in_features, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(num_classes, device=device, dtype=dtype))
        init_like_linear(self.mean)

    def logits(self, features: Tensor, target: Tensor | None = None) -> Tensor:
        z = unit(features) if self.normalize else features
        mean = F.normalize(self.mean, dim=-1)
        flat = linear(z, self.weight.flatten(0, 1)).unflatten(-1, self.weight.shape[:2])
        along = torch.einsum("ckn,cn->ck", self.weight, mean)
        rest = flat.float() - linear(z, mean).float().unsqueeze(-1) * along
        length = (rest.square().sum(-1) + 1e-12).sqrt()
        return self.beta * linear(z, self.mean).float() + self.bias + self.gamma * length


OWN_HEADS = {
    SOFTMAX: SoftmaxHead,
    COSINE: DecayedCosineHead,
    SIGNED: SignedHead,
    VARIETY: VarietyHead,
    MEAN: MeanSubspaceHead,
}


def register() -> None:
    """Let recipes name the heads of the study."""
    HEADS.update(OWN_HEADS)


def _decay(value: float | None) -> float | None:
    if value is not None and not 0 <= number(value) < float("inf"):
        raise ValueError(f"decay must be a number >= 0 or None, got {value!r}")
    return value


def set_classifier_decay(optimizer: JointOptimizer, model: torch.nn.Module) -> JointOptimizer:
    """Move the weights of heads that have a `decay` of their own to a parameter group with that decay."""
    for head in (module for module in model.modules() if getattr(module, "decay", None) is not None):
        own = {id(p) for p in head.parameters()}
        for group in list(optimizer.param_groups):
            moved = [p for p in group["params"] if id(p) in own]
            if moved and group[MANIFOLD] == "euclidean":
                group["params"] = [p for p in group["params"] if id(p) not in own]
                optimizer.add_param_group({**group, "params": moved, "weight_decay": head.decay})
    return optimizer
