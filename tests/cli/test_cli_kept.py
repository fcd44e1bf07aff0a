"""What is kept: real commands in an empty home leave nothing that the table does not know."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import time
from pathlib import Path

import pytest

import kept_table
from command_line import COMMAND, copy_self_test, failed, python_path, run_cli
from edgespec.cli.cache import delete_files
from edgespec.cli.local_run import running_servers
from edgespec.models.registry import Entry
from edgespec.models.store import Stamp, Store
from edgespec.platform.kept import EVERYTHING, QUANTIZED, SERVERS, StateFile, owner_of
from terminals import Terminal
from tiny_gguf import write_tiny_gguf
from tiny_whisper import write_tiny_whisper

ROOT = Path(__file__).parents[2]
DELETABLE = [row for row in EVERYTHING if row.deleted != "never"]
QUICK = ("--threads", 1, "-n", 4)


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A home with the kernels' self-test alone, and no variable that moves anything out of it."""
    home = tmp_path / "home"
    copy_self_test(home / ".cache")
    monkeypatch.setenv("HOME", str(home))
    for name in [*(name for name in os.environ if name.startswith("XDG_")), "EDGESPEC_MODELS_DIR"]:
        monkeypatch.delenv(name, raising=False)
    return home


@pytest.fixture
def env(home):
    return {**os.environ, "PYTHONPATH": python_path(), "HF_HUB_OFFLINE": "1"}


def files_in(home):
    return {file for file in home.rglob("*") if file.is_file()}


def locks(files):
    return {file for file in files if file.name.startswith(".") and file.name.endswith("lock")}


def test_the_page_shows_the_table():
    page = kept_table.PAGE.read_text()
    assert kept_table.table() in page, "write it: PYTHONPATH=. python tests/support/kept_table.py"


def test_nothing_is_kept_outside_the_table(home):
    names = [row.name for row in EVERYTHING]
    assert len(set(names)) == len(names)
    assert "all" not in names
    for module in (ROOT / "edgespec").rglob("*.py"):
        if module.name not in ("files.py", "kept.py", "cache.py"):
            assert "import cache_root" not in module.read_text(), f"{module}: ask a row of kept.py"


def test_real_commands_in_an_empty_home(home, env, tmp_path):
    """Every place is known, listed with its bytes, and emptied by `cache clear`; your own files stay."""
    (work := tmp_path / "work").mkdir()
    target, draft = (
        write_tiny_gguf(work / f"{name}.gguf", seed=seed, peak=0.7)
        for seed, name in enumerate(("big", "small"))
    )
    speech = write_tiny_whisper(work / "hears.gguf", n_text_ctx=40, peak=4.0)
    (work / "notes.txt").write_text("the cat and the other dog")
    question = {"question_id": 1, "category": "x", "turns": ["abc abc"]}
    (work / "suite.jsonl").write_text(json.dumps(question) + "\n")
    (work / "requests.jsonl").write_text('{"prompt": "abc"}\n')
    pair = ("--target", target, "--draft", draft)
    suite = ("--suite", "suite.jsonl", "--assume-watts", 5, *QUICK)
    for command in (
        ("run", "abc", *pair, *QUICK),
        ("cache", "import", "notes.txt", "--target", target),
        ("profile", *pair, "--threads", 1),
        ("calibrate", *pair, "--suite", "suite.jsonl", *QUICK),
        ("bench", *pair, *suite, "--rounds", 1),
        ("compare", "--targets", target, "--drafts", "none", "--quants", "q4_0", "--rounds", 1, *suite),
        ("batch", "requests.jsonl", "-o", "results.jsonl", *pair, *QUICK),
        ("models", "add", speech),
        ("models", "scan", work),
        ("energy", "--seconds", 1),
        ("doctor", target),
    ):
        done = run_cli(*command, env=env, cwd=work)
        assert done.returncode in (0, 1), (command, done.stderr)
        assert "Traceback" not in done.stderr
    with Terminal([*COMMAND, "chat", "--continue", *map(str, (*pair, *QUICK))], env) as terminal:
        terminal.expect(">")
        terminal.type("a secret\r")
        terminal.expect("cut after")
        terminal.type("/exit\r")
        assert terminal.wait() == 0
    subprocess.run([*COMMAND, "--install-completion", "bash"], env=env, capture_output=True, check=False)

    unknown = {file for file in files_in(home) if owner_of(file) is None}
    assert unknown <= {home / ".bashrc"}
    listed = json.loads(run_cli("cache", "info", "--json", env=env).stdout)["kept"]
    assert sum(row["bytes"] for row in listed) == sum(
        file.stat().st_size for file in files_in(home) - unknown
    )
    there = {row["name"] for row in listed if row["files"]}
    known = {"history", "chat-lines", "chats", "profiles", "self-tests", "quantized", "models.toml"}
    assert there >= known
    for name in there & {row.name for row in DELETABLE}:
        assert run_cli("cache", "clear", name, "--yes", env=env).returncode == 0
    left = {owner_of(file).name for file in files_in(home) - unknown - locks(files_in(home))}
    assert left <= {"models.toml", "completion"}


