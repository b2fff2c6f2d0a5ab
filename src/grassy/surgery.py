"""Find the classifier of a model and replace it by a head.

What a library says about its own models is believed first (timm names the classifier of each model); everything else
goes by the structure of the module tree. Where that leaves a doubt, an error names the candidates: surgery on a wrong
layer would train without complaint.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from grassy.heads import Head, HeadOnMap, create_head, describe
from grassy.spelling import nearest

__all__ = ["HeadOnMap", "find_classifiers", "replace_head"]

Layers = dict[str, nn.Module]  # by dotted name

# Names that timm, torchvision and Hugging Face give to what holds the classifier: "fc", "heads", "cls_classifier"...
_CONVENTIONAL = re.compile(r"(^|_)(fc|heads?|classif(ier)?s?|predictor|last_linear)(_dist(ill(ation)?)?)?$")
_DISTILLED = re.compile(r"(^|_)dist(ill(ation)?)?(_|$)")
_AUXILIARY = re.compile(r"(^|_)aux", re.IGNORECASE)  # torchvision's Inception and GoogLeNet
_SHARDING = {"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"}
_ALLOWED = "an nn.Linear, a 1x1 convolution or a grassy head"


def replace_head(
    model: nn.Module, name: str, num_classes: int | None = None, classifier: str | None = None, **options: Any
) -> Head:
    """Replace the classifier of an image classifier by `create_head(name, ...)`, in place, and return the new head.

    num_classes: None keeps the number that the classifier has.
    classifier: the dotted name of the layer to replace, such as "backbone.fc", where the search finds none or several.
    options: of the head, such as k=8.

    The new head has the device, dtype and train/eval mode of the old layer; `num_classes`, `num_labels` and
    `config.num_labels` of the modules around it follow, and the config of a model of transformers describes the head. A
    1x1 convolution gives way to a `HeadOnMap` around the head. A model with several classifiers by design (a distilled
    DeiT, a CrossViT) gets as many heads: the first is returned, and `grassy.heads.heads_of(model)` gives all. Auxiliary
    classifiers (Inception's AuxLogits) stay. If an error is raised, the model has not been changed.
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
    heads = [_head_like(layer, name, num_classes, options) for layer in layers.values()]
    for path, head in zip(layers, heads, strict=True):
        _check_that_nothing_follows(model, path, head)
    for (path, layer), head in zip(layers.items(), heads, strict=True):
        for depth, module in enumerate(_ancestors(model, path)):
            _declare_classes(module, head.num_classes)
            _describe_in_config(module, head, None if classifier is None else path.split(".", depth)[depth])
        _put_in_place(model, layer, HeadOnMap(head) if _is_pointwise(layer) else head)
    return heads[0]


def find_classifiers(model: nn.Module) -> Layers:
    """The layers, by dotted name, that turn features into logits: what `replace_head` would replace."""
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
    """The classifier inside `module`, whose dotted name is `path`; empty if there is none.

    convolutions: whether a 1x1 convolution counts. Backbones are full of them, so only where a classifier is expected.
    """
    if _is_linear(module) or (convolutions and _is_pointwise(module)):
        return {path: module}
    if _declared_classes(module) == 0:  # timm and Hugging Face: the features alone
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
        return _choose(found, declared)
    # From here on the evidence is weak, for a backbone has Linears too. The declared number tells them apart.
    guess = _choose(found, declared) if found else {} if taken_out else _last_of_sequence(module, path, False)
    return guess if declared is None or all(_widths(layer)[1] == declared for layer in guess.values()) else {}


def _last_of_sequence(module: nn.Module, path: str, convolutions: bool) -> Layers:
    """The classifier inside the last child that has one."""
    for name, child in reversed(list(module.named_children())):
        if _AUXILIARY.search(name):
            continue
        found = _find(child, _join(path, name), convolutions and _is_pointwise(child))
        if found:
            return found
        if any(True for _ in child.parameters()):  # a convolution before other layers does not give the logits
            convolutions = False
    return {}


def _choose(found: dict[str, Layers], declared: int | None) -> Layers:
    """Out of what sibling modules hold, by their names, that which gives the logits; ValueError if it is not clear."""
    if len(found) == 1:
        return next(iter(found.values()))
    distilled = _merge(layers for name, layers in found.items() if _DISTILLED.search(name))
    plain = _merge(layers for name, layers in found.items() if not _DISTILLED.search(name)) or distilled
    layers = list(plain.values())
    # fc1, fc2, fc3: what has the width of a later one's input feeds it. Ends of chains remain.
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
    if isinstance(layer, LazyModuleMixin) and layer.has_uninitialized_params():  # type: ignore[misc]
        raise ValueError(f"{path!r} is a {type(layer).__name__} of unknown width: call the model on a batch first")
    for module in _ancestors(model, path):
        wrapper = _SHARDING & {cls.__name__ for cls in type(module).__mro__}
        if wrapper:
            raise ValueError(f"model is wrapped in {wrapper.pop()} already: replace the head before wrapping it")


def _check_that_no_adapters_are_there(model: nn.Module) -> None:
    """PEFT trains a copy of the classifier and keeps the original, which would be the one to be replaced."""
    if any(type(module).__module__.split(".")[0] == "peft" for module in model.modules()):
        raise ValueError(
            f"{type(model).__name__} has adapters of PEFT already, which trains a copy of the classifier: call "
            "grassy.replace_head first, then get_peft_model with the classifier in modules_to_save"
        )


def _check_that_nothing_follows(model: nn.Module, path: str, head: Head) -> None:
    """A head with a loss of its own gives a loss where the model expects logits: a softmax of it would be constant."""
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
            if child is old:  # under every name that it has
                parent._modules[name] = new


def _named_by_timm(module: nn.Module) -> list[str]:
    """What timm says is the classifier, one name or several, as far as it is there: some are only if distilled."""
    config = vars(module).get("pretrained_cfg") or vars(module).get("default_cfg")
    named = config.get("classifier") if isinstance(config, dict) else getattr(config, "classifier", None)
    if not named:
        return []
    names = [named] if isinstance(named, str) else list(named)
    modules = dict(module.named_modules(remove_duplicate=False))
    # levit_384_s8 is built with a second head that its configuration does not mention.
    return [name for name in dict.fromkeys([*names, "head_dist"]) if name in modules]


def _declared_classes(module: nn.Module) -> int | None:
    own = vars(module)  # what the module itself stores: a property would compute it
    numbers = (own.get("num_classes"), own.get("num_labels"), getattr(own.get("config"), "num_labels", None))
    return next((number for number in numbers if isinstance(number, int)), None)


def _declare_classes(module: nn.Module, number: int) -> None:
    own = vars(module)
    for attribute in ("num_classes", "num_labels"):
        if isinstance(own.get(attribute), int):
            setattr(module, attribute, number)
    if isinstance(getattr(own.get("config"), "num_labels", None), int):
        own["config"].num_labels = number  # keeps id2label if the number is the same


def _describe_in_config(module: nn.Module, head: Head, classifier: str | None) -> None:
    """Tell the config of a model of transformers about its head, so that `save_pretrained` writes it."""
    config = vars(module).get("config")
    if isinstance(getattr(config, "num_labels", None), int) and hasattr(config, "to_json_string"):
        where = {} if classifier is None else {"classifier": classifier.removesuffix(".head")}
        config.grassy_head = {**describe(head), **where}  # type: ignore[union-attr]


def _is_linear(module: nn.Module) -> bool:
    # The output projection of nn.MultiheadAttention is a Linear by its type, but its forward is never called.
    return isinstance(module, nn.Linear | Head) and not isinstance(module, NonDynamicallyQuantizableLinear)


def _is_pointwise(module: nn.Module) -> bool:
    if not isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d) or module.groups > 1:
        return False
    return set(module.kernel_size) == set(module.stride) == {1} and set(module.padding) == {0}


def _widths(layer: nn.Module) -> tuple[int, int]:
    """Width of the features in, number of logits out."""
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
