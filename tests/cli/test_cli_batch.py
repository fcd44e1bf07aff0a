"""`edgespec batch` as a user runs it: real (tiny) models, real files, processes that are killed."""

from __future__ import annotations

import importlib.util
import json
import re
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from batch_parts import custom_ids, results, write_lines
from command_line import COMMAND, failed, run_cli, started
from edgespec.apps.batch.commands.batch import BatchDisplay
from terminals import Terminal

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """One for all tests of this file: what one has measured another need not."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out.jsonl"


@pytest.fixture
def source(tmp_path):
    """Requests of every kind, a third of them not in order."""
    lines = [
        {
            "custom_id": "chat",
            "method": "POST",
            "url": CHAT,
            "body": {
                "model": "edgespec",
                "messages": [{"role": "user", "content": "the quick brown fox"}],
                "max_tokens": 9,
                "temperature": 0,
            },
        },
        '"a plain prompt"',
        "{broken",
        {"custom_id": "chat", "prompt": "twice"},
        {"custom_id": "vectors", "method": "POST", "url": "/v1/embeddings", "body": {"input": "a"}},
        {"custom_id": "long", "prompt": "word " * 600},
        *({"custom_id": f"c{i}", "prompt": f"number {i}", "max_tokens": 5 + i} for i in range(14)),
    ]
    return write_lines(tmp_path / "in.jsonl", lines)


@pytest.fixture
def options(tiny_path):
    return ("--target", tiny_path, "--drafter", "none", "--threads", 1, "--temp", 0, "-n", 6)


GATE = """
import time
from pathlib import Path
class Gate:
    n = 0
    def begin(self, tokens):
        Gate.n += 1
        while Gate.n > 3 and not Path(__file__).with_name("open").exists():
            time.sleep(0.01)
    def draft(self, tokens, room, sample):
        return []
    def accept(self, tokens, n_accepted):
        pass
