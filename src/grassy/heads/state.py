"""The options of a head that change its logits, as part of its state.

Weights of subspaces mean nothing without their gamma. So a `state_dict` holds, beside them, one tensor with the options
that change logits, and loading compares it with the head. The tensor holds the bytes of a JSON text, one number from 0
to 255 per byte. Those are exact in float16 and bfloat16, an average of equal ones is the same again, and safetensors
stores them, which knows nothing but tensors.
"""

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX

#: torch's name for what `nn.Module.get_extra_state` adds to a state_dict.
KEY = _EXTRA_STATE_KEY_SUFFIX
MOST_BYTES = 10_000


def encode(options: Mapping[str, Any]) -> Tensor:
    """The options as a tensor of bytes, in float32."""
    return torch.tensor(list(json.dumps(options, sort_keys=True).encode()), dtype=torch.float32, device="cpu")


def decode(record: Any) -> dict[str, Any]:
    """The options in such a tensor; a ValueError if it is none."""
    found = None
    if isinstance(record, Tensor) and record.ndim == 1 and len(record) <= MOST_BYTES and not record.is_meta:
        numbers = record.detach().double().round().tolist()
        if all(0 <= each <= 255 for each in numbers):
            try:
                found = json.loads(bytes(int(each) for each in numbers))
            except (ValueError, RecursionError):  # no UTF-8, no JSON
                found = None
    if not isinstance(found, dict):
        raise ValueError(f"{KEY} of a head must hold its options, as a head's state_dict() has it, got something else")
    return found


def options_in(state_dict: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The options of each head whose state is part of a state_dict, by the prefix of its keys, such as "fc."."""
    return {key.removesuffix(KEY): decode(state_dict[key]) for key in state_dict if key.split(".")[-1] == KEY}


def difference(saved: Mapping[str, Any], own: Mapping[str, Any]) -> str:
    """What differs between two heads, in words; empty if nothing does."""
    return ", ".join(
        f"{name} is {saved.get(name, 'not set')} there and {own.get(name, 'not set')} here"
        for name in sorted({*saved, *own})
        if saved.get(name) != own.get(name)
    )
