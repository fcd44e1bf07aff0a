"""Where windows end, and the segments that their tokens say."""

import pytest

from edgespec.apps.speech.windows import Piece, split_window
from toy_speech import FIRST_TIME


def times(*steps):
    return [FIRST_TIME + step for step in steps]


def split(tokens, n_frames=3000):
    return split_window(tokens, first_timestamp=FIRST_TIME, n_frames=n_frames)


def test_pairs_of_timestamps_end_segments_and_text_after_the_last_is_left_to_the_next_window():
    tokens = [*times(0), 1, 2, *times(10, 12), 3, *times(40, 40), 4, 5]
    found = split(tokens)
    assert [(piece.start, piece.end) for piece in found.pieces] == [(0, 20), (24, 80)]
    assert found.pieces[0].tokens == (*times(0), 1, 2, *times(10))
    assert found.n_read == 80
    assert found.ends_with_speech


def test_a_single_timestamp_at_the_end_means_that_nobody_speaks_after_it():
    tokens = [*times(0), 1, *times(10, 12), 3, *times(40)]
    found = split(tokens, 2500)
    assert [(piece.start, piece.end) for piece in found.pieces] == [(0, 20), (24, 80)]
    assert found.n_read == 2500
    assert not found.ends_with_speech


@pytest.mark.parametrize(
    ("tokens", "end"), [([*times(0), 1, *times(33)], 66), ([*times(0), 1], 1234), ([1, 2], 1234), ([], 1234)]
)
def test_without_a_pair_the_window_is_one_segment(tokens, end):
    found = split(tokens, 1234)
    assert found.pieces == (Piece(0, end, tuple(tokens)),)
    assert found.n_read == 1234
