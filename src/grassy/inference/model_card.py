"""The model card: the README.md of a Hub folder.

Its last line seals it. A card that still fits its seal was not edited, and the next save into the folder replaces it.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

from grassy._version import __version__

TEMPLATE = """\
---
library_name: {library}
pipeline_tag: {task}
tags:
- grassy
- {task}
---

# {title}

{kind} with {classes} classes. Its head is grassy's `{head}`{subspaces}.

```python
import grassy

model = grassy.load("path/to/this/folder")  # or "hf-hub:user/name"
```

Without grassy, {library} loads the backbone{how} but not the classifier.

## The model

{about}
{results}{recipe}
Written by grassy {version}.
"""


SEAL = "<!-- Saving again replaces this card unless it was edited: {digest} -->\n"


def sealed(card: str) -> str:
    """The card with a last line from which `is_unedited` knows it again; readers do not see that line."""
    return card + SEAL.format(digest=_digest(card))


def is_unedited(card: str) -> bool:
    """Whether a card is one that `sealed` gave."""
    text, _, last = card.rstrip("\n").rpartition("\n")
    found = re.search(r"[0-9a-f]{64}", last)
    return found is not None and last + "\n" == SEAL.format(digest=found[0]) and found[0] == _digest(f"{text}\n")


def _digest(card: str) -> str:
    return hashlib.sha256(card.encode()).hexdigest()


def model_card(
    *,
    library: str,
    task: str,
    model: str,
    head: Mapping[str, Any],
    classes: int,
    facts: Mapping[str, Any],
    metrics: Mapping[str, float],
    epoch: int | None,
    recipe: Mapping[str, Any],
) -> str:
    """The text of a model card. facts: further properties to list; recipe: the settings of the run, if any."""
    k = head.get("k")
    dims = f"{min(k)} to {max(k)}" if isinstance(k, list) else k
    subspaces = f": each class is a subspace of {dims} dimensions" if head["name"] == "grassmann" else ""
    options = {name: value for name, value in head.items() if name not in ("name", "k")}
    rows = {"architecture": model, "head": head["name"], **({"k": dims} if k else {}), **options, **facts}
    results = [f"| {name.replace('_', ' ')} | {value:.4g} |" for name, value in metrics.items()]
    when = "" if epoch is None else f", after epoch {epoch}"
    settings = [f"- {name}: `{json.dumps(value)}`" for name, value in recipe.items() if value not in (None, {}, [])]
    settings = [line for line in settings if len(line) <= 200]
    return TEMPLATE.format(
        library=library,
        task=task,
        title=recipe.get("name") or f"{model} with a {head['name']} head",
        kind="A text classifier" if task == "text-classification" else "An image classifier",
        classes=f"{classes:,}",
        head=head["name"],
        subspaces=subspaces,
        how=" (`num_classes=0`)" if library == "timm" else " (`AutoModel`)",
        about="\n".join(f"- {name.replace('_', ' ')}: {value}" for name, value in rows.items()),
        results="\n".join(["", f"## Results{when}", "", "| figure | value |", "|---|---|", *results, ""])
        if results
        else "",
        recipe="\n".join(["", "## How it was trained", "", *settings, ""]) if settings else "",
        version=__version__,
    )
