"""The contract of a head: features in, logits out, and a loss."""

import functools
import math
import operator
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypedDict

import torch
import torch.fx
from torch import Tensor, nn

from grassy.heads.request import Criterion, Inbox, LossRequest, recomputed
from grassy.heads.standardize import standardization, standardized
from grassy.heads.state import KEY, decode, difference, encode
from grassy.kernels import autocasts


class HeadOptions(TypedDict, total=False):
    """Options that all heads have; `Head` says what they mean."""

    dropout: float
    standardize: bool
    device: torch.device | str | None
    dtype: torch.dtype | None


class Head(nn.Module):
    """Maps features (..., N) to logits (..., C).

    A new head defines `logits`. It may use the target, as margin heads do in training. If its training loss is more
    than a criterion on its logits, it defines `loss` as well.

    dropout: probability of dropping a feature in training.
    standardize: give each of the N features mean 0 and variance 1 first, by a batch normalisation without parameters.
    """

    #: Names of the parameters that are subspaces, to be trained by Riemannian SGD.
    subspace_names: tuple[str, ...] = ()
    #: Whether the target may be probabilities (B, C), as mixup and cutmix give.
    takes_soft_targets = True
    #: Whether `logits` looks at the target, as margin heads do.
    logits_use_target = True
    #: Whether no logit can be negative, which binary cross-entropy cannot work with.
    logits_are_nonnegative = False
    #: Names of the options that change logits in evaluation for the same weights. They are part of the state.
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

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if "inbox" not in vars(self):  # a module that an earlier version pickled
            vars(self).pop("loss_request", None)
            self.inbox = Inbox()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "logits" in vars(cls) and "logits_use_target" not in vars(cls):  # what a parent said is of its own logits
            cls.logits_use_target = True

    def forward(self, features: Tensor, target: Tensor | None = None) -> Tensor:
        """Logits; or the loss, if `classification_loss` asked a head that has one of its own for it."""
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
        """What `classification_loss` asks of this head, in this thread, or asked in the forward that is repeated."""
        if self.inbox.request is not None or torch.compiler.is_compiling():
            return self.inbox.request
        return recomputed(self)

    def needs(self, request: LossRequest) -> bool:
        """Whether its forward depends on the request."""
        return self.logits_use_target or self.answers_with_loss(request)

    def reset_parameters(self) -> None:
        """Start anew. A head with weights of its own fills them, too."""
        if self.batch_norm is not None:
            self.batch_norm.reset_parameters()  # type: ignore[operator]

    @property
    def out_features(self) -> int:
        """The number of classes, under the name that `nn.Linear` has for it."""
        return self.num_classes

    def logits(self, features: Tensor, target: Tensor | None = None) -> Tensor:
        """Logits (..., C) of prepared features (..., N). `target` is None, or holds class indices (...)."""
        raise NotImplementedError(f"{type(self).__name__} must define logits(features, target)")

    def loss(self, features: Tensor, target: Tensor, criterion: Criterion) -> Tensor:
        """The training loss: the criterion on the logits, unless the representation needs more."""
        return with_classes_last(criterion, self.logits(self.prepare(features, target, criterion), target), target)

    def has_own_loss(self) -> bool:
        """Whether it may give its loss where a model expects logits."""
        return type(self).loss is not Head.loss

    def answers_with_loss(self, request: LossRequest) -> bool:
        """Whether it does so now. In evaluation the loss is the criterion on plain logits, whatever becomes of them."""
        return self.training and self.has_own_loss()

    @torch.no_grad()
    def scores(self, features: Tensor) -> Tensor:
        """What evaluation ranks classes by, (..., C): logits without dropout or margin, whatever the mode."""
        with self.evaluating():
            return self.logits(self.prepare(features))

    def outlier_score(self, features: Tensor) -> Tensor:
        """How little a feature looks like any class, (...) in [0, 1]: here one minus the largest softmax."""
        return 1 - self.scores(features).softmax(-1).amax(-1)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Within this the head is in evaluation mode, its statistics too; afterwards in whatever mode each was."""
        modes = [(module, module.training) for module in self.modules()]
        for module, _ in modes:
            module.training = False
        try:
            yield
        finally:
            for module, training in modes:
                module.training = training

    def prepare(self, features: Tensor, target: Tensor | None = None, criterion: Criterion | None = None) -> Tensor:
        """Check features and target, standardise the features if asked to, and apply dropout.

        In this order: dropout changes variances in training alone, and running statistics must hold in evaluation too.
        """
        self.check_features(features)
        if target is not None:
            self.check_target(target, criterion)
        if self.batch_norm is not None:
            features = standardized(self.batch_norm, features)
        return nn.functional.dropout(features, self.dropout, self.training)

    def check_features(self, features: Tensor) -> None:
        """Raise a TypeError or ValueError for features of the wrong type or width."""
        if not features.is_floating_point():
            raise TypeError(f"features must be floating point, got {features.dtype}")
        if features.shape[-1:] != (self.in_features,):
            images = features.ndim == 4 and features.shape[1] in (1, 3)
            hint = ". Are these images? replace_head changes the model in place and returns the head" if images else ""
            raise ValueError(
                f"{type(self).__name__} takes features of width {self.in_features}, got {tuple(features.shape)}{hint}"
            )

    def check_target(self, target: Tensor, criterion: Criterion | None = None) -> None:
        """Raise a ValueError for labels out of range or soft targets of the wrong width, or of no use to this head."""
        keywords = getattr(criterion, "keywords", {})  # of a functools.partial
        ignore_index = getattr(criterion, "ignore_index", keywords.get("ignore_index", -100))
        if target.is_floating_point():
            if not self.takes_soft_targets:
                raise ValueError(
                    f"{type(self).__name__} needs class indices for its margin, not soft targets: train it without "
                    "mixup, cutmix and the like"
                )
            if target.ndim < 2 or target.shape[-1] != self.num_classes:
                raise ValueError(f"soft targets must have shape (B, {self.num_classes}), got {tuple(target.shape)}")
        elif target.device.type == "cpu" and not torch.compiler.is_compiling():  # a GPU would have to be waited for
            labels = target.long()  # in uint8 the label to ignore, -100, would be 156
            wrong = labels[((labels < 0) | (labels >= self.num_classes)) & (labels != ignore_index)]
            if wrong.numel():
                raise ValueError(f"labels must lie between 0 and {self.num_classes - 1}, got {int(wrong[0])}")

    @property
    def options(self) -> dict[str, Any]:
        """The options that make such a head again, by name. Device and dtype are those of its weights."""
        return {"dropout": self.dropout, "standardize": self.batch_norm is not None}

    def get_extra_state(self) -> Tensor:
        """What its logits depend on besides its weights, for `state_dict`: see `grassy.heads.state`."""
        return encode(self._logit_values())

    def set_extra_state(self, state: Any) -> None:
        """Raise a ValueError unless weights with this state have the same logits in this head."""
        if wrong := difference(decode(state), self._logit_values()):
            raise ValueError(
                f"these weights are of a head with other options, which give other logits: {wrong}. Build the head "
                f"with the same options, or remove {KEY!r} from the state_dict"
            )

    def _logit_values(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in self.logit_options}
        fixed = {name: value for name, value in values.items() if not isinstance(value, nn.Parameter)}
        # Of standardised features the ε that is added to the variance, too.
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
            self.set_extra_state(state_dict[key])  # before any weight is copied
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        if key in missing_keys:  # weights that were saved before options were part of the state
            missing_keys.remove(key)

    def extra_repr(self) -> str:
        shown = {"in_features": self.in_features, "num_classes": self.num_classes, **self.options}
        many = {name: f"{min(value)}..{max(value)}" for name, value in shown.items() if isinstance(value, list)}
        return ", ".join(f"{name}={value}" for name, value in {**shown, **many}.items() if value)


def _has_extra_state(head: Head) -> bool:
    return type(head).get_extra_state is not nn.Module.get_extra_state


def with_classes_last(criterion: Criterion, logits: Tensor, target: Tensor) -> Tensor:
    """A criterion on the logits (..., C) of a head, against labels (...) or probabilities (..., C).

    torch's cross-entropy has the classes second, and timm's criteria take (B, C) only: both get one row for each label.
    Other criteria get what the head gives.
    """
    function = criterion.func if isinstance(criterion, functools.partial) else criterion
    cross_entropy = function is nn.functional.cross_entropy or isinstance(function, nn.CrossEntropyLoss)
    if logits.ndim < 3 or not (cross_entropy or type(function).__module__.startswith("timm.loss")):
        return criterion(logits, target)
    soft = target.is_floating_point()
    expected = logits.shape if soft else logits.shape[:-1]
    if target.shape != expected:
        raise ValueError(
            f"target must have shape {tuple(expected)} for logits {tuple(logits.shape)}, whose classes are last, got "
            f"{tuple(target.shape)}"
        )
    loss = criterion(logits.flatten(0, -2), target.flatten(0, -2) if soft else target.flatten())
    return loss.reshape(logits.shape[:-1]) if loss.ndim else loss


def positive_integer(name: str, value: int) -> int:
    """The value as an int, NumPy's included, or a ValueError that names the argument."""
    try:
        found = 0 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        found = 0
    if found < 1:
        raise ValueError(f"{name} must be a positive integer, got {value!r}")
    return found


