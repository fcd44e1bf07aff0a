"""Text comes in whole characters, and never past a stop string, however tokens cut it."""

from hypothesis import given
from hypothesis import strategies as st

from edgespec.engine.stream import TextStream


def feed_all(pieces, stop=()):
    stream = TextStream(stop)
    shown = [stream.feed(piece) for piece in pieces]
    return shown, stream.finish(), stream.stopped


def test_half_a_character_waits_for_the_rest():
    euro = "€".encode()
    assert feed_all([b"a" + euro[:1], euro[1:2], euro[2:] + b"b"]) == (["a", "", "€b"], "", False)


def test_half_a_character_at_the_end_is_dropped():
    assert feed_all([b"ok", "€".encode()[:2]]) == (["ok", ""], "", False)


def test_bytes_that_are_not_utf8_are_replaced():
    assert feed_all([b"a\xffb"])[0] == ["a\N{REPLACEMENT CHARACTER}b"]


def test_a_stop_string_across_tokens():
    assert feed_all([b"one ST", b"O", b"P two"], ["STOP"]) == (["one ", "", ""], "", True)


def test_text_held_for_a_stop_string_that_did_not_come():
    assert feed_all([b"one ST", b"OW"], ["STOP"]) == (["one ", "STOW"], "", False)
    assert feed_all([b"one ST"], ["STOP"]) == (["one "], "ST", False)


def test_the_earliest_of_several_stop_strings():
    assert feed_all([b"a b c d"], ["d", "b"])[0] == ["a "]
    assert feed_all([b"xab", b"c"], ["abc", "b"])[0][0] == "xa"


def test_a_stop_string_that_overlaps_itself():
    assert "".join(feed_all([b"aa", b"ab"], ["aab"])[0]) == "a"


@given(
    st.text(alphabet="abé€😀", max_size=40),
    st.lists(st.text(alphabet="abé", min_size=1, max_size=4)),
    st.data(),
)
def test_any_cut_gives_the_text_up_to_the_first_stop(text, stop, data):
    raw = text.encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=10)))
    pieces = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    shown, rest, stopped = feed_all(pieces, stop)
    got = "".join(shown) + rest
    # Character by character is the reference: the first stop string to be complete ends the text.
    ends = [(text.find(s) + len(s), text.find(s)) for s in stop if s in text]
    if not ends:
        assert (got, stopped) == (text, False)
        return
    assert stopped
    assert any(got == text[:at] for _, at in ends)
    assert not any(s in got for s in stop)
    if len(pieces) == len(raw):
        assert len(got) <= min(at for _, at in ends)
