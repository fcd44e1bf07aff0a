"""The texts in which bench/cache_quality.py looks up facts, and what it measures of a model."""

from __future__ import annotations

from argparse import Namespace

import pytest

from cache_quality import N_NEEDLES, haystack, lines, measure


def words(text: str) -> list[int]:
    """A tokenizer: a token for each byte."""
    return list(text.encode())


def test_a_needle_begins_each_tenth() -> None:
    tokens, needles = haystack(words, 8000, 3)
    assert (len(tokens), len(needles)) == (8000, N_NEEDLES)
    text = bytes(tokens).decode(errors="replace")
    for i, needle in enumerate(needles):
        fact = bytes(needle.question + needle.answer).decode()
        assert needle.at == i * 800
        assert bytes(tokens[needle.at :]).decode(errors="replace").startswith(f"{fact}. ")
        assert text.count(fact) == text.count(bytes(needle.question).decode()) == 1
        assert len(bytes(needle.answer).decode().strip()) == 5


def test_a_seed_makes_one_text() -> None:
    assert haystack(words, 4000, 1) == haystack(words, 4000, 1)
    assert haystack(words, 4000, 1)[0] != haystack(words, 4000, 2)[0]


def test_a_text_longer_than_there_is() -> None:
    with pytest.raises(ValueError, match="no text of"):
        haystack(words, 100_000_000, 1)


def test_all_is_measured(packable_path) -> None:
    quality = measure(packable_path, Namespace(tokens=300, lengths=[1000], seed=1, threads=1))
    for by_type in quality.texts.values():
        assert [*by_type] == ["f16", "q8_0", "q4_0"]
        assert max(by_type["f16"].agreement.kl) == 0
        assert 0 < sum(by_type["q8_0"].agreement.kl) < sum(by_type["q4_0"].agreement.kl)
    assert {len(found.found) for found in quality.needles[1000].values()} == {N_NEEDLES}
    assert len([*lines(quality)]) == 2 * 3 + 3
