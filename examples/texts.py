"""Texts with labels that are on every machine: sentences of the docstrings of Python's standard library.

The label of a text is the module that it comes from. Replace `load_texts` by your own data.
"""

import ast
import importlib.util
import re
from pathlib import Path

import tokenizers
import transformers

MODULES = ["decimal", "email", "statistics", "unittest"]


def load_texts() -> tuple[list[str], list[int]]:
    texts: dict[str, int] = {}
    for label, module in enumerate(MODULES):
        source = Path(importlib.util.find_spec(module).origin)
        files = sorted(source.parent.rglob("*.py")) if source.stem == "__init__" else [source]
        if module == "decimal":
            files = [source.with_name("_pydecimal.py")]
        for file in files:
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.FunctionDef | ast.ClassDef) and (text := ast.get_docstring(node)):
                    sentences = re.split(r"(?<=\.)\s+", " ".join(text.split()))
                    texts.update({s: label for s in sentences if 6 <= len(s.split()) <= 40})
    return list(texts), list(texts.values())


def train_tokenizer(texts: list[str], size: int = 1500) -> transformers.PreTrainedTokenizerFast:
    """A tokenizer of one's own, because none can be downloaded here. Take the one of your model instead."""
    made = tokenizers.BertWordPieceTokenizer()
    made.train_from_iterator(texts, vocab_size=size, show_progress=False)
    names = {"unk_token": "[UNK]", "pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made._tokenizer, **names)
