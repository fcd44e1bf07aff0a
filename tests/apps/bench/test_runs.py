"""Records of benchmarks: what is written is read again, and what is none is not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from edgespec.apps.bench.runs import Run, read_kept, store
from edgespec.platform.metering import Measurement

RUN = Run(
    prompt="code/1",
    category="code",
    variant="model-3",
    round=2,
    prompt_tokens=30,
    tokens=21,
    total_s=5.0,
    ttft_s=1.0,
    prefill_s=0.9,
    draft_prefill_s=0.1,
    draft_s=1.5,
    verify_s=2.0,
    rest_s=0.5,
    n_emitted=20,
    histogram=((3, 3, 4), (3, 0, 4)),
    stop_reason="length",
    text_sha256="ab" * 32,
    energy=Measurement(
        5.0, 50.0, 2.0, {"package-0": 50.0}, {"prefill": 10.0, "verify": 40.0}, source="RAPL", gap_s=0.5
    ),
)
PEERS = Run("code/1", "code", "llama.cpp plain", 2, 30, 21, total_s=5.0, ttft_s=None, prefill_s=None)


def test_unavailable_is_null_and_never_0() -> None:
    written = json.loads(
        msgspec.json.encode(replace(RUN, energy=Measurement(5.0, None, reason="no counter")))
    )
    assert (written["energy"]["joules"], written["energy"]["idle_w"]) == (None, None)
    assert json.loads(msgspec.json.encode(PEERS))["energy"] is None


KEY, OTHER = b"0" * 64, b"1" * 64


@pytest.mark.parametrize(
    "data", [b"", b"{", b'["%s"]' % KEY, b'["%s", {"a": 1}]' % OTHER, b'["%s", 5]' % KEY, b"\xff\xfe"]
)
def test_a_damaged_value_and_that_of_another_key_are_none(tmp_path: Path, data: bytes) -> None:
    file = tmp_path / "kept.json"
    key = KEY.decode()
    assert read_kept(file, key, Run) is None
    store(file, key, RUN)
    assert read_kept(file, key, Run) == RUN
    file.write_bytes(data)
    assert read_kept(file, key, Run) is None


def test_speeds() -> None:
    assert RUN.whole_tokens_per_s == 21 / 5
    assert RUN.decode_tokens_per_s == 20 / 4
    assert PEERS.whole_tokens_per_s == 21 / 5
    assert PEERS.decode_tokens_per_s is None


@pytest.mark.parametrize(
    ("changed", "whole", "decode"),
    [
        ({"tokens": 0}, None, None),
        ({"tokens": 1}, 1 / 5, None),
        ({"total_s": 0.0}, None, None),
        ({"ttft_s": 5.0}, 21 / 5, None),
        ({"ttft_s": 6.0}, 21 / 5, None),
    ],
    ids=str,
)
def test_speeds_of_what_has_none(
    changed: dict[str, float], whole: float | None, decode: float | None
) -> None:
    run = replace(RUN, **changed)  # type: ignore[arg-type]
    assert (run.whole_tokens_per_s, run.decode_tokens_per_s) == (whole, decode)
