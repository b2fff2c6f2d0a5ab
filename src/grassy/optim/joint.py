"""One optimizer for a whole model: Riemannian SGD for its subspaces, any other optimizer for the rest."""

import functools
import inspect
import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from grassy.arguments import check_booleans
from grassy.kernels.step_options import Retraction, Transport
from grassy.optim.riemannian_sgd import LR_FACTOR, RiemannianSGD, refuse_spectral_steps
from grassy.shards import is_dtensor, was_replaced
from grassy.spelling import nearest
from grassy.subspaces import has_adapters, named_subspaces
from grassy.torchvision_import import import_torchvision

#: Key of a parameter group that selects its update.
MANIFOLD = "manifold"
GRASSMANN, EUCLIDEAN = "grassmann", "euclidean"


def make_optimizer(
    model: nn.Module,
    base: str | type[Optimizer],
    lr: float,
    head_lr: float | None = None,
    head_momentum: float = 0.9,
    *,
    head_lr_factor: float | None = None,
    retraction: Retraction = "geodesic",
    transport: Transport = "projection",
    max_angle: float | None = None,
    bfloat16_momentum: bool = False,
    weight_decay: float = 0.0,
    decay_all: bool = False,
    layer_decay: float | None = None,
    **base_options: Any,
) -> "JointOptimizer":
    """Create one optimizer for all trainable parameters of a model.

    Riemannian SGD updates the subspaces, the base optimizer all other parameters. A model without subspaces works too.

    Each parameter group has a key "manifold" with the value "euclidean" or "grassmann". Schedulers that multiply the
    learning rates keep head_lr/lr constant. Schedulers that set absolute values would give the subspaces the learning
    rate of the rest: pass `head_lr_factor` with them. Examples are OneCycleLR, SWALR, Lightning's LearningRateFinder,
    and timm's `warmup_lr_init` and `lr_min`.

    Args:
        model: The model, not its parameters: it knows which of them are subspaces.
        base: The optimizer of all other parameters: "sgd", "adamw" or "adam" (torch's), any name that timm knows, such
            as "lamb", or an optimizer class.
        lr: Learning rate of the base optimizer.
        head_lr: Learning rate of the subspaces. None means `lr` for SGD and 0.1 for any other base, whose usual
            learning rates would hardly move a subspace.
        head_momentum: Momentum factor of the subspaces.
        head_lr_factor: Ratio head_lr/lr, in place of `head_lr`. All groups then show the learning rate `lr`, and the
            step multiplies it. Use it with tools that write one learning rate into all groups.
        retraction: See `RiemannianSGD`.
        transport: See `RiemannianSGD`.
        max_angle: See `RiemannianSGD`.
        bfloat16_momentum: See `RiemannianSGD`.
        weight_decay: Weight decay of matrices. It does not apply to subspaces, biases, norms, other vectors, and
            parameters that `no_weight_decay()` of the model names.
        decay_all: Decay everything except the subspaces, as plain torch optimizers do.
        layer_decay: Factor in (0, 1] per layer group: earlier groups of a timm model get lower learning rates.
        **base_options: Options of the base optimizer, such as `betas`.

    Returns:
        An ordinary `torch.optim.Optimizer`.

    Raises:
        TypeError: If `model` is not a module, or the base optimizer lacks one of the options.
        ValueError: If a value is out of range, `base` is unknown, or `head_lr` is given for a model without subspaces.

    Examples:
        >>> import torch, grassy
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
        >>> head = grassy.replace_head(model, "grassmann", k=4)
        >>> optimizer = grassy.make_optimizer(model, "adamw", lr=1e-3, weight_decay=0.05, head_lr=0.1)
        >>> [(group["manifold"], group["lr"]) for group in optimizer.param_groups]
        [('euclidean', 0.001), ('euclidean', 0.001), ('grassmann', 0.1)]
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"make_optimizer takes the model, which knows its subspaces, got {type(model).__name__}")
    optimizer_class, implied = _optimizer_class(base)
    _check_options(optimizer_class, base_options)
    given = {"lr": lr, "head_lr": head_lr, "head_lr_factor": head_lr_factor, "weight_decay": weight_decay}
    for name, value in given.items():
        if isinstance(value, Tensor):
            raise TypeError(f"{name} must be a number; put tensors into the optimizer's param_groups, got {value!r}")
        if value is None and name.startswith("head_lr"):
            continue
        if isinstance(value, bool) or not (isinstance(value, Real) and 0 <= value < math.inf):
            raise ValueError(f"{name} must be a finite number >= 0, got {value!r}")
    check_booleans(decay_all=decay_all, bfloat16_momentum=bfloat16_momentum)
    if not (isinstance(head_momentum, Real | Tensor) and 0 <= head_momentum < 1):
        raise ValueError(f"head_momentum must lie in [0, 1), got {head_momentum!r}")
    if layer_decay is not None and not (isinstance(layer_decay, Real) and 0 < layer_decay <= 1):
        raise ValueError(f"layer_decay must lie in (0, 1], got {layer_decay!r}")
    if head_lr is not None and head_lr_factor is not None:
        raise ValueError(f"pass head_lr or head_lr_factor, not both, got {head_lr!r} and {head_lr_factor!r}")
    # Python floats: a state_dict with NumPy scalars could not be loaded without unpickling.
    lr, weight_decay, head_lr = float(lr), float(weight_decay), None if head_lr is None else float(head_lr)
    head_momentum = head_momentum if isinstance(head_momentum, Tensor) else float(head_momentum)
    if issubclass(optimizer_class, torch.optim.LBFGS):
        raise ValueError("LBFGS evaluates its closure several times per step, which Riemannian SGD cannot do")
    subspaces = dict(named_subspaces(model))
    if not subspaces and not (head_lr is None and head_lr_factor is None):
        name = "head_lr_factor" if head_lr is None else "head_lr"
        raise ValueError(
            f"{name} was given, but the model has no subspaces: leave it out, or call grassy.replace_head(model, "
            "'grassmann') first"
        )
    trainable = [p for p in subspaces.values() if p.requires_grad]
    if any(p.is_meta for p in trainable):
        raise ValueError(
            "the weight of the head is on the meta device, without values: call grassy.distributed.shard_head(model, "
            "mesh) first, or create the head without device='meta'"
        )
    riemannian = None
    if subspaces and not trainable:
        _warn_if_peft_froze_them(model, next(iter(subspaces)))
    if trainable:
        if head_lr is None:
            follows = head_lr_factor is not None or issubclass(optimizer_class, torch.optim.SGD)
            head_lr = lr if follows else 0.1
        maximize = base_options.get("maximize", False)
        riemannian = RiemannianSGD(
            trainable,
            head_lr,
            head_momentum,
            retraction,
            transport,
            max_angle,
            maximize,
            bfloat16_momentum=bfloat16_momentum,
        )
        if head_lr_factor is not None:
            for group in (*riemannian.param_groups, riemannian.defaults):
                group[LR_FACTOR] = float(head_lr_factor)
    groups = _euclidean_groups(model, {id(p) for p in subspaces.values()}, lr, weight_decay, decay_all, layer_decay)
    euclidean = None
    if groups:
        euclidean = optimizer_class(groups, **{**implied, "lr": lr, **base_options})
        if weight_decay and "weight_decay" not in euclidean.defaults:
            raise ValueError(f"{optimizer_class.__name__} has no weight_decay, got {weight_decay!r}")
        if "weight_decay" in euclidean.defaults:  # for groups that are added later
            euclidean.defaults["weight_decay"] = weight_decay
    return JointOptimizer(euclidean, riemannian)


class JointOptimizer(Optimizer):
    """Combines two optimizers behind the interface of one; `make_optimizer` creates it.

    Learning-rate schedulers, GradScaler, gradient clipping and checkpoints see an ordinary optimizer, with one
    `param_groups` and one `state_dict`.

    Args:
        euclidean: Optimizer of the ordinary parameters, or None.
        riemannian: Optimizer of the subspaces, or None.

    Raises:
        ValueError: If both are None.
    """

    _has_stepped = False

    def __init__(self, euclidean: Optimizer | None, riemannian: RiemannianSGD | None) -> None:
        if euclidean is None and riemannian is None:
            raise ValueError("the model has no trainable parameters")
        self.euclidean, self.riemannian = euclidean, riemannian
        for part, manifold in self._parts():
            for group in part.param_groups:
                group[MANIFOLD] = manifold
        # Schedulers that cycle the momentum look for "momentum" or "betas" in the defaults, and then in every group.
        defaults = dict(next(self._parts())[0].defaults)
        super().__init__([group for part, _ in self._parts() for group in part.param_groups], defaults)
        self._share()

    def _parts(self) -> Iterator[tuple[Optimizer, str]]:
        if self.euclidean is not None:
            yield self.euclidean, EUCLIDEAN
        if self.riemannian is not None:
            yield self.riemannian, GRASSMANN

    def _share(self) -> None:
        """Make both optimizers use the groups and the state of this one: the same objects, not copies."""
        for part, manifold in self._parts():
            groups = [group for group in self.param_groups if group[MANIFOLD] == manifold]
            part.__setstate__({"state": self.state, "param_groups": groups})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Perform one step of both optimizers.

        Args:
            closure: A function that evaluates the model again and returns the loss. It is called once.

        Returns:
            The result of the closure, or None without one.

        Raises:
            RuntimeError: In the first step, if a head was sharded after the optimizer was created.
        """
        if not self._has_stepped:
            self._refuse_replaced_parameters()
            self._has_stepped = True
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        given = {name: getattr(self, name) for name in ("grad_scale", "found_inf") if hasattr(self, name)}
        for part, _ in self._parts():
            vars(part).update(given)
            try:
                part.step()
            finally:
                for name in given:
                    delattr(part, name)
        return loss

    def _refuse_replaced_parameters(self) -> None:
        if any(was_replaced(p) for part, _ in self._parts() for group in part.param_groups for p in group["params"]):
            raise RuntimeError(
                "the optimizer was created before shard_head or wrap, so it holds weights that the model no longer "
                "has: call grassy.make_optimizer after grassy.distributed.shard_head and wrap"
            )

    def train(self) -> None:
        """Call `train()` of a base optimizer that has it, such as a schedule-free one. Call it before training."""
        self._switch("train")

    def eval(self) -> None:
        """Call `eval()` of a base optimizer that has it. Call it before evaluating or saving the model."""
        self._switch("eval")

    def _switch(self, mode: str) -> None:
        for part, _ in self._parts():
            if callable(method := getattr(part, mode, None)):
                method()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset all gradients, including those of sampled classes."""
        super().zero_grad(set_to_none)
        if self.riemannian is not None:
            self.riemannian.zero_grad(set_to_none)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether a GradScaler passes `grad_scale` and `found_inf` to the step, without synchronising.

        As in torch, only `fused=True` enables this. Without it, the GradScaler unscales the gradients before the step.
        """
        return bool(getattr(self.euclidean, "_step_supports_amp_scaling", False))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group. It is Euclidean unless it has the item {"manifold": "grassmann"}.

        Args:
            param_group: The group, a dict with the key "params".

        Raises:
            ValueError: If this optimizer has no part for the manifold of the group.
        """
        manifold = param_group.setdefault(MANIFOLD, EUCLIDEAN)
        part = {manifold: part for part, manifold in self._parts()}.get(manifold)
        if part is None:
            raise ValueError(
                f"this optimizer has no part for {MANIFOLD} {manifold!r}, since the model had no such trainable "
                "parameters: after unfreezing some, call grassy.make_optimizer again"
            )
        if manifold == GRASSMANN:  # else it would get the default of the other optimizer
            param_group["weight_decay"] = 0.0
        own = any(group is param_group for group in part.param_groups)
        if not own:
            part.add_param_group(param_group)
        try:
            super().add_param_group(param_group)
        except Exception:
            if not own:
                part.param_groups.pop()
            raise

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state that `state_dict` returned.

        Args:
            state_dict: The state of an optimizer that `make_optimizer` created for the same kind of model.

        Raises:
            ValueError: If the saved groups or shapes do not fit this optimizer.
        """
        saved = [group.get(MANIFOLD) for group in state_dict["param_groups"]]
        own = [group[MANIFOLD] for group in self.param_groups]
        if saved != own:
            raise ValueError(
                f"the saved optimizer has groups on {saved}, this one on {own}: was it saved by grassy.make_optimizer "
                "for the same kind of model, with the same weight_decay and layer_decay, which determine the groups?"
            )
        refuse_spectral_steps(state_dict["param_groups"])
        options = {manifold: part.defaults.keys() - {LR_FACTOR} for part, manifold in self._parts()}
        for group, old in zip(self.param_groups, state_dict["param_groups"], strict=True):
            # Schedulers add keys too, so only the optimizer's own options can be lacking.
            lacking = sorted((options[group[MANIFOLD]] & group.keys()) - old.keys())
            foreign = sorted(old.keys() - group.keys() - {"direction"})
            if lacking and foreign:  # another torch version may add keys or drop keys, but hardly both
                raise ValueError(
                    f"the saved optimizer is of another kind: its groups have {', '.join(foreign)}, those of this one "
                    f"{', '.join(lacking)}"
                )
            for p, index in zip(group["params"], old["params"], strict=False):  # torch checks their number
                momentum = state_dict.get("state", {}).get(index, {}).get("momentum_buffer")
                if group[MANIFOLD] != EUCLIDEAN and momentum is not None and momentum.shape != p.shape:
                    raise ValueError(
                        f"the saved optimizer has a momentum of shape {tuple(momentum.shape)} for subspaces of shape "
                        f"{tuple(p.shape)}: was it saved for a head with another k or number of classes?"
                    )
        super().load_state_dict(state_dict)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._share()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "euclidean": self.euclidean, "riemannian": self.riemannian}

    @property
    def skipped_classes(self) -> int:
        """How often a class was skipped so far because its gradient held a NaN or an Inf."""
        return self.riemannian.skipped_classes if self.riemannian else 0

    @property
    def capped_classes(self) -> int:
        """How often the rotation angle of a class was limited so far, by `max_angle` or by 64 radians."""
        return self.riemannian.capped_classes if self.riemannian else 0


