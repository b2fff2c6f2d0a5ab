"""Find the parameters of a model that are subspaces; the limits on their rows; whether PEFT trains others instead.

A module declares them in a class attribute `subspace_names`. Neither an attribute of the Parameter nor a tensor
subclass would survive `deepcopy`, an EMA or FSDP.
"""

from collections.abc import Iterator

from torch import nn

#: Errors of orthonormality above which a given weight is repaired with a warning, or refused.
REPAIR_ABOVE, REFUSE_ABOVE = 1e-5, 0.1


def has_adapters(model: nn.Module) -> bool:
    """Whether PEFT has added adapters to the model."""
    return any(type(module).__module__.split(".")[0] == "peft" for module in model.modules())


def named_subspaces(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the name and the Parameter (C, K, N) of each weight of subspaces in the model, shared ones once."""
    seen = set()
    for prefix, module in model.named_modules():
        for name in getattr(module, "subspace_names", ()):
            weight = getattr(module, name)
            if id(weight) not in seen:
                seen.add(id(weight))
                yield f"{prefix}.{name}" if prefix else name, weight
