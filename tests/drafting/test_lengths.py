"""Expected lengths of answers."""

import math

import pytest

from edgespec.drafting.answer_lengths import AnswerLengths


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
    lengths.learn("Write a book", 50, unfinished=True)
    assert lengths.expected("Write a book") == 100.0
    lengths.learn("Write a book", 500, unfinished=True)
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


# ---- what is believed of one answer ----


def usually(n_tokens, *, times=8):
    lengths = AnswerLengths(100.0)
    for _ in range(times):
        lengths.learn("Write", n_tokens)
    return lengths.of("Write")


@pytest.mark.parametrize("lengths", [AnswerLengths(100.0).of(""), usually(5), usually(3000), usually(1e6)])
def test_what_is_believed_is_a_distribution(lengths):
    assert sum(lengths.shares) == pytest.approx(1.0)
    assert lengths.longer(1) == pytest.approx(1.0)
    left = [lengths.longer(n) for n in (1, 2, 3, 7, 8, 100, 5000, 131_072, 10**7)]
    assert left == sorted(left, reverse=True)
    assert left[-1] == 0.0
    for n in (1, 5, 64, 900, 10**7):
        found = lengths.after(n)
        assert sum(chance for _, chance in found) == pytest.approx(1.0)
        assert all(length > n for length, _ in found)
        assert lengths.to_come(n) > 0.0


def test_the_longer_an_answer_has_become_the_more_is_to_come():
    unknown = AnswerLengths(100.0).of("")
    to_come = [unknown.to_come(n) for n in (1000, 4000, 16_000)]
    assert to_come == sorted(to_come)


def test_what_was_answered_is_believed_and_what_was_not_is_open():
    assert usually(10).longer(40) < 0.1 < AnswerLengths(100.0).of("").longer(40)
    assert usually(400).longer(40) > 0.9
    assert usually(10, times=8).longer(40) < usually(10, times=1).longer(40)


def pays(lengths, n, *, price=3.0, saved=0.3, n_max=math.inf):
    """Whether to pay the time of three tokens for three tenths of each token from now on."""
    return lengths.pays(price, saved, n=n, n_max=n_max, spent=5.0 + n, pace=1.0)


def test_where_the_length_is_not_known_one_waits_for_some_tokens():
    unknown = AnswerLengths(100.0).of("")
    first = next(n for n in range(1, 1000) if pays(unknown, n))
    assert 10 < first < 60
    assert not pays(unknown, first, n_max=first + 5)  # 5 tokens more save less than that
    assert not pays(unknown, 1000, saved=0.0)
    assert not pays(unknown, 1000, saved=-1.0)


def test_what_is_known_of_the_length_is_used():
    unknown = AnswerLengths(100.0).of("")
    first = next(n for n in range(1, 1000) if pays(unknown, n))
    assert next(n for n in range(1, 1000) if pays(usually(500), n)) < first / 2
    assert not any(pays(usually(10), n) for n in range(1, 20))


def test_an_empty_answer_is_a_short_one():
    lengths = AnswerLengths(100.0)
    for _ in range(9):
        lengths.learn("Say nothing", 0)
    assert lengths.expected("Say nothing") < 20
    assert lengths.of("Say nothing").longer(40) < 0.1