def test_clear_deletes_your_texts_and_says_what_is_left(home, env):
    (home / ".cache/edgespec/hashes.json").write_text("{}")
    (lines := home / ".cache/edgespec/chat-lines").write_text("+a secret\n")
    line = failed(run_cli("cache", "clear", env=env), 2, f"chat-lines (10 bytes) in {lines}", "give --yes")
    assert "hashes" not in line
    done = run_cli("cache", "clear", "--yes", env=env)
    assert done.stdout == f"{lines}: deleted, 10 bytes\n"
    assert re.search(r"still here: .*hashes \(2 bytes\)", done.stderr)
    assert "cache clear NAME" in done.stderr
    assert not lines.exists()


def test_models_are_deleted_only_by_name_and_only_what_was_pulled(home, env):
    store = Store.default()
    store.root.mkdir(parents=True)
    for name in ("pulled.gguf", "stopped.gguf.part", "stopped.gguf.part.json", "mine.gguf", "notes.txt"):
        (store.root / name).write_bytes(b"GGUF")
    store.write_stamp(Entry("pulled"), Stamp(hashlib.sha256(b"GGUF").hexdigest(), 4, "the registry"))
    (made := QUANTIZED.path() / "a-q4_0-of-0123456789ab.gguf").parent.mkdir()
    made.write_bytes(b"GGUF")
    assert run_cli("cache", "clear", "all", "--yes", env=env).returncode == 0
    assert not made.exists()
    assert (store.root / "pulled.gguf").exists()
    done = run_cli("cache", "clear", "models", "--yes", env=env)
    assert "pulled: deleted" in done.stdout
    assert "stopped: deleted, 8 bytes" in done.stdout
    assert f"kept, as they were not pulled: {store.root / 'mine.gguf'}" in done.stdout
    assert {file.name for file in store.root.iterdir() if file.is_file()} - {
        ".pulled.lock",
        ".stopped.lock",
    } == {"mine.gguf", "notes.txt"}


OWN = {
    "states": (f"{'0' * 16}-{'0' * 32}-{'0' * 32}.state", b"edgespec prompt state 1\n"),
    "packed-weights": ("0123456789abcdef-avx2-0123456789abcdef.weights", b"edgespec packed weights 2\n"),
    "quantized": ("a-q4_0-of-0123456789ab.gguf", b"GGUF"),
    "profiles": ("a+b-0123456789abcdef.json", b"{}"),
    "chats": ("0123456789abcdef.json", b"{}"),
}


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("kind", ["a file", "a file of our name", "a folder", "a pipe", "a link"])
def test_clear_deletes_what_edgespec_wrote(home, capsys, name, kind):
    (row,) = (row for row in EVERYTHING if row.name == name)
    (folder := row.path()).mkdir(parents=True)
    file_name, content = OWN[name]
    (own := folder / file_name).write_bytes(content)
    stranger = folder / ("notes" + own.suffix + ".txt" if kind == "a file" else f"other{file_name}")
    if kind == "a file of our name":
        stranger = folder / file_name.replace("0", "1")
    match kind:
        case "a folder":
            stranger.mkdir()
            (stranger / own.name).write_bytes(b"a letter")
        case "a pipe":
            os.mkfifo(stranger)
        case "a link":
            stranger.symlink_to(own)
        case _:
            stranger.write_bytes(b"a letter")
    if kind == "a file of our name" and not row.magics[0]:
        pytest.skip("such files have no beginning of their own")
    assert row.bytes() == len(content)
    delete_files(row)
    assert not own.exists()
    assert os.path.lexists(stranger) and (kind != "a folder" or (stranger / own.name).exists())


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(home):
    os.mkfifo(pipe := home / "pipe")
    with pytest.raises(OSError, match="no ordinary file"):
        StateFile(pipe, bytes).read()
    (servers := SERVERS.path()).mkdir(parents=True)
    os.mkfifo(servers / "1.json")
    assert [*running_servers(home)] == []
    assert (servers / "1.json").exists()


@pytest.mark.parametrize(
    "other", ["m.gguf.part-list.txt", "m.gguf.parts", "m.gguf.part.d/", "m.json", "m.gguf/"]
)
def test_removing_a_model_leaves_what_is_called_alike(home, other):
    store = Store.default()
    store.root.mkdir(parents=True)
    for name in ("m.gguf.part", "m.gguf.part.json", "m.gguf.part.wheels/a.whl"):
        (store.root / name).parent.mkdir(exist_ok=True)
        (store.root / name).write_bytes(b"GGUF")
    (stranger := store.root / other / "a" if other.endswith("/") else store.root / other).parent.mkdir(
        exist_ok=True
    )
    stranger.write_text("a letter")
    assert store.pulled() == ["m"]
    store.remove_pulled("m")
    assert stranger.read_text() == "a letter"
    assert {file.name for file in store.root.iterdir()} == {".m.lock", other.rstrip("/")}
    assert store.pulled() == []


def test_a_model_replaced_by_hand_is_not_deleted_as_pulled(home):
    store, entry = Store.default(), Entry("m")
    store.root.mkdir(parents=True)
    store.file(entry).write_bytes(b"GGUF")
    store.write_stamp(entry, Stamp("0" * 64, 4, "test"))
    assert store.pulled() == ["m"]
    time.sleep(0.03)  # the clock of a file system is no finer than that
    store.file(entry).write_bytes(b"mine")
    assert store.pulled() == []
