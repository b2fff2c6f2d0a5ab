"""Write and load models in the folder format of the Hugging Face Hub; `grassy.runs.hub` describes the format."""

import contextlib
import tempfile
import types
import warnings
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from grassy.atomic import TEMPORARY, copy_atomically, write_text_atomically
from grassy.distributed.saves import MANIFEST
from grassy.heads import Head, check_head_options, describe, heads_of
from grassy.heads.saved_options import KEY
from grassy.inference.model_card import is_unedited, model_card, sealed
from grassy.models import import_timm, without_pretrained
from grassy.recipes.files import ARGS
from grassy.recipes.recipe import DEFAULTS
from grassy.runs.hub import ADAPTER_WEIGHTS, ALL_WEIGHTS, CARD, CONFIG, HEAD, WEIGHTS, is_folder_of_hub, read_config
from grassy.runs.state import SAVES, STATE
from grassy.runs.weights import BEST, BEST_SAVES, LAST, PREPARATION, Description, save_weights, with_number_for_gamma
from grassy.schema import check_head, fail
from grassy.surgery import replace_head
from grassy.torchvision_import import import_torchvision

#: Columns of a run's table that are not results.
NO_RESULTS = ("lr", "head_lr", "seconds", "input_share")
#: Files and folders of a run. In a folder that has them, `load` prefers the run's weights to a Hub model's.
OF_A_RUN = (BEST, LAST, BEST_SAVES, STATE, SAVES, ARGS, MANIFEST)


def write_timm_folder(model: nn.Module, description: Description, folder: Path) -> None:
    """Write a timm model. An existing README.md stays as it is if it was edited."""
    check_folder(folder)
    description = with_number_for_gamma(description, model)
    config = _timm_config(model, description)
    save_weights(model, description, folder / WEIGHTS)
    card = model_card(
        library="timm",
        task="image-classification",
        model=description.model,
        head=description.head,
        classes=description.num_classes,
        facts={"image_size": description.img_size},
        metrics={name: value for name, value in description.metrics.items() if name not in NO_RESULTS},
        epoch=_epoch_as_printed(description),
        recipe=_changed_settings(description.recipe),
    )
    _write_card(card, folder)
    _remove_other_weights(folder, [WEIGHTS])
    write_text_atomically(folder / CONFIG, config)  # last: it marks the folder as complete


def _epoch_as_printed(about: Description) -> int | None:
    """The epoch of a run counted from 1, as training prints it; files count from 0. An epoch from a user stays."""
    return about.epoch + 1 if about.epoch is not None and about.recipe else about.epoch


