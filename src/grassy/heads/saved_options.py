"""The options of a head that change its logits, as part of its state.

The same subspaces give different logits for a different gamma. So a `state_dict` also holds one tensor with the
options that change the logits, and loading compares it with the head. The tensor holds the bytes of a JSON text as
integers from 0 to 255. Float16 and bfloat16 represent these exactly, averaging equal tensors does not change them, and
safetensors can store them.
"""

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX

#: The key suffix under which torch stores the result of `nn.Module.get_extra_state`.
KEY = _EXTRA_STATE_KEY_SUFFIX
MOST_BYTES = 10_000


def encode(options: Mapping[str, Any]) -> Tensor:
    """Encode the options as a float32 tensor of bytes."""
    return torch.tensor(list(json.dumps(options, sort_keys=True).encode()), dtype=torch.float32, device="cpu")


def decode(record: Any) -> dict[str, Any]:
    """Decode a tensor made by `encode`. Raises ValueError for anything else."""
    found = None
    if isinstance(record, Tensor) and record.ndim == 1 and len(record) <= MOST_BYTES and not record.is_meta:
        numbers = record.detach().double().round().tolist()
        if all(0 <= each <= 255 for each in numbers):
            try:
                found = json.loads(bytes(int(each) for each in numbers))
            except (ValueError, RecursionError):  # not UTF-8, or not JSON
                found = None
    if not isinstance(found, dict):
        raise ValueError(f"{KEY} of a head must hold its options, as written by state_dict(), got something else")
    return found


def options_in(state_dict: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the options of each head in a state_dict, by the prefix of its keys, such as "fc."."""
    return {key.removesuffix(KEY): decode(state_dict[key]) for key in state_dict if key.split(".")[-1] == KEY}


def difference(saved: Mapping[str, Any], own: Mapping[str, Any]) -> str:
    """Describe the differences between the options of two heads; the empty string means none."""
    return ", ".join(
        f"{name} is {saved.get(name, 'not set')} there and {own.get(name, 'not set')} here"
        for name in sorted({*saved, *own})
        if saved.get(name) != own.get(name)
    )
