"""`edgespec draft` as a user types it, with tiny models."""

from __future__ import annotations

import json
import signal
import subprocess
from datetime import datetime

import pytest

from command_line import COMMAND, failed, run_cli
from edgespec.apps.forge.commands.draft import seconds_until
from edgespec.cli.options import read_number
from edgespec.errors import UsageError
from kept_drafts import keep_draft
from terminals import messages_in_terminal, plain
from tiny_gguf import write_tiny_gguf


@pytest.fixture
def edgespec(environment):
    def edgespec(*arguments, **more):
        return run_cli(*arguments, env={**environment, **more})

    return edgespec


@pytest.fixture
def source(tmp_path):
    return write_tiny_gguf(tmp_path / "small-f32.gguf", seed=5, n_layer=3, n_embd=64, n_ff=64)


FEWEST = "--keep 272 --types q8_0 --data-tokens 100 --answer-tokens 24 --rounds 1 -n 8 --threads 1"
"""Options of what takes least time."""


@pytest.fixture
def asked(tiny_path):
    """A draft that takes a second of training."""
    return ["draft", "make", "--target", tiny_path, "--tokens", "1k", *FEWEST.split()]


@pytest.fixture
def kept(environment, tiny_path, tmp_path, monkeypatch):
    """A draft that was made before, as far as its file and its record are concerned."""
    for name in ("XDG_CONFIG_HOME", "XDG_CACHE_HOME", "EDGESPEC_MODELS_DIR"):
        monkeypatch.setenv(name, environment[name])
    return lambda name, **changes: keep_draft(tmp_path / "models", name, tiny_path, **changes)


def models(tmp_path):
    found = (tmp_path / "models").glob("*")
    return sorted(path.name for path in found if not path.name.endswith(".lock"))


def test_from_texts_to_a_draft_that_is_used(edgespec, asked, tiny_path, tmp_path):
    process = edgespec(*asked, "--force", "--name", "mine")
    assert process.returncode == 0, process.stderr
    lines = process.stdout.splitlines()
    assert lines[0].startswith("for target, from built-in ")
    assert [line.split()[0] for line in lines[1:4]] == ["draft", "no", "head-q8_0"]
    assert "head-q8_0 is " in lines[4]
    assert lines[5:] == [
        f"kept: {tmp_path / 'models' / 'mine.gguf'}",
        "it drafts for target from now on; `edgespec draft remove mine` removes it",
    ]
    for stage in ("writing", "choosing tokens", "training head", "evaluating"):
        assert stage in process.stderr.splitlines()
    assert any(line.startswith("writing: ") and "tokens/s" in line for line in process.stderr.splitlines())
    assert models(tmp_path) == ["mine.draft.json", "mine.gguf"]

    options = ["hello", "-t", tiny_path, "--temp", "0", "-n", "40", "--json"]
    drafted = edgespec("run", *options, "--drafter", "model", "--gamma", "3")
    assert drafted.returncode == 0, drafted.stderr
    alone = edgespec("run", *options, "--drafter", "none")
    assert json.loads(drafted.stdout)["text"] == json.loads(alone.stdout)["text"]
    assert json.loads(drafted.stdout)["draft"] == "mine"
    assert json.loads(drafted.stdout)["stats"]["n_drafted"] > 0


def test_what_is_said_of_it_as_json(edgespec, asked, tmp_path):
    process = edgespec(*asked, "--json", "--force")
    assert process.returncode == 0, process.stderr
    made = json.loads(process.stdout)
    (one,) = made["candidates"]
    assert (one["label"], made["best"]) == ("head-q8_0", "head-q8_0")
    assert one["trained"]["n_tokens"] >= 1000
    assert len(one["trained"]["acceptance"]) == 5
    assert one["trained"]["curve"]
    assert one["cost_ratio"] > 0
    assert {run["variant"] for run in one["runs"]} == {"plain", "auto"}
    record = made["kept"]
    assert record["name"] == "target-head-q8_0"
    assert record["tokens_seen"] == one["trained"]["n_tokens"]
    assert record["gains"] == {"greedy": one["greedy"]["median"], "sampled": one["sampled"]["median"]}
    assert models(tmp_path) == ["target-head-q8_0.draft.json", "target-head-q8_0.gguf"]
    lines = process.stderr.splitlines()
    assert any(line.startswith("training head: ") and "tokens" in line for line in lines)


