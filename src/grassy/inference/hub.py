"""Models in folders as the Hugging Face hub has them, written by their own library: see `grassy.runs.hub`."""

import os
import shutil
import tempfile
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from grassy.heads import describe, heads_of
from grassy.heads.state import KEY
from grassy.inference.model_card import model_card
from grassy.models import import_timm
from grassy.runs.atomic import write_atomically
from grassy.runs.hub import CARD, CONFIG, HEAD, WEIGHTS
from grassy.runs.recipe import DEFAULTS
from grassy.runs.schema import check_head
from grassy.runs.weights import Description, save_weights
from grassy.surgery import replace_head

#: Columns of a run's table that say nothing about how good a model is.
NO_RESULTS = ("lr", "head_lr", "seconds")


def write_timm_folder(model: nn.Module, description: Description, folder: Path) -> None:
    """Write a timm model. A README.md that is there already stays."""
    _check_folder(folder)
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
        epoch=description.epoch,
        recipe=_changed_settings(description.recipe),
    )
    _write_card(card, folder)
    write_atomically(folder / CONFIG, lambda file: file.write(config))  # last: with it the folder is complete


def _changed_settings(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a run that are not the default, without paths of the machine that it ran on."""
    plain = {name: list(value) if isinstance(value, tuple) else value for name, value in DEFAULTS.items()}
    own = {name: list(value) if isinstance(value, tuple) else value for name, value in recipe.items()}
    return {name: value for name, value in own.items() if name != "initial_checkpoint" and value != plain.get(name)}


def _timm_config(model: nn.Module, about: Description) -> bytes:
    """The config.json that timm writes for the model, with the head."""
    timm = import_timm()
    from timm.models._hub import save_config_for_hf

    known = timm.models.get_pretrained_cfg(about.model, allow_unregistered=True)
    own = {} if known is None else known.to_dict()
    prepared = {
        "architecture": about.model,
        "num_classes": about.num_classes,
        "input_size": (about.model_kwargs.get("in_chans", 3), about.img_size, about.img_size),
        **{name: getattr(about, name) for name in ("crop_pct", "interpolation", "mean", "std")},
    }
    # What says how the architecture is built, and nothing of weights that timm has for it.
    kept = ("pool_size", "fixed_input_size", "min_input_size", "first_conv", "classifier")
    pretrained = {name: own[name] for name in kept if own.get(name) is not None} | prepared
    stand_in = types.SimpleNamespace(
        pretrained_cfg=pretrained,
        num_classes=about.num_classes,
        num_features=getattr(model, "num_features", None),
        global_pool=getattr(model, "global_pool", None),
    )
    options = {name: value for name, value in about.model_kwargs.items() if name != "pretrained"}
    extra = {"label_names": about.class_names, HEAD: about.head}
    with tempfile.TemporaryDirectory() as place:
        save_config_for_hf(stand_in, Path(place) / CONFIG, model_config=extra, model_args=options)  # type: ignore[arg-type]
        return (Path(place) / CONFIG).read_bytes()


def is_transformers_model(model: nn.Module) -> bool:
    """Whether a model writes and describes itself, as those of transformers do."""
    return hasattr(model, "save_pretrained") and hasattr(vars(model).get("config"), "to_json_string")


def write_transformers_folder(
    model: nn.Module,
    folder: Path,
    class_names: Sequence[str] | None,
    epoch: int | None,
    metrics: Mapping[str, float] | None,
) -> None:
    """Write a model of transformers by its `save_pretrained`, once it has been read again with the same weights."""
    _check_folder(folder)
    heads = heads_of(model)
    if not heads:
        raise ValueError(f"{type(model).__name__} has no head of grassy's: call grassy.replace_head(model, ...) first")
    config: Any = model.config
    place = getattr(config, HEAD, None) or {}
    where = {"classifier": place["classifier"]} if "classifier" in place else {}
    setattr(config, HEAD, {**describe(heads[0]), **where})  # as it has become
    if class_names is not None:
        if len(class_names) != heads[0].num_classes:
            raise ValueError(
                f"class_names has {len(class_names)} names, but the head has {heads[0].num_classes} classes"
            )
        config.id2label = {number: str(name) for number, name in enumerate(class_names)}
        config.label2id = {str(name): number for number, name in enumerate(class_names)}
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".writing-", dir=folder.parent) as place_to_write:
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
        files = sorted(written.iterdir(), key=lambda file: file.name == CONFIG)  # that of the config last
        for file in files:
            shutil.copyfile(file, folder / f".{file.name}.new")
            os.replace(folder / f".{file.name}.new", folder / file.name)


def _check_that_it_is_read_again(model: nn.Module, folder: Path) -> None:
    again, own = load_transformers(folder).state_dict(), model.state_dict()
    wrong = [name for name in own if name not in again or not torch.equal(again[name].cpu(), own[name].cpu())]
    if wrong or again.keys() != own.keys():
        name = (wrong or sorted(again.keys() ^ own.keys()))[0]
        raise ValueError(f"{type(model).__name__} cannot be read again as it is saved: {name} differs")


def load_transformers(folder: Path) -> nn.Module:
    """The model of transformers in a folder, with the head that its config describes."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    head = check_head(HEAD, getattr(config, HEAD))
    (name,) = getattr(config, "architectures", None) or [""]
    kind = getattr(transformers, name, None)
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        raise ValueError(f"{folder / CONFIG}: transformers has no model {name!r}")
    model, info = _with_head(kind, head).from_pretrained(folder, config=config, output_loading_info=True)
    lost = [key for key in info["missing_keys"] if key.split(".")[-1] != KEY]
    lost += [*info["unexpected_keys"], *(key for key, *_ in info["mismatched_keys"])]
    if lost:
        raise ValueError(f"{folder} does not hold the weights that it describes: look at {sorted(lost)[0]}")
    model.__class__ = kind
    for each in heads_of(
        model
    ):  # transformers copies tensors one by one, and no hook is called that would look at them
        each.load_state_dict(each.state_dict())
    loaded: nn.Module = model.eval()
    return loaded


def load_adapters(folder: Path, base: nn.Module) -> nn.Module:
    """A model with the adapters of PEFT in a folder."""
    from peft import PeftModel

    model: nn.Module = PeftModel.from_pretrained(base, folder).eval()
    return model


def _with_head(kind: Any, head: dict[str, Any]) -> Any:
    """The class of a model that is built with another head, so that `from_pretrained` fills that one."""

    class WithHead(kind):  # type: ignore[misc]
        def __init__(self, config: Any, *args: Any, **options: Any) -> None:
            super().__init__(config, *args, **options)
            replace_head(self, **head)

    WithHead.__name__ = kind.__name__
    WithHead.__qualname__ = kind.__qualname__
    WithHead.__module__ = kind.__module__
    return WithHead


def _check_folder(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file: name a folder, or a file that ends in .safetensors")


def _write_card(text: str, folder: Path) -> None:
    if not (folder / CARD).exists():  # one that was written by hand
        write_atomically(folder / CARD, lambda file: file.write(text.encode()))
