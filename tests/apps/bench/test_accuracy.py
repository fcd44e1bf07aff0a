"""Accuracy of tiny models, beside computing it plainly."""

from __future__ import annotations

import gc
import math
import os
import shutil
from collections import namedtuple
from collections.abc import Callable
from io import FileIO
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from edgespec.apps.bench import accuracy as room
from edgespec.apps.bench.accuracy import Reference, Score, score, text_tokens
from edgespec.errors import EdgespecError
from edgespec.llama.quantize import quantize
from edgespec.llama.session import Session
from edgespec.llama.weights import Model
from edgespec.platform.signals import SignalPipe
from tiny_gguf import BOS, write_tiny_gguf

TEXT = "the cat and the other dog ran in the rain; on and on it went, as the sun was out. " * 4
N_TOKENS, N_WINDOW = 170, 80  # two windows, a rest; passes of 64 tokens end within a window

Row = np.ndarray


@pytest.fixture(scope="module")
def tokens(tiny_target: Model) -> list[int]:
    found = text_tokens(tiny_target, TEXT, N_TOKENS)
    assert len(found) == N_TOKENS
    return found


@pytest.fixture(scope="module")
def quantized(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("quantized") / "q4_0.gguf"
    quantize(tiny_path, path, "q4_0")
    return path


def plainly(model: Model, tokens: list[int], bos: list[int]) -> list[tuple[Row, int]]:
    """The log-probabilities for each scored token, one token a pass, and the token."""
    found = []
    step = N_WINDOW - len(bos)
    for start in range(0, len(tokens), step):
        window = tokens[start : start + step]
        with Session(model, n_ctx=N_WINDOW, n_threads=1) as session:
            if bos:
                session.eval(bos)
            for token, following in pairwise(window):
                logits = session.eval([token])[0].astype(np.float64)
                found.append((logits - np.logaddexp.reduce(logits), following))
    return found


def scored(model: Model, tokens: list[int], reference: Reference | None = None) -> Score:
    return score(model, tokens, n_threads=1, reference=reference, n_window=N_WINDOW)


def is_open_in(folder: Path) -> bool:
    """Whether this process has a file in `folder` open, with or without a name."""
    links = list(Path("/proc/self/fd").iterdir())
    return any(str(link.readlink()).startswith(str(folder)) for link in links if link.is_symlink())


@pytest.mark.parametrize("add_bos", [False, True])
def test_beside_computing_it_plainly(
    tmp_path: Path, tokens: list[int], add_bos: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "_BYTES_OF_ROWS", 8 * 300 * 7)  # seven rows at a time
    best = write_tiny_gguf(tmp_path / "best.gguf", seed=1, add_bos=add_bos)
    quantize(best, tmp_path / "other.gguf", "q4_0")
    plain = []
    scores = []
    with Reference(tmp_path) as reference:
        for path in (best, tmp_path / "other.gguf"):
            with Model(path) as model:
                plain.append(plainly(model, tokens, [BOS] if add_bos else []))
                scores.append(scored(model, tokens, reference))
    kls = [float((np.exp(p) * (p - q)).sum()) for (p, _), (q, _) in zip(*plain, strict=True)]
    same = [p.argmax() == q.argmax() for (p, _), (q, _) in zip(*plain, strict=True)]
    for found, rows in zip(scores, plain, strict=True):
        assert found.n_tokens == len(rows) == N_TOKENS - 3
        nll = -sum(float(row[token]) for row, token in rows) / len(rows)
        assert found.nll == pytest.approx(nll, rel=1e-5)
        assert found.perplexity == pytest.approx(math.exp(nll), rel=1e-4)
    assert (scores[0].kl, scores[0].kl_error, scores[0].top1) == (None, None, None)
    assert scores[1].kl == pytest.approx(np.mean(kls), rel=1e-3)
    assert scores[1].kl_error == pytest.approx(np.std(kls, ddof=1) / math.sqrt(len(kls)), rel=1e-3)
    assert scores[1].top1 == np.mean(same)


def test_a_model_beside_itself(tmp_path: Path, tiny_target: Model, tokens: list[int]) -> None:
    with Reference(tmp_path) as reference:
        first = scored(tiny_target, tokens, reference)
        assert reference.written
        for _ in range(2):  # the reference is read from its beginning each time
            again = scored(tiny_target, tokens, reference)
            assert again == Score(first.n_tokens, first.nll, 0.0, 0.0, 1.0)
    assert scored(tiny_target, tokens) == first


def test_another_model_differs(
    tmp_path: Path, tiny_target: Model, tiny_draft: Model, quantized: Path, tokens: list[int]
) -> None:
    with Reference(tmp_path) as reference, Model(quantized) as model:
        scored(tiny_target, tokens, reference)
        near = scored(model, tokens, reference)
        far = scored(tiny_draft, tokens, reference)
    assert near.kl is not None and far.kl is not None and near.top1 is not None and far.top1 is not None
    assert 0 < near.kl < far.kl
    assert near.kl_error is not None and near.kl_error > 0
    assert far.top1 < near.top1 <= 1


def test_progress(tiny_target: Model, tokens: list[int]) -> None:
    told: list[tuple[int, int]] = []
    score(tiny_target, tokens, n_threads=1, n_window=N_WINDOW, on_progress=lambda *done: told.append(done))
    assert told == [(n, 170) for n in (64, 80, 144, 160, 170)]


def test_tokens_that_cannot_be_scored(tiny_target: Model, tokens: list[int]) -> None:
    with pytest.raises(EdgespecError, match=r"the text has 79 tokens: it must have at least 80 "):
        scored(tiny_target, tokens[:79])
    with pytest.raises(EdgespecError, match=r"target.gguf: was trained for 512 tokens; choose windows"):
        score(tiny_target, tokens * 9, n_threads=1, n_window=513)
    with pytest.raises(ValueError, match="n_window 2"):
        score(tiny_target, tokens, n_threads=1, n_window=2)


def test_what_cannot_be_compared(tmp_path: Path, tiny_target: Model, tokens: list[int]) -> None:
    larger = write_tiny_gguf(tmp_path / "larger.gguf", n_padding=3)
    renamed = write_tiny_gguf(tmp_path / "renamed.gguf", texts={7: "seven"})
    with Reference(tmp_path) as reference:
        first = scored(tiny_target, tokens, reference)
        with (
            Model(larger) as model,
            pytest.raises(EdgespecError, match=r"larger.gguf: .* has 287 tokens, .* 284"),
        ):
            scored(model, tokens, reference)
        with Model(renamed) as model, pytest.raises(EdgespecError, match=r"renamed.gguf: .* another one$"):
            scored(model, tokens, reference)
        for others, n_window in (([*tokens[:-1], 5], N_WINDOW), (tokens[:-1], N_WINDOW), (tokens, 60)):
            with pytest.raises(EdgespecError, match=r"target.gguf: cannot be compared .* has read"):
                score(tiny_target, others, n_threads=1, reference=reference, n_window=n_window)
        # None of this has touched the reference.
        assert scored(tiny_target, tokens, reference).kl == 0.0
        assert scored(tiny_target, tokens, reference).nll == first.nll


def test_a_model_with_broken_numbers(tmp_path: Path, tokens: list[int]) -> None:
    path = write_tiny_gguf(tmp_path / "nan.gguf", peak=math.nan)
    with (
        Model(path, check_tensors=False) as model,
        Reference(tmp_path) as reference,
        pytest.raises(EdgespecError, match=r"nan.gguf: its logits are not finite"),
    ):
        scored(model, tokens, reference)


def test_no_room_on_the_disk(
    tmp_path: Path, tiny_target: Model, tokens: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**9, 10**9, 1000))
    with Reference(tmp_path) as reference:
        with pytest.raises(EdgespecError, match=r"no disk space for the reference's logits: .*another disk"):
            scored(tiny_target, tokens, reference)
        assert not reference.written


