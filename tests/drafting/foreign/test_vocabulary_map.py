"""Which tokens of two vocabularies are the same text, and text tokenized from its middle."""

from __future__ import annotations

import numpy as np
import pytest

from edgespec.drafting.foreign.vocabulary_map import NONE, TextTokenizer, map_vocabularies
from edgespec.errors import EdgespecError
from edgespec.llama.weights import Model
from edgespec.models.resolve import resolve
from tiny_gguf import BOS, EOS, IM_END, IM_START, N_WORDS, write_tiny_gguf
from toy_vocabularies import ToyVocabulary


def test_tokens_are_the_same_by_their_bytes():
    target = ToyVocabulary([b"a", b"b", b"bc", b"c"])
    draft = ToyVocabulary([b"c", b"ab", b"a", b"b"])
    found = map_vocabularies(target, draft)
    assert found.target_of.tolist() == [3, NONE, 0, 1, 4]
    assert found.draft_of.tolist() == [2, 3, NONE, 0, 4]
    assert sorted(zip(*(ids.tolist() for ids in found.shared), strict=True)) == [(0, 3), (2, 0), (3, 1)]
    assert found.n_shared == 3
    assert (found.target_end, found.draft_ends) == (4, (4,))


def test_of_several_tokens_with_the_same_bytes_the_tokenizers_own_stands_for_all():
    target = ToyVocabulary([b"\n", b"a"])

    class PrefersTheLast(ToyVocabulary):
        def tokenize(self, text, *, add_special, parse_special):
            found = super().tokenize(text, add_special=add_special, parse_special=parse_special)
            return [2 if token == 0 else token for token in found]

    for kind, chosen in ((ToyVocabulary, 0), (PrefersTheLast, 2)):
        draft = kind([b"\n", b"a", b"\n"])
        found = map_vocabularies(target, draft)
        assert found.draft_of[0] == chosen
        assert found.target_of.tolist()[:3] == [0, 1, 0]  # whichever is read, it is that text
        assert found.shared[0].tolist() == sorted([1, chosen])
        back = map_vocabularies(draft, target)
        assert back.draft_of.tolist()[:3] == [0, 1, 0]
        assert back.target_of[0] == chosen


def test_end_tokens_are_the_same_by_their_role_and_others_never_proposed():
    target = ToyVocabulary([b"a"], [b"<s>", b"</s>", b"<|im_end|>", b"<x>"], bos=1, eos=2, eot=3)
    draft = ToyVocabulary([b"a"], [b"<bos>", b"<eos>", b"<turn>", b"<x>"], bos=1, eos=2, eot=3)
    found = map_vocabularies(target, draft)
    assert found.target_of.tolist() == [0, NONE, 3, 3, NONE]
    assert found.draft_of.tolist() == [0, NONE, 3, 3, 4]  # <x> may be read: both call it so
    assert (found.target_end, found.draft_ends) == (3, (3, 2))


def test_a_control_token_of_the_same_name_is_read_as_that():
    target = ToyVocabulary([b"a"], [b"<|im_start|>", b"<|im_end|>"], eos=2)
    draft = ToyVocabulary([b"a"], [b"<|im_end|>", b"<|im_start|>"], eos=1)
    assert map_vocabularies(target, draft).draft_of.tolist() == [0, 2, 1]


def test_nothing_in_common():
    found = map_vocabularies(ToyVocabulary([b"a"]), ToyVocabulary([b"b"]))
    assert found.n_shared == 0
    assert found.target_of.tolist() == [NONE, 1]


@pytest.mark.parametrize("adds_space", [False, True])
def test_text_is_tokenized_as_in_the_middle_of_a_text(adds_space):
    vocabulary = ToyVocabulary([b" ", b"a", b" a", b"\n", b"b"], adds_space=adds_space)
    tokens = TextTokenizer(vocabulary).tokens
    assert tokens(b"") == []
    for text in (b"a", b" a", b"ab a", b"\na", b" "):
        assert vocabulary.said(tokens(text)) == text


def test_half_a_character_becomes_single_bytes():
    whole = "é".encode()
    vocabulary = ToyVocabulary([b"a", whole, whole[:1], whole[1:]])
    tokens = TextTokenizer(vocabulary).tokens
    assert tokens(b"a" + whole) == [0, 1]
    assert tokens(b"a" + whole[:1]) == [0, 2]
    assert tokens(whole[1:] + b"a" + whole) == [3, 0, 1]
    assert tokens(b"\xff") == []  # there is no such token


# --- models in files


def test_vocabularies_of_files(tmp_path, tiny_target):
    """A draft with two words changed, other names of control tokens and more padding."""
    texts = {260: "xyzzy", 261: "Ġplugh", IM_START: "<|turn|>"}
    path = write_tiny_gguf(tmp_path / "other.gguf", texts=texts, n_padding=5, eos=IM_END)
    with Model(path, vocab_only=True) as draft:
        found = map_vocabularies(tiny_target, draft)
        back = map_vocabularies(draft, tiny_target)
    assert found.n_shared == N_WORDS - 2
    assert np.flatnonzero(found.draft_of[:N_WORDS] == NONE).tolist() == [260, 261]
    assert found.target_of[IM_END] == found.target_end == (tiny_target.eot or tiny_target.eos)
    assert found.draft_of[IM_START] == NONE
    assert found.draft_of[BOS] == BOS
    assert found.draft_of[EOS] == EOS
    assert (found.target_of[N_WORDS + 4 :] == NONE).all()
    assert back.shared[0].tolist() == sorted(found.shared[1].tolist())


@pytest.fixture(scope="module")
def vocabularies(pair):
    try:
        paths = [pair[0], resolve("smollm2-135m-q4_1"), resolve("gemma-3-270m-q4_k_m")]
    except EdgespecError as error:
        pytest.skip(f"the drafts could not be downloaded: {error}")
    models = [Model(path, vocab_only=True) for path in paths]
    yield models
    for model in models:
        model.close()


TEXTS = [
    "def f(x):\n    return x + 12\n\n\n",
    "  Two  spaces,\ttabs; naïve 日本語 😀🏳️‍🌈",
    "'s don't  \n \n  x",
]


@pytest.mark.pair
@pytest.mark.parametrize(("which", "least"), [(1, 39_000), (2, 95_000)])
def test_real_vocabularies(vocabularies, which, least):
    target, draft = vocabularies[0], vocabularies[which]
    found = map_vocabularies(target, draft)
    assert found.n_shared > least
    for ours, theirs in zip(*(ids[::97] for ids in found.shared), strict=True):
        assert draft.piece(int(ours)) == target.piece(int(theirs)) != b""
    for ids, n in zip(found.shared, (draft.n_vocab, target.n_vocab), strict=True):
        assert len(set(ids.tolist())) == len(ids) <= n
    assert found.target_end == target.eot
    assert found.draft_ends
    assert all(found.target_of[end] == target.eot for end in found.draft_ends)
    assert draft.bos is None or found.target_of[draft.bos] == NONE
    assert found.draft_of[target.eot] in found.draft_ends


@pytest.mark.pair
@pytest.mark.parametrize("text", TEXTS)
def test_real_tokenizers_keep_every_byte(vocabularies, text):
    data = text.encode()
    for model in vocabularies:
        tokens = TextTokenizer(model).tokens
        for start in range(0, len(data), 5):
            for end in (start + 1, start + 3, len(data)):
                part = data[start:end]
                assert b"".join(map(model.piece, tokens(part))) == part
