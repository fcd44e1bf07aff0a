"""Whisper's tokenizer over a small vocabulary of bytes and a few merges."""

from __future__ import annotations

from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.apps.speech import options
from edgespec.apps.speech.options import LANGUAGES, language_code
from edgespec.apps.speech.tokenizer import WhisperTokenizer
from edgespec.errors import EdgespecError, UsageError
from tiny_gguf import write_tiny_gguf
from tiny_whisper import write_tiny_whisper

MERGES = [b" t", b"he", b" the", b"\xc3\xa4", b"\xe6\x97", b" -", b" '"]
TOKENS = tuple(bytes([i]) for i in range(256)) + tuple(MERGES)
TOKENIZER = WhisperTokenizer(TOKENS, len(TOKENS) + 1608)


def test_special_tokens_follow_from_the_size():
    end = len(TOKENS)
    assert (TOKENIZER.eot, TOKENIZER.sot) == (end, end + 1)
    assert TOKENIZER.languages[:3] == ("en", "zh", "de") and len(TOKENIZER.languages) == 99
    assert TOKENIZER.language_token("de") == end + 4
    after = end + 2 + 99
    assert (TOKENIZER.translate, TOKENIZER.transcribe, TOKENIZER.sot_lm) == (after, after + 1, after + 2)
    found = (TOKENIZER.sot_prev, TOKENIZER.no_speech, TOKENIZER.no_timestamps)
    assert found == (after + 3, after + 4, after + 5)
    assert TOKENIZER.timestamp_begin == after + 6
    assert TOKENIZER.seconds(TOKENIZER.n_vocab - 1) == pytest.approx(30.0)
    # large-v3 has one language more
    newer = WhisperTokenizer(TOKENS, len(TOKENS) + 1609)
    assert newer.languages[-1] == "yue" and newer.transcribe == after + 2


def test_the_tokens_that_begin_a_transcript():
    t = TOKENIZER
    assert t.start("de") == [t.sot, t.language_token("de"), t.transcribe]
    assert t.start("de", translate=True, timestamps=False)[2:] == [t.translate, t.no_timestamps]
    english = WhisperTokenizer(TOKENS, t.n_vocab, is_multilingual=False)
    assert english.start("en") == [english.sot]
    with pytest.raises(UsageError, match="knows no language 'yue'"):
        t.start("yue")


@given(st.text())
def test_text_round_trips(text):
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


def test_merges_and_names_of_special_tokens_in_a_text():
    assert TOKENIZER.encode(" the") == [258]
    assert max(TOKENIZER.encode("<|endoftext|>")) < TOKENIZER.eot
    assert TOKENIZER.decode([*TOKENIZER.encode("a"), TOKENIZER.eot, TOKENIZER.timestamp_begin]) == "a"


def test_words():
    t = TOKENIZER
    tokens = [*t.encode(" the thä, 日 the."), t.timestamp_begin + 50, t.eot]
    words, groups = t.split_to_words(tokens, "en")
    assert words == [" the", " thä", ",", " 日", " the", ".", "<|1.00|>", "<|endoftext|>"]
    assert list(chain(*groups)) == tokens
    words, groups = t.split_to_words(t.encode("日本"), "ja")
    assert words == ["日", "本"] and groups[0] == [260, 0xA5]
    cut = t.encode("日")[:1]  # a character that never ends is kept
    assert list(chain(*t.split_to_words(cut, "en")[1])) in ([], cut)


def test_suppressed_tokens():
    t = TOKENIZER
    assert {ord("("), ord("#"), 261, 262} <= set(t.non_speech_tokens)  # "(", "#", " -", " '"
    assert not {ord("-"), ord("'"), ord("a")} & set(t.non_speech_tokens)
    assert {t.sot, t.no_speech, t.translate} <= set(t.suppressed) and t.eot not in t.suppressed


def test_files(tmp_path):
    found = WhisperTokenizer.from_gguf(write_tiny_whisper(tmp_path / "w.gguf", multilingual=False))
    assert not found.is_multilingual and len(found.languages) == 99
    assert found.decode(found.encode("Grüße, 日本")) == "Grüße, 日本"
    with pytest.raises(EdgespecError, match="no Whisper model's vocabulary"):
        WhisperTokenizer.from_gguf(write_tiny_gguf(tmp_path / "text.gguf"))


def test_names_of_languages():
    assert len(LANGUAGES) == 100
    for code, names in (
        ("en", "en EN en-US en_US en_GB.UTF-8 English eng"),
        ("de", "German Deutsch deu de-AT"),
        ("fr", "français Francais french"),
        ("zh", "zh-Hans-CN 中文 mandarin"),
        ("yue", "zh-yue cantonese"),
        ("no", "nb nb-NO norsk"),
        ("ht", "Haitian_Creole ht"),
        ("my", "burmese"),
        ("hi", "हिन्दी"),
        (None, "auto AUTO"),
    ):
        assert {language_code(name) for name in names.split()} == {code}
    assert language_code(" Haitian  creole") == "ht"
    for name, alike in (
        ("germn", "(nearest: german"),
        ("Englisch", "(nearest: english"),
        ("xx", "such as german"),
    ):
        with pytest.raises(UsageError) as caught:
            language_code(name)
        assert f"language {name}: Whisper knows no such language" in str(caught.value)
        assert alike in str(caught.value) and len(str(caught.value)) < 150
    with pytest.raises(UsageError):
        language_code("x-en")


def test_a_language_has_one_name_and_no_name_means_two():
    names: dict[str, str] = {}
    for code, others in options._OTHER_NAMES.items():
        for name in (code, LANGUAGES[code], *others.split()):
            assert names.setdefault(options._plain(name), code) == code
            assert language_code(name) == code