def test_a_disk_that_becomes_full(
    tmp_path: Path, tiny_target: Model, tokens: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Reference(tmp_path) as reference:
        with monkeypatch.context() as patch:
            patch.setattr(room.tempfile, "TemporaryFile", lambda **_: FileIO("/dev/full", "r+"))
            with pytest.raises(EdgespecError, match=r"logits in .*: No space left on device; free some"):
                scored(tiny_target, tokens, reference)
        assert not reference.written
        scored(tiny_target, tokens, reference)  # there is room again
        assert scored(tiny_target, tokens, reference).kl == 0.0


def test_a_folder_that_is_not_there(tmp_path: Path, tiny_target: Model, tokens: list[int]) -> None:
    with (
        Reference(tmp_path / "none") as reference,
        pytest.raises(EdgespecError, match=r"logits in .*/none: No such file or directory"),
    ):
        scored(tiny_target, tokens, reference)


def raising(error: BaseException) -> Callable[[int, int], None]:
    def progressed(done: int, _total: int) -> None:
        if done > N_WINDOW:
            raise error

    return progressed


@pytest.mark.parametrize("error", [KeyboardInterrupt(), EdgespecError("no"), BrokenPipeError("theirs")])
def test_nothing_is_left_of_a_stopped_one(
    tmp_path: Path, tiny_target: Model, tokens: list[int], error: BaseException
) -> None:
    with Reference(tmp_path) as reference:
        with pytest.raises(type(error)) as caught:
            score(
                tiny_target,
                tokens,
                n_threads=1,
                reference=reference,
                n_window=N_WINDOW,
                on_progress=raising(error),
            )
        assert caught.value is error
        assert not reference.written
        assert not is_open_in(tmp_path)
        scored(tiny_target, tokens, reference)
        with pytest.raises(type(error)):  # while comparing: the reference stays
            score(
                tiny_target,
                tokens,
                n_threads=1,
                reference=reference,
                n_window=N_WINDOW,
                on_progress=raising(error),
            )
        assert scored(tiny_target, tokens, reference).kl == 0.0
        assert is_open_in(tmp_path)
        assert not list(tmp_path.iterdir())
    assert not is_open_in(tmp_path)


def test_ctrl_c_ends_a_pass(tmp_path: Path, tiny_target: Model, tokens: list[int]) -> None:
    with SignalPipe() as signals, Reference(tmp_path) as reference:

        def press(done: int, _total: int) -> None:
            os.write(signals._write_end, b"\2")  # as Python does at a signal

        with pytest.raises(KeyboardInterrupt):
            score(
                tiny_target,
                tokens,
                n_threads=1,
                reference=reference,
                n_window=N_WINDOW,
                signals=signals,
                on_progress=press,
            )
        assert not reference.written
        # What was pressed before a pass does not end it.
        score(tiny_target, tokens, n_threads=1, reference=reference, n_window=N_WINDOW, signals=signals)
        assert reference.written


def test_closed(tmp_path: Path, tiny_target: Model, tokens: list[int]) -> None:
    reference = Reference(tmp_path)
    scored(tiny_target, tokens, reference)
    assert is_open_in(tmp_path)
    reference.close()
    reference.close()
    assert not is_open_in(tmp_path)
    with pytest.raises(EdgespecError, match="the reference is closed"):
        scored(tiny_target, tokens, reference)


def test_a_forgotten_reference_leaves_nothing(tmp_path: Path, tiny_target: Model, tokens: list[int]) -> None:
    scored(tiny_target, tokens, forgotten := Reference(tmp_path))
    assert is_open_in(tmp_path)
    assert not list(tmp_path.iterdir())
    with pytest.warns(ResourceWarning):
        del forgotten
        gc.collect()
    assert not is_open_in(tmp_path)