"""
"""A drafter at whose fourth text a batch waits until there is a file: it is not over before it is stopped."""


NAMES = ["chat", "line-2", "line-3", "line-4", "vectors", "long", *(f"c{i}" for i in range(14))]
FAILED = {"line-3": "not valid JSON", "line-4": "earlier line", "vectors": "url", "long": "context length"}


def check(file, names=NAMES):
    """Check every line of an output; return the texts by custom_id."""
    texts = {}
    lines = results(file)
    assert [line["custom_id"] for line in lines] == names
    assert len({line["id"] for line in lines}) == len(lines)
    for line in lines:
        name, response = line["custom_id"], line["response"]
        assert line["error"] is None
        assert response["status_code"] == (400 if name in FAILED else 200)
        if name in FAILED:
            assert FAILED[name] in response["body"]["error"]["message"]
        else:
            choice = response["body"]["choices"][0]
            n_wanted = 9 if name == "chat" else 6 if name == "line-2" else 5 + int(name[1:])
            assert (
                response["body"]["usage"]["completion_tokens"] == n_wanted
                or choice["finish_reason"] == "stop"
            )
            texts[name] = choice["message"]["content"]
    return texts


def left_over(folder):
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".gguf" and path.is_file())


# ---- answers ----


def test_a_file_of_requests(environment, source, out, options):
    process = run_cli("batch", source, "-o", out, *options, env=environment)
    assert (process.returncode, process.stdout) == (1, ""), process.stderr
    check(out)
    *progress, last = process.stderr.splitlines()
    assert last.startswith(f"edgespec: 20 results in {out}; 4 of them failed; ")
    assert last.endswith(" tokens/s")
    told = [line for line in progress if " of 20 requests" not in line]
    assert len(progress) - len(told) <= 10
    for line, (name, why) in zip(told, FAILED.items(), strict=True):
        assert re.fullmatch(rf"edgespec: line {NAMES.index(name) + 1} failed \({name}\): .*{why}.*", line)
    assert "\x1b" not in process.stderr
    assert left_over(out.parent) == ["in.jsonl", "out.jsonl"]


@pytest.mark.parametrize("to", ["out.jsonl", "-"])
def test_the_first_lines_that_failed_are_named_by_their_numbers_in_the_file(
    environment, source, out, options, to
):
    lines = ["", "{broken", "", '"plain"', '"plain"', '{"prompt": 3, "custom_id": "number"}', *["[]"] * 7]
    source.write_text("\n".join(lines))
    process = run_cli("batch", source, "-o", to, *options, env=environment, cwd=out.parent)
    assert process.returncode == 1
    told = re.findall(r"^edgespec: line (\d+) failed \((.*?)\): (.*)$", process.stderr, re.MULTILINE)
    assert [(int(number), name) for number, name, _ in told] == [
        (2, "line-2"), (6, "number"), (7, "line-7"), (8, "line-8"), (9, "line-9"),
    ]  # fmt: skip
    assert "prompt" in told[1][2]
    assert "4 more failed" in process.stderr


def test_where_none_failed_the_exit_code_is_0(environment, source, out, options):
    write_lines(source, ['"one"', '"two"'])
    process = run_cli("batch", source, "-o", out, *options, env=environment)
    assert process.returncode == 0
    assert process.stderr.splitlines()[-1].startswith(f"edgespec: 2 results in {out}; no errors; ")
    write_lines(source, ['"one"', '"two"', "{broken"])
    process = run_cli("batch", source, "-o", "-", *options, env=environment)
    assert process.returncode == 1
    assert "3 results; 1 of them failed" in process.stderr


def test_json_and_results_as_they_come(environment, source, out, options):
    arguments = ("--as-they-come", "--json", "--assume-watts", 10)
    process = run_cli("batch", source, "-o", out, *options, *arguments, env=environment)
    assert process.returncode == 1, process.stderr
    assert sorted(custom_ids(out)) == sorted(NAMES)
    facts = json.loads(process.stdout)
    joules, seconds, rate = facts.pop("joules"), facts.pop("seconds"), facts.pop("tokens_per_s")
    n_tokens = sum(
        line["response"]["body"]["usage"]["completion_tokens"]
        for line in results(out)
        if line["response"]["status_code"] == 200
    )
    bodies = [line["response"]["body"] for line in results(out)]
    n_cut = sum(body.get("choices", [{}])[0].get("finish_reason") == "length" for body in bodies)
    assert facts.pop("cut") == n_cut > 0
    assert facts == {"out": str(out), "lines": 20, "errors": 4, "lines_before": 0, "tokens": n_tokens}
    assert rate == pytest.approx(n_tokens / seconds)
    assert joules == pytest.approx(10 * seconds, rel=0.2)


def test_through_pipes(environment, source, out, options):
    process = run_cli(
        "batch", "-", "-o", "-", *options, env=environment, stdin=source.read_bytes(), text=False
    )
    assert process.returncode == 1, process.stderr
    out.write_bytes(process.stdout)
    check(out)
    assert b"20 results; 4 of them failed" in process.stderr


def test_a_terminal_gets_a_bar(environment, source, out, options):
    command = [*COMMAND, "batch", str(source), "-o", str(out), *map(str, options)]
    with Terminal(command, environment) as terminal:
        terminal.expect("of 20 requests")
        terminal.expect("20 results in")
    check(out)


# ---- ends before the end ----


def test_ctrl_c_keeps_what_is_done(environment, source, tmp_path, out, options):
    partial, drafter = Path(f"{out}.partial"), tmp_path / "drafter.py"
    drafter.write_text(GATE)
    options = (*options, "--parallel", 2, "--drafter", f"{drafter}:Gate")
    with started("batch", source, "-o", out, *options, env=environment) as process:
        while not (partial.exists() and partial.read_bytes().count(b"\n") > 2):
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.005)
        process.send_signal(signal.SIGINT)
        drafter.with_name("open").touch()
        said, told = process.communicate(timeout=60)
    assert (process.returncode, said) == (130, b""), told
    (line,) = (line for line in told.decode().splitlines() if line.startswith("edgespec: interrupted: "))
    assert line.endswith(" of 20 requests are done; run the same command again to resume")
    n_done = partial.read_bytes().count(b"\n") - 1
    assert f" {n_done} of 20" in line
    process = run_cli("batch", source, "-o", out, *options, env=environment)
    assert process.returncode == 1
    assert f"resuming: {n_done} of 20 requests are done" in process.stderr
    assert custom_ids(out) == NAMES


def test_a_device_that_takes_nothing(environment, source, options):
    process = run_cli("batch", source, "-o", "/dev/full", *options, env=environment)
    assert process.returncode == 1
    assert process.stderr.splitlines()[-1] == "edgespec: error: /dev/full: No space left on device"


# ---- prompts and answers as text ----


def test_a_prompt_a_line_and_answers_as_text(environment, options, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_bytes("\ufeffabc\n\n{broken\r\n".encode() + b"\xff\n" + b'"def"')
    as_lines = write_lines(tmp_path / "in.jsonl", [json.dumps(text) for text in ("abc", "{broken", '"def"')])
    whole = tmp_path / "whole.jsonl"
    assert run_cli("batch", as_lines, "-o", whole, *options, env=environment).returncode == 0
    texts = [
        line["response"]["body"]["choices"][0]["message"]["content"].strip("\n") for line in results(whole)
    ]
    texts.insert(2, "[failed: the line is not UTF-8 text at byte 0]")
    written = run_cli("batch", prompts, *options, env=environment)
    assert (written.returncode, written.stdout) == (1, "\n\n".join(texts) + "\n")
    run_cli("batch", prompts, "-o", tmp_path / "out.txt", *options, env=environment)
    assert (tmp_path / "out.txt").read_text() == written.stdout
    run_cli("batch", prompts, "-o", tmp_path / "out.jsonl", *options, env=environment)
    assert len(results(tmp_path / "out.jsonl")) == 4


# ---- what is refused before a model is loaded ----


def test_without_the_extra_one_line_says_what_to_install(environment, source, out, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "fastapi" else find(name))
    process = run_cli("batch", source, "-o", out, env=environment)
    failed(process, 1, "edgespec batch needs fastapi: pip install 'edgespec[serve]'")


def test_a_line_for_each_tenth_where_there_is_no_terminal(capfd):
    results = SimpleNamespace(n_done=30, n_failed=0)
    with BatchDisplay(results, 100) as display:
        for results.n_done in range(30, 101):
            results.n_failed = int(results.n_done > 70)
            display.update(0)
            display.update(0)
    lines = capfd.readouterr().err.splitlines()
    assert lines == [f"{n} of 100 requests" + ", 1 with errors" * (n > 70) for n in (40, 50, 60, 70, 80, 90)]
