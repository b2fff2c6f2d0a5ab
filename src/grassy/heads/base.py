"""The contract that every head follows: features in, logits and a loss out."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypedDict

import torch
import torch.fx
from torch import Tensor, nn

from grassy.arguments import check_booleans, number, positive_integer
from grassy.criteria import Criterion, ignored_label, with_classes_last
from grassy.heads.loss_request import Inbox, LossRequest, recomputed
from grassy.heads.saved_options import KEY, decode, difference, encode
from grassy.heads.standardize import standardization, standardized
from grassy.kernels import autocasts


class HeadOptions(TypedDict, total=False):
    """Keyword options that every head accepts. `Head` documents them."""

    dropout: float
    standardize: bool
    device: torch.device | str | None
    dtype: torch.dtype | None


class Head(nn.Module):
    """Base class of all heads: maps features (..., N) to logits (..., C).

    A subclass defines `logits`, which may use the target in training, as margin heads do. It also defines `loss` if its
    training loss is more than a criterion on its logits.

    Args:
        in_features: Feature dimension N.
        num_classes: Number of classes C.
        dropout: Probability of zeroing an element of a feature in training, in [0, 1).
        standardize: Standardise each feature dimension to mean 0 and variance 1 first, by a batch normalisation without
            learnable parameters.
        device: Device of the parameters.
        dtype: Dtype of the parameters.

    Raises:
        ValueError: If an argument is out of range.
        TypeError: If a boolean option is not a boolean.
    """

    #: Names of the parameters that hold subspaces. Riemannian SGD trains them.
    subspace_names: tuple[str, ...] = ()
    #: Whether the target may hold probabilities (B, C), as produced by mixup and cutmix.
    takes_soft_targets = True
    #: Whether the target of its loss may be `MixedLabels`. Other heads get probabilities instead.
    takes_mixed_labels = False
    #: Whether `logits` uses the target, as in margin heads.
    logits_use_target = True
    #: Whether all logits are >= 0, which makes binary cross-entropy unsuitable.
    logits_are_nonnegative = False
    #: Names of the options that change the logits in evaluation for equal weights. The state_dict includes them.
    logit_options: tuple[str, ...] = ()

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        dropout: float = 0.0,
        standardize: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        in_features = positive_integer("in_features", in_features)
        num_classes = positive_integer("num_classes", num_classes)
        if not 0 <= number(dropout) < 1:
            raise ValueError(f"dropout must lie in [0, 1), got {dropout!r}")
        self.in_features = in_features
        self.num_classes = num_classes
        self.dropout = float(dropout)
        check_booleans(standardize=standardize)
        self.batch_norm: nn.Module | None = standardization(in_features, device, dtype) if standardize else None
        self.inbox = Inbox()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        # An inherited flag describes the logits of the parent.
        if "logits" in vars(cls) and "logits_use_target" not in vars(cls):
            cls.logits_use_target = True

    def forward(self, features: Tensor, target: Tensor | None = None) -> Tensor:
        """Return the logits, or the loss if `classification_loss` requests it from a head with a loss of its own.

        Args:
            features: Features (..., N), floating point.
            target: Class indices (...), or probabilities (..., C) for heads that accept them. Margin heads need the
                target in training.

        Returns:
            Logits (..., C). Inside `classification_loss`, a head with a loss of its own returns a scalar loss.

        Raises:
            TypeError: If the features are not floating point.
            ValueError: If the features have the wrong width or the target is invalid.
        """
        if (traced := as_one_operation(self, features, target)) is not None:
            return traced
        request = self.loss_request if target is None else None
        if request is not None:
            if self.answers_with_loss(request):
                return self.loss(features, request.target, request.criterion)
            return self.logits(self.prepare(features), request.target)
        return self.logits(self.prepare(features, target), target)

    @property
    def loss_request(self) -> LossRequest | None:
        """The pending request of `classification_loss` in this thread, or that of the forward being recomputed."""
        if self.inbox.request is not None or torch.compiler.is_compiling():
            return self.inbox.request
        return recomputed(self)

    def needs(self, request: LossRequest) -> bool:
        """Whether the result of `forward` depends on the request."""
        return self.logits_use_target or self.answers_with_loss(request)

    def reset_parameters(self) -> None:
        """Initialise all parameters and running statistics anew."""
        if self.batch_norm is not None:
            self.batch_norm.reset_parameters()  # type: ignore[operator]

    @property
    def out_features(self) -> int:
        """The number of classes C, under the name that `nn.Linear` uses."""
        return self.num_classes

    def logits(self, features: Tensor, target: Tensor | None = None) -> Tensor:
        """Return the logits (..., C) of prepared features (..., N).

        Args:
            features: Features (..., N) as returned by `prepare`.
            target: Class indices (...), or None.
        """
        raise NotImplementedError(f"{type(self).__name__} must define logits(features, target)")

    def loss(self, features: Tensor, target: Tensor, criterion: Criterion) -> Tensor:
        """Return the loss: by default the criterion applied to the logits.

        Args:
            features: Features (..., N).
            target: Class indices (...), or probabilities (..., C).
            criterion: A callable `criterion(logits, target)`.

        Returns:
            What the criterion returns, usually a scalar.
        """
        return with_classes_last(criterion, self.logits(self.prepare(features, target, criterion), target), target)

    def has_own_loss(self) -> bool:
        """Whether the head can return a loss in place of logits."""
        return type(self).loss is not Head.loss

    def answers_with_loss(self, request: LossRequest) -> bool:
        """Whether `forward` returns a loss for this request. In evaluation it returns logits by default."""
        return self.training and self.has_own_loss()

    @torch.no_grad()
    def scores(self, features: Tensor) -> Tensor:
        """Return the evaluation logits (..., C), without dropout or margin, in training mode too.

        Args:
            features: Features (..., N).
        """
        with evaluating(self):
            return self.logits(self.prepare(features))

    def outlier_score(self, features: Tensor) -> Tensor:
        """Return how far each feature is from all classes, in [0, 1]: 1 minus the largest softmax probability.

        Args:
            features: Features (..., N).

        Returns:
            Scores (...). A high score suggests an outlier.
        """
        return 1 - self.scores(features).softmax(-1).amax(-1)

    def prepare(self, features: Tensor, target: Tensor | None = None, criterion: Criterion | None = None) -> Tensor:
        """Check features and target, standardise the features if `standardize` is set, and apply dropout.

        Dropout comes last because it changes variances in training only. The running statistics must also fit
        evaluation.
        """
        self.check_features(features)
        if target is not None:
            self.check_target(target, criterion)
        if self.batch_norm is not None:
            features = standardized(self.batch_norm, features)
        return nn.functional.dropout(features, self.dropout, self.training)

    def check_features(self, features: Tensor) -> None:
        """Raise TypeError or ValueError for features with the wrong dtype or width, or for a head without values."""
        weight = getattr(self, "weight", None)
        if isinstance(weight, Tensor) and weight.is_meta and not features.is_meta:  # torch would compute with garbage
            raise ValueError(
                f"this {type(self).__name__} is on the meta device, without values: call grassy.distributed.shard_head"
                "(model, mesh) first, or create the head without device='meta'"
            )
        if not features.is_floating_point():
            raise TypeError(f"features must be floating point, got {features.dtype}")
        if features.shape[-1:] != (self.in_features,):
            images = features.ndim == 4 and features.shape[1] in (1, 3)
            hint = ". Are these images? replace_head changes the model in place and returns the head" if images else ""
            raise ValueError(
                f"{type(self).__name__} takes features of width {self.in_features}, got {tuple(features.shape)}{hint}"
            )

    def check_target(self, target: Tensor, criterion: Criterion | None = None) -> None:
        """Raise ValueError for labels out of range and for soft targets that are malformed or unsupported."""
        if target.is_floating_point():
            if not self.takes_soft_targets:
                raise ValueError(
                    f"{type(self).__name__} needs class indices for its margin, not soft targets: train it without "
                    "mixup and cutmix"
                )
            if target.ndim < 2 or target.shape[-1] != self.num_classes:
                raise ValueError(
                    f"soft targets must have shape (B, {self.num_classes}), got {tuple(target.shape)} in "
                    f"{target.dtype}; labels must be integers"
                )
        elif target.device.type == "cpu" and not torch.compiler.is_compiling():  # on a GPU this would synchronise
            labels = target.long()  # in uint8, ignore_index -100 would be 156
            wrong = labels[((labels < 0) | (labels >= self.num_classes)) & (labels != ignored_label(criterion))]
            if wrong.numel():
                raise ValueError(f"labels must lie between 0 and {self.num_classes - 1}, got {int(wrong[0])}")

    @property
    def options(self) -> dict[str, Any]:
        """The keyword options that rebuild this head, without device and dtype."""
        return {"dropout": self.dropout, "standardize": self.batch_norm is not None}

    def get_extra_state(self) -> Tensor:
        """Return the options that its logits depend on, encoded as a tensor: see `grassy.heads.saved_options`."""
        return encode(self._logit_values())

    def set_extra_state(self, state: Any) -> None:
        """Check that the saved options give the same logits in this head. Raises ValueError if not."""
        if wrong := difference(decode(state), self._logit_values()):
            raise ValueError(
                f"these weights belong to a head with different options, so the logits would differ: {wrong}. Build "
                f"the head with the same options, or remove {KEY!r} from the state_dict"
            )

    def _logit_values(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in self.logit_options}
        fixed = {name: value for name, value in values.items() if not isinstance(value, nn.Parameter)}
        # A user may assign a NumPy or tensor scalar, which JSON cannot represent.
        fixed = {name: value.item() if hasattr(value, "item") else value for name, value in fixed.items()}
        # For standardised features the value is the ε that batch normalisation adds to the variance.
        return {"head": type(self).__name__, "standardize": getattr(self.batch_norm, "eps", False), **fixed}

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        key = prefix + KEY
        if key in state_dict and _has_extra_state(self):
            self.set_extra_state(state_dict[key])  # raises before any weight is copied
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        if key in missing_keys:  # an older file, whose state holds no options
            missing_keys.remove(key)

    def extra_repr(self) -> str:
        shown = {"in_features": self.in_features, "num_classes": self.num_classes, **self.options}
        many = {name: f"{min(value)}..{max(value)}" for name, value in shown.items() if isinstance(value, list)}
        return ", ".join(f"{name}={value}" for name, value in {**shown, **many}.items() if value)


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Context manager that puts a module and its submodules into evaluation mode, and restores their modes.

    It writes nothing to a module that is in evaluation mode already, so several threads can evaluate such a module.
    """
    training = [each for each in module.modules() if each.training]
    for each in training:
        each.training = False
    try:
        yield
    finally:
        for each in training:
            each.training = True


