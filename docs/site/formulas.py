"""Formulas between dollar signs become MathML when the site is built, which browsers show without a script."""

import re
from html import unescape

from latex2mathml.converter import convert

FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)


def on_page_content(html: str, **_: object) -> str:
    return FORMULA.sub(lambda found: _mathml(found[2], "block" if found[1] == "div" else "inline"), html)


def _mathml(latex: str, display: str) -> str:
    return convert(unescape(latex).strip(), display=display)
