"""Sentences in README and docs are short. `python tests/test_language.py` prints the figures and the worst ten."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [
    *sorted(ROOT.glob("*.md")),
    ROOT / "examples" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "studies").glob("*/README.md")),
]
MEAN, LONGEST = 20, 40


def sentences(markdown):
    """The sentences of paragraphs and list items. Code, tables, headings, images, HTML do not count."""
    text = re.sub(r"^( *)```.*?^\1```", "", markdown, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"^:::.*\n( {4}.*\n)*", "", text, flags=re.MULTILINE)  # what mkdocstrings fills in
    text = re.sub(r"^[ ]*(\||#|!\[|<).*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"^[ >]*([-*+]|\d+\.) ", "\n\n", text, flags=re.MULTILINE)  # a list item is a paragraph of its own
    paragraphs = (" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", text))
    # A colon ends a sentence too if what follows could be one.
    return [s for p in paragraphs for s in re.split(r"(?<=[.!?:])\s+(?=[A-Z`*])", p) if s]


def name(page):
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_the_sentences_of_a_page_are_short(page):
    found = sentences(page.read_text())
    lengths = [len(sentence.split()) for sentence in found]
    too_long = [
        f"{length} words: {sentence}" for sentence, length in zip(found, lengths, strict=True) if length > LONGEST
    ]
    assert not too_long, "\n".join(too_long)
    assert sum(lengths) <= MEAN * len(lengths)


def test_list_items_count_on_their_own_and_code_and_tables_do_not_count():
    page = """# A heading of six words here

One two three: four. `Five` six
seven! See:

- Eight nine.
- Ten eleven.
  Twelve.

1. Last
   line

| a | table |

```python
code = "is no. Sentence"
```
"""
    assert sentences(page) == [
        "One two three: four.", "`Five` six seven!", "See:", "Eight nine.", "Ten eleven.", "Twelve.", "Last line",
    ]  # fmt: skip


if __name__ == "__main__":
    found = []
    print("mean  max")
    for page in PAGES:
        here = [(len(sentence.split()), name(page), sentence) for sentence in sentences(page.read_text())]
        if here:
            lengths = [length for length, *_ in here]
            print(f"{sum(lengths) / len(lengths):4.1f} {max(lengths):4}  {name(page)}")
        found += here
    print("\nthe longest ten")
    for length, where, sentence in sorted(found, reverse=True)[:10]:
        print(f"{length:4}  {where}: {sentence}")
