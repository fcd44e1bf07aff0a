"""The suffix store as llama-cpp-python's draft model: real `Llama` objects over tiny models, and by hand."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llama_cpp import Llama

from edgespec.drafting.history import History
from edgespec.engine.llama_draft import MOST, PACKED, STOCK, SuffixDraft
from edgespec.errors import EdgespecError
from edgespec.llama import kernels as kernels_room
from edgespec.llama.fingerprints import tokenizer_fingerprint
from edgespec.llama.weights import Model
from tiny_gguf import N_WORDS

PROMPT = b"the cat and the other cat and the other "
FREE = {1: 1.0, 32: 1.0}  # tokens cost nothing: all that is likely is offered


class Watched(SuffixDraft):
    """Notes what was offered and what came of it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.offered: list[int] = []
        self.accepted: list[int] = []

    def __call__(self, input_ids: np.ndarray, /, **others: Any) -> np.ndarray:
        before, last = self._text, self._offered
        offered = super().__call__(input_ids, **others)
        if len(before) and np.array_equal(input_ids[: len(before)], before):
            new = input_ids[len(before) :]
            n = min(len(new), len(last))
            self.accepted.append(int(np.cumprod(new[:n] == last[:n]).sum()))
        self.offered.append(len(offered))
        return offered


def make(path: Path, draft: SuffixDraft | None = None, **options: Any) -> Llama:
    options = {"n_ctx": 512, "n_threads": 1, "logits_all": True, "verbose": False, "seed": 7, **options}
    return Llama(str(path), draft_model=draft, **options)


def write(llm: Llama, prompt: bytes, n: int, **options: Any) -> list[int]:
    tokens = llm.tokenize(prompt, add_bos=False)
    options = {"temp": 0.0, **options}
    return [token for token, _ in zip(llm.generate(tokens, **options), range(n), strict=False)]


@pytest.fixture(scope="module")
def plain(tiny_path: Path) -> Iterator[Llama]:
    llm = make(tiny_path)
    yield llm
    llm.close()


def hand(draft: SuffixDraft, *tokens: int) -> list[int]:
    offered = draft(np.array(tokens, np.intc))
    assert offered.dtype == np.intc
    return offered.tolist()


# In Llama


@pytest.mark.parametrize("costs", [STOCK, FREE])
def test_the_text_is_the_same_and_some_of_it_was_drafted(
    tiny_path: Path, plain: Llama, costs: dict[int, float]
) -> None:
    draft = Watched(costs=costs)
    llm = make(tiny_path, draft)
    expected = write(plain, PROMPT, 300)
    assert write(llm, PROMPT, 300) == expected
    assert sum(draft.accepted) > 30
    assert len(draft.offered) < 300 - sum(draft.accepted) + MOST
    # Again: the text is cut back to the prompt, and what stood there was seen.
    n_steps = len(draft.offered)
    assert write(llm, PROMPT, 300) == expected
    assert len(draft.offered) - n_steps < n_steps
    llm.close()


def test_other_prompts_and_turns(tiny_path: Path, plain: Llama) -> None:
    draft = Watched(costs=FREE)
    llm = make(tiny_path, draft)
    for prompt in (PROMPT, b"another one", PROMPT + b"more", PROMPT[:9], b"x", PROMPT):
        assert write(llm, prompt, 60) == write(plain, prompt, 60)
    answer = plain.detokenize(write(plain, PROMPT, 60))
    assert write(llm, PROMPT + answer + b" and", 60) == write(plain, PROMPT + answer + b" and", 60)
    llm.close()


@pytest.mark.parametrize("options", [{"temp": 0.8}, {"temp": 1.5, "top_k": 0, "repeat_penalty": 1.1}])
def test_a_sampled_text_is_the_same_too(tiny_path: Path, plain: Llama, options: dict[str, float]) -> None:
    """`Llama` samples after each token in turn, with the coin that it would have used."""
    draft = Watched(costs=FREE)
    llm = make(tiny_path, draft)
    for seed in range(3):
        for one in (llm, plain):
            one.set_seed(seed)
        assert write(llm, PROMPT * 3, 80, **options) == write(plain, PROMPT * 3, 80, **options)
    assert sum(draft.offered) > 0
    llm.close()


def test_to_the_end_of_the_context_and_in_several_batches(tiny_path: Path, plain: Llama) -> None:
    draft = Watched(MOST, costs=FREE)
    llm = make(tiny_path, draft, n_batch=32)
    expected = plain.create_completion(PROMPT.decode() * 9, max_tokens=None, temperature=0)
    got = llm.create_completion(PROMPT.decode() * 9, max_tokens=None, temperature=0)
    assert got["choices"] == expected["choices"]
    assert got["choices"][0]["finish_reason"] == "length"
    assert max(draft.offered) == MOST, "31 tokens and the last one: a whole batch"
    llm.close()


