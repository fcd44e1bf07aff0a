"""Times of words: the path through the attention, and what is done about pauses and punctuation."""

import itertools

import numpy as np
import pytest

from edgespec.apps.speech.windows import (
    _Timed,
    median_filter,
    merge_punctuation,
    shorten_at_sentence_ends,
    warp,
)


def word(text, start=0.0, end=0.0, tokens=(1,)):
    return _Timed(text, list(tokens), start, end, 1.0)


def best_path_cost(cost):
    """Try every path."""
    n, m = cost.shape
    best = np.inf
    for n_both in range(min(n, m)):
        steps = ["both"] * n_both + ["down"] * (n - 1 - n_both) + ["right"] * (m - 1 - n_both)
        for order in set(itertools.permutations(steps)):
            i = j = 0
            total = cost[0, 0]
            for step in order:
                i += step != "right"
                j += step != "down"
                total += cost[i, j]
            best = min(best, total)
    return best


@pytest.mark.parametrize("shape", [(1, 1), (1, 4), (3, 3), (3, 4), (4, 2)])
def test_warping_finds_the_cheapest_path(shape):
    cost = np.random.default_rng(shape).standard_normal(shape).astype(np.float32)
    rows, columns = warp(cost)
    assert (rows[0], columns[0]) == (0, 0)
    assert (rows[-1], columns[-1]) == (shape[0] - 1, shape[1] - 1)
    assert cost[rows, columns].sum() == pytest.approx(best_path_cost(cost), abs=1e-5)


def test_the_median_is_over_mirrored_ends():
    values = np.array([[5.0, 1.0, 2.0, 9.0, 3.0]], np.float32)
    assert median_filter(values, 3).tolist() == [[1.0, 2.0, 2.0, 3.0, 9.0]]
    assert np.array_equal(median_filter(values[:, :3], 7), values[:, :3])


def test_punctuation_joins_the_word_that_it_opens_or_closes():
    words = [word(' "', tokens=[7]), word("Yes", tokens=[8]), word(",", tokens=[9]), word(" no", tokens=[10])]
    words.append(word(".", tokens=[11]))
    merge_punctuation(words)
    assert [one.text for one in words if one.text] == [' "Yes,', " no."]
    assert [one.tokens for one in words if one.text] == [[7, 8, 9], [10, 11]]


def test_a_pause_at_the_end_of_a_sentence_belongs_to_no_word():
    words = [word(" a", 0, 0.2), word(".", 0.2, 3.0), word(" b", 3.0, 6.0)]
    shorten_at_sentence_ends(words, 0.5)
    assert (words[1].start, words[1].end) == (0.2, 0.7)
    assert (words[2].start, words[2].end) == (5.5, 6.0)
