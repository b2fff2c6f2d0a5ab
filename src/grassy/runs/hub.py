"""Folders for the Hugging Face Hub: the `config.json` of timm or transformers beside `model.safetensors`.

grassy adds one key to the config, "grassy_head": the name and options of the head. The rest follows the library's
format, so timm and transformers load the backbone without grassy.
"""

from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from grassy.schema import MOST_DESCRIPTION, parse_json, read_text

CONFIG, WEIGHTS, CARD = "config.json", "model.safetensors", "README.md"
ADAPTERS, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
#: Weights of transformers and timm, whole or in parts. A folder holds the weights of one model only.
ALL_WEIGHTS = (
    *("model.safetensors", "model-*-of-*.safetensors", "model.safetensors.index.json"),
    *("pytorch_model.bin", "pytorch_model-*-of-*.bin", "pytorch_model.bin.index.json"),
)
#: Files that may be in a folder before its model: a cloned repository, a tokenizer, an image processor.
BESIDE_A_MODEL = (
    *(".*", CARD, "LICENSE*", "vocab.*", "merges.txt", "*.model", "chat_template.*"),
    *("tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "*processor_config.json"),
)
#: The key that grassy adds to the config.
HEAD = "grassy_head"
#: Prefix of Hub repositories in timm and grassy: "hf-hub:user/name" or "hf-hub:user/name@revision".
REMOTE = "hf-hub:"


def local_folder(path: Path) -> Path:
    """The path itself, or the local copy of a Hub repository, downloaded if necessary."""
    name = str(path)
    if not name.startswith(REMOTE):
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    repository, _, revision = name.removeprefix(REMOTE).partition("@")
    try:
        # No files that could hold code or a pickle.
        wanted = ["*.json", "*.safetensors", "*.txt", "*.model", CARD]
        return Path(snapshot_download(repository, revision=revision or None, allow_patterns=wanted))
    except (HFValidationError, LocalEntryNotFoundError, HfHubHTTPError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"{name} could not be downloaded from the Hub: {reason}") from None


def read_config(folder: Path) -> dict[str, Any] | None:
    """The config of a folder; None if it does not exist or describes no grassy head."""
    config = _read(folder / CONFIG)
    return config if config is not None and HEAD in config else None


def base_of_adapters(folder: Path) -> str | None:
    """The base model of the PEFT adapters in a folder; None if there are none."""
    config = _read(folder / ADAPTERS)
    if config is None:
        return None
    base = config.get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise ValueError(f"{folder / ADAPTERS} does not name the base model of the adapters")
    return base


def _read(file: Path) -> dict[str, Any] | None:
    if not file.is_file():
        return None
    try:
        config = parse_json(read_text(file, MOST_DESCRIPTION))
    except ValueError as error:
        raise ValueError(f"{file} cannot be read: {error}") from None
    return config if isinstance(config, dict) else None


def is_folder_of_hub(folder: Path) -> bool:
    """Whether an existing folder may be written to: it has a grassy head, or no model and no other files."""
    names = [file.name for file in folder.iterdir()]
    return read_config(folder) is not None or all(any(fnmatch(name, p) for p in BESIDE_A_MODEL) for name in names)


def is_of_transformers(config: dict[str, Any]) -> bool:
    return "model_type" in config


def timm_description(config: dict[str, Any]) -> dict[str, Any]:
    """The fields of a `Description` from the config of a timm model, unchecked."""
    pretrained = config.get("pretrained_cfg")
    pretrained = pretrained if isinstance(pretrained, dict) else {}
    size = pretrained.get("input_size")
    found = {
        "model": config.get("architecture"),
        "num_classes": config.get("num_classes"),
        "head": config[HEAD],
        "model_kwargs": config.get("model_args", {}),
        "class_names": config.get("label_names"),
        "img_size": size[-1] if isinstance(size, list) and size else None,
        **{name: pretrained.get(name) for name in ("crop_pct", "crop_mode", "interpolation", "mean", "std")},
    }
    return {name: value for name, value in found.items() if value is not None}
