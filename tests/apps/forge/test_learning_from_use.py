"""Drafts made from the history: what is added to what is there, what is remembered, what is said."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edgespec.apps.forge.dataset import BUILT_IN, FROM_HISTORY, READ, Dataset, DatasetTarget
from edgespec.apps.forge.draft_store import delete_user_texts, find_stored
from edgespec.apps.forge.make import RunState, make
from edgespec.drafting.history import History
from edgespec.errors import EdgespecError
from edgespec.llama.gguf_header import tokenizer_fingerprint
from edgespec.models.store import hash_file


@pytest.fixture(autouse=True)
def own_folders(tmp_path, monkeypatch):
    """A registry, a store and a cache of the test's own."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("EDGESPEC_MODELS_DIR", str(tmp_path / "models"))


def fill_history(target, n):
    """Store `n` prompts with answers of the target's tokenizer, about 60 tokens each."""
    documents = []
    for i in range(n):
        asked = target.tokenize_chat([{"role": "user", "content": f"What is {i} plus {i}?"}])
        answer = target.tokenize(
            f"It is {2 * i}, as all of us know. ", add_special=False, parse_special=False
        )
        documents.append([*asked, *answer])
    History(tokenizer_fingerprint(target.header)).extend(documents)
    return sum(map(len, documents))


def sources(target_path, target):
    """Tokens of answers in the target's dataset, by source."""
    found = dict.fromkeys((BUILT_IN, FROM_HISTORY, READ), 0)
    dataset = Dataset(DatasetTarget(hash_file(target_path), "target", target.n_embd))
    for text in dataset.texts():
        found[text.source] += len(text.tokens) - text.n_prompt
    return found


def test_a_history_that_is_too_small(request_, tiny_target):
    n = fill_history(tiny_target, 3)
    request = replace(request_, from_history=True)
    with pytest.raises(
        EdgespecError, match=rf"the history has {n} tokens .* at least 2,000 are needed"
    ) as raised:
        make(request)
    assert "\n" not in str(raised.value)


def test_the_second_draft_learns_from_use_and_that_is_remembered(
    request_, speeds, jobs, tiny_path, tiny_target
):
    request_ = replace(request_, force=True)
    first = make(request_).kept
    assert not first.uses_own_texts
    before = sources(tiny_path, tiny_target)

    fill_history(tiny_target, 100)
    request = replace(request_, from_history=True)
    second = make(request).kept
    after = sources(tiny_path, tiny_target)
    assert min(after[FROM_HISTORY], after[READ]) > 0, "though as many as were asked for were there"
    assert 300 <= sum(after.values()) - sum(before.values()) < 3_000, "and not all there is"
    assert {FROM_HISTORY, READ} < set(second.data)
    assert second.uses_own_texts

    (kept,) = find_stored()
    assert delete_user_texts(kept) == kept.own_texts > 0
    assert sources(tiny_path, tiny_target) == {**after, FROM_HISTORY: 0, READ: 0}
    third = make(request_).kept
    assert third.uses_own_texts, "it may start from weights that know of these texts"


def test_what_a_run_was_made_from_only_grows():
    state = RunState("key")
    for tokens in ({"read": 5, "prompt:built-in": 7}, {"prompt:built-in": 9}, {"read": 1}):
        state.add_sources(tokens)
    assert state.sources == {"prompt:built-in": 9, "read": 5}
