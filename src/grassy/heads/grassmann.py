"""One subspace per class: the Grassmann class representation (paper, Section 4.1)."""

import math
import warnings
from collections.abc import Sequence
from typing import Any, Literal, Self, Unpack

import torch
from torch import Tensor, nn

from grassy import geometry, kernels, shards
from grassy.arguments import check_booleans, number, positive_integer
from grassy.heads.base import HeadOptions, empty_parameter, evaluating
from grassy.heads.gamma import automatic_gamma
from grassy.heads.loss_request import recomputed
from grassy.heads.per_class import PerClassHead
from grassy.mixed_labels import MixedLabels
from grassy.subspaces import REFUSE_ABOVE, REPAIR_ABOVE

WARN_ABOVE = 1e-3
OFF_THE_MANIFOLD = (
    "was it trained, or averaged, as an ordinary weight? Use grassy.make_optimizer and grassy.AveragedModel"
)
#: How many classes to check after the weight changed. An optimizer treats all classes alike, so some suffice.
LOOK_AT = 1000


class GrassmannHead(PerClassHead):
    """Represents each class by a subspace: the logit l_c = γ‖W_c x‖/‖x‖ is large if x lies close to the subspace.

    The parameter `weight` (C, K, N) holds an orthonormal basis of each class subspace as rows. Train it with
    `make_optimizer`, which uses `RiemannianSGD` for it. An ordinary optimizer takes it off the manifold. The defaults
    are the paper's. `recommended_options` returns those that `replace_head` prefers.

    Args:
        in_features: Feature dimension N.
        num_classes: Number of classes C.
        k: Dimension of the subspaces, one for all classes or one per class. Classes with fewer dimensions than the
            largest have zero rows, which stay zero.
        gamma: Scale γ of the logits, 25 in the paper for 1,000 classes. "auto" uses `recommended_gamma`. For features
            that are standardised but not normalised, "auto" divides it by √N, their typical length.
        normalize: Normalise the features. False gives l_c = γ‖W_c x‖, an ablation of the paper.
        learnable_gamma: Make gamma a parameter with the given initial value.
        riemannian: False makes the weight an ordinary parameter, which loses its orthonormality, another ablation.
        fuse_loss: In training, compute the cross-entropy of `classification_loss` in the head, without storing the
            logits or all B x C x K coordinates. Saves memory with very many classes. Other criteria, plain logits and
            models with several heads are not affected.
        sample: In training, update only this fraction of the classes per step, plus all classes that are labels in the
            batch: for more than ten million classes. The draw depends only on the seed, the step and the class. Needs
            `classification_loss` with cross-entropy, `make_optimizer`, and `distributed.shard_head` in several
            processes.
        sample_correct: Weight each sampled class by 1/sample in the softmax, to estimate the softmax over all classes.
        sample_seed: Seed of the draw.
        **options: Options of every head: see `Head`.

    Raises:
        ValueError: If an argument is out of range or two arguments contradict each other.
        TypeError: If a boolean option is not a boolean, or gamma is a parameter.

    Examples:
        >>> import torch, grassy
        >>> head = grassy.GrassmannHead(64, 10, k=4)
        >>> head.weight.shape
        torch.Size([10, 4, 64])
        >>> head(torch.randn(32, 64)).shape
        torch.Size([32, 10])
    """

    subspace_names: tuple[str, ...] = ("weight",)
    logits_use_target = False
    logits_are_nonnegative = True
    logit_options = ("gamma", "normalize")
    gamma: float | nn.Parameter
    _looked_at: tuple[int, int] | None = None  # id and version counter of the weight
    _error: float | None = None
    draws: Tensor

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        k: int | Sequence[int] = 8,
        gamma: float | Literal["auto"] = 25.0,
        normalize: bool = True,
        learnable_gamma: bool = False,
        riemannian: bool = True,
        fuse_loss: bool = False,
        sample: float = 1.0,
        sample_correct: bool = False,
        sample_seed: int = 0,
        **options: Unpack[HeadOptions],
    ) -> None:
        super().__init__(in_features, num_classes, **options)
        check_booleans(normalize=normalize, learnable_gamma=learnable_gamma, riemannian=riemannian, fuse_loss=fuse_loss)
        check_booleans(sample_correct=sample_correct)
        if not 0 < number(sample) <= 1:
            raise ValueError(f"sample must lie in (0, 1], the fraction of classes in an update, got {sample!r}")
        if sample < 1 and not riemannian:
            raise ValueError("sample needs riemannian=True: ordinary optimizers cannot update a subset of the classes")
        dims = _dims(k, num_classes)
        largest = max(dims) if isinstance(dims, list) else dims
        if largest > in_features:
            raise ValueError(f"k must lie between 1 and in_features = {in_features}, got {largest}")
        if largest == in_features > 1:
            warnings.warn(
                f"k = {largest} spans the whole feature space: such a class has the largest logit for every feature",
                stacklevel=2,
            )
        if isinstance(gamma, nn.Parameter):
            raise TypeError("gamma must be a number: to learn it, pass learnable_gamma=True as well")
        if isinstance(gamma, str) and gamma == "auto":
            # Without sample_correct, the softmax runs over the sampled classes only.
            seen = num_classes if sample_correct else max(1, round(num_classes * sample))
            automatic = automatic_gamma(seen, dims, in_features, normalize, self.batch_norm is not None)
            if automatic is None:
                raise ValueError(
                    "gamma='auto' needs features of a known length: normalize or standardize them, or pass gamma"
                )
            gamma = automatic
        if not 0 < number(gamma) < math.inf:
            raise ValueError(f"gamma must be positive or 'auto', got {gamma!r}")
        gamma = float(gamma)
        self.normalize = bool(normalize)
        self.fuse_loss = bool(fuse_loss)
        self.sample, self.sample_correct, self.sample_seed = float(sample), bool(sample_correct), int(sample_seed)
        if self.sample < 1:
            # Number of draws so far, so that a resumed run draws the same classes as an uninterrupted one.
            self.register_buffer("draws", torch.zeros((), dtype=torch.int64, device=options.get("device")))
        if not riemannian:
            self.subspace_names = ()
        self.gamma = empty_parameter(options) if learnable_gamma else gamma
        self.initial_gamma = gamma
        self._initial_dims = dims
        self.weight = empty_parameter(options, num_classes, largest, in_features)
        self.reset_parameters()
        self.register_load_state_dict_pre_hook(_return_to_manifold)  # type: ignore[no-untyped-call]

    def reset_parameters(self) -> None:
        """Draw uniformly random subspaces, the qf factors of Gaussian matrices."""
        super().reset_parameters()
        if self.sample < 1:
            self.draws.zero_()
        w = self.weight
        if isinstance(self.gamma, nn.Parameter):
            nn.init.constant_(self.gamma, self.initial_gamma)
        with torch.no_grad():
            drawn = geometry.random_subspace(*w.shape, dtype=w.dtype, device=w.device)
            w.copy_(self._without_absent_rows(drawn, 0))

    def draw_classes(self, name: str, first: int, count: int, generator: torch.Generator) -> Tensor:
        shape = (count, *self.weight.shape[1:])
        drawn = geometry.random_subspace(*shape, generator=generator, dtype=self.weight.dtype, device=generator.device)
        return self._without_absent_rows(drawn, first)

    def _without_absent_rows(self, drawn: Tensor, first: int) -> Tensor:
        """Zero the absent rows of the subspaces of the classes from `first` on, if dimensions differ."""
        if not isinstance(self._initial_dims, list):
            return drawn
        dims = torch.tensor(self._initial_dims[first : first + len(drawn)], device=drawn.device)
        present = torch.arange(drawn.shape[1], device=drawn.device) < dims.unsqueeze(-1)
        return drawn * present.unsqueeze(-1)

    def train(self, mode: bool = True) -> Self:
        """Switch the mode; warn at the end of training if an ordinary optimizer took the subspaces off the manifold.

        In that case the logits are not projection lengths, and loading may refuse the weights.
        """
        if self.training and not mode:
            self._look_at_weight()
        self._looked_at = None  # Lightning averages after this, through .data, which does not increase the version
        return super().train(mode)

    def forward(self, features: Tensor, target: Tensor | None = None) -> Tensor:
        # Not every averaged model passes through train(False), and some users never call eval(): check here too.
        if not (self.training and torch.is_grad_enabled()) and isinstance(features, Tensor):
            self._look_at_weight()
        return super().forward(features, target)

    def _look_at_weight(self) -> None:
        """Warn once per version of the weight if the subspaces are off the manifold."""
        if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None or not self.subspace_names:
            return
        known_kind = type(self.weight) is nn.Parameter or shards.is_sharded(self.weight)  # no view of FSDP's flat one
        weight = shards.local(self.weight.detach())
        if not known_kind or weight.ndim != 3 or weight.is_meta or not weight.shape[0]:
            return
        # An inference tensor has no version counter, and a CUDA graph cannot synchronise.
        if weight.is_inference() or (weight.is_cuda and torch.cuda.is_current_stream_capturing()):
            return
        now = id(self.weight), self.weight._version
        if now == self._looked_at:
            return
        error = float(geometry.orthonormality_error(weight[:LOOK_AT]))
        known, self._looked_at, self._error = self._error, now, error
        if not error <= max(WARN_ABOVE, 4 * torch.finfo(weight.dtype).eps) and error != known:
            warnings.warn(
                f"the rows of a GrassmannHead's weight are orthonormal only to {error:.2g}: {OFF_THE_MANIFOLD}",
                stacklevel=3,
            )

    @property
    def dims(self) -> Tensor:
        """The dimension k_i of each class that this process holds, (C,) unless sharded: its number of nonzero rows."""
        return geometry.present_rows(shards.local(self.weight.detach())).sum(-1)

    def rows(self, features: Tensor) -> Tensor:
        rows = kernels.unit(features) if self.normalize else features
        # All classes share a learnable gamma, so it multiplies the features and not the parameters of a class.
        return self.gamma * rows if isinstance(self.gamma, nn.Parameter) else rows

    def class_logits(self, rows: Tensor, target: Tensor | None, *params: Tensor) -> Tensor:
        gamma = 1.0 if isinstance(self.gamma, nn.Parameter) else self.gamma
        (weight,) = params
        return kernels.subspace_logits(rows, weight, gamma, normalize=False)

    def logits(self, features: Tensor, target: Tensor | None = None) -> Tensor:
        if self.is_sharded:
            return super().logits(features, target)
        return kernels.subspace_logits(features, self.weight, self.gamma, normalize=self.normalize)

    @property
    def skips_logits(self) -> bool:
        return self.is_sharded or self.samples or self.fuse_loss

    @property
    def takes_mixed_labels(self) -> bool:  # type: ignore[override]
        return super().takes_mixed_labels or self.samples

    def cross_entropy(self, features: Tensor, target: Tensor | MixedLabels, **options: Any) -> Tensor:
        if not (self.is_sharded or self.samples):
            assert isinstance(target, Tensor)
            return kernels.subspace_cross_entropy(
                features, self.weight, target, self.gamma, normalize=self.normalize, **options
            )
        (weight,), shard = self.class_parameters(), self.shard
        gamma = 1.0 if isinstance(self.gamma, nn.Parameter) else self.gamma
        sampling = self._next_sampling() if self.samples else None
        return kernels.sharded_subspace_cross_entropy(
            self._sent(features), target, weight, gamma, shard, sampling=sampling, **options
        )

    @property
    def samples(self) -> bool:
        """Whether the loss uses a sample of the classes: `sample` is below 1 and the head is in training mode."""
        return self.sample < 1 and self.training

    def _next_sampling(self) -> kernels.Sampling:
        several = torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
        if several and not self.is_sharded:
            raise ValueError(
                f"sample={self.sample} in several processes needs the classes sharded over them: call "
                "grassy.distributed.shard_head(model, mesh) first"
            )
        if not torch.compiler.is_compiling() and recomputed(self) is not None:
            raise ValueError(
                f"sample={self.sample} draws other classes when a checkpoint recomputes the head in the backward: "
                "leave the head out of torch.utils.checkpoint"
            )
        update = self.draws.clone()
        self.draws += 1
        return kernels.Sampling(self.sample, self.sample_seed, update, self.sample_correct, self.weight)

    def has_own_loss(self) -> bool:
        return self.fuse_loss or self.sample < 1 or super().has_own_loss()

    def outlier_score(self, features: Tensor) -> Tensor:
        """Return the fraction of each feature's energy outside the nearest class subspace: 1 − max_c ‖W_c x‖²/‖x‖².

        Args:
            features: Features (..., N).

        Returns:
            Scores (...) in [0, 1]. 0 means that the feature lies in a class subspace. A zero feature has score 1.
        """
        with torch.no_grad(), evaluating(self):
            unit = kernels.unit(self.prepare(features))
            rows = unit.to(kernels.product_dtype(unit, self.weight)) if self.is_sharded else unit
            inside, _ = kernels.sharded_top(rows, self._lengths_inside, self.class_parameters(), self.shard, 1)
        return (1 - inside.squeeze(-1).square()).clamp(0, 1)

    def _lengths_inside(self, rows: Tensor, _: None, weight: Tensor) -> Tensor:
        """Return the lengths (..., c) of the projections of unit features (..., N) onto the spans of c classes."""
        weight = weight if self.subspace_names else _with_the_same_projection(weight)
        return kernels.subspace_logits(rows, weight, 1.0, normalize=False)

    @property
    def options(self) -> dict[str, Any]:
        # Reading the dimensions of a sharded weight would need communication.
        known = self.weight.is_meta or shards.is_dtensor(self.weight)
        dims = self._initial_dims if known else self.dims.tolist()
        dims = [dims] if isinstance(dims, int) else dims
        rows = self.weight.shape[1]  # in a loaded weight, no class may use all of them
        learnable = isinstance(self.gamma, nn.Parameter)
        names = ("sample", "sample_correct", "sample_seed") if self.sample < 1 else ()
        sampling = {name: getattr(self, name) for name in names}
        return {
            "k": rows if max(dims) < rows or len(set(dims)) == 1 else dims,
            "gamma": self.initial_gamma if learnable else self.gamma,
            "normalize": self.normalize,
            "learnable_gamma": learnable,
            "riemannian": bool(self.subspace_names),
            "fuse_loss": self.fuse_loss,
            **sampling,
            **super().options,
        }