def number(value: Any) -> float:
    """The value as a float, also of NumPy or a tensor, or NaN if it is no number: True, None and text are none."""
    if isinstance(value, bool | str | bytes) or "bool" in str(getattr(value, "dtype", "")):
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # the last of a tensor of several
        return math.nan


def positive(name: str, value: float) -> float:
    """The value as a float, or a ValueError that names the argument."""
    if not 0 < number(value) < math.inf:
        raise ValueError(f"{name} must be positive, got {value!r}")
    return float(value)


def nonnegative(name: str, value: float) -> float:
    """The value as a float, or a ValueError that names the argument."""
    if not 0 <= number(value) < math.inf:
        raise ValueError(f"{name} must be a finite number of at least 0, got {value!r}")
    return float(value)


def check_booleans(**options: Any) -> None:
    """Raise a TypeError for an option that is not True or False: "no" would count as True."""
    for name, value in options.items():
        if type(value).__name__ not in ("bool", "bool_"):  # those of NumPy have the one name or the other
            raise TypeError(f"{name} must be True or False, got {value!r}")


def as_one_operation(module: nn.Module, *inputs: Any) -> Any:
    """What a module gives to torch.fx, which cannot look into it, if that is tracing a model that it is part of: one
    call of the module. Otherwise None.
    """
    given = tuple(each for each in inputs if each is not None)
    if not isinstance(given[0], torch.fx.Proxy):
        return None
    tracer: Any = given[0].tracer
    path = tracer.path_of_module(module)
    return tracer.create_proxy("call_module", path, given, {}) if path else None  # else it is the model itself


def empty_parameter(options: HeadOptions, *shape: int) -> nn.Parameter:
    """A parameter of the device and dtype that the options of a head name, to be filled by `reset_parameters`."""
    return nn.Parameter(torch.empty(shape, device=options.get("device"), dtype=options.get("dtype")))


def init_like_linear(weight: Tensor) -> None:
    """Fill a (..., out, in) weight as `nn.Linear` does: uniform within 1/√in."""
    bound = weight.shape[-1] ** -0.5
    with torch.no_grad():
        weight.uniform_(-bound, bound)


def drawn_like_linear(rows: int, width: int, generator: torch.Generator) -> Tensor:
    """Such a weight (rows, width), from a generator of its own, and where that is."""
    return (2 * torch.rand(rows, width, generator=generator, device=generator.device) - 1) * width**-0.5


def linear(features: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`nn.functional.linear` that takes features of another precision than the weight, as under autocast."""
    if not autocasts(features):
        features = features.to(weight.dtype)
    return nn.functional.linear(features, weight, bias)


def heads_of(model: nn.Module) -> list[Head]:
    """All heads in a model, in the order of its modules."""
    return [module for module in model.modules() if isinstance(module, Head)]
