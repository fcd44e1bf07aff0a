"""The target writes texts, 16 at once, and reads others."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from command_line import python_path
from edgespec.apps.forge import writing as writing_module
from edgespec.apps.forge.dataset import (
    BUILT_IN,
    FROM_HISTORY,
    READ,
    Dataset,
    DatasetTarget,
    TrainingText,
    key_of,
)
from edgespec.apps.forge.prompts import TextPrompt, TokenPrompt
from edgespec.apps.forge.writing import (
    TEMPERATURES,
    TargetWriter,
    WritingRun,
    WritingSettings,
    prompt_tokens,
    temperature_of,
)
from edgespec.decoding.sampling import SamplingParams
from edgespec.decoding.session import Forward, ForwardResult
from edgespec.engine.engine import Engine
from edgespec.errors import EdgespecError
from edgespec.llama import hidden_states
from edgespec.llama.kv_cache import KVCache, KVCacheSize
from edgespec.llama.session import Session
from edgespec.llama.weights import Model
from tiny_gguf import BOS, IM_END, write_tiny_gguf

PLENTY = 1 << 26
SMALL = WritingSettings(n_texts=4, n_predict=24, longest_prompt=104, window=16, n_pass=20)


def prompts_of(n: int, wanted: Callable[[float], bool] = lambda _: True) -> list[TextPrompt]:
    """Prompts whose temperature is as `wanted`."""
    found = (TextPrompt(BUILT_IN, (f"Tell me of {'the ' * (i % 9)}{i}.",)) for i in range(100 * n))
    return [prompt for prompt in found if wanted(temperature_of(prompt.key))][:n]


@pytest.fixture
def dataset(tmp_path: Path, tiny_target: Model) -> Dataset:
    return Dataset(target_of(tiny_target), tmp_path / "data")


def target_of(model: Model) -> DatasetTarget:
    return DatasetTarget("ab" * 32, "tiny", model.n_embd)


@pytest.fixture
def writing(tiny_target: Model) -> Iterator[TargetWriter]:
    with TargetWriter(tiny_target, SMALL, n_threads=1) as writing:
        yield writing


def fill(
    writing: TargetWriter,
    dataset: Dataset,
    prompts: list[TextPrompt | TokenPrompt] | list[TextPrompt],
    until: int = 1 << 30,
) -> list[TrainingText]:
    with dataset.writer(PLENTY) as writer:
        written = writing.fill(writer, prompts, until=until)
    texts = list(dataset.texts())
    assert sum(len(text.tokens) - text.n_prompt for text in texts) >= written.n_tokens
    return texts


def plain_features(model: Model, tokens: list[int]) -> np.ndarray:
    with KVCache(model, KVCacheSize(n_ctx=512, n_logits_max=512), n_threads=1) as cache:
        return Forward(Session.within(cache), tokens, with_features=True).run().copy().features


def test_greedy_texts_are_what_the_engine_generates(
    writing: TargetWriter, dataset: Dataset, tiny_path: Path, tiny_target: Model
) -> None:
    prompts = prompts_of(9, lambda temperature: temperature == 0.0)
    texts = fill(writing, dataset, prompts)
    assert len(texts) == 9
    with Engine(tiny_path, drafter="none", n_threads=1) as engine:
        for prompt in prompts:
            text = next(text for text in texts if text.key == prompt.key)
            tokens = prompt_tokens(tiny_target, prompt)
            assert text.tokens[: text.n_prompt].tolist() == tokens
            result = engine.generate(
                tokens, n_predict=SMALL.n_predict, params=SamplingParams(temperature=0.0)
            )
            answer = text.tokens[text.n_prompt :].tolist()
            assert answer[: len(result.token_ids)] == list(result.token_ids)
            assert len(answer) == SMALL.n_predict or tiny_target.is_eog(answer[-1])


def test_features_are_those_of_a_plain_pass(
    writing: TargetWriter, dataset: Dataset, tiny_target: Model
) -> None:
    for text in fill(writing, dataset, prompts_of(12)):
        tokens = text.tokens.tolist()
        assert text.first == max(0, text.n_prompt - SMALL.window)
        assert text.features.shape == (len(tokens) - 1 - text.first, tiny_target.n_embd)
        expected = plain_features(tiny_target, tokens)[text.first : -1]
        # Half precision has 11 bits; the library multiplies matrices of other heights in another order.
        assert np.allclose(text.features, expected, rtol=2e-3, atol=2e-3)


def test_on_edgespecs_kernels_they_are_close_too(tmp_path: Path, packable_path: Path) -> None:
    with Model(packable_path) as model, TargetWriter(model, SMALL, n_threads=1) as writing:
        for text in fill(writing, Dataset(target_of(model), tmp_path / "data"), prompts_of(6)):
            expected = plain_features(model, text.tokens.tolist())[text.first : -1]
            assert np.allclose(text.features, expected, rtol=2e-2, atol=2e-2)


def test_a_run_can_be_repeated(tmp_path: Path, tiny_target: Model, writing: TargetWriter) -> None:
    def by_key(folder: str) -> dict[int, list[int]]:
        data = Dataset(target_of(tiny_target), tmp_path / folder)
        return {text.key: text.tokens.tolist() for text in fill(writing, data, prompts_of(12, bool))}

    assert by_key("1") == by_key("2")


def test_temperatures_are_mixed_and_held_out_texts_greedy() -> None:
    keys = [key_of(str(i).encode()) for i in range(4000)]
    found = Counter(temperature_of(key) for key in keys)
    assert set(found) == {0.0, *TEMPERATURES}
    assert abs(found[0.0] / 4000 - (0.05 + 0.95 * 0.4)) < 0.03
    assert all(abs(found[one] / 4000 - 0.95 * 0.2) < 0.03 for one in TEMPERATURES)


def test_sampled_tokens_are_the_models(tiny_target: Model, dataset: Dataset) -> None:
    """At temperature 0.6 and top-p 0.95, a token that is written is one of the likeliest."""
    with TargetWriter(tiny_target, SMALL, n_threads=1) as writing:
        texts = fill(writing, dataset, prompts_of(8, lambda temperature: temperature == 0.6))
    for text in texts:
        tokens = text.tokens.tolist()
        with KVCache(tiny_target, KVCacheSize(n_ctx=256, n_logits_max=256), n_threads=1) as cache:
            rows = Forward(Session.within(cache), tokens, len(tokens)).run().rows.astype(np.float64) / 0.6
        probs = np.exp(rows - rows.max(axis=1, keepdims=True))
        probs /= probs.sum(axis=1, keepdims=True)
        for i in range(text.n_prompt, len(tokens)):
            p = probs[i - 1]
            assert p[p > p[tokens[i]] + 1e-3].sum() < 0.95


@pytest.fixture
def ending_path(tmp_path: Path, tiny_target: Model) -> Path:
    """The tiny target, but what it says most often is the end of its answers."""
    with TargetWriter(tiny_target, SMALL, n_threads=1) as writing:
        texts = fill(writing, Dataset(target_of(tiny_target), tmp_path / "before"), prompts_of(20))
    said = Counter(token for text in texts for token in text.tokens[text.n_prompt :].tolist())
    return write_tiny_gguf(tmp_path / "ends.gguf", seed=1, eos=said.most_common(1)[0][0])


def test_a_text_ends_where_the_model_ends_it(tmp_path: Path, ending_path: Path) -> None:
    with Model(ending_path) as model, TargetWriter(model, SMALL, n_threads=1) as writing:
        texts = fill(writing, Dataset(target_of(model), tmp_path / "data"), prompts_of(40))
        ended = [text for text in texts if len(text.tokens) - text.n_prompt < SMALL.n_predict]
        assert ended
        assert all(model.is_eog(text.tokens[-1]) for text in ended)
        assert not any(model.is_eog(token) for text in texts for token in text.tokens[text.n_prompt : -1])


def test_an_answer_is_followed_by_the_next_turn(tmp_path: Path, ending_path: Path) -> None:
    asked = [TextPrompt(BUILT_IN, (f"Tell me {i}.",), "And then?") for i in range(40)]
    with Model(ending_path) as model, TargetWriter(model, SMALL, n_threads=1) as writing:
        texts = fill(writing, Dataset(target_of(model), tmp_path / "data"), asked)
        firsts = {prompt.key for prompt in asked}
        later = [text for text in texts if text.key not in firsts]
        ended = [text for text in texts if text.key in firsts and model.is_eog(text.tokens[-1])]
        assert len(later) == len(ended) > 0
        for first in ended:
            question = next(prompt for prompt in asked if prompt.key == first.key)
            answer = b"".join(map(model.piece, first.tokens[first.n_prompt :].tolist())).decode(
                errors="replace"
            )
            (after,) = question.followed(answer)
            text = next(text for text in later if text.key == after.key)
            assert text.tokens[: text.n_prompt].tolist() == prompt_tokens(model, after)
            rendered = b"".join(
                model.piece(token, special=True) for token in text.tokens[: text.n_prompt].tolist()
            )
            said = [("user", question.turns[0]), ("assistant", answer), ("user", "And then?")]
            parts = [f"<|im_start|>{role}\n{turn}<|im_end|>\n" for role, turn in said]
            assert rendered.decode() == "".join(parts) + "<|im_start|>assistant\n"
            assert text.held_out == first.held_out


def test_texts_are_read_beside_those_that_are_written(
    writing: TargetWriter, dataset: Dataset, tiny_target: Model
) -> None:
    given = [TokenPrompt(READ, (*range(10 + i, 60 + 3 * i),), 7 + i) for i in range(6)]
    begun = TokenPrompt(FROM_HISTORY, (BOS, 5, 6, 7), 4)
    texts = {text.key: text for text in fill(writing, dataset, [*prompts_of(5), *given, begun])}
    assert len(texts) == 12
    for one in given:
        text = texts[one.key]
        assert text.source == READ and math.isnan(text.temperature)
        assert (text.tokens.tolist(), text.n_prompt) == (list(one.tokens), one.n_prompt)
        expected = plain_features(tiny_target, list(one.tokens))[text.first : -1]
        assert np.allclose(text.features, expected, rtol=2e-3, atol=2e-3)
    assert texts[begun.key].source == FROM_HISTORY
    assert texts[begun.key].tokens[:4].tolist() == [BOS, 5, 6, 7]
    assert len(texts[begun.key].tokens) > 4


def test_no_pass_is_larger_than_the_kernels_take(
    writing: TargetWriter, dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes: list[list[int]] = []
    real = KVCache.forward

    def counting(self: KVCache, parts: list[Forward]) -> list[ForwardResult]:
        passes.append([len(part.tokens) for part in parts])
        return real(self, parts)

    monkeypatch.setattr(KVCache, "forward", counting)
    long = TextPrompt(BUILT_IN, ("a b c d e f g h i j " * 2,))
    texts = fill(writing, dataset, [long, *prompts_of(10)])
    assert len(texts) == 11
    assert max(map(sum, passes)) == SMALL.n_pass
    # While a long prompt is read, the other texts go on: each pass has a token of theirs.
    assert any(sorted(lengths)[0] == 1 and max(lengths) > 1 for lengths in passes)


def test_prompts_that_are_too_long_are_left_out(writing: TargetWriter, dataset: Dataset) -> None:
    with dataset.writer(PLENTY) as writer:
        long = [
            TextPrompt(BUILT_IN, ("x y z " * 100,)),
            TokenPrompt(READ, (5,) * 200, 9),
            TokenPrompt(READ, (5, 6), 0),
        ]
        writing.fill(writer, [*long, *prompts_of(2)], until=1000)
    assert [text.key for text in dataset.texts()] == [prompt.key for prompt in prompts_of(2)]


def test_it_ends_when_enough_is_written_and_goes_on_later(writing: TargetWriter, dataset: Dataset) -> None:
    prompts = prompts_of(60)
    seen: list[WritingRun] = []
    with dataset.writer(PLENTY) as writer:
        written = writing.fill(writer, prompts, until=300, on_progress=seen.append)
    assert 300 <= written.n_tokens <= 300 + SMALL.n_texts * SMALL.n_predict
    assert seen[-1].share == 1.0 and seen[-1].n_tokens == written.n_tokens
    assert [one.share for one in seen] == sorted(one.share for one in seen)
    before = [text.key for text in dataset.texts()]
    assert len(fill(writing, dataset, prompts, until=300)) == len(before)  # nothing is left to do
    after = [text.key for text in fill(writing, dataset, prompts)]
    assert after[: len(before)] == before
    assert sorted(after) == sorted(prompt.key for prompt in prompts)  # each prompt once


def test_a_budget_is_kept_and_used_up(writing: TargetWriter, dataset: Dataset) -> None:
    for _ in range(2):
        with dataset.writer(40_000) as writer:
            written = writing.fill(writer, prompts_of(60), until=1 << 30)
        assert written.full
        assert 10_000 < dataset.n_bytes() <= 40_000
    assert written.n_tokens == 0
    with dataset.writer(PLENTY) as writer:
        assert not writing.fill(writer, prompts_of(60), until=1 << 30).full
    assert len({text.key for text in dataset.texts()}) == 60


def test_ctrl_c_keeps_the_finished_texts_and_the_cache(writing: TargetWriter, dataset: Dataset) -> None:
    def stop(progress: WritingRun) -> None:
        if progress.n_tokens > 200:
            raise KeyboardInterrupt

    prompts = prompts_of(30)
    with pytest.raises(KeyboardInterrupt), dataset.writer(PLENTY) as writer:
        writing.fill(writer, prompts, until=1 << 30, on_progress=stop)
    kept = list(dataset.texts())
    assert 1 <= len(kept) < 30
    assert len(fill(writing, dataset, prompts)) == 30


CHILD = """
import sys
from pathlib import Path
from edgespec.apps.forge import dataset as dataset_module
from edgespec.apps.forge.dataset import BUILT_IN, Dataset, DatasetTarget
from edgespec.apps.forge.prompts import TextPrompt
from edgespec.apps.forge.writing import TargetWriter, WritingSettings
from edgespec.llama.weights import Model
dataset_module.TEXTS_PER_SHARD = 5
prompts = [TextPrompt(BUILT_IN, (f"Tell me of {i}.",)) for i in range(80)]
with Model(sys.argv[1]) as model:
    dataset = Dataset(DatasetTarget("ab" * 32, "tiny", model.n_embd), Path(sys.argv[2]))
    settings = WritingSettings(n_texts=4, n_predict=24, longest_prompt=104, window=16, n_pass=20)
    with TargetWriter(model, settings, n_threads=1) as writing, dataset.writer(1 << 26) as writer:
        writing.fill(writer, prompts, until=1 << 30, on_progress=lambda one: print(one.n_tokens, flush=True))
