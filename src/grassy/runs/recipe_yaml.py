"""YAML as recipes have it: plain values, each key once, aliases that do not grow without end."""

import functools
import re
from collections.abc import Hashable
from typing import Any

#: How many values the aliases of a text may stand for. Those that are written out need no bound but the file's size.
MOST_VALUES = 10_000
MOST_DEPTH = 30


def parse_yaml(text: str, place: str) -> Any:
    """What a text of YAML says, or a ValueError that begins with its place."""
    import yaml  # an extra

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
    """How many values a node stands for with all aliases written out, and how many of them are due to aliases.

    Nesting or aliases beyond the bounds raise a ValueError.
    """
    if depth > MOST_DEPTH:
        raise ValueError(f"it is nested more than {MOST_DEPTH} deep")
    if id(node) in known:
        count = known[id(node)]
        if count == 0:
            raise ValueError("an alias stands for what it is part of")
        return count, count
    known[id(node)] = 0  # under way
    count, repeated = 1, 0
    children = node.value if isinstance(getattr(node, "value", None), list) else []
    for child in children:
        for part in child if isinstance(child, tuple) else (child,):
            more, more_repeated = _written_out(part, known, depth + 1)
            count, repeated = count + more, repeated + more_repeated
        if repeated > MOST_VALUES:
            raise ValueError(f"its aliases stand for more than {MOST_VALUES:,} values")
    known[id(node)] = count
    return count, repeated


@functools.cache
def _loader() -> Any:
    import yaml

    class Loader(yaml.SafeLoader):
        """1e-3, without a point, is a number as in YAML 1.2, not PyYAML's string; a key that comes twice is wrong."""

        def __init__(self, stream: Any) -> None:
            super().__init__(stream)
            self.checked: set[Any] = set()

        def flatten_mapping(self, node: Any) -> None:
            if node not in self.checked:  # afterwards it also has the keys of those merged into it
                self.checked.add(node)
                self.check_keys(node)
            super().flatten_mapping(node)

        def check_keys(self, node: Any) -> None:
            own = [key for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
            seen: set[Any] = set()
            for key in (self.construct_object(key, deep=True) for key in own):
                if not isinstance(key, Hashable):
                    continue  # which PyYAML itself refuses
                if key in seen:
                    raise ValueError(f"the key {key!r} comes twice")
                seen.add(key)

    Loader.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
    )
    return Loader