def _warn_if_peft_froze_them(model: nn.Module, name: str) -> None:
    """Warn if PEFT froze a new head, which then keeps its random subspaces."""
    if has_adapters(model):
        head = name.removeprefix("base_model.model.").rpartition(".")[0]
        warnings.warn(
            "the head is frozen, since PEFT trains only adapters and what modules_to_save names: to train it, pass "
            f"modules_to_save=[{head!r}] to the PEFT config",
            stacklevel=3,
        )


def _optimizer_class(base: str | type[Optimizer]) -> tuple[type[Optimizer], dict[str, Any]]:
    """Return the optimizer class that `base` names, and the options that the name implies."""
    if isinstance(base, type) and issubclass(base, Optimizer):
        return base, {}
    if not isinstance(base, str):
        raise TypeError(f"base must be the name or the class of an optimizer, got {base!r}")
    known: dict[str, type[Optimizer]] = {
        "sgd": torch.optim.SGD,
        "adam": torch.optim.Adam,
        "adamw": torch.optim.AdamW,
    }
    if base in known:
        return known[base], {}
    try:
        import_torchvision()  # which timm imports
        from timm.optim import get_optimizer_class, get_optimizer_info, list_optimizers
    except ImportError:
        raise ValueError(
            f"unknown optimizer {base!r}; available are {', '.join(sorted(known))}, and those of timm: "
            "pip install 'grassy[train]'"
        ) from None
    names = sorted({*known, *map(str, list_optimizers())})
    if base not in names:
        raise ValueError(f"unknown optimizer {base!r}{nearest(base, names, 3)}; known: {', '.join(names)}")
    # Some names of timm imply options: "cadamw" is AdamW with caution=True.
    info = get_optimizer_info(base)
    if info.second_order:
        raise ValueError(f"{base!r} needs second derivatives, which a training loop has to provide: choose another")
    made = get_optimizer_class(base)
    optimizer_class, options = (made.func, dict(made.keywords)) if isinstance(made, functools.partial) else (made, {})
    if info.has_momentum:
        options.setdefault("momentum", 0.9)  # as timm has always done
    return optimizer_class, options  # type: ignore[return-value]