"""


def test_it_goes_on_after_kill_9(tmp_path: Path, tiny_path: Path, dataset: Dataset) -> None:
    environment = {**os.environ, "PYTHONPATH": python_path()}
    command = [sys.executable, "-c", CHILD, str(tiny_path), str(dataset.folder)]
    n_before = 0
    for n_tokens in (250, 700):
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        assert child.stdout
        for line in child.stdout:
            if int(line) > n_tokens:
                child.send_signal(signal.SIGKILL)
                break
        child.stdout.close()
        assert child.wait() == -signal.SIGKILL
        n = len(list(dataset.texts()))
        assert n > n_before and n % 5 == 0
        n_before = n
    half = dataset.folder / ".edgespec-1-1.tmp"
    half.write_bytes(b"PK")
    subprocess.run(command, check=True, capture_output=True, env=environment)
    assert not half.exists()
    keys = [text.key for text in dataset.texts()]
    assert sorted(keys) == sorted(TextPrompt(BUILT_IN, (f"Tell me of {i}.",)).key for i in range(80))


def test_with_little_memory_fewer_texts_are_written_at_once(
    tiny_target: Model, dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    def needed(n_texts: int) -> int:
        n_ctx = n_texts * 128
        return writing_module.loaded_bytes(0, writing_module.shape_of(tiny_target.header), n_ctx, 20, 20)

    lines: list[str] = []
    monkeypatch.setattr(writing_module, "available_bytes", lambda: needed(2))
    with TargetWriter(tiny_target, SMALL, n_threads=1, on_message=lines.append) as writing:
        assert len(fill(writing, dataset, prompts_of(5))) == 5
    assert lines == ["tiny 1 writes 2 of 4 texts at once: the memory has no room for more"]
    monkeypatch.setattr(writing_module, "available_bytes", lambda: 1000)
    with pytest.raises(
        EdgespecError, match=r"not enough memory for tiny 1 to write: a cache of 128 tokens takes"
    ):
        TargetWriter(tiny_target, SMALL, n_threads=1)


def test_a_model_without_hidden_states_is_one_line(
    writing: TargetWriter, dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hidden_states, "_last_norm", lambda _: None)
    with pytest.raises(EdgespecError, match=r"llama\.cpp gives no hidden states of this model"):
        fill(writing, dataset, prompts_of(2))
    assert dataset.shards() == []


def test_a_model_without_a_template_is_asked_without(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "raw.gguf", chat_template=None)
    with Model(path) as model, TargetWriter(model, SMALL, n_threads=1) as writing:
        text = fill(writing, Dataset(target_of(model), tmp_path / "data"), [TextPrompt(BUILT_IN, ("Why?",))])[
            0
        ]
        assert model.tokenize("Why?", add_special=True, parse_special=False) == text.tokens[:4].tolist()
        assert IM_END not in text.tokens[:4]


def test_of_a_short_context_an_answer_takes_half(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "short.gguf", n_ctx=64)
    settings = WritingSettings(n_texts=2, n_predict=100)
    with Model(path) as model, TargetWriter(model, settings, n_threads=1) as writing:
        texts = fill(
            writing,
            Dataset(target_of(model), tmp_path / "data"),
            [
                TokenPrompt(READ, (5,) * 64, 9),
                TokenPrompt("x", (5,) * 20, 20),
                TokenPrompt("x", (5,) * 33, 33),
            ],
        )
        assert sorted(len(text.tokens) for text in texts) == [52, 64]
