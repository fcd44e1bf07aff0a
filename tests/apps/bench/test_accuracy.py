"""Accuracy of tiny models, beside computing it plainly."""

from __future__ import annotations

import math
import shutil
import tempfile
from collections import namedtuple
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec.apps.bench import compare as room
from edgespec.apps.bench.compare import Reference, TextTask, score
from edgespec.apps.bench.runs import AccuracyScore
from edgespec.errors import EdgespecError
from edgespec.llama.quantize import quantize
from edgespec.llama.session import Session
from edgespec.llama.weights import Model
from tiny_gguf import BOS, write_tiny_gguf

TEXT = "the cat and the other dog ran in the rain; on and on it went, as the sun was out. " * 4
N_TOKENS, N_WINDOW = 170, 80  # two windows, a rest; passes of 64 tokens end within a window

Row = np.ndarray


@pytest.fixture(scope="module")
def tokens(tiny_target: Model) -> list[int]:
    found = tiny_target.tokenize(TEXT, add_special=False, parse_special=False)[:N_TOKENS]
    assert len(found) == N_TOKENS
    return found


@pytest.fixture
def reference() -> Iterator[Reference]:
    with tempfile.TemporaryFile() as file:
        yield Reference(file)


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


def scored(model: Model, tokens: list[int], reference: Reference, n_window: int = N_WINDOW) -> AccuracyScore:
    return score(model, model.path.stem, tokens, reference, n_threads=1, n_window=n_window)


@pytest.mark.parametrize("add_bos", [False, True])
def test_beside_computing_it_plainly(
    tmp_path: Path, tokens: list[int], add_bos: bool, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "_BYTES_OF_ROWS", 8 * 300 * 7)  # seven rows at a time
    best = write_tiny_gguf(tmp_path / "best.gguf", seed=1, add_bos=add_bos)
    quantize(best, tmp_path / "other.gguf", "q4_0")
    plain = []
    scores = []
    for path in (best, tmp_path / "other.gguf"):
        with Model(path) as model:
            plain.append(plainly(model, tokens, [BOS] if add_bos else []))
            scores.append(scored(model, tokens, reference))
    kls = [float((np.exp(p) * (p - q)).sum()) for (p, _), (q, _) in zip(*plain, strict=True)]
    same = [p.argmax() == q.argmax() for (p, _), (q, _) in zip(*plain, strict=True)]
    for found, rows in zip(scores, plain, strict=True):
        assert found.n_tokens == len(rows) == N_TOKENS - 3
        nll = -sum(float(row[token]) for row, token in rows) / len(rows)
        assert found.perplexity == pytest.approx(math.exp(nll), rel=1e-4)
        assert found.reference == "best"
    assert (scores[0].kl, scores[0].kl_error, scores[0].top1) == (None, None, None)
    assert scores[1].kl == pytest.approx(np.mean(kls), rel=1e-3)
    assert scores[1].kl_error == pytest.approx(np.std(kls, ddof=1) / math.sqrt(len(kls)), rel=1e-3)
    assert scores[1].top1 == np.mean(same)


def test_a_model_beside_itself(tiny_target: Model, tokens: list[int], reference: Reference) -> None:
    first = scored(tiny_target, tokens, reference)
    for _ in range(2):  # the reference is read from its beginning each time
        assert scored(tiny_target, tokens, reference) == replace(first, kl=0.0, kl_error=0.0, top1=1.0)


def test_a_model_with_broken_numbers(
    tmp_path: Path, tiny_target: Model, tokens: list[int], reference: Reference
) -> None:
    path = write_tiny_gguf(tmp_path / "nan.gguf", peak=math.nan)
    with (
        Model(path, check_tensors=False) as model,
        pytest.raises(EdgespecError, match=r"nan.gguf: its logits are not finite"),
    ):
        scored(model, tokens, reference)
    assert not reference.name
    assert scored(tiny_target, tokens, reference).reference == "target"
    assert scored(tiny_target, tokens, reference).kl == 0.0


@pytest.mark.parametrize("free", [True, False], ids=["that becomes full", "without room"])
def test_a_disk(free: bool, tmp_path: Path, tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Any] = []
    monkeypatch.setattr(room, "send", lambda *what: said.append(what))
    if free:
        full = Path("/dev/full")
        monkeypatch.setattr(room.tempfile, "TemporaryFile", lambda **_: full.open("r+b", buffering=0))
    else:
        usage = namedtuple("usage", "total used free")
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**9, 10**9, 1000))
    task = TextTask({"it": str(tiny_path)}, TEXT * 4, 600, "off", 1, str(tmp_path))
    if free:
        with pytest.raises(EdgespecError, match=r"cannot keep the reference's logits in .*; free some space"):
            room._score_all(task)
    else:
        room._score_all(task)
        assert any("no disk space for the reference's logits" in str(value) for _, value in said)
    assert not [kind for kind, _ in said if kind == "score"]
    assert not list(tmp_path.iterdir())
