"""YAML for recipes: plain values, no repeated keys, and a bound on the expansion of aliases."""

import functools
import re
from collections.abc import Hashable
from typing import Any

#: Largest number of values that aliases may expand to. Values written out are bounded by the file's size.
MOST_VALUES = 10_000
MOST_DEPTH = 30


def parse_yaml(text: str, place: str) -> Any:
    """Parse YAML text; a ValueError starts with `place`."""
    import yaml  # belongs to an extra

    try:
        loader = _loader()(text)
        try:
            node = loader.get_single_node()
            _written_out(node, {}, 0)
            return None if node is None else loader.construct_document(node)
        finally:
            loader.dispose()
    except RecursionError:
        raise ValueError(f"{place} is nested too deeply") from None
    except (yaml.YAMLError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise ValueError(f"{place} is not YAML: {error}") from None


def _written_out(node: Any, known: dict[int, int], depth: int) -> tuple[int, int]:
    """The number of values of a node with all aliases expanded, and how many of them come from aliases.

    Nesting or aliases beyond the bounds raise a ValueError.
    """
    if depth > MOST_DEPTH:
        raise ValueError(f"it is nested more than {MOST_DEPTH} deep")
    if id(node) in known:
        count = known[id(node)]
        if count == 0:
            raise ValueError("an alias refers to a value that contains it")
        return count, count
    known[id(node)] = 0  # under way
    count, repeated = 1, 0
    children = node.value if isinstance(getattr(node, "value", None), list) else []
    for child in children:
        for part in child if isinstance(child, tuple) else (child,):
            more, more_repeated = _written_out(part, known, depth + 1)
            count, repeated = count + more, repeated + more_repeated
        if repeated > MOST_VALUES:
            raise ValueError(f"its aliases expand to more than {MOST_VALUES:,} values")
    known[id(node)] = count
    return count, repeated


@functools.cache
def _loader() -> Any:
    import yaml

    class Loader(yaml.SafeLoader):
        """Reads 1e-3 as a number, as in YAML 1.2 (PyYAML reads a string), and refuses repeated keys."""

        def __init__(self, stream: Any) -> None:
            super().__init__(stream)
            self.checked: set[Any] = set()

        def flatten_mapping(self, node: Any) -> None:
            if node not in self.checked:  # afterwards it also holds the merged keys
                self.checked.add(node)
                self.check_keys(node)
            super().flatten_mapping(node)

        def check_keys(self, node: Any) -> None:
            own = [key for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
            seen: set[Any] = set()
            for key in (self.construct_object(key, deep=True) for key in own):
                if not isinstance(key, Hashable):
                    continue  # PyYAML itself refuses it
                if key in seen:
                    raise ValueError(f"the key {key!r} comes twice")
                seen.add(key)

    Loader.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
    )
    return Loader
