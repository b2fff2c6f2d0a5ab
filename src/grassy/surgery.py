"""Find the classifier of a model and replace it by a head.

The search first uses what a library says about its own models: timm names the classifier of each. For other models it
uses the structure of the module tree. If several layers are possible, an error names the candidates, because training
with the wrong layer replaced would raise no error.
"""

import copy
import re
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from grassy.heads import RECOMMENDED, Head, HeadOnMap, create_head, describe
from grassy.spelling import nearest
from grassy.subspaces import has_adapters

__all__ = ["HeadOnMap", "find_classifiers", "replace_head"]

Layers = dict[str, nn.Module]  # by dotted name

# Names of classifiers, and of modules that contain them, in timm, torchvision and Hugging Face.
_CONVENTIONAL = re.compile(r"(^|_)(fc|heads?|classif(ier)?s?|predictor|last_linear)(_dist(ill(ation)?)?)?$")
_DISTILLED = re.compile(r"(^|_)dist(ill(ation)?)?(_|$)")
_AUXILIARY = re.compile(r"(^|_)aux", re.IGNORECASE)  # torchvision's Inception and GoogLeNet
_SHARDING = {"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"}
_ALLOWED = "an nn.Linear, a 1x1 convolution or a grassy head"


def replace_head(
    model: nn.Module,
    name: str = RECOMMENDED,
    num_classes: int | None = None,
    classifier: str | None = None,
    **options: Any,
) -> Head:
    """Replace the classifier of a model by a new head, in place.

    The new head has the device, dtype and train/eval mode of the old layer. `num_classes`, `num_labels` and
    `config.num_labels` of the enclosing modules are updated. A Hugging Face model gets its own copy of its
    config, which describes the head.

    A 1x1 convolution is replaced by a `HeadOnMap` around the head. A model with several classifiers by design, such as
    a distilled DeiT or a CrossViT, gets one head for each: `grassy.heads.heads_of(model)` lists them. Auxiliary
    classifiers (Inception's AuxLogits) stay. After an error the model is unchanged.

    Args:
        model: A classifier of timm, torchvision or Hugging Face, or your own.
        name: Name of the head, as in `create_head`. The default is subspaces with `grassy.heads.recommended_options`,
            those for texts if `model` is a transformers model that reads tokens.
        num_classes: Number of classes C. None keeps that of the classifier.
        classifier: Dotted name of the layer to replace, such as "backbone.fc". Needed if the search finds none or
            several.
        **options: Options of the head, such as `k=8`.

    Returns:
        The new head, or the first of several.

    Raises:
        TypeError: If `model` is not a module.
        ValueError: If the search finds no classifier or several, or the layer cannot be replaced. Also if the head or
            an option is unknown.

    Examples:
        >>> import torch, grassy
        >>> model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
        >>> head = grassy.replace_head(model)
        >>> model[-1] is head, model(torch.randn(8, 32)).shape
        (True, torch.Size([8, 10]))
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
    _check_that_no_adapters_are_there(model)
    layers = _find(model, "", convolutions=True) if classifier is None else _named(model, classifier)
    if not layers:
        raise ValueError(
            f"found no classifier in {type(model).__name__}: build it with its classes (not num_classes=0), or name "
            f"{_ALLOWED} in it by classifier='dotted.name'"
        )
    for path, layer in layers.items():
        _check_replaceable(model, path, layer)
    if name == RECOMMENDED and getattr(model, "main_input_name", None) == "input_ids":
        options = {"normalize": True, "standardize": False, **options}
    heads = [_head_like(layer, name, num_classes, options) for layer in layers.values()]
    for path, head in zip(layers, heads, strict=True):
        _check_that_nothing_follows(model, path, head)
    _give_own_configs(model, layers)
    for (path, layer), head in zip(layers.items(), heads, strict=True):
        for depth, module in enumerate(_ancestors(model, path)):
            _declare_classes(module, head.num_classes)
            _describe_in_config(module, head, None if classifier is None else path.split(".", depth)[depth])
        _put_in_place(model, layer, HeadOnMap(head) if _is_pointwise(layer) else head)
    return heads[0]


def find_classifiers(model: nn.Module) -> Layers:
    """Return the layers that `replace_head` would replace, by dotted name.

    Args:
        model: Any module.

    Returns:
        A dict, empty if there is no classifier.

    Raises:
        ValueError: If several layers could be the classifier.
    """
    return _find(model, "", convolutions=True)


def _named(model: nn.Module, classifier: str) -> Layers:
    if not isinstance(classifier, str):
        raise TypeError(f"classifier must be the dotted name of a layer, got {type(classifier).__name__}")
    modules = dict(model.named_modules(remove_duplicate=False))
    if classifier not in modules:
        hint = nearest(classifier, modules, 3)
        raise ValueError(f"classifier={classifier!r} is not a module of {type(model).__name__}{hint}")
    layer = modules[classifier]
    if isinstance(layer, HeadOnMap):
        return {f"{classifier}.head": layer.head}
    if not (_is_linear(layer) or _is_pointwise(layer)):
        raise ValueError(f"classifier={classifier!r} is a {type(layer).__name__}, but must be {_ALLOWED}")
    return {classifier: layer}


def _find(module: nn.Module, path: str, convolutions: bool) -> Layers:
    """Return the classifier inside `module`, whose dotted name is `path`; empty if there is none.

    `convolutions` says whether a 1x1 convolution counts. Backbones are full of them, so they count only where a
    classifier is expected.
    """
    if _is_linear(module) or (convolutions and _is_pointwise(module)):
        return {path: module}
    if _declared_classes(module) == 0:  # timm and Hugging Face: no classifier
        return {}
    named = _named_by_timm(module)
    if named:
        return _merge(_find(module.get_submodule(name), _join(path, name), convolutions=True) for name in named)
    if isinstance(module, nn.Sequential):
        return _last_of_sequence(module, path, convolutions)
    children = {name: child for name, child in module.named_children() if not _AUXILIARY.search(name)}
    expected = {name for name in children if _CONVENTIONAL.search(name)}
    taken_out = any(isinstance(children[name], nn.Identity) for name in expected)
    found = {
        name: layers
        for name, child in children.items()
        if _is_linear(child) or name in expected
        if (layers := _find(child, _join(path, name), convolutions=not taken_out))
    }
    declared = _declared_classes(module)
    if expected & found.keys():
        return _choose(_whole_classifiers(children, path) | found, declared)
    # From here on the evidence is weak, since backbones have linear layers too: compare with the declared classes.
    last = {} if taken_out else _last_of_sequence(module, path, False)
    if last and not last.items() <= _merge(found.values()).items():  # inside another child: `found` may only feed it
        found[next(iter(last)).removeprefix(_join(path, "")).split(".")[0]] = last
    guess = _choose(found, declared) if found else {}
    return guess if declared is None or all(_widths(layer)[1] == declared for layer in guess.values()) else {}


def _whole_classifiers(children: Layers, path: str) -> dict[str, Layers]:
    """Return the classifiers of those children that are whole classifiers: they declare classes of their own."""
    found = {}
    for name, child in children.items():
        numbers = {vars(child).get("num_classes"), vars(child).get("num_labels")}
        layers = _find(child, _join(path, name), convolutions=True) if numbers - {None, 0} else {}
        if layers and all(_widths(layer)[1] in numbers for layer in layers.values()):
            found[name] = layers
    return found


def _last_of_sequence(module: nn.Module, path: str, convolutions: bool) -> Layers:
    """Return the classifier inside the last child that has one."""
    for name, child in reversed(list(module.named_children())):
        if _AUXILIARY.search(name):
            continue
        found = _find(child, _join(path, name), convolutions and _is_pointwise(child))
        if found:
            return found
        if any(True for _ in child.parameters()):  # a convolution before other layers is no classifier
            convolutions = False
    return {}


def _choose(found: dict[str, Layers], declared: int | None) -> Layers:
    """Choose the classifier among the layers found in sibling modules. Raises ValueError if it is ambiguous."""
    if len(found) == 1:
        return next(iter(found.values()))
    distilled = _merge(layers for name, layers in found.items() if _DISTILLED.search(name))
    plain = _merge(layers for name, layers in found.items() if not _DISTILLED.search(name)) or distilled
    layers = list(plain.values())
    # In fc1, fc2, fc3, a layer whose output width is the input width of a later one feeds it. Ends of chains remain.
    feeds = [any(_widths(later)[0] == _widths(layer)[1] for later in layers[i:]) for i, layer in enumerate(layers, 1)]
    ends = {path: layer for (path, layer), feeding in zip(plain.items(), feeds, strict=True) if not feeding}
    if len(ends) > 1 and declared is not None:
        matching = {path: layer for path, layer in ends.items() if _widths(layer)[1] == declared}
        ends = matching if len(matching) == 1 else ends
    pair = ends | distilled
    if len(ends) > 1 or len({_widths(layer)[1] for layer in pair.values()}) > 1:
        raise ValueError(f"several layers could be the classifier, pass one of them as classifier=: {', '.join(pair)}")
    return pair


def _check_replaceable(model: nn.Module, path: str, layer: nn.Module) -> None:
    if layer is model:
        raise ValueError(f"model is itself the layer to replace ({type(model).__name__}): wrap it in nn.Sequential")
    if isinstance(layer, LazyModuleMixin) and layer.has_uninitialized_params():
        raise ValueError(f"{path!r} is a {type(layer).__name__} of unknown width: call the model on a batch first")
    for module in _ancestors(model, path):
        wrapper = _SHARDING & {cls.__name__ for cls in type(module).__mro__}
        if wrapper:
            raise ValueError(f"model is wrapped in {wrapper.pop()} already: replace the head before wrapping it")


def _check_that_no_adapters_are_there(model: nn.Module) -> None:
    """PEFT trains a copy of the classifier and keeps the original, so replacing the original has no effect."""
    if has_adapters(model):
        raise ValueError(
            f"{type(model).__name__} has PEFT adapters already, and PEFT trains a copy of the classifier: call "
            "grassy.replace_head first, then get_peft_model with the classifier in modules_to_save"
        )


def _check_that_nothing_follows(model: nn.Module, path: str, head: Head) -> None:
    """A head with a loss of its own returns it in place of logits: a softmax after it would be constant."""
    for depth, parent in enumerate(_ancestors(model, path)):
        if head.has_own_loss() and isinstance(parent, nn.Sequential):
            names = list(parent._modules)
            followers = [parent._modules[name] for name in names[names.index(path.split(".")[depth]) + 1 :]]
            for module in followers:
                if isinstance(module, nn.Softmax | nn.LogSoftmax | nn.Softmax2d | nn.Sigmoid | nn.LogSigmoid):
                    raise ValueError(
                        f"{type(head).__name__} computes its loss itself, but in this model {type(module).__name__} "
                        f"follows the classifier {path!r}: remove it first"
                    )


def _head_like(layer: nn.Module, name: str, num_classes: int | None, options: dict[str, Any]) -> Head:
    in_features, old_classes = _widths(layer)
    old = next(layer.parameters())
    options = {"device": old.device, "dtype": old.dtype, **options}
    head = create_head(name, in_features, old_classes if num_classes is None else num_classes, **options)
    return head.train(layer.training)


def _put_in_place(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child is old:  # a shared module has several names
                parent._modules[name] = new


def _named_by_timm(module: nn.Module) -> list[str]:
    """Return the names that timm declares for the classifier and that exist: some exist only in distilled models."""
    config = vars(module).get("pretrained_cfg") or vars(module).get("default_cfg")
    named = config.get("classifier") if isinstance(config, dict) else getattr(config, "classifier", None)
    if not named:
        return []
    names = [named] if isinstance(named, str) else list(named)
    modules = dict(module.named_modules(remove_duplicate=False))
    # levit_384_s8 is built with a second head that its configuration does not mention.
    return [name for name in dict.fromkeys([*names, "head_dist"]) if name in modules]


def _declared_classes(module: nn.Module) -> int | None:
    own = vars(module)  # stored values only: a property would compute something
    numbers = (own.get("num_classes"), own.get("num_labels"), getattr(own.get("config"), "num_labels", None))
    return next((number for number in numbers if isinstance(number, int)), None)


def _declare_classes(module: nn.Module, number: int) -> None:
    own = vars(module)
    for attribute in ("num_classes", "num_labels"):
        if isinstance(own.get(attribute), int):
            setattr(module, attribute, number)
    if isinstance(getattr(own.get("config"), "num_labels", None), int):
        own["config"].num_labels = number  # keeps id2label if the number is the same
    config = own.get("pretrained_cfg")
    if isinstance(config, dict) and len(config.get("label_names") or ()) != number:
        own["pretrained_cfg"] = {**config, "label_names": None}


def _give_own_configs(model: nn.Module, paths: Iterable[str]) -> None:
    """Give each Hugging Face model around a layer its own config: models built from one config share the object.

    The modules of a model share its config or a part of it. Afterwards they share the copy in the same way.
    """
    ancestors = [module for path in paths for module in _ancestors(model, path)]
    owners = [module for module in ancestors if _describes_a_model(vars(module).get("config"))]
    copies: dict[int, Any] = {}  # by the id of the original: deepcopy's memo, which also keeps the originals alive
    for owner in owners:
        copy.deepcopy(vars(owner)["config"], copies)
    for module in {module for owner in owners for module in owner.modules()}:
        for name, value in vars(module).items():
            if id(value) in copies and hasattr(value, "to_json_string"):
                vars(module)[name] = copies[id(value)]


def _describes_a_model(config: object) -> bool:
    return isinstance(getattr(config, "num_labels", None), int) and hasattr(config, "to_json_string")


def _describe_in_config(module: nn.Module, head: Head, classifier: str | None) -> None:
    """Describe the head in the config of a Hugging Face model, so that `save_pretrained` writes it."""
    config: Any = vars(module).get("config")
    if _describes_a_model(config):
        where = {} if classifier is None else {"classifier": classifier.removesuffix(".head")}
        config.grassy_head = {**describe(head), **where}


def _is_linear(module: nn.Module) -> bool:
    # The output projection of nn.MultiheadAttention is a Linear by its type, but its forward is never called.
    return isinstance(module, nn.Linear | Head) and not isinstance(module, NonDynamicallyQuantizableLinear)


def _is_pointwise(module: nn.Module) -> bool:
    if not isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d) or module.groups > 1:
        return False
    return set(module.kernel_size) == set(module.stride) == {1} and set(module.padding) == {0}


def _widths(layer: nn.Module) -> tuple[int, int]:
    """Return the number of input features and of logits."""
    if isinstance(layer, Head):
        return layer.in_features, layer.num_classes
    if isinstance(layer, nn.Linear):
        return layer.in_features, layer.out_features
    assert isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d)
    return layer.in_channels, layer.out_channels


def _ancestors(model: nn.Module, path: str) -> Iterator[nn.Module]:
    parts = path.split(".")
    for depth in range(len(parts)):
        yield model.get_submodule(".".join(parts[:depth]))


def _merge(groups: Iterable[Layers]) -> Layers:
    return {path: layer for layers in groups for path, layer in layers.items()}


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
