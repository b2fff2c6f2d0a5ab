"""One subspace a class: the Grassmann class representation (paper, Section 4.1)."""

import math
import warnings
from collections.abc import Sequence
from typing import Any, Literal, Self, Unpack

import torch
from torch import Tensor, nn

from grassy import geometry, kernels, shards
from grassy.heads.base import HeadOptions, check_booleans, empty_parameter, number, positive_integer
from grassy.heads.cross_entropy import cross_entropy_options, one_loss
from grassy.heads.gamma import automatic_gamma
from grassy.heads.per_class import PerClassHead
from grassy.heads.request import Criterion, LossRequest

REPAIR_ABOVE = 1e-5
WARN_ABOVE = 1e-3
REFUSE_ABOVE = 0.1
OFF_THE_MANIFOLD = (
    "was it trained, or averaged, as an ordinary weight? Use grassy.make_optimizer and grassy.AveragedModel"
)
#: Classes that are looked at when weights are used after a change: an optimizer treats all alike.
LOOK_AT = 1000


class GrassmannHead(PerClassHead):
    """l_c = γ‖W_c x‖/‖x‖: how long the projection of the feature onto the subspace of class c is.

    `weight` (C, K, N) holds an orthonormal basis of each class subspace as rows. Train it with `RiemannianSGD` (which
    `make_optimizer` does); an ordinary optimizer would take it off the manifold.

    k: dimension of the subspaces, one for all or one for each class. Classes of a smaller dimension than the largest
        have zero rows, which stay zero.
    gamma: the length that features are scaled to, 25 in the paper for 1,000 classes. "auto" is `recommended_gamma`,
        divided by √N for features that are standardised and not normalised, whose length is about that.
    learnable_gamma: make gamma a parameter, starting from the given value.
    normalize: False keeps the length of the features and multiplies by gamma (an ablation of the paper's).
    riemannian: False makes the weight an ordinary parameter, which loses its orthonormality (another ablation).
    fuse_loss: in training, compute the cross-entropy of `classification_loss` in the head, without the logits, and with
        few of the B x C x K coordinates at a time. For very many classes, where these take more memory than the weight.
        It changes nothing for other criteria, for logits, and in models with several heads.
    sample: in training, let only this share of the classes take part in an update, and all that are labels in it: for
        more than ten million classes. The draw depends on the seed, the update and the class alone. Needs
        `classification_loss` with cross-entropy, `make_optimizer`, and in several processes `distributed.shard_head`.
    sample_correct: let each class that was drawn count 1/sample times in the softmax, as if all had taken part.
    sample_seed: another seed draws other classes.
    """

    subspace_names: tuple[str, ...] = ("weight",)
    logits_use_target = False
    logits_are_nonnegative = True
    logit_options = ("gamma", "normalize")
    gamma: float | nn.Parameter
    _looked_at: tuple[int, int] | None = None  # the weight, and how often it had changed
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
            raise ValueError(f"sample must lie in (0, 1], the share of classes in an update, got {sample!r}")
        if sample < 1 and not riemannian:
            raise ValueError("sample needs riemannian=True: ordinary optimizers cannot update some classes alone")
        dims = _dims(k, num_classes)
        largest = max(dims) if isinstance(dims, list) else dims
        if largest > in_features:
            raise ValueError(f"k must lie between 1 and in_features = {in_features}, got {largest}")
        if largest == in_features > 1:
            warnings.warn(
                f"k = {largest} is all of the feature space: such a class has the largest logit for every feature",
                stacklevel=2,
            )
        if isinstance(gamma, nn.Parameter):
            raise TypeError("gamma must be a number: for one that is learned give learnable_gamma=True as well")
        if isinstance(gamma, str) and gamma == "auto":
            # A softmax that is not corrected has fewer classes.
            seen = num_classes if sample_correct else max(1, round(num_classes * sample))
            automatic = automatic_gamma(seen, dims, in_features, normalize, self.batch_norm is not None)
            if automatic is None:
                raise ValueError("gamma='auto' is for features of a known length: with normalize=False give a number")
            gamma = automatic
        if not 0 < number(gamma) < math.inf:
            raise ValueError(f"gamma must be positive or 'auto', got {gamma!r}")
        gamma = float(gamma)
        self.normalize = bool(normalize)
        self.fuse_loss = bool(fuse_loss)
        self.sample, self.sample_correct, self.sample_seed = float(sample), bool(sample_correct), int(sample_seed)
        if self.sample < 1:
            # How many samples were drawn, so that a run that goes on draws what it would have drawn.
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
        """Uniformly random subspaces: the qf factor of a Gaussian matrix."""
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
        """Subspaces of the classes from `first` on with zero rows, if some have a smaller dimension than others."""
        if not isinstance(self._initial_dims, list):
            return drawn
        dims = torch.tensor(self._initial_dims[first : first + len(drawn)], device=drawn.device)
        present = torch.arange(drawn.shape[1], device=drawn.device) < dims.unsqueeze(-1)
        return drawn * present.unsqueeze(-1)

    def train(self, mode: bool = True) -> Self:
        """As any module's; warns at the end of training if an ordinary optimizer took the subspaces off the manifold.

        Logits are no projections then, and such weights may not be loaded.
        """
        if self.training and not mode:
            self._look_at_weight()
        self._looked_at = None  # Lightning's averages come after this, and by .data, which counts no changes
        return super().train(mode)

    def forward(self, features: Tensor, target: Tensor | None = None) -> Tensor:
        # An average is never in training, and not everybody calls eval(): so also when weights are first used.
        if not (self.training and torch.is_grad_enabled()) and isinstance(features, Tensor):
            self._look_at_weight()
        return super().forward(features, target)

    def _look_at_weight(self) -> None:
        """Warn if the subspaces are off the manifold, once for each weight."""
        if torch.compiler.is_compiling() or not self.subspace_names:
            return
        known_kind = type(self.weight) is nn.Parameter or shards.is_sharded(self.weight)  # not a view of a flat one
        weight = shards.local(self.weight.detach())
        if not known_kind or weight.ndim != 3 or weight.is_meta or not weight.shape[0]:
            return
        # A tensor of inference mode does not count its changes; in a CUDA graph nobody may wait for a number.
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
        """The dimension k_i of each class (C,), or of each that this process holds, read off the weight."""
        return geometry.present_rows(shards.local(self.weight.detach())).sum(-1)

    def rows(self, features: Tensor) -> Tensor:
        rows = kernels.unit(features) if self.normalize else features
        # A gamma that is learned belongs to all classes, so it is applied to what they see.
        return self.gamma * rows if isinstance(self.gamma, nn.Parameter) else rows

    def class_logits(self, rows: Tensor, target: Tensor | None, *params: Tensor) -> Tensor:
        gamma = 1.0 if isinstance(self.gamma, nn.Parameter) else self.gamma
        (weight,) = params
        return kernels.subspace_logits(rows, weight, gamma, normalize=False)

    def logits(self, features: Tensor, target: Tensor | None = None) -> Tensor:
        if self.is_sharded:
            return super().logits(features, target)
        return kernels.subspace_logits(features, self.weight, self.gamma, normalize=self.normalize)

    def loss(self, features: Tensor, target: Tensor, criterion: Criterion) -> Tensor:
        """The criterion on the logits; if it is cross-entropy and `fuse_loss` is set, without the logits."""
        options = cross_entropy_options(criterion, target) if self.fuse_loss or self.samples else None
        if self.samples and options is not None:
            return self.sharded_loss(self.prepare(features, target, criterion), target, **options)
        if self.is_sharded or not one_loss(options):
            return super().loss(features, target, criterion)
        features = self.prepare(features, target, criterion)
        return kernels.subspace_cross_entropy(
            features, self.weight, target, self.gamma, normalize=self.normalize, **(options or {})
        )

    def sharded_loss(self, features: Tensor, target: Tensor, **options: Any) -> Tensor:
        (weight,), shard = self.class_parameters(), self.shard
        gamma = 1.0 if isinstance(self.gamma, nn.Parameter) else self.gamma
        sampling = self._next_sampling() if self.samples else None
        return kernels.sharded_subspace_cross_entropy(
            self._sent(features), target, weight, gamma, shard, sampling=sampling, **options
        )

    @property
    def samples(self) -> bool:
        """Whether a loss is that of a sample of the classes."""
        return self.sample < 1 and self.training

    def _next_sampling(self) -> kernels.Sampling:
        several = torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
        if several and not self.is_sharded:
            raise ValueError(
                f"sample={self.sample} in several processes needs the classes divided over them: call "
                "grassy.distributed.shard_head(model, mesh) first"
            )
        update = self.draws.clone()
        self.draws += 1
        return kernels.Sampling(self.sample, self.sample_seed, update, self.sample_correct, self.weight)

    def has_own_loss(self) -> bool:
        return self.fuse_loss or self.is_sharded or self.sample < 1 or type(self).loss is not GrassmannHead.loss

    def answers_with_loss(self, request: LossRequest) -> bool:
        if type(self).loss is not GrassmannHead.loss:
            return self.training
        # The fused loss must be that of the logits, which a model may average if it has several heads.
        same = request.alone and one_loss(cross_entropy_options(request.criterion, request.target))
        return same and (self.is_sharded or self.samples or (self.training and self.fuse_loss))

    def outlier_score(self, features: Tensor) -> Tensor:
        """The part of a feature's energy that no class subspace holds, (...) in [0, 1]: 1 − max_c ‖W_c x‖²/‖x‖².

        0 means that the feature lies in the subspace of a class; a zero feature has 1.
        """
        with torch.no_grad(), self.evaluating():
            unit = kernels.unit(self.prepare(features))
            rows = unit.to(kernels.product_dtype(unit, self.weight)) if self.is_sharded else unit
            inside, _ = kernels.sharded_top(rows, self._lengths_inside, self.class_parameters(), self.shard, 1)
        return (1 - inside.squeeze(-1).square()).clamp(0, 1)

    def _lengths_inside(self, rows: Tensor, _: None, weight: Tensor) -> Tensor:
        """The lengths (..., c) of the projections of unit features (..., N) onto the spans of some classes."""
        weight = weight if self.subspace_names else _with_the_same_projection(weight)
        return kernels.subspace_logits(rows, weight, 1.0, normalize=False)

    @property
    def options(self) -> dict[str, Any]:
        # Of a sharded weight, asking all processes would make them wait for each other.
        known = self.weight.is_meta or shards.is_distributed(self.weight)
        dims = self._initial_dims if known else self.dims.tolist()
        dims = [dims] if isinstance(dims, int) else dims
        rows = self.weight.shape[1]  # of a weight that was loaded, no class may have all of them
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
    """The dimension of all classes, or a list of those of each: 100 million equal ones would fill 800 MB."""
    if not hasattr(k, "__len__") or isinstance(k, str) or getattr(k, "ndim", 1) == 0:
        return positive_integer("k", k)
    dims = [positive_integer("k", dim) for dim in k]
    if len(dims) != num_classes:
        raise ValueError(f"k must be one int or one for each of the {num_classes} classes, got {len(dims)} of them")
    return dims