def _check_options(optimizer_class: type[Optimizer], given: Iterable[str]) -> None:
    """Raise TypeError for an option that the optimizer does not have."""
    parameters = inspect.signature(optimizer_class).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    known = [parameter.name for parameter in parameters]
    for name in given:
        if name not in known:
            hint = nearest(name, [*known, *inspect.signature(make_optimizer).parameters])
            raise TypeError(f"{optimizer_class.__name__} has no option {name!r}{hint}")


def _euclidean_groups(
    model: nn.Module, subspaces: set[int], lr: float, weight_decay: float, decay_all: bool, layer_decay: float | None
) -> list[dict[str, Any]]:
    """Return the parameter groups of everything except the subspaces, by weight decay and learning rate."""
    undecayed = _undecayed_names(model)
    scales = {} if layer_decay is None else _layer_scales(model, layer_decay)
    groups: dict[tuple[float, float, bool], list[Tensor]] = {}
    for name, p in model.named_parameters():
        if p.requires_grad and id(p) not in subspaces:
            decays = decay_all or (p.ndim > 1 and name.split(".")[-1] != "bias" and name not in undecayed)
            # The _foreach functions of torch cannot mix plain tensors and DTensors in a group.
            kind = (scales.get(id(p), 1.0), weight_decay if decays else 0.0, is_dtensor(p))
            groups.setdefault(kind, []).append(p)
    return [
        {"params": params, "lr": lr * scale, "weight_decay": decay}
        for (scale, decay, _), params in sorted(groups.items())
    ]


def _undecayed_names(model: nn.Module) -> set[str]:
    """Return the names of the parameters of norms, and those that a `no_weight_decay` method excludes, as in timm."""
    names: set[str] = set()
    for prefix, module in model.named_modules():
        excluded = list(module.no_weight_decay()) if callable(getattr(module, "no_weight_decay", None)) else []
        if "Norm" in type(module).__name__:
            excluded += [name for name, _ in module.named_parameters(recurse=False)]
        names.update(f"{prefix}.{name}" if prefix else name for name in excluded)
    return names


def _layer_scales(model: nn.Module, layer_decay: float) -> dict[int, float]:
    """Return the factor on the learning rate of each parameter, by id: 1 in the last layer group, smaller before."""
    model = getattr(model, "_orig_mod", model)  # torch.compile adds a prefix to the names, which timm does not know
    if not hasattr(model, "group_matcher"):
        raise ValueError("layer_decay needs a timm model, whose group_matcher() names its layers")
    from timm.models import group_parameters

    depth = group_parameters(model, model.group_matcher(coarse=False), reverse=True)  # type: ignore[operator]
    last = max(depth.values())
    parameters = dict(model.named_parameters())
    return {id(parameters[name]): layer_decay ** (last - layer) for name, layer in depth.items()}
