"""Load timm's pretrained weights from its cache or the network, without a long wait for an unreachable network.

huggingface_hub retries an unreachable network for most of a minute. One connection attempt tells sooner.
"""

import contextlib
import socket
import threading
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from grassy.models import import_timm
from grassy.runs.weights import PREPARATION, read_description, weights_file
from grassy.schema import INTERPOLATIONS

#: Seconds to wait for a connection.
PATIENCE = 4.0
WAY_OUT = "give --initial-checkpoint FILE, or --from-scratch to start from random weights"


@contextlib.contextmanager
def fetching_weights(name: str) -> Iterator[None]:
    """A context in which timm may download weights; a ValueError if it has none or cannot reach them."""
    config = _pretrained_config(name)
    if config is None:
        raise ValueError(f"timm has no pretrained weights for {name}: {WAY_OUT}")
    online = answers(_host(config))
    try:
        with contextlib.nullcontext() if online else _offline():
            yield
    except Exception as error:
        if isinstance(error, ValueError) and not _is_about_the_network(error):
            raise  # an error of the model or its options
        place = config.get("hf_hub_id") or config.get("url")
        why = f"{_host(config)[0]} cannot be reached" if not online else " ".join(str(error).split())[:200]
        raise ValueError(f"no pretrained weights of {name} ({place}) in the cache, and {why}: {WAY_OUT}") from error


def _pretrained_config(name: str) -> dict[str, Any] | None:
    """The config of timm's pretrained weights for a model, with their preprocessing; None if there are none."""
    timm = import_timm()
    found = timm.get_pretrained_cfg(name) if timm.is_model(name) else None
    config: dict[str, Any] = {} if found is None else found.to_dict()
    return config if config.get("hf_hub_id") or config.get("url") or config.get("file") else None


def preparation_of_weights(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The preprocessing of the weights that a recipe starts from: as a grassy file describes it, or else as timm does.

    Empty if it is unknown.
    """
    if given := settings.get("initial_checkpoint"):
        with contextlib.suppress(ValueError, OSError):  # weights without a description: use timm's config of the model
            about = read_description(weights_file(Path(given)))
            return {name: getattr(about, name) for name in ("img_size", *PREPARATION)}
    config = _pretrained_config(str(settings.get("model", "")))
    if config is None:
        return {}
    found = {name: config[name] for name in PREPARATION} | {"img_size": config["input_size"][-1]}
    return {name: value for name, value in found.items() if name != "interpolation" or value in INTERPOLATIONS}


def answers(place: tuple[str, int]) -> bool:
    """Whether a connection succeeds within `PATIENCE`, even if the DNS lookup hangs."""
    answered: list[bool] = []

    def connect() -> None:
        with contextlib.suppress(OSError), socket.create_connection(place, timeout=PATIENCE):
            answered.append(True)

    attempt = threading.Thread(target=connect, daemon=True)
    attempt.start()
    attempt.join(PATIENCE)
    return bool(answered)


def _host(config: dict[str, Any]) -> tuple[str, int]:
    """Host and port of the weights, or of the proxy."""
    url = config.get("url") or ""
    if config.get("hf_hub_id"):
        url = _hub().ENDPOINT
    address = urllib.parse.urlsplit(url)
    if address.hostname and not urllib.request.proxy_bypass(address.hostname):
        proxy = urllib.request.getproxies().get(address.scheme)
        address = urllib.parse.urlsplit(proxy) if proxy else address
    return address.hostname or "localhost", address.port or (80 if address.scheme == "http" else 443)


def _hub() -> Any:
    import_timm()
    from huggingface_hub import constants

    return constants


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    """Run huggingface_hub as with HF_HUB_OFFLINE=1: it uses only its cache."""
    constants = _hub()
    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def _is_about_the_network(error: BaseException | None) -> bool:
    """Whether an error, or its cause, is about files or the network."""
    while error is not None:
        if isinstance(error, OSError) or type(error).__module__.startswith(("huggingface_hub", "httpx", "requests")):
            return True
        error = error.__cause__ or error.__context__
    return False