def _has_extra_state(head: Head) -> bool:
    return type(head).get_extra_state is not nn.Module.get_extra_state


def as_one_operation(module: nn.Module, *inputs: Any) -> Any:
    """Record the module as one call while torch.fx traces a model that contains it; return None otherwise.

    torch.fx cannot trace the control flow inside the module.
    """
    given = tuple(each for each in inputs if each is not None)
    if not isinstance(given[0], torch.fx.Proxy):
        return None
    tracer: Any = given[0].tracer
    path = tracer.path_of_module(module)
    return tracer.create_proxy("call_module", path, given, {}) if path else None  # no path: it is the whole model


def empty_parameter(options: HeadOptions, *shape: int) -> nn.Parameter:
    """Create an uninitialised parameter with the device and dtype of the options. `reset_parameters` fills it."""
    return nn.Parameter(torch.empty(shape, device=options.get("device"), dtype=options.get("dtype")))


def init_like_linear(weight: Tensor) -> None:
    """Initialise a (..., out, in) weight as `nn.Linear` does: uniform in [-1/√in, 1/√in]."""
    bound = weight.shape[-1] ** -0.5
    with torch.no_grad():
        weight.uniform_(-bound, bound)


def drawn_like_linear(rows: int, width: int, generator: torch.Generator) -> Tensor:
    """Return a (rows, width) weight with the initialisation of `nn.Linear`, on the device of the generator."""
    return (2 * torch.rand(rows, width, generator=generator, device=generator.device) - 1) * width**-0.5


def linear(features: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Apply `nn.functional.linear`, casting features to the dtype of the weight unless autocast does."""
    if not autocasts(features):
        features = features.to(weight.dtype)
    return nn.functional.linear(features, weight, bias)


def heads_of(model: nn.Module) -> list[Head]:
    """Return all heads of a model, in the order of `model.modules()`.

    Args:
        model: Any module.
    """
    return [module for module in model.modules() if isinstance(module, Head)]


def check_labels_of_a_margin(target: Tensor, logits: Tensor) -> None:
    """Raise ValueError unless there is one label (...) for each row of the logits (..., C)."""
    if target.shape != logits.shape[:-1]:
        raise ValueError(
            f"target must have shape {tuple(logits.shape[:-1])}, one label per feature, got {tuple(target.shape)}: "
            "a model that classifies every token and then chooses one needs a head without a margin"
        )
