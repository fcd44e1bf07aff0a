"""Other programs that bench/speed.py runs: what they are told, and what is read of what they print."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from edgespec import Engine
from edgespec.apps.bench.measure import BenchSettings, rendered
from edgespec.apps.bench.suites import Prompt
from edgespec.errors import EdgespecError
from fake_llama_cpp import asked, fake, fake_server, option, started
from peers import IkSpecBench, llama_bench
from speed import open_peers, run_peers

PROMPT = Prompt("own/1", "code", "one")
SETTINGS = BenchSettings(variants=(), n_predict=64)


@pytest.fixture(scope="module")
def engine(tiny_path: Path, tiny_draft_path: Path) -> Iterator[Engine]:
    with Engine(tiny_path, tiny_draft_path, n_threads=1) as opened:
        yield opened


def given(**peers: Path | None) -> argparse.Namespace:
    options = {"llama": None, "ik": None, "n_predict": 64, "gamma": [3], "peer_gamma": None}
    return argparse.Namespace(**options | peers)


def test_llama_cpp_runs_plain_and_drafted(engine: Engine, tmp_path: Path) -> None:
    folder = fake_server(tmp_path / "bin")
    with open_peers(given(llama=folder), engine, SETTINGS, [PROMPT]) as peers:
        runs = run_peers(peers, PROMPT, 2)
    assert [(run.variant, run.round) for run in runs] == [("llama.cpp plain", 2), ("llama.cpp model-3", 2)]
    assert engine.draft
    assert option(started(folder, "drafted")["argv"], "-md") == str(engine.draft.path)


def test_a_peer_that_fails_is_left_out(engine: Engine, tmp_path: Path) -> None:
    program = tmp_path / "llama-spec-bench"
    fake(program, out="nothing\n")
    with open_peers(given(ik=program), engine, SETTINGS, [PROMPT]) as peers:
        assert run_peers(peers, PROMPT, 0) == []
        assert peers == []


def test_what_ik_llama_cpp_prints(engine: Engine, tmp_path: Path) -> None:
    row = {"row_type": "attempt", "ok": True, "generated": 64, "decode_s": 2.5}
    program = tmp_path / "llama-spec-bench"
    fake(program, out=f"loading\n{json.dumps(row, separators=(',', ':'))}\n")
    peer = IkSpecBench(program, engine, SETTINGS, n_ctx=512, gammas=[3])
    (run,) = peer.runs(PROMPT, 1)
    assert (run.variant, run.round, run.tokens) == ("ik_llama.cpp model-3", 1, 64)
    assert run.decode_tokens_per_s == 63 / 2.5  # the first token is not of decoding
    call = asked(program)
    assert option(call["argv"], "--spec-type") == "draft:n_max=3"
    assert json.loads(call["files"]["--prompts"]) == {"prompt": rendered(engine, "one")}
    fake(program, out="loading\n")
    with pytest.raises(EdgespecError, match="did not finish the prompt"):
        list(peer.runs(PROMPT, 1))


def test_what_llama_bench_prints(engine: Engine, tmp_path: Path) -> None:
    rows = [
        {"n_prompt": 512, "n_gen": 0, "flash_attn": False, "avg_ts": 90.5},
        {"n_prompt": 0, "n_gen": 128, "flash_attn": True, "avg_ts": 28.5},
    ]
    program = tmp_path / "llama-bench"
    fake(program, out=json.dumps(rows), log="[a warning]\n")
    assert llama_bench(program, engine) == {"pp512": 90.5, "tg128 flash": 28.5}
    fake(program, out="nothing\n")
    with pytest.raises(EdgespecError, match="llama-bench printed no results"):
        llama_bench(program, engine)