def test_logits_all_is_needed(tiny_path: Path) -> None:
    """docs/integration.md says so: without it `Llama` has rows for one batch only."""
    llm = make(tiny_path, SuffixDraft(), logits_all=False, n_batch=32)
    with pytest.raises(ValueError, match="broadcast"):
        write(llm, PROMPT * 3, 5)
    llm.close()


def test_with_the_kernels_of_edgespec(packable_path: Path, kernels: kernels_room.Kernels) -> None:
    with kernels_room.packing(True) as packed:
        plain = make(packable_path, flash_attn=True)
        assert packed.tensors()
    draft = Watched(costs=FREE)
    with kernels_room.packing(True):
        llm = make(packable_path, draft, flash_attn=True)
    assert write(llm, PROMPT, 100) == write(plain, PROMPT, 100)
    assert sum(draft.offered) > 0
    plain.close()
    llm.close()


# By hand


def test_nothing_is_offered_where_nothing_is_known() -> None:
    draft = SuffixDraft(costs=FREE)
    assert hand(draft, 1) == []
    assert hand(draft, 1, 2, 3, 4, 5, 6) == []
    assert hand(SuffixDraft(0), 1, 2, 3, 1, 2, 3, 1, 2) == []


def test_what_followed_is_offered_up_to_the_most() -> None:
    text = [*range(40), *range(8)]
    assert hand(SuffixDraft(3, costs=FREE), *text) == [8, 9, 10]
    assert hand(SuffixDraft(MOST, costs=FREE), *text)[:20] == list(range(8, 28))


def test_only_what_pays_is_offered() -> None:
    text = [*range(40), 1, 2]  # two tokens that were seen together
    assert hand(SuffixDraft(costs=PACKED), *text)
    assert not hand(SuffixDraft(costs={1: 1.0, 2: 2.0, 16: 16.0}), *text), (
        "twice the tokens for twice the time"
    )
    assert not hand(SuffixDraft(costs=PACKED), *range(40), 1), "one token says little"


def test_a_text_that_never_does_what_it_did_costs_little() -> None:
    """The worst case: each offer is wrong. All that is lost is the credit, and 3 % of the steps."""
    for costs in (STOCK, PACKED):
        draft = SuffixDraft(costs=costs)
        text, fresh, lost = [*range(200)] * 2, 1000, 0.0
        text.append(0)
        for step in range(1, 300):
            offered = hand(draft, *text)
            lost += np.interp(len(offered) + 1, list(costs), list(costs.values())) - 1
            assert lost <= 3 + 0.03 * step
            # Breaks off, and then begins like something seen.
            text += [fresh, *[(7 * step + i) % 180 for i in range(6)]]
            fresh += 1
        assert lost > 2, "it was tried"


def test_it_takes_heart_again() -> None:
    draft = SuffixDraft()
    text = [*range(100)] * 3
    short = len(hand(draft, *text[:110]))
    for n in range(112, 280, 8):
        long = len(hand(draft, *text[:n]))
    assert 0 < short < long == 15


def test_the_texts_of_the_history(tiny_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with Model(tiny_path, vocab_only=True) as model:
        fingerprint = tokenizer_fingerprint(model)
    history = History(fingerprint)
    history.append([*range(60, 100), N_WORDS + 900, 5])  # one id that this model does not have
    assert hand(SuffixDraft(costs=FREE), 1, 70, 71, 72) == []
    draft = SuffixDraft(31, costs=FREE, history=tiny_path)
    assert hand(draft, 1, 70, 71, 72) == list(range(73, 100))
    assert history.info().documents == 1, "only read"
    with pytest.raises(EdgespecError):
        SuffixDraft(history=tiny_path.with_name("none.gguf"))


def test_what_follows_a_cut_is_found_by_what_stands_before_it() -> None:
    draft = SuffixDraft(3, costs=FREE)
    hand(draft, *range(40))
    hand(draft, *range(20), 100, 101, 102, 103)
    hand(draft, 99, 19, 100, 77)  # later, but it has less in common with what comes
    assert hand(draft, 18, 19, 100)[:1] == [101]


def test_a_text_that_is_cut_back_is_not_stored_twice() -> None:
    draft = SuffixDraft(costs=FREE)
    text = [*range(250)]
    for _ in range(20):
        hand(draft, *text)
        hand(draft, *text[:100])
    assert len(draft._store._store) < 250 + 20 * (150 + 2 * 33)
    assert draft._store._store.check()


@pytest.mark.parametrize("most", [-1, MOST + 1])
def test_wrong_numbers(most: int) -> None:
    with pytest.raises(ValueError, match="most"):
        SuffixDraft(most)
    for costs in ({2: 1.0}, {1: 0.0}, {0: 1.0, 1: 1.0}, {}):
        with pytest.raises(ValueError, match="costs"):
            SuffixDraft(costs=costs)
