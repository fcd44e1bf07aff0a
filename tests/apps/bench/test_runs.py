"""Records of benchmarks: what is written is read again, and what is none is refused in one line."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from edgespec.apps.bench.runs import FORMAT, AccuracyScore, BenchmarkOutcome, Cell, Run, as_json, from_json
from edgespec.errors import EdgespecError
from edgespec.models.quantizations import FileFacts
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
OUTCOME = BenchmarkOutcome(
    kind="bench",
    date="2026-11-21T10:00:00+01:00",
    machine={"processor": "naïve", "usable processors": 2, "memory GiB": 23.5},
    settings={"temperature": 0.0, "rule": "match"},
    suite={"name": "default", "prompts": {"code": 1}},
    models={"t": FileFacts("t", "t.gguf", "ab" * 32, 10, "Q4_0", made_from="t-q8_0")},
    cells=(
        Cell("t", None, "stock", (RUN, PEERS), peak_rss_bytes=1 << 40),
        Cell("t", "d", "auto", skipped="its vocabulary is another one"),
    ),
    accuracy=(AccuracyScore("t", "t", "stock", 1024, 12.5, None, None, None, passed=3, n_problems=164),),
    warnings=("the machine was busy",),
)


@pytest.mark.parametrize(
    "record", [RUN, PEERS, *OUTCOME.cells, OUTCOME], ids=lambda record: type(record).__name__
)
def test_what_was_written_is_read_again(record: object) -> None:
    data = as_json(record)
    assert b"\n" not in data
    assert from_json(type(record), data, "file") == record
    assert from_json(type(record), data.decode(), "file") == record


def test_unavailable_is_null_and_never_0() -> None:
    written = json.loads(as_json(replace(RUN, energy=Measurement(5.0, None, reason="no counter"))))
    assert (written["energy"]["joules"], written["energy"]["idle_w"]) == (None, None)
    assert json.loads(as_json(PEERS))["energy"] is None


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[]", b"null", b'{"target": 5}', b"\xff\xfe", as_json(RUN), as_json(OUTCOME)[:-20]],
    ids=range(8),
)
def test_what_is_no_record_is_one_line(data: bytes) -> None:
    with pytest.raises(EdgespecError) as found:
        from_json(BenchmarkOutcome, data, "dir/outcome.json")
    assert str(found.value).startswith("dir/outcome.json: holds no benchmark outcome that edgespec wrote: ")
    assert "\n" not in str(found.value)


def test_another_format_is_not_read() -> None:
    newer = replace(OUTCOME, format=FORMAT + 1)
    with pytest.raises(EdgespecError, match=rf"x.json: written in format {FORMAT + 1}; this edgespec reads"):
        from_json(BenchmarkOutcome, as_json(newer), "x.json")


def test_fields_of_a_later_edgespec_are_passed_over() -> None:
    later = json.loads(as_json(RUN)) | {"a new figure": 5}
    assert from_json(Run, json.dumps(later), "file") == RUN


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
