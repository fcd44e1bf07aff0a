"""`edgespec bench` as a user types it, with tiny models."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from command_line import COMMAND, run_cli
from edgespec.apps.bench.commands import bench as bench_room
from edgespec.apps.bench.commands.bench_options import VariantChoice
from edgespec.apps.bench.runs import BenchmarkOutcome
from edgespec.cli import app
from edgespec.llama.kv_cache import KVCache
from fake_llama_cpp import fake, fake_server, option, started
from random_heads import write_random_head
from server_app import serving
from terminals import messages_in_terminal
from user_models import write_user_models

PROMPTS = [
    ("code/1", "code", "def the(thing):"),
    ("code/2", "code", "for a in an: b"),
    ("prose/1", "prose", "Über the sea and the sand."),
]
QUICK = ("-n", 6, "--rounds", 1, "--variants", "suffix-2,model-2")


def suite_file(path: Path, prompts=PROMPTS) -> Path:
    lines = [json.dumps({"question_id": id_, "category": of, "turns": [text]}) for id_, of, text in prompts]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def suite(tmp_path):
    return suite_file(tmp_path / "three.jsonl")


@pytest.fixture
def models(tiny_path, tiny_draft_path):
    return ["-t", str(tiny_path), "-d", str(tiny_draft_path)]


def arguments_of(*arguments: object, suite: Path) -> list[str]:
    return ["bench", "--threads", "1", "--suite", str(suite), *map(str, arguments)]


@pytest.fixture
def bench(environment, models, suite):
    """Run `edgespec bench` on the tiny pair and three prompts, unless others are given."""

    def bench(*arguments, models=models, suite=suite):
        return run_cli(*arguments_of(*models, *arguments, suite=suite), env=environment)

    return bench


def outcome_of(process) -> BenchmarkOutcome:
    assert process.stdout.count("\n") == 1
    return msgspec.convert(json.loads(process.stdout)["outcome"], BenchmarkOutcome)


def messages(text: str) -> list[str]:
    """What is on stderr beside the lines of a machine that is busy with other tests."""
    return [line for line in text.splitlines() if "warning: other programs" not in line]


# ---- what it prints ----


def test_tables_and_lines(bench):
    process = bench(*QUICK)
    assert process.returncode == 0, process.stderr
    assert messages(process.stderr) == ["round 1", "edgespec: 1 round, as asked for"]
    assert "\x1b[" not in process.stdout + process.stderr, "piped output is plain"
    first = process.stdout.splitlines()[0]
    assert first == "target, drafted by draft"
    rows = [line.split() for line in process.stdout.splitlines()]
    assert [row[0] for row in rows if row and row[-1] in ("1/1", "2/2", "3/3")] == [
        "code",
        "prose",
        "overall",
    ] * 2
    assert "kernels stock; peak memory" in process.stdout
    assert "all 6 identical to plain decoding's, token by token" in process.stdout


def test_json_has_all(bench, suite):
    process = bench(*QUICK, "--json", "--rounds", 2, "--seed", 3)
    assert process.returncode == 0, process.stderr
    outcome = outcome_of(process)
    assert (outcome.kind, outcome.suite["name"]) == ("bench", "three.jsonl")
    assert outcome.suite["prompts"] == {"code": 2, "prose": 1}
    assert (
        outcome.settings.items()
        >= {
            "variants": "suffix-2, model-2",
            "n_predict": 6,
            "temperature": 0.0,
            "seed": 3,
            "rule": "match",
            "threads": 1,
            "ended": "2 rounds, as asked for",
        }.items()
    )
    (cell,) = outcome.cells
    assert (cell.target, cell.draft, cell.kernels) == ("target", "draft", "stock")
    assert cell.peak_rss_bytes and cell.peak_rss_bytes > 1 << 20
    assert list(outcome.models) == ["target", "draft"]
    assert len({model.sha256 for model in outcome.models.values()}) == 2
    assert Counter((run.variant, run.round) for run in cell.runs) == {
        (variant, round_): 3 for variant in ("plain", "suffix-2", "model-2") for round_ in (0, 1)
    }
    assert [run.prompt for run in cell.runs[:9:3]] == ["code/1", "prose/1", "code/2"], "categories in turn"
    (summaries,) = json.loads(process.stdout)["summary"]
    assert [summary["category"] for summary in summaries] == ["overall", "code", "prose"]
    assert summaries[0]["comparisons"][0]["n_identical"] == 6


def test_files(bench, tmp_path):
    files = {name: tmp_path / f"out.{name}" for name in ("csv", "html")}
    process = bench(*QUICK, "--csv", files["csv"], "--report", files["html"])
    assert process.returncode == 0, process.stderr
    assert process.stdout.startswith("target, drafted by draft\n"), "beside the table, not instead of it"
    rows = list(csv.DictReader(files["csv"].open()))
    assert [(row["category"], row["variant"]) for row in rows] == [
        (category, variant)
        for category in ("overall", "code", "prose")
        for variant in ("plain", "suffix-2", "model-2")
    ]
    page = files["html"].read_text()
    assert page.startswith("<!doctype html>")
    assert "three.jsonl" in page


def test_what_is_asked_for_of_a_suite(bench):
    runs = (
        outcome_of(bench("-n", 3, "--variants", "model-1", "--rounds", 1, "--per-category", 1, "--json"))
        .cells[0]
        .runs
    )
    assert [run.prompt for run in runs[::2]] == ["code/1", "prose/1"]
    process = bench("-n", 3, "--variants", "model-1", "--rounds", 1, "--category", "prose", "--json")
    assert {run.category for run in outcome_of(process).cells[0].runs} == {"prose"}


def test_the_default_suite_and_variants(bench):
    process = bench("-n", 2, "--rounds", 1, "--per-category", 1, "--json", suite="default")
    assert process.returncode == 0, process.stderr
    outcome = outcome_of(process)
    assert outcome.settings["variants"] == "auto"
    assert len(outcome.suite["prompts"]) == 7


def test_a_target_alone(bench, tiny_path):
    """No draft model is known for it: auto does without one, and suffix needs none."""
    for variants in ("auto", "suffix"):
        process = bench(
            "-n", 4, "--rounds", 1, "--variants", variants, "--json", models=["-t", str(tiny_path)]
        )
        assert process.returncode == 0, process.stderr
        outcome = outcome_of(process)
        assert (outcome.cells[0].draft, list(outcome.models)) == (None, ["target"])


def test_a_pair_by_name(bench, tiny_path, tiny_draft_path, tmp_path):
    pair = '[pairs.mine]\ntarget = "big"\ndraft = "small"\n'
    write_user_models(tmp_path / "config", {"big": tiny_path, "small": tiny_draft_path}, pair)
    for choice, variants, draft in (("--pair", "model-1", "small"), ("--pair", "suffix", None)):
        options = ("-n", 3, "--rounds", 1, "--variants", variants, "--json")
        process = bench(*options, models=[choice, "mine"])
        assert process.returncode == 0, process.stderr
        (cell,) = outcome_of(process).cells
        assert (cell.target, cell.draft) == ("big", draft)


def test_two_files_of_one_name_are_told_apart(bench, tiny_path, tiny_draft_path, tmp_path):
    paths = []
    for folder, source in (("a", tiny_path), ("b", tiny_draft_path)):
        (tmp_path / folder).mkdir()
        paths.append(tmp_path / folder / "model.gguf")
        paths[-1].symlink_to(source)
    process = bench(*QUICK, "--json", models=["-t", str(paths[0]), "-d", str(paths[1])])
    assert process.returncode == 0, process.stderr
    outcome = outcome_of(process)
    (cell,) = outcome.cells
    assert (cell.target, cell.draft) == tuple(map(str, paths))
    assert outcome.models[str(paths[0])].size == tiny_path.stat().st_size
    assert outcome.models[str(paths[1])].size == tiny_draft_path.stat().st_size


def test_the_budget_is_said(bench):
    process = bench("-n", 3, "--variants", "model-1", "--budget", "0.001s")
    assert process.returncode == 0, process.stderr
    assert messages(process.stderr)[-2:] == [
        "edgespec: warning: only 1 of 3 prompts had their turn; give more time (--budget) or take fewer "
        "(--per-category)",
        "edgespec: 0 rounds and 1 of 3 prompts of the next; the budget of 0.001 s was spent",
    ]
    assert "code" in process.stdout
    assert "prose" not in process.stdout


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("300", 300), ("90s", 90), ("10m", 600), ("1h", 3600), ("1.5h", 5400), (" 2 m ", 120), ("0.5", 0.5)],
)
def test_budgets(text, seconds):
    assert bench_room.BenchMeasuring(variants=VariantChoice(), budget=text).budget_s == seconds


# ---- ends before its time ----


def test_interrupted(environment, models, suite):
    """What was measured is printed."""
    process = subprocess.Popen(
        [*COMMAND, *arguments_of(*models, "--precision", 0, "-n", 20, "--json", suite=suite)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr
    while not process.stderr.readline().startswith("round 3"):
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert "edgespec: interrupted" in stderr.splitlines()
    assert "Traceback" not in stderr
    outcome = msgspec.convert(json.loads(stdout)["outcome"], BenchmarkOutcome)
    assert outcome.settings["ended"] == "interrupted"
    assert len(outcome.cells[0].runs) >= 12, "two rounds, three prompts, two variants"


@pytest.fixture
def in_process(models, suite, monkeypatch, tmp_path):
    """The same without a process of its own, where something is to go wrong in the midst of it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def run(*arguments):
        return app.main(arguments_of(*models, "--kernels", "off", *QUICK, *arguments, suite=suite))

    return run


