"""bench/clients.py: edgespec's real server on tiny models, and an invented peer."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import clients
from edgespec.errors import EdgespecError, UsageError
from edgespec.llama import kernels
from loads import GOALS, Load, Record, differing, quantile, ratios
from servers import Server
from tiny_gguf import write_tiny_gguf

FAKE = Path(__file__).parents[1] / "support" / "fake_llama_server.py"
PEER = f"{sys.executable} {FAKE}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    kernels.load()  # tests the kernels once, for all servers
    return write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", n_ctx=2048, peak=0.7)


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four short prompts of two categories."""
    lines = [
        {"question_id": i, "category": "ab"[i % 2], "turns": [f"the number {i} and the {word}"]}
        for i, word in enumerate(("sea", "fox", "hat", "sun"))
    ]
    file = tmp_path_factory.mktemp("suite") / "short.jsonl"
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return file


def run(
    script: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *options: object
) -> str:
    """Run a script's main; return what it printed."""
    monkeypatch.setattr(sys, "argv", ["script", "--threads", "1", *map(str, options)])
    script.main()  # type: ignore[attr-defined]
    return capsys.readouterr().out


def test_servers_take_turns_and_every_prompt_is_asked_once(
    model: Path, suite: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ("--clients", "1,3", "--temps", "0.8", "-n", "8", "--least", "4", "--per-client", "1")
    options = ("--target", model, "--variants", "suffix", "--rounds", "2", "--suite", suite, "--json", *small)
    printed = run(clients, monkeypatch, capsys, *options, "--peer", f"ik={PEER} --forget")
    loads = json.loads(printed[printed.index("\n{") :])["loads"]
    names = [load["contender"] for load in loads]
    turns = ["edgespec suffix", "ik"], ["ik", "edgespec suffix"]  # another begins in the second round
    assert names == [*turns[0], *turns[0], *turns[1], *turns[1]]
    for load in loads:
        asked = [record["prompt"] for record in load["records"]]
        assert len(asked) == len(set(asked)) == 4
        assert load["failed"] == []
        assert all(0 < record["first_s"] <= record["total_s"] for record in load["records"])
        assert all(record["tokens"] <= 8 for record in load["records"])
    assert "edgespec suffix: 0 of 4 texts depend on clients or round, met" in printed
    assert "ik: 4 of 4 texts depend" in printed
    assert "MISSED" not in printed


def test_a_server_that_does_not_come_up(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = f"{sys.executable} -c \"import sys; sys.exit('no such option')\""
    options = ("--target", str(model), "--least", "1", "--clients", "1", "--peer", f"broken={program}")
    monkeypatch.setattr(sys, "argv", ["script", "--variants", "", *options])
    with pytest.raises(UsageError, match="variants"):
        clients.main()
    with pytest.raises(
        EdgespecError, match=r"^broken ended with code 1 before it served:\n  no such option$"
    ):
        Server("broken", [sys.executable, "-c", "import sys; sys.exit('no such option')"])
    with pytest.raises(EdgespecError, match="absent cannot be started: No such file or directory"):
        Server("absent", ["/does/not/exist"])
    with pytest.raises(EdgespecError, match=r"slow does not serve after 0.2 s:\n  it wrote nothing"):
        Server("slow", [sys.executable, "-c", "import time; time.sleep(60)"], timeout_s=0.2)


def load(contender: str, round_: int, seconds: float, *texts: str) -> Load:
    records = [Record(f"p{i}", 5, 10, i + 1.0, i + 2.0, text) for i, text in enumerate(texts)]
    return Load(contender, 4, 0.0, round_, seconds, (0.1, 0.2), tuple(records), ())


def test_figures() -> None:
    one = load("edgespec auto", 0, 2.0, "a", "b", "c")
    assert one.tokens_per_s == 15.0
    assert [one.first_s(share) for share in (0.5, 0.9, 1.0)] == [2.0, 3.0, 3.0]
    assert quantile([], 0.5) == 0.0
    other = load("edgespec auto", 1, 4.0, "a", "x", "c")
    assert differing([one, other]) == (1, 3)
    assert differing([one], [other]) == (1, 3)
    assert differing([one]) == (0, 0)
    older = [load("older auto", 0, 4.0, "a", "b", "c"), load("older auto", 1, 4.0, "a", "b", "c")]
    goal = next(goal for goal in GOALS if goal.n_clients == 4)
    assert sorted(ratios([one, other, *older], goal, "older auto", 0.0)) == [1.0, 2.0]