def test_killed_and_started_again_and_trained_on(asked, environment, edgespec, tmp_path):
    """kill -9 while it trains: no text is written again. A second training starts from the first."""
    arguments = [*asked, "--force"]
    process = subprocess.Popen(
        [*COMMAND, *map(str, arguments)],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr
    while not process.stderr.readline().startswith("training head: "):
        assert process.poll() is None
    process.kill()
    process.communicate()
    (folder,) = (tmp_path / "cache" / "edgespec" / "forge").iterdir()
    texts = {path.name: path.read_bytes() for path in folder.glob("*.npz")}
    state = json.loads((folder / "make.json").read_text())
    assert (state["written"], state["ended"]) == (True, False)
    assert models(tmp_path) != [], "what was being made"
    again = edgespec(*arguments)
    assert again.returncode == 0, again.stderr
    lines = again.stderr.splitlines()
    assert "edgespec: resuming the run that was stopped" in lines
    assert not any(line.startswith("writing") for line in lines)
    assert {path.name: path.read_bytes() for path in folder.glob("*.npz")} == texts
    assert json.loads((folder / "make.json").read_text())["ended"]
    assert models(tmp_path) == ["target-head-q8_0.draft.json", "target-head-q8_0.gguf"]

    first = json.loads((tmp_path / "models" / "target-head-q8_0.draft.json").read_text())
    process = edgespec(*arguments, "--name", "second", "--json")
    assert process.returncode == 0, process.stderr
    second = json.loads(process.stdout)["kept"]
    assert (first["parent"], second["parent"]) == (None, "target-head-q8_0")
    assert [path.name for path in (folder / "training").iterdir()] == ["2"]
    left = {path.name for path in (folder / "training" / "2" / "head").iterdir()}
    assert left == {"best.npz", "name"}, "checkpoints are for trainings that go on"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_or_sigterm_and_again(asked, environment, edgespec, tmp_path, number):
    process = subprocess.Popen(
        [*COMMAND, *map(str, asked)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr
    while process.stderr.readline().strip() != "evaluating":
        assert process.poll() is None
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert out == ""
    assert err.splitlines()[-2:] == [
        "edgespec: what was written and trained is kept; run the same command again to resume",
        "edgespec: error: interrupted",
    ]
    assert models(tmp_path) == []
    assert not (tmp_path / "config").exists()
    again = edgespec(*asked)
    assert again.returncode == 0, again.stderr
    assert "edgespec: resuming the run that was stopped" in again.stderr.splitlines()
    assert "writing" not in again.stderr.splitlines()


def test_until_a_time_of_the_day(asked, environment, tmp_path):
    """The command ends by itself, with code 0, and goes on when it is given again."""
    code = (
        "import sys; from edgespec.apps.forge.commands import draft; draft.seconds_until = lambda *_: 0.5\n"
        "from edgespec.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    many = [*without_length(asked), "--hours", "1", "--until", "07:00"]
    command = [COMMAND[0], "-c", code, *map(str, many)]
    process = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert process.returncode == 0, process.stderr
    assert process.stderr.splitlines()[-1] == (
        "edgespec: what was written and trained is kept; run the same command again to resume"
    )
    assert (process.stdout, models(tmp_path)) == ("", [])


def test_the_next_time_of_a_day():
    now = datetime(2026, 3, 1, 23, 30)
    assert seconds_until("23:31", now) == 60
    assert seconds_until("07:00", now) == 7.5 * 3600
    assert seconds_until("23:30", now) == 86_400
    with pytest.raises(UsageError, match="must be a time of the day"):
        seconds_until("7 o'clock", now)


def test_in_a_terminal(asked, environment):
    code, seen, out = messages_in_terminal([*COMMAND, *map(str, asked), "--force"], environment)
    assert code == 0, seen
    shown = plain(seen.decode())
    for stage in ("writing", "choosing tokens", "training head", "evaluating"):
        assert stage in shown
    assert "tokens/s" in shown
    assert "100%" in shown
    assert b"\x1b[?25h" in seen, "the cursor is back"
    assert b"head-q8_0" in out


def test_without_jax(asked, environment, tmp_path):
    """A Python without it: one line, before anything is written."""
    code = (
        "import sys; sys.modules['jax'] = None; from edgespec.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    command = [COMMAND[0], "-c", code, *map(str, asked)]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    failed(process, 1, "training needs JAX: pip install 'edgespec[forge]'")
    assert not (tmp_path / "cache" / "edgespec" / "forge").exists()


def without_length(asked):
    at = asked.index("--tokens")
    return [*asked[:at], *asked[at + 2 :]]


# ---- list, eval, remove ----


def test_list(edgespec, kept):
    assert "no draft was made here yet" in edgespec("draft", "list").stdout
    record = kept("mine")
    kept("other", target_sha256="00" * 32, made="2026-02-03T04:05:06+00:00")
    lines = edgespec("draft", "list").stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["draft", "mine", "other"]
    for part in (
        record.target_sha256[:12],
        "built-in 1.23 M, history 30.5 k tokens",
        "3 M",
        "1.5",
        "0.61 0.55 0.50",
        "0.06",
        "1.44x",
        "1.21x",
        "2026-01-02",
    ):
        assert part in lines[1]
    listed = json.loads(edgespec("draft", "list", "--json").stdout)["drafts"]
    assert [one["name"] for one in listed] == ["mine", "other"]
    assert listed[0]["acceptance"] == [0.61, 0.55, 0.5]


def test_eval_and_remove(edgespec, asked, tmp_path):
    made = edgespec(*asked, "--force", "--name", "mine")
    assert made.returncode == 0, made.stderr
    record = tmp_path / "models" / "mine.draft.json"
    before = json.loads(record.read_text())
    process = edgespec(
        "draft", "eval", "mine", "--target", tiny(asked), "--rounds", "1", "-n", "8", "--questions", "2"
    )
    assert process.returncode == 0, process.stderr
    lines = process.stdout.splitlines()
    assert lines[0] == "for target"
    assert [line.split()[0] for line in lines[1:]] == ["draft", "mine", "no"]
    after = json.loads(record.read_text())
    assert after["gains"] != before["gains"]
    assert {**after, **dict.fromkeys(MEASURED, 0)} == {**before, **dict.fromkeys(MEASURED, 0)}

    suite = tmp_path / "suite.jsonl"
    suite.write_text(json.dumps({"question_id": 1, "category": "mine", "turns": ["the wind"]}) + "\n")
    process = edgespec(
        "draft", "eval", "mine", "-t", tiny(asked), "--suite", suite, "--rounds", "1", "-n", "8", "--json"
    )
    assert process.returncode == 0, process.stderr
    found = json.loads(process.stdout)
    assert {run["category"] for run in found["draft"]["runs"]} == {"mine"}
    assert found["other"]["name"] == "no draft"
    failed(edgespec("draft", "eval", "mine"), 2, "mine was made for a file called target: say where that is")
    failed(edgespec("draft", "eval", "none"), 2, "no draft that was made here is called 'none'")

    (folder,) = (tmp_path / "cache" / "edgespec" / "forge").iterdir()
    process = edgespec("draft", "remove", "mine")
    assert process.returncode == 0, process.stderr
    assert process.stdout.splitlines() == [
        f"{tmp_path / 'models' / name}: deleted" for name in ("mine.gguf", "mine.draft.json")
    ]
    assert folder.exists()
    failed(edgespec("draft", "remove", "mine"), 2, "no draft that was made here is called 'mine'")
    assert edgespec("models", "list").stdout.find("mine") < 0
    assert edgespec(*asked, "--force", "--name", "mine").returncode == 0
    process = edgespec("draft", "remove", "mine", "--data")
    assert process.stdout.splitlines()[-1].startswith(f"{folder}: deleted, ")
    assert not folder.exists()


MEASURED = ("gains", "acceptance", "cost_ratio")


def tiny(asked):
    return asked[asked.index("--target") + 1]


def test_a_head_is_judged_for_its_target_only(edgespec, kept, source):
    kept("mine")
    process = edgespec("draft", "eval", "mine", "--target", source)
    failed(process, 2, "--target small-f32: mine was made for another file, target with the SHA-256")


# ---- what users write ----


def test_numbers_and_sizes():
    assert [read_number("x", text) for text in ("5", "200k", "1M", "1.5 M", "2G")] == [
        5,
        200_000,
        1_000_000,
        1_500_000,
        2_000_000_000,
    ]
    assert [
        read_number("x", text, is_size=True) for text in ("5", "2GB", "500M", "1.5GiB", "10 kB", "7B")
    ] == [
        5,
        2_000_000_000,
        500_000_000,
        3 << 29,
        10_000,
        7,
    ]
    for text in ("", "k", "-1", "0", "1e9", "2GB", "nan"):
        with pytest.raises(UsageError, match="must be a number"):
            read_number("x", text)
    for text in ("", "GB", "-1GB", "0MB", "1PB"):
        with pytest.raises(UsageError, match="must be a size"):
            read_number("x", text, is_size=True)