def _changed_settings(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a run that differ from the defaults, without paths of the machine that it ran on."""
    plain = {name: list(value) if isinstance(value, tuple) else value for name, value in DEFAULTS.items()}
    own = {name: list(value) if isinstance(value, tuple) else value for name, value in recipe.items()}
    return {name: value for name, value in own.items() if name != "initial_checkpoint" and value != plain.get(name)}


def _timm_config(model: nn.Module, about: Description) -> str:
    """The config.json that timm writes for the model, with the head."""
    timm = import_timm()
    from timm.models._hub import save_config_for_hf

    known = timm.models.get_pretrained_cfg(about.model, allow_unregistered=True)
    own = {} if known is None else known.to_dict()
    prepared = {
        "architecture": about.model,
        "num_classes": about.num_classes,
        "input_size": (about.model_kwargs.get("in_chans", 3), about.img_size, about.img_size),
        **{name: getattr(about, name) for name in PREPARATION},
    }
    # Keys that describe the architecture; keys about timm's own pretrained weights are dropped.
    kept = ("pool_size", "fixed_input_size", "min_input_size", "first_conv", "classifier")
    pretrained = {name: own[name] for name in kept if own.get(name) is not None} | prepared
    stand_in = types.SimpleNamespace(
        pretrained_cfg=pretrained,
        num_classes=about.num_classes,
        num_features=getattr(model, "num_features", None),
        global_pool=getattr(model, "global_pool", None),
    )
    options = without_pretrained(about.model_kwargs)
    extra = {"label_names": about.class_names, HEAD: about.head}
    with tempfile.TemporaryDirectory() as place:
        save_config_for_hf(stand_in, Path(place) / CONFIG, model_config=extra, model_args=options)
        return (Path(place) / CONFIG).read_text(encoding="utf-8")


def is_transformers_model(model: nn.Module) -> bool:
    """Whether a model has a config and `save_pretrained`, as transformers models do."""
    return hasattr(model, "save_pretrained") and hasattr(vars(model).get("config"), "to_json_string")


def write_transformers_folder(
    model: nn.Module,
    folder: Path,
    class_names: Sequence[str] | None,
    epoch: int | None,
    metrics: Mapping[str, float] | None,
) -> None:
    """Write a transformers model with its `save_pretrained`, after checking that it loads with equal weights."""
    check_folder(folder)
    heads = heads_of(model)
    if not heads:
        raise ValueError(f"{type(model).__name__} has no head of grassy's: call grassy.replace_head(model, ...) first")
    config: Any = model.config
    place = getattr(config, HEAD, None) or {}
    where = {"classifier": place["classifier"]} if "classifier" in place else {}
    setattr(config, HEAD, {**describe(heads[0]), **where})  # the head may have changed since replace_head
    if class_names is not None:
        check_class_names(class_names, heads[0].num_classes)
        config.id2label = {number: str(name) for number, name in enumerate(class_names)}
        config.label2id = {str(name): number for number, name in enumerate(class_names)}
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=TEMPORARY, dir=folder.parent) as place_to_write:
        written = Path(place_to_write)
        model.save_pretrained(written)  # type: ignore[operator]
        _check_that_it_is_read_again(model, written)
        card = model_card(
            library="transformers",
            task="image-classification" if "Image" in type(model).__name__ else "text-classification",
            model=type(model).__name__,
            head={name: value for name, value in getattr(config, HEAD).items() if name != "classifier"},
            classes=heads[0].num_classes,
            facts={},
            metrics=metrics or {},
            epoch=epoch,
            recipe={},
        )
        _write_card(card, folder)
        files = sorted(written.iterdir(), key=lambda file: file.name == CONFIG)  # the config last
        for file in files:
            if file.name == CONFIG:
                _remove_other_weights(folder, [each.name for each in files])
            copy_atomically(file, folder / file.name)


def _check_that_it_is_read_again(model: nn.Module, folder: Path) -> None:
    again, own = load_transformers(folder).state_dict(), model.state_dict()
    wrong = [name for name in own if name not in again or not torch.equal(again[name].cpu(), own[name].cpu())]
    if wrong or again.keys() != own.keys():
        name = (wrong or sorted(again.keys() ^ own.keys()))[0]
        raise ValueError(f"{type(model).__name__} does not load as it was saved: {name} differs")


def load_transformers(folder: Path) -> nn.Module:
    """Load the transformers model in a folder, with the head that its config describes."""
    _prepare_torchvision()
    import transformers

    described = read_config(folder) or {}
    head = check_head(HEAD, described.get(HEAD))
    check_described_head({name: value for name, value in head.items() if name != "classifier"}, folder / CONFIG)
    names = described.get("architectures")
    if not (isinstance(names, list) and len(names) == 1 and isinstance(names[0], str)):
        raise fail(f"{folder / CONFIG}: architectures", "a list of one name", names)
    kind = getattr(transformers, names[0], None)
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        raise ValueError(f"{folder / CONFIG}: transformers has no model {names[0]!r}")
    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
        model, info = _with_head(kind, head).from_pretrained(
            folder,
            config=config,
            output_loading_info=True,
            use_safetensors=True,  # never a pickle
            ignore_mismatched_sizes=True,  # `info` lists them, and they are refused below
        )
    except Exception as error:  # a config may hold anything, so constructors may raise anything
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise ValueError(f"{folder} does not hold the weights that it describes: {reason}") from error
    lost = [key for key in info["missing_keys"] if key.split(".")[-1] != KEY]
    lost += [*info["unexpected_keys"], *(key for key, *_ in info["mismatched_keys"])]
    if lost:
        raise ValueError(f"{folder} does not hold the weights that it describes: look at {sorted(lost)[0]}")
    model.__class__ = kind
    # transformers calls no hook that would check a head, and casts a float32 head to the dtype of its backbone.
    for path, each in model.named_modules():
        if isinstance(each, Head):
            state = each.state_dict() | _stored(folder, f"{path}.")
            take_over_dtypes(each, state)
            each.load_state_dict(state)
    loaded: nn.Module = model.eval()
    return loaded


def take_over_dtypes(module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Cast each parameter and buffer to the dtype of its counterpart: a head may be more precise than its backbone."""
    for name, own in (*module.named_parameters(), *module.named_buffers()):
        own.data = own.data.to(tensors[name].dtype if name in tensors else own.dtype)


def _stored(folder: Path, prefix: str) -> dict[str, torch.Tensor]:
    """The tensors in the safetensors files of a folder whose names start with a prefix, without the prefix."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            names = [name for name in file.keys() if name.startswith(prefix)]  # noqa: SIM118  # it is no dict
            found |= {name.removeprefix(prefix): file.get_tensor(name) for name in names}
    return found


def load_adapters(folder: Path, base: nn.Module) -> nn.Module:
    """Add the PEFT adapters in a folder to a model."""
    if not (folder / ADAPTER_WEIGHTS).is_file():  # PEFT would fall back to unpickling another file
        raise ValueError(f"{folder} has no {ADAPTER_WEIGHTS}: adapters are loaded from no other file")
    _prepare_torchvision()
    from peft import PeftModel

    model: nn.Module = PeftModel.from_pretrained(base, folder).eval()
    return model


def check_class_names(names: Sequence[str], num_classes: int) -> None:
    """Raise a ValueError unless each class has one name and no name appears twice."""
    if isinstance(names, str | Mapping):  # of which the keys would be the names
        raise TypeError(f"class_names must be a list with one name per class, got a {type(names).__name__}")
    if len(names) != num_classes:
        raise ValueError(f"class_names has {len(names)} names, but the head has {num_classes} classes")
    twice = [name for name, count in Counter(map(str, names)).items() if count > 1]
    if twice:
        raise ValueError(f"class_names has {twice[0]!r} more than once")


def _prepare_torchvision() -> None:
    """Import torchvision first: transformers and PEFT do not need it, but import it if it is installed."""
    with contextlib.suppress(ImportError):
        import_torchvision()


def _with_head(kind: Any, head: dict[str, Any]) -> Any:
    """A subclass that builds the model with another head, so that `from_pretrained` loads weights into that head."""

    class WithHead(kind):  # type: ignore[misc]
        def __init__(self, config: Any, *args: Any, **options: Any) -> None:
            super().__init__(config, *args, **options)
            replace_head(self, **head)

    WithHead.__name__ = kind.__name__
    WithHead.__qualname__ = kind.__qualname__
    WithHead.__module__ = kind.__module__
    return WithHead


def check_described_head(head: Mapping[str, Any], file: Path) -> None:
    """Raise a ValueError if a file describes a head with options that its kind does not have, or with a device."""
    try:
        check_head_options(head["name"], [name for name in head if name != "name"])
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    if wrong := next((name for name in ("device", "dtype") if name in head), None):
        raise ValueError(f"{file}: a head must be described without {wrong}, got {head[wrong]!r}")


def check_folder(folder: Path) -> None:
    """Raise a ValueError if writing a model there would overwrite a run, or files that grassy did not write."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise ValueError(f"{folder} is a file: give a folder, or a file that ends in .safetensors")
    if name := next((name for name in OF_A_RUN if (folder / name).exists()), None):
        raise ValueError(f"{folder} is the folder of a run, with {name}: give another folder")
    if not is_folder_of_hub(folder):
        raise ValueError(f"{folder} holds other files: give a new folder, or one that grassy.save wrote")


def _remove_other_weights(folder: Path, written: Collection[str]) -> None:
    """Remove the weights of an earlier save, which could be loaded instead of the new ones."""
    for file in folder.iterdir():
        if file.name not in written and any(fnmatch(file.name, pattern) for pattern in ALL_WEIGHTS):
            file.unlink()


def _write_card(text: str, folder: Path) -> None:
    """Write a model card, but never over one that a user wrote or edited."""
    card = folder / CARD
    if card.exists() and not is_unedited(card.read_text(encoding="utf-8", errors="replace")):
        warnings.warn(f"{card} was edited or is your own, and stays as it is: see whether it still fits", stacklevel=4)
        return
    write_text_atomically(card, sealed(text))