def damage(monkeypatch, prompt: bytes) -> None:
    """Logits are no numbers wherever the target reads that prompt."""
    real = KVCache.forward

    def damaged(self, parts):
        read = b"".join(self.model.piece(token) for part in parts for token in part.tokens)
        results = real(self, parts)
        return (
            [replace(one, rows=np.full_like(one.rows, np.nan)) for one in results]
            if prompt in read
            else results
        )

    monkeypatch.setattr(KVCache, "forward", damaged)


def test_a_failure_in_mid_bench(in_process, monkeypatch, capsys, tmp_path):
    damage(monkeypatch, PROMPTS[1][2].encode())
    assert in_process("--csv", tmp_path / "x.csv") == 1
    shown = capsys.readouterr()
    assert [line for line in messages(shown.err) if not line.startswith("round ")][-1].startswith(
        "edgespec: error: "
    )
    assert shown.err.count("may be damaged") == 1, "said once"
    assert "prose" in shown.out
    assert len(list(csv.DictReader((tmp_path / "x.csv").open()))) == 9


def test_files_are_there_though_nobody_reads_stdout(environment, models, suite, tmp_path):
    file = tmp_path / "x.csv"
    process = subprocess.Popen(
        [*COMMAND, *arguments_of(*models, *QUICK, "--csv", file, suite=suite)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout
    assert process.stderr
    process.stdout.close()
    stderr = process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=60) == 141
    assert "error" not in stderr
    assert "Traceback" not in stderr
    assert len(list(csv.DictReader(file.open()))) == 9


def test_what_was_measured_is_not_lost_with_its_file(bench):
    """/dev/full can be opened and never written: a disk that is full at the end."""
    process = bench(*QUICK, "--csv", "/dev/full")
    assert (process.returncode, "plain" in process.stdout) == (1, True)
    assert "--csv /dev/full" in process.stderr


def test_a_bar_in_a_terminal(environment, models, suite):
    command = [*COMMAND, *arguments_of(*models, *QUICK, "--rounds", 20, suite=suite)]
    code, seen, table = messages_in_terminal(command, environment)
    assert code == 0
    assert re.search(rb"round \d+, \d of 3 prompts", seen)
    assert b"\x1b" not in table


# ---- peers ----


def test_a_peer_in_turns(bench, tmp_path, tiny_draft_path):
    process = bench(*QUICK, "--peer", fake_server(tmp_path / "bin"), "--json")
    assert process.returncode == 0, process.stderr
    outcome = outcome_of(process)
    runs = outcome.cells[0].runs
    assert [run.variant for run in runs[3:5]] == ["llama.cpp plain", "llama.cpp model-3"]
    assert Counter(run.variant for run in runs)["llama.cpp model-3"] == 3
    assert outcome.settings["peers"].endswith(f", drafted by {tiny_draft_path.stem}")


def test_a_peer_that_cannot_be_started(bench, tmp_path):
    fake(tmp_path / "llama-server", log="no such model\n", code=1)
    process = bench(*QUICK, "--peer", tmp_path)
    assert (process.returncode, process.stdout) == (1, "")
    assert messages(process.stderr)[-1] == "edgespec: error: llama-server ended with code 1: no such model"


def test_ctrl_c_ends_what_was_started(environment, models, suite, tmp_path):
    folder = fake_server(tmp_path / "bin")
    command = [*COMMAND, *arguments_of(*models, *QUICK, "--peer", folder, "--rounds", 1000, suite=suite)]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not (folder / "llama-server.drafted").exists():
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130
    for how in ("plain", "drafted"):
        with pytest.raises(ProcessLookupError):
            os.kill(started(folder, how)["pid"], 0)


def test_a_server_in_turns(bench, tiny_path):
    with serving(tiny_path, engine_options={"prefix_cache": 0}) as served:
        process = bench(*QUICK, "--peer", served.url, "--json")
    assert process.returncode == 0, process.stderr
    outcome = outcome_of(process)
    assert Counter(run.variant for run in outcome.cells[0].runs)["llama.cpp served"] == 3
    assert outcome.settings["peers"] == f"llama.cpp at {served.url} with {tiny_path.stem}"
    process = bench(*QUICK, "--peer", served.url)
    assert (process.returncode, process.stdout) == (1, "")
    assert messages(process.stderr)[-1].startswith(f"edgespec: error: {served.url}: ")


def test_a_peer_drafts_with_the_small_model_where_the_draft_is_a_head(
    bench, tiny_path, tiny_draft_path, tmp_path
):
    folder = fake_server(tmp_path / "bin")
    paths = {"big": tiny_path, "head": write_random_head(tmp_path / "head.gguf", tiny_path)}
    pair = '[pairs.mine]\ntarget = "big"\ndraft = "head"\n'
    peer = ("--peer", folder, "--json")
    for more, drafted in (("", False), ('small = "small"\n', True)):
        write_user_models(tmp_path / "config", paths | {"small": tiny_draft_path}, pair + more)
        process = bench(*QUICK, *peer, models=["--pair", "mine"])
        assert process.returncode == 0, process.stderr
        outcome = outcome_of(process)
        (cell,) = outcome.cells
        assert cell.draft == "head"
        assert ("llama.cpp model-3" in {run.variant for run in cell.runs}) is drafted
        assert outcome.settings["peers"].endswith(f", drafted by {tiny_draft_path.stem}") is drafted
        assert outcome.models.keys() == {"big", "head", *([tiny_draft_path.stem] if drafted else [])}
    assert option(started(folder, "drafted")["argv"], "-md") == str(tiny_draft_path)


def test_a_peer_that_fails_leaves_the_other_runs(bench, tiny_path, tmp_path):
    one = suite_file(tmp_path / "one.jsonl", PROMPTS[:1])
    with serving(tiny_path, engine_options={"prefix_cache": 1 << 24}) as served:
        process = bench(*QUICK, "--rounds", 2, "--peer", served.url, "--json", suite=one)
    assert process.returncode == 0, process.stderr
    outcome = outcome_of(process)
    found = Counter(run.variant for run in outcome.cells[0].runs)
    assert found == {"plain": 2, "suffix-2": 2, "model-2": 2, "llama.cpp served": 1}
    (line,) = (line for line in outcome.warnings if "llama.cpp" in line)
    assert re.fullmatch(r".* keeps prompts: .*; llama\.cpp .* is left out from here on", line)
    assert f"edgespec: warning: {line}" in process.stderr.splitlines()
