"""Batches: every answer once in an epoch, each in the place that the families expect."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest

from edgespec.apps.forge.dataset import BUILT_IN, TrainingText
from edgespec.apps.forge.training.batches import BatchSize, EpochPosition, TextPacking, batches
from edgespec.apps.forge.training.loop import starts

N_EMBD = 4
ROWS = BatchSize(n=3, columns=40, answers=24, overlap=6)


def a_text(rng, number, n_tokens, n_prompt, first) -> TrainingText:
    """Its tokens are numbered through all texts; its features say of which token they are."""
    tokens = 1000 * number + np.arange(n_tokens)
    features = np.zeros((n_tokens - 1 - first, N_EMBD), np.float16)
    features[:, 0], features[:, 1] = number, np.arange(first, n_tokens - 1)
    return TrainingText(tokens.astype(np.int32), n_prompt, first, features, 0.0, BUILT_IN, number)


@pytest.fixture
def texts():
    rng = np.random.default_rng(3)
    short = [
        a_text(rng, i, int(n), int(rng.integers(2, n)), int(rng.integers(0, 2)))
        for i, n in enumerate(rng.integers(4, 30, 40))
    ]
    return [*short, a_text(rng, 40, 200, 50, 30), a_text(rng, 41, 90, 1, 0), a_text(rng, 42, 9, 9, 3)]


def embed(tokens):
    return np.stack([tokens, -tokens], -1).astype(np.float16)


def test_every_answer_comes_once_in_an_epoch(texts):
    packing = TextPacking(texts, ROWS)
    seen = []
    for batch, place in batches(packing, embed, ROWS.n, 5, EpochPosition()):
        assert batch.tokens.shape == (3, 40)
        assert batch.answers.shape == (3, 24)
        for row, i in zip(*np.nonzero(batch.weights), strict=True):
            column = batch.answers[row, i]
            token = batch.tokens[row, column]
            number, at = divmod(int(token), 1000)
            assert batch.tokens[row, column + 1] == token + 1
            assert batch.features[row, column, :2].tolist() == [number, at]
            # Never a text's first column: a head needs the feature before it.
            assert batch.text[row, column - 1] == batch.text[row, column] == batch.text[row, column + 1]
            assert batch.features[row, column - 1, :2].tolist() == [number, at - 1]
            seen.append((number, at))
        np.testing.assert_array_equal(batch.embeddings[..., 0], batch.tokens.astype(np.float16))
        if place.epoch:
            break
    wanted = [
        (number, at)
        for number, text in enumerate(texts)
        for at in range(max(text.n_prompt - 1, text.first + 1), len(text.tokens) - 1)
    ]
    assert sorted(seen) == wanted
    assert packing.n_answers == len(wanted)


def test_texts_of_a_row_are_kept_apart_and_each_is_whole(texts):
    packing = TextPacking(texts, ROWS)
    for row in packing.epoch(0, 0):
        batch = packing.batch([row], embed)
        columns = np.flatnonzero(batch.text[0] >= 0)
        np.testing.assert_array_equal(columns, np.arange(len(columns)))
        for number in range(batch.text[0].max() + 1):
            tokens = batch.tokens[0, batch.text[0] == number]
            np.testing.assert_array_equal(np.diff(tokens), 1)


def test_the_order_is_a_function_of_seed_epoch_and_place(texts):
    packing = TextPacking(texts, ROWS)

    def first_tokens(place, seed=0, n=4):
        return [
            batch.tokens[:, 0].tolist() for batch, _ in islice(batches(packing, embed, 3, seed, place), n)
        ]

    whole = first_tokens(EpochPosition(), n=6)
    assert first_tokens(EpochPosition()) == whole[:4]
    assert first_tokens(EpochPosition(0, 6)) == whole[2:6]
    assert first_tokens(EpochPosition(1, 0)) != whole[:4]
    assert first_tokens(EpochPosition(), seed=1) != whole[:4]


def test_drafts_start_where_enough_answers_of_one_text_follow(texts):
    packing = TextPacking(texts, ROWS)
    for n in (1, 3, 5):
        batch = packing.batch(packing.epoch(0, 0)[:3], embed)
        found = starts(batch, n)
        for row in range(3):
            at = {int(c) for c, w in zip(batch.answers[row], batch.weights[row], strict=True) if w}
            for i, column in enumerate(batch.answers[row]):
                is_answer = batch.weights[row, i] > 0
                text = batch.text[row, column]
                follows = all(column + k in at and batch.text[row, column + k] == text for k in range(n))
                assert found[row, i] == (is_answer and follows)
