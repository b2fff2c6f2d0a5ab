"""One ordinary optimizer for a whole model: Riemannian SGD on its subspaces, any other optimizer on the rest."""

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Iterator
from numbers import Real
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from grassy.optim.riemannian_sgd import LR_FACTOR, RiemannianSGD, refuse_spectral_steps
from grassy.shards import is_distributed
from grassy.spelling import nearest
from grassy.subspaces import named_subspaces
from grassy.torchvision_import import import_torchvision

#: The visible key of a parameter group that says which of the two updates it gets.
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
    retraction: Literal["geodesic", "qf"] = "geodesic",
    transport: Literal["projection", "parallel"] = "projection",
    max_angle: float | None = None,
    bfloat16_momentum: bool = False,
    weight_decay: float = 0.0,
    decay_all: bool = False,
    layer_decay: float | None = None,
    **base_options: Any,
) -> "JointOptimizer":
    """An optimizer for all trainable parameters of the model.

    base: "sgd", "adamw", "adam" (torch's), "lamb" or any other name timm knows, or an optimizer class; it gets
        `base_options` as they are.
    head_lr: learning rate of the subspaces. None means `lr` for SGD and 0.1 for any other base, whose learning rates
        would hardly move a subspace.
    head_lr_factor: instead of `head_lr`, how many times larger than `lr` it is. All groups then have the rate `lr`, and
        the step multiplies: for tools that write one learning rate into all groups.
    weight_decay: for matrices only. Biases, norms and other vectors, what the model's `no_weight_decay()` names, and
        subspaces are not decayed.
    decay_all: decay everything but the subspaces, as plain torch optimizers do.
    layer_decay: the learning rate of each earlier layer group of a timm model is lower by this factor.
    retraction, transport, max_angle, bfloat16_momentum (of the subspaces): see `RiemannianSGD`.

    Each group has a key "manifold", "euclidean" or "grassmann". Schedulers that multiply keep head_lr/lr constant.
    Those that set absolute values (OneCycleLR, SWALR, Lightning's LearningRateFinder, timm's warmup_lr_init and lr_min)
    give the subspaces the rate of the rest: with them use `head_lr_factor`.
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
        if not (isinstance(value, Real) and 0 <= value < math.inf):
            raise ValueError(f"{name} must be a finite number >= 0, got {value!r}")
    if not (isinstance(head_momentum, Real | Tensor) and 0 <= head_momentum < 1):
        raise ValueError(f"head_momentum must lie in [0, 1), got {head_momentum!r}")
    if layer_decay is not None and not (isinstance(layer_decay, Real) and 0 < layer_decay <= 1):
        raise ValueError(f"layer_decay must lie in (0, 1], got {layer_decay!r}")
    if head_lr is not None and head_lr_factor is not None:
        raise ValueError(f"give head_lr or head_lr_factor, not both, got {head_lr!r} and {head_lr_factor!r}")
    # As plain numbers: a state_dict with NumPy's would not be read again without unpickling.
    lr, weight_decay, head_lr = float(lr), float(weight_decay), None if head_lr is None else float(head_lr)
    head_momentum = head_momentum if isinstance(head_momentum, Tensor) else float(head_momentum)
    if issubclass(optimizer_class, torch.optim.LBFGS):
        raise ValueError("LBFGS evaluates its closure several times in a step, which the subspaces cannot follow")
    subspaces = dict(named_subspaces(model))
    if not subspaces and not (head_lr is None and head_lr_factor is None):
        name = "head_lr_factor" if head_lr is None else "head_lr"
        raise ValueError(
            f"{name} was given, but the model has no subspaces; call grassy.replace_head(model, 'grassmann') first"
        )
    trainable = [p for p in subspaces.values() if p.requires_grad]
    riemannian = None
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
            for group in riemannian.param_groups:
                group[LR_FACTOR] = float(head_lr_factor)
    groups = _euclidean_groups(model, {id(p) for p in subspaces.values()}, lr, weight_decay, decay_all, layer_decay)
    euclidean = None
    if groups:
        euclidean = optimizer_class(groups, **{**implied, "lr": lr, **base_options})
        if weight_decay and "weight_decay" not in euclidean.defaults:
            raise ValueError(f"{optimizer_class.__name__} knows no weight_decay, got {weight_decay!r}")
    return JointOptimizer(euclidean, riemannian)


class JointOptimizer(Optimizer):
    """Two optimizers that share one list of parameter groups and one state, behind the interface of one.

    Learning-rate schedulers, GradScaler, gradient clipping and checkpoints see an ordinary optimizer: the groups of
    both, in one `param_groups`, and in one `state_dict`.
    """

    def __init__(self, euclidean: Optimizer | None, riemannian: RiemannianSGD | None) -> None:
        if euclidean is None and riemannian is None:
            raise ValueError("the model has no trainable parameters")
        self.euclidean, self.riemannian = euclidean, riemannian
        for part, manifold in self._parts():
            for group in part.param_groups:
                group[MANIFOLD] = manifold
                if manifold == GRASSMANN:  # else the other part's default decay would fill the gap
                    group["weight_decay"] = 0.0
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
        """Let both parts work on this optimizer's groups and state: the same objects, not copies."""
        for part, manifold in self._parts():
            groups = [group for group in self.param_groups if group[MANIFOLD] == manifold]
            part.__setstate__({"state": self.state, "param_groups": groups})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
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

    def train(self) -> None:
        """For a base that has such a method, as schedule-free optimizers do: call it before training."""
        self._switch("train")

    def eval(self) -> None:
        """For a base that has such a method: call it before evaluation, and before saving the model."""
        self._switch("eval")

    def _switch(self, mode: str) -> None:
        for part, _ in self._parts():
            if callable(method := getattr(part, mode, None)):
                method()

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        if self.riemannian is not None:
            self.riemannian.zero_grad(set_to_none)  # gradients of a sample of classes, too

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """What a GradScaler asks: whether to hand over its scale and flag, `grad_scale` and `found_inf`, and not to
        wait for the flag. As with torch's own optimizers that is for who asks for `fused`: others unscale before they
        clip, and count on it.
        """
        return bool(getattr(self.euclidean, "_step_supports_amp_scaling", False))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; it is Euclidean unless it says {"manifold": "grassmann"}."""
        manifold = param_group.setdefault(MANIFOLD, EUCLIDEAN)
        part = {manifold: part for part, manifold in self._parts()}.get(manifold)
        if part is None:
            raise ValueError(f"this optimizer has no part for {MANIFOLD} {manifold!r}")
        if not any(group is param_group for group in part.param_groups):
            part.add_param_group(param_group)
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        saved = [group.get(MANIFOLD) for group in state_dict["param_groups"]]
        own = [group[MANIFOLD] for group in self.param_groups]
        if saved != own:
            raise ValueError(
                f"the saved optimizer has groups on {saved}, this one on {own}: was it saved by grassy.make_optimizer "
                "for the same kind of model, and with the same weight_decay and layer_decay, which make groups?"
            )
        refuse_spectral_steps(state_dict["param_groups"])
        for group, old in zip(self.param_groups, state_dict["param_groups"], strict=True):
            lacking, foreign = sorted(group.keys() - old.keys()), sorted(old.keys() - group.keys() - {"direction"})
            if lacking and foreign:  # of another torch it may lack something, or have more, but hardly both
                raise ValueError(
                    f"the saved optimizer is of another kind: a group of it has {', '.join(foreign)}, of this one "
                    f"{', '.join(lacking)}"
                )
            for p, index in zip(group["params"], old["params"], strict=False):  # how many there are torch checks
                momentum = state_dict.get("state", {}).get(index, {}).get("momentum_buffer")
                if group[MANIFOLD] != EUCLIDEAN and momentum is not None and momentum.shape != p.shape:
                    raise ValueError(
                        f"the saved optimizer has a momentum of shape {tuple(momentum.shape)} for subspaces of shape "
                        f"{tuple(p.shape)}: is it of a head with another k, or other classes?"
                    )
        super().load_state_dict(state_dict)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._share()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "euclidean": self.euclidean, "riemannian": self.riemannian}

    @property
    def skipped_classes(self) -> int:
        """How many times, so far, a class was left as it was because its gradient held a NaN or an Inf."""
        return self.riemannian.skipped_classes if self.riemannian else 0

    @property
    def capped_classes(self) -> int:
        """How many times, so far, a class was turned less than asked: by `max_angle`, or by 64 radians."""
        return self.riemannian.capped_classes if self.riemannian else 0


def _optimizer_class(base: str | type[Optimizer]) -> tuple[type[Optimizer], dict[str, Any]]:
    """The class that `base` stands for, and options of it that the name implies."""
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
        from timm.optim import get_optimizer_class, get_optimizer_info, list_optimizers  # type: ignore[attr-defined]
    except ImportError:
        raise ValueError(
            f"unknown optimizer {base!r}; there are {', '.join(sorted(known))}, and those of timm: "
            "pip install 'grassy[train]'"
        ) from None
    names = sorted({*known, *map(str, list_optimizers())})
    if base not in names:
        raise ValueError(f"unknown optimizer {base!r}{nearest(base, names, 3)}; known: {', '.join(names)}")
    # A name of timm's stands for a class and some options of it, "cadamw" for AdamW with caution.
    info = get_optimizer_info(base)
    if info.second_order:
        raise ValueError(f"{base!r} needs second derivatives, which a training loop has to provide: choose another")
    made = get_optimizer_class(base)
    optimizer_class, options = (made.func, dict(made.keywords)) if isinstance(made, functools.partial) else (made, {})
    if info.has_momentum:
        options.setdefault("momentum", 0.9)  # as timm has always done
    return optimizer_class, options  # type: ignore[return-value]


def _check_options(optimizer_class: type[Optimizer], given: Iterable[str]) -> None:
    """Raise a TypeError for an option that the optimizer does not have."""
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
    """Parameter groups of everything but the subspaces, decayed and not, with their learning rates."""
    undecayed = _undecayed_names(model)
    scales = dict.fromkeys((name for name, _ in model.named_parameters()), 1.0)
    if layer_decay is not None:
        scales |= _layer_scales(model, layer_decay)
    groups: dict[tuple[float, float, bool], list[Tensor]] = {}
    for name, p in model.named_parameters():
        if p.requires_grad and id(p) not in subspaces:
            decays = decay_all or (p.ndim > 1 and name.split(".")[-1] != "bias" and name not in undecayed)
            # torch's optimizers take many parameters at a time, but not plain tensors and DTensors together.
            kind = (scales[name], weight_decay if decays else 0.0, is_distributed(p))
            groups.setdefault(kind, []).append(p)
    return [
        {"params": params, "lr": lr * scale, "weight_decay": decay}
        for (scale, decay, _), params in sorted(groups.items())
    ]


def _undecayed_names(model: nn.Module) -> set[str]:
    """Parameters of norms, and what a module excludes by the method `no_weight_decay`, as timm's models do."""
    names: set[str] = set()
    for prefix, module in model.named_modules():
        excluded = list(module.no_weight_decay()) if callable(getattr(module, "no_weight_decay", None)) else []
        if "Norm" in type(module).__name__:
            excluded += [name for name, _ in module.named_parameters(recurse=False)]
        names.update(f"{prefix}.{name}" if prefix else name for name in excluded)
    return names


def _layer_scales(model: nn.Module, layer_decay: float) -> dict[str, float]:
    """The factor on each parameter's learning rate: 1 in the last group of layers, less before."""
    if not hasattr(model, "group_matcher"):
        raise ValueError("layer_decay needs a timm model, whose group_matcher() tells its layers")
    from timm.models import group_parameters

    depth = group_parameters(model, model.group_matcher(coarse=False), reverse=True)  # type: ignore[operator]
    last = max(depth.values())
    return {name: layer_decay ** (last - layer) for name, layer in depth.items()}
