"""YAML as recipes have it: plain values, each key once, aliases that do not grow without end."""

import functools
import re
from typing import Any

#: How many values a text may stand for once its aliases are written out. A recipe has about a hundred.
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


def _written_out(node: Any, known: dict[int, int], depth: int) -> int:
    """How many values a node stands for with all aliases written out; a ValueError beyond the bounds."""
    if depth > MOST_DEPTH:
        raise ValueError(f"it is nested more than {MOST_DEPTH} deep")
    if id(node) in known:
        count = known[id(node)]
        if count == 0:
            raise ValueError("an alias stands for what it is part of")
        return count
    known[id(node)] = 0  # under way
    count = 1
    children = node.value if isinstance(getattr(node, "value", None), list) else []
    for child in children:
        for part in child if isinstance(child, tuple) else (child,):
            count += _written_out(part, known, depth + 1)
        if count > MOST_VALUES:
            raise ValueError(f"it stands for more than {MOST_VALUES:,} values")
    known[id(node)] = count
    return count


@functools.cache
def _loader() -> Any:
    import yaml

    class Loader(yaml.SafeLoader):
        """1e-3, without a point, is a number as in YAML 1.2, not PyYAML's string; a key that comes twice is wrong."""

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            own = [key for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
            keys = [self.construct_object(key, deep=True) for key in own]
            if twice := next((key for place, key in enumerate(keys) if key in keys[:place]), None):
                raise ValueError(f"the key {twice!r} comes twice")
            return dict(super().construct_mapping(node, deep))

    Loader.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
    )
    return Loader