def _with_the_same_projection(weight: Tensor) -> Tensor:
    """Rows for which ‖W x‖ is the length of the projection onto the span of given ones, which may be of any length, or
    even linearly dependent, as those of an ordinary parameter: (W Wᵀ)^(-1/2) W, without directions lost in rounding.
    """
    exact = (weight if weight.device.type in ("cpu", "cuda") else weight.cpu()).double()  # not all others know it
    values, vectors = torch.linalg.eigh(exact @ exact.mT)
    kept = values > 1e-12 * values[..., -1:]
    scales = values.where(kept, 1).rsqrt() * kept
    return ((vectors * scales.unsqueeze(-2)) @ vectors.mT @ exact).to(weight)


def _return_to_manifold(head: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Repair a loaded weight that is slightly off the manifold, and refuse one that is far off."""
    key = prefix + "weight"
    weight = state_dict.get(key)
    if not isinstance(weight, Tensor) or weight.ndim != 3 or weight.is_meta:
        return  # a missing key or a wrong shape: load_state_dict has its own message
    if not head.subspace_names:
        return  # not meant to be on the manifold
    given, weight = weight, shards.local(weight)  # of a weight that is divided over processes, what is here
    empty = (~geometry.present_rows(weight).any(-1)).nonzero().flatten()
    # Processes raise together, or those without an empty class would wait for the others in the next reduction.
    own = int(empty[0]) + shards.first_row(given) if len(empty) else len(given)
    first = -int(shards.largest_of_all(torch.tensor(-own, device=weight.device), given))
    if first < len(given):
        others = 0 if shards.is_distributed(given) else len(empty) - 1  # a process knows its own alone
        raise ValueError(
            f"{key} is not a weight of subspaces: class {first} has no direction, its rows are zero"
            + (f", and so have {others} others" if others else "")
        )
    here = geometry.orthonormality_error(weight) if weight.shape[0] else weight.new_zeros(())
    error = float(shards.largest_of_all(here.detach(), given))  # so that all processes agree
    # Rounding to half precision alone takes a weight this far.
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
