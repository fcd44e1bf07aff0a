"""Expected lengths of answers."""

import pytest

from edgespec.lengths import AnswerLengths


def test_prompts_that_begin_alike():
    lengths = AnswerLengths(100.0)
    assert lengths.expected("Translate this") == 100.0
    for i in range(4):
        lengths.learn(f"Translate German to English: {i}", 20)
        lengths.learn(f"Translate German poems well: {i}", 400)
    assert lengths.expected("translate  German to English: and more") < 60
    assert lengths.expected("Translate German poems well: and more") > 250
    assert 100 < lengths.expected("Translate German") < 250
    other = lengths.expected("Write")
    assert other == lengths.mean == lengths.expected("") != 100.0
    assert lengths.expected([1, 2, 3]) == other


def test_an_answer_that_was_cut_tells_that_it_is_no_shorter():
    lengths = AnswerLengths(100.0)
    lengths.learn("Write a book", 50, cut=True)
    assert lengths.expected("Write a book") == 100.0
    lengths.learn("Write a book", 500, cut=True)
    assert lengths.expected("Write a book") > 300
    assert lengths.mean == 100.0


def test_tokens_as_prompts():
    lengths = AnswerLengths(100.0)
    lengths.learn([1, 2, 3, 4, 5], 10)
    assert lengths.expected([1, 2, 3, 4, 9]) < 60


def test_it_follows_a_change_and_is_bounded():
    lengths = AnswerLengths(100.0)
    for _ in range(100):
        lengths.learn("a", 10)
    for _ in range(20):
        lengths.learn("a", 1000)
    assert lengths.expected("a") > 700
    for i in range(5000):
        lengths.learn(f"{i} b c d", 5)
    assert len(lengths.as_dict()) == 1024


def test_kept_and_restored():
    lengths = AnswerLengths(100.0)
    lengths.learn("Translate a b c d", 20)
    stored = lengths.as_dict()
    assert not any("ranslate" in key for key in stored)
    again = AnswerLengths(lengths.mean)
    again.restore(stored)
    assert again.as_dict() == stored
    assert again.expected("Translate a") == pytest.approx(lengths.expected("Translate a"))


@pytest.mark.parametrize(
    "damage",
    [None, 5, [], {"a": 1}, {"a": [1]}, {"a": ["x", 1]}, {"a": [10**400, 1]}, {"a": [-1, float("nan")]}],
)
def test_what_makes_no_sense_is_left_alone(damage):
    lengths = AnswerLengths(100.0)
    lengths.restore(damage)
    assert lengths.as_dict() == {}