def _dims(k: Any, num_classes: int) -> int | list[int]:
    """Return the common dimension, or a list with one per class. 100 million equal ones would take 800 MB."""
    if not hasattr(k, "__len__") or isinstance(k, str) or getattr(k, "ndim", 1) == 0:
        return positive_integer("k", k)
    dims = [positive_integer("k", dim) for dim in k]
    if len(dims) != num_classes:
        raise ValueError(f"k must be one int or one for each of the {num_classes} classes, got {len(dims)} of them")
    return dims


def _with_the_same_projection(weight: Tensor) -> Tensor:
    """Return (W Wᵀ)^(-1/2) W, so that ‖W x‖ is the length of the projection onto the span of the given rows.

    The rows of an ordinary parameter may have any length or be linearly dependent. Directions with a negligible
    eigenvalue are dropped.
    """
    # Other devices may lack float64 or eigh.
    exact = (weight if weight.device.type in ("cpu", "cuda") else weight.cpu()).double()
    values, vectors = torch.linalg.eigh(exact @ exact.mT)
    kept = values > 1e-12 * values[..., -1:]
    scales = values.where(kept, 1).rsqrt() * kept
    return ((vectors * scales.unsqueeze(-2)) @ vectors.mT @ exact).to(weight)


def _return_to_manifold(head: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Orthonormalise a loaded weight that is slightly off the manifold; raise ValueError if it is far off."""
    key = prefix + "weight"
    weight = state_dict.get(key)
    if not isinstance(weight, Tensor) or weight.ndim != 3 or weight.is_meta:
        return  # load_state_dict reports a missing key or a wrong shape
    if not head.subspace_names:
        return  # an ordinary parameter
    given, weight = weight, shards.local(weight)  # the local part of a sharded weight
    empty = (~geometry.present_rows(weight).any(-1)).nonzero().flatten()
    # All processes must raise together, or those without an empty class would hang in the next reduction.
    own = int(empty[0]) + shards.first_row(given) if len(empty) else len(given)
    first = -int(shards.largest_of_all(torch.tensor(-own, device=weight.device), given))
    if first < len(given):
        others = 0 if shards.is_dtensor(given) else len(empty) - 1  # a process knows only its own classes
        raise ValueError(
            f"{key} is not a weight of subspaces: class {first} has no direction, its rows are zero"
            + (f" (and {others} more classes)" if others else "")
        )
    here = geometry.orthonormality_error(weight) if weight.shape[0] else weight.new_zeros(())
    error = float(shards.largest_of_all(here.detach(), given))  # so that all processes agree
    # Rounding to half precision alone causes this error.
    tolerance = max(REPAIR_ABOVE, 4 * torch.finfo(weight.dtype).eps)
    if not error <= REFUSE_ABOVE:
        raise ValueError(
            f"{key} is not a weight of subspaces: its rows are orthonormal only to {error:.2g}, the limit is "
            f"{REFUSE_ABOVE}; {OFF_THE_MANIFOLD}"
        )
    to_higher_precision = torch.finfo(weight.dtype).eps > torch.finfo(head.weight.dtype).eps  # type: ignore[arg-type]
    if error > tolerance or (to_higher_precision and error > REPAIR_ABOVE):
        warnings.warn(f"{key} was orthonormal only to {error:.2g}; it has been re-orthonormalised", stacklevel=2)
        repaired = geometry.orthonormalize(weight.to(head.weight.dtype))  # type: ignore[arg-type]
        state_dict[key] = shards.with_local(given, repaired)
