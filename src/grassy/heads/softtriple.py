"""Several directions per class, softly assigned: SoftTriple (Qian et al. 2019)."""

from typing import Any, Unpack

import torch
from torch import Tensor

from grassy.arguments import nonnegative, positive, positive_integer
from grassy.criteria import Criterion
from grassy.heads.base import Head, HeadOptions, check_labels_of_a_margin, empty_parameter, init_like_linear
from grassy.heads.cosine import cosines
from grassy.kernels import unit


class SoftTripleHead(Head):
    """SoftTriple: l_c = λ S_c with S_c = Σ_k softmax_k(cos θ_ck / γ) cos θ_ck over the K centres of class c.

    In training it subtracts the margin δ from S of the target class and adds τ times a regulariser to the loss. The
    regulariser pulls the centres of a class together, so that superfluous centres merge. It accepts class indices only,
    so mixup and cutmix do not work with it.

    Args:
        in_features: Feature dimension N.
        num_classes: Number of classes C.
        centers: Number of centres K per class.
        scale: Scale λ of the logits.
        gamma: Temperature γ of the soft assignment to centres.
        tau: Weight τ of the regulariser.
        margin: Margin δ on the similarity of the target class.
        **options: Options of every head: see `Head`.

    Raises:
        ValueError: If an argument is out of range.
    """

    takes_soft_targets = False
    logit_options = ("scale", "gamma")  # the others apply in training only

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        centers: int = 8,
        scale: float = 20.0,
        gamma: float = 0.1,
        tau: float = 0.2,
        margin: float = 0.01,
        **options: Unpack[HeadOptions],
    ) -> None:
        super().__init__(in_features, num_classes, **options)
        centers = positive_integer("centers", centers)
        self.scale, self.gamma = positive("scale", scale), positive("gamma", gamma)
        self.tau, self.margin = nonnegative("tau", tau), nonnegative("margin", margin)
        self.weight = empty_parameter(options, num_classes, centers, in_features)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        init_like_linear(self.weight)

    def logits(self, features: Tensor, target: Tensor | None = None) -> Tensor:
        cosine = cosines(features, self.weight.flatten(0, 1)).unflatten(-1, self.weight.shape[:2])
        similarity = ((cosine / self.gamma).softmax(-1) * cosine).sum(-1)
        if self.training and target is not None:
            check_labels_of_a_margin(target, similarity)
            target = target.unsqueeze(-1)
            valid = (target >= 0) & (target < self.num_classes)  # False for ignored labels
            similarity = similarity.scatter_add(-1, target.where(valid, 0), -self.margin * valid.to(similarity.dtype))
        return self.scale * similarity

    def regularizer(self) -> Tensor:
        """Return Σ √(2 − 2 w_sᵀw_t) over classes and pairs of centres, divided by C K (K − 1)."""
        classes, centers, _ = self.weight.shape
        centers_of_class = unit(self.weight)
        s, t = torch.triu_indices(centers, centers, offset=1, device=self.weight.device)
        overlap = (centers_of_class @ centers_of_class.mT)[:, s, t]
        # 1e-5, as in the authors' code, keeps the derivative finite where two centres coincide.
        return (2 + 1e-5 - 2 * overlap).clamp_min(0).sqrt().sum() / (classes * centers * max(1, centers - 1))

    def loss(self, features: Tensor, target: Tensor, criterion: Criterion) -> Tensor:
        loss = super().loss(features, target, criterion)
        return loss + self.tau * self.regularizer() if self.training else loss

    @property
    def options(self) -> dict[str, Any]:
        own = {"scale": self.scale, "gamma": self.gamma, "tau": self.tau, "margin": self.margin}
        return {"centers": self.weight.shape[1], **own, **super().options}
