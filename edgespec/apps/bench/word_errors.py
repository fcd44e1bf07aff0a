"""Counts word errors: words in lower case without punctuation, numbers as they are written."""

from __future__ import annotations

import importlib
import re
from typing import NamedTuple

from edgespec.errors import EdgespecError


class WordErrors(NamedTuple):
    """Errors in what was heard of a known text."""

    n_errors: int
    """Words replaced, missing or added."""
    n_words: int
    """Words of the known text."""


def require_counting(field: str) -> None:
    """Raise EdgespecError if jiwer, which `field` needs, is missing."""
    try:
        importlib.import_module("jiwer")
    except ImportError:
        raise EdgespecError("word errors need jiwer: pip install 'edgespec[bench]'", field=field) from None


def plain_words(text: str) -> str:
    """Return a text in lower case, without punctuation."""
    return " ".join(re.findall(r"[\w']+", text.lower()))


def word_errors(known: str, heard: str) -> WordErrors:
    """Count the errors in `heard`, where `known` is said, by the least edits that make one of the other."""
    import jiwer

    found = jiwer.process_words(plain_words(known), plain_words(heard))
    n_wrong = found.substitutions + found.deletions
    return WordErrors(n_wrong + found.insertions, n_wrong + found.hits)
