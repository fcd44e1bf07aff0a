"""Texts that a grammar allows: whether one is, random ones, and whether they match a schema."""

from __future__ import annotations

import contextlib
import json
import random
import sys
from typing import Any

import jsonschema
import jsonschema_rs
import numpy as np
import pytest

from edgespec.decoding.grammars import Grammar
from edgespec.decoding.json_schemas import FORMATS

_CHECKER = jsonschema.Draft202012Validator.FORMAT_CHECKER
assert _CHECKER.checkers.keys() >= FORMATS, "the package that checks a format is missing"


def accepts(grammar: Grammar, text: str) -> bool:
    """Return whether `text` is one that the grammar allows as a whole."""
    model, constraint = grammar.model, grammar.begin()
    with constraint:
        for token in model.tokenize(text, add_special=False, parse_special=False):
            if not constraint.allows((), token):
                return False
            constraint.advance([token])
        return constraint.allows((), model.eos)


def walk(grammar: Grammar, seed: int, *, longest: int = 120, end: float = 0.4) -> str | None:
    """Return a text of allowed tokens, chosen at random; None if it became too long.

    The text ends where it may with probability `end`, and tokens that close something come often.
    """
    model, rng, text = grammar.model, random.Random(seed), b""
    row = np.zeros(model.n_vocab, np.float32)
    with grammar.begin() as constraint:
        for _ in range(longest):
            masked = constraint.mask(row, ())
            assert masked is not None
            ids = [int(token) for token in np.flatnonzero(np.isfinite(masked))]
            ends = [token for token in ids if model.is_eog(token)]
            if ends and (len(ends) == len(ids) or rng.random() < end):
                return text.decode()
            ids = [token for token in ids if token not in ends]
            closing = [token for token in ids if model.piece(token)[:1] in b'"}]' and model.piece(token)]
            chosen = rng.choice(closing if closing and rng.random() < 0.3 else ids)
            text += model.piece(chosen)
            constraint.advance([chosen])
    return None


def verdicts(schema: Any, value: Any) -> list[bool]:
    """Return what the validators say that can read the schema: Python's patterns are not JSON Schema's."""
    said = []
    text = json.dumps(schema)
    if '"pattern' not in text:
        usual = jsonschema.Draft7Validator if '"additionalItems"' in text else jsonschema.Draft202012Validator
        kind = jsonschema.validators.validator_for(schema, usual)
        said.append(kind(schema, format_checker=_CHECKER).is_valid(value))
    if r"\\<" not in text:  # which it takes for the beginning of a word
        with contextlib.suppress(ValueError, jsonschema_rs.ReferencingError):
            said.append(jsonschema_rs.validator_for(schema, validate_formats=True).is_valid(value))
    return said


def read(text: str) -> Any:
    """Return what a text of JSON says; numbers beyond the range of doubles as the last of them."""
    largest = sys.float_info.max
    return json.loads(
        text, parse_constant=pytest.fail, parse_float=lambda x: min(max(float(x), -largest), largest)
    )
