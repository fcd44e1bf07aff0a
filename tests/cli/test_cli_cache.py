"""`edgespec cache`, called as a user does, with the vocabulary of a tiny model."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
from functools import partial

import numpy as np
import pytest

from edgespec.apps.forge.dataset import BUILT_IN, FROM_HISTORY, READ, Dataset, DatasetTarget, TrainingText
from edgespec.apps.forge.draft_store import DraftStore
from edgespec.cli import cache as commands
from edgespec.cli.app import main
from edgespec.drafting.history import MAX_TOKENS, History
from edgespec.drafting.rejections import RejectedPlaces, RejectedText
from edgespec.llama.gguf_header import read_header, tokenizer_fingerprint
from edgespec.llama.weights import Model
from edgespec.models.store import hash_file
from edgespec.platform.files import cache_root
from edgespec.platform.kept import CONVERSATIONS, FORGE, HISTORY
from kept_drafts import keep_draft


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("EDGESPEC_MODELS_DIR", raising=False)


@pytest.fixture
def history(tiny_path):
    return History(tokenizer_fingerprint(read_header(tiny_path)))


@pytest.fixture
def edgespec(capsys):
    """Run the command line; returns stdout and stderr of one that ends with `code`."""

    def run(*arguments, code=0):
        assert main(["cache", *map(str, arguments)]) == code
        captured = capsys.readouterr()
        assert "\x1b" not in captured.out + captured.err
        return captured.out, captured.err

    return run


@pytest.fixture
def tree(tmp_path):
    """A small codebase, and what is not to be imported of it."""
    root = tmp_path / "project"
    for name, content in {
        "a.py": b"print('hello')\n",
        "sub/b.txt": "Größe\n".encode(),
        "sub/deeper/c.md": b"# the end\n",
        "copy.py": b"print('hello')\n",
        "empty.py": b" \n",
        "program": b"\x7fELF\0\0",
        "latin1.txt": b"Gr\xf6\xdfe",
        "large.json": b"x" * 1_000_001,
        ".env": b"SECRET=1",
        ".git/config": b"text",
        "sub/.hidden/d.py": b"text",
    }.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    os.mkfifo(root / "pipe")  # opening it would wait for ever
    (root / "loop").symlink_to(root)
    (root / "dangling").symlink_to("nowhere")
    return root


def texts(history, path):
    """The stored documents as text."""
    with Model(path, kernels=False) as model:
        pieces = [b"\0" if t == -1 else model.piece(t, special=True) for t in history.load().tolist()]
    return b"".join(pieces).decode().split("\0")[:-1]


def test_info_of_nothing(edgespec):
    assert edgespec("info") == (f"nothing is kept in {cache_root()}\n", "")
    found = json.loads(edgespec("info", "--json")[0])
    assert {(row["files"], row["bytes"]) for row in found.pop("kept")} == {(0, 0)}
    assert found == {"directory": str(HISTORY.path()), "max_tokens": MAX_TOKENS, "histories": [], "forge": []}
    assert not HISTORY.path().exists()


def test_info(edgespec, history):
    history.extend([[1, 2, 3], [4] * 1000])
    text, _ = edgespec("info")
    assert "2          1,003" in text
    assert str(history.path.parent) in text
    assert "token ids, which whoever can read these files can turn into text" in text
    assert "--no-cache" in text
    (described,) = json.loads(edgespec("info", "--json")[0])["histories"]
    fingerprint = history.fingerprint
    assert described == {"tokenizer": "gpt-2", "fingerprint": fingerprint, "documents": 2, "tokens": 1003}


def test_info_names_what_is_wrong_and_changes_nothing(edgespec, history):
    history.append([1])
    history.path.write_bytes(b"damaged" * 100)
    text, said = edgespec("info")
    assert "history" in text
    assert f"{history.path}: file is not a database; not used" in said.replace("\n", " ")
    assert history.path.read_bytes() == b"damaged" * 100


def test_clear(edgespec, history):
    history.append([1])
    history.path.write_bytes(b"damaged" * 100)
    history.append([2])
    _, line = edgespec("clear", code=2)
    assert line.count("\n") == 1
    assert "history (" in line
    assert "give --yes" in line
    assert history.path.exists()
    text, _ = edgespec("clear", "--yes")
    assert text.startswith(f"{history.path.parent}: deleted, ")
    assert [path.name for path in HISTORY.path().iterdir()] == [".lock"]
    assert edgespec("clear") == (
        "nothing is kept of history, rejected, chat-lines, forge, chats, states\n",
        "",
    )


def test_where_drafts_failed_is_shown_and_deleted(edgespec):
    places = RejectedPlaces("ab" * 32)
    likeliest = np.zeros((1, 16), np.int32)
    text = RejectedText(
        np.arange(9, dtype=np.int32), 3, np.array([5], np.int32), likeliest, np.ones((1, 16), np.float32)
    )
    places.append(text)
    shown, _ = edgespec("info")
    assert re.search(r"^rejected .*, yours: where drafts were rejected", shown, re.MULTILINE)
    assert edgespec("clear", "rejected", "--yes")[0].startswith(f"{places.path.parent}: deleted, ")
    assert places.texts() == []
    places.append(text)
    assert "rejected (" in edgespec("clear", code=2)[1]
    edgespec("clear", "--yes")
    assert places.texts() == []


# ---- what drafts are made from ----


@pytest.fixture
def forge(tiny_path):
    """What was kept of a target: a text of its own prompts and two of the user's, and a checkpoint."""
    target = DatasetTarget(hash_file(tiny_path), "my-target", n_embd=4)
    dataset = Dataset(target)
    with dataset.writer(1 << 20) as writer:
        for key, source in enumerate((BUILT_IN, FROM_HISTORY, READ)):
            tokens, features = np.full(9, key, np.int32), np.zeros((8, 4), np.float16)
            assert writer.append(TrainingText(tokens, 4, 0, features, 0.0, source, key))
    (dataset.folder / "training").mkdir()
    (dataset.folder / "training" / "00001.checkpoint").write_bytes(b"x" * 3000)
    return dataset


def test_info_of_what_drafts_are_made_from(edgespec, forge):
    text, _ = edgespec("info")
    assert text.startswith("forge   ")
    assert "\n\ndrafts for" in text
    row = next(line.split() for line in text.splitlines() if line.startswith("my-target"))
    assert row[:3] == ["my-target", "3", "2"]
    assert row[-1] == str(forge.folder)
    assert "which whoever can read these files can turn into text" in text
    (described,) = json.loads(edgespec("info", "--json")[0])["forge"]
    assert described["own_texts"] == 2
    assert described["data_bytes"] == forge.n_bytes()
    assert described["checkpoint_bytes"] >= 3000
    assert described["target_sha256"] == forge.target.sha256


def test_clear_takes_own_texts_from_what_drafts_are_made_from(edgespec, history, forge, tmp_path, tiny_path):
    history.append([1])
    keep_draft(tmp_path / "models", "mine", tiny_path)
    keep_draft(tmp_path / "models", "of-built-in", tiny_path, data={"prompt:built-in": 5})
    _, line = edgespec("clear", code=2)
    assert f" in {HISTORY.path()} and 2 texts in {FORGE.path()} without a terminal" in line
    assert len(list(forge.texts())) == 3
    text, _ = edgespec("clear", "--yes")
    assert not history.path.exists()
    assert text.splitlines()[1:] == [
        f"{forge.folder}: deleted, 2 of 3 texts: those of yours",
        f"{forge.folder}: its checkpoints may still know of these texts; `edgespec cache clear forge` "
        "deletes them",
        "mine: kept, a draft trained on your texts, of which it may still know; `edgespec draft remove mine "
        "--data` deletes it, and what is left of its training",
    ]
    assert [text.source for text in forge.texts()] == [BUILT_IN]
    nothing, mine = edgespec("clear")[0].splitlines()
    assert nothing == "nothing is kept of history, rejected, chat-lines, forge, chats, states"
    assert mine.startswith("mine: kept, ")


def test_clear_all_that_drafts_are_made_from(edgespec, forge):
    _, line = edgespec("clear", "--forge", code=2)
    assert f"to delete 3 texts and the checkpoints in {FORGE.path()} without a terminal" in line
    text, _ = edgespec("clear", "--forge", "--yes")
    assert text.startswith(f"{forge.folder}: deleted, 3 texts and checkpoints, ")
    assert not forge.folder.exists()


def test_clear_beside_a_process_that_makes_a_draft(edgespec, history, forge):
    history.append([1])
    chat = CONVERSATIONS.path() / "one.json"
    chat.parent.mkdir(parents=True)
    chat.write_text("{}")
    with DraftStore("my-target", forge.target.sha256).locked_folder():
        text, lines = edgespec("clear", "--yes", code=1)
    first, *others = text.splitlines()
    assert first.startswith(f"{history.path.parent}: deleted, ")
    assert [chat.exists(), len(others)] == [False, 1], "what comes after it is deleted all the same"
    left, problem = lines.splitlines()
    assert left.startswith("edgespec: still here: forge (")
    assert "another process makes drafts for my-target" in problem
    assert len(list(forge.texts())) == 3


@pytest.mark.parametrize(("answer", "deleted"), [(b"y\n", True), (b"n\n", False), (b"\n", False)])
def test_clear_asks_in_a_terminal(history, child_environment, answer, deleted):
    history.append([1])
    terminal, inside = pty.openpty()
    os.write(terminal, answer)
    command = [sys.executable, "-m", "edgespec", "cache", "clear"]
    ended = subprocess.run(
        command, stdin=inside, capture_output=True, check=False, env=child_environment, timeout=60
    )
    os.close(terminal)
    os.close(inside)
    assert ended.returncode == 0, ended.stderr
    assert f" in {HISTORY.path()}?".encode() in ended.stderr
    assert history.path.exists() != deleted
    assert (b"nothing was deleted" in ended.stderr) != deleted


def test_import(edgespec, history, tree, tiny_path):
    text, said = edgespec("import", tree, "--target", tiny_path)
    assert text.startswith("imported 3 of 10 files, ")
    assert text.endswith(f" tokens: {history.path}\n")
    assert said == (
        "skipped: 1 empty, 3 hidden, 1 not regular files, 2 not text, 1 over 1 MB, 1 unreadable, "
        "1 stored already\n"
    )
    assert texts(history, tiny_path) == ["print('hello')\n", "Größe\n", "# the end\n"]
    text, said = edgespec("import", tree, "--target", tiny_path)
    assert text.startswith("imported 0 of 10 files, 0 tokens")
    assert "4 stored already" in said
    assert len(history.texts()) == 3


def test_a_hidden_file_may_be_named(edgespec, history, tree, tiny_path):
    edgespec("import", tree / ".env", tree / "a.py", tree / "sub/.hidden", "--target", tiny_path)
    assert texts(history, tiny_path) == ["SECRET=1", "print('hello')\n", "text"]


def test_control_tokens_in_a_text_are_text(edgespec, history, tmp_path, tiny_path, tiny_target):
    (tmp_path / "chat.txt").write_text("<|im_start|>user\n<|im_end|>")
    edgespec("import", tmp_path / "chat.txt", "--target", tiny_path)
    tokens = history.load().tolist()
    assert not any(tiny_target.is_control(token) for token in tokens[:-1])
    assert texts(history, tiny_path) == ["<|im_start|>user\n<|im_end|>"]
    with Model(tiny_path, kernels=False) as model:
        plain = model.tokenize("<|im_start|>user\n<|im_end|>", add_special=False, parse_special=False)
    assert tokens == [*plain, -1]


def test_more_than_the_bound(edgespec, history, tmp_path, tiny_path, monkeypatch):
    monkeypatch.setattr(commands, "_BATCH", 100)
    bounded = partial(History, max_tokens=200)
    monkeypatch.setattr("edgespec.drafting.history.History", bounded)
    for i in range(20):
        (tmp_path / f"{i:02}.txt").write_text(f"{i:02} " * 10)
    files = [tmp_path / f"{i:02}.txt" for i in range(20)]
    text, said = edgespec("import", *files, "--target", tiny_path)
    assert text.startswith("imported 20 of 20 files")
    assert "the history keeps 200 tokens: of these files, the last ones" in said
    kept = texts(history, tiny_path)
    assert kept == [file.read_text() for file in files[-len(kept) :]]


@pytest.mark.parametrize("batch", [1, 10_000])
def test_ctrl_c_keeps_what_was_read(edgespec, history, tmp_path, tiny_path, monkeypatch, batch):
    monkeypatch.setattr(commands, "_BATCH", batch)
    for i in range(5):
        (tmp_path / f"{i}.txt").write_text(f"text {i}")
    real = commands._read

    def read(file, skipped):
        if file.name == "3.txt":
            signal.raise_signal(signal.SIGINT)
        return real(file, skipped)

    monkeypatch.setattr(commands, "_read", read)
    files = [tmp_path / f"{i}.txt" for i in range(5)]
    text, said = edgespec("import", *files, "--target", tiny_path, code=130)
    assert text.startswith("imported 3 of 5 files")
    assert said == "edgespec: error: interrupted\n"
    assert texts(history, tiny_path) == ["text 0", "text 1", "text 2"]


def test_links_that_lead_out_of_the_directory_are_not_followed(edgespec, history, tmp_path, tiny_path):
    inside, outside = tmp_path / "project", tmp_path / "secret"
    for folder in (inside, outside):
        folder.mkdir()
        (folder / "notes.txt").write_text(f"notes of {folder.name}")
    (inside / "again.txt").symlink_to("notes.txt")
    (inside / "file.txt").symlink_to(outside / "notes.txt")
    (inside / "folder").symlink_to(outside)
    text, said = edgespec("import", inside, "--target", tiny_path)
    assert text.startswith("imported 1 of 2 files, ")
    assert said == "skipped: 2 links that lead out, 1 stored already\n"


def test_import_into_a_history_that_cannot_be_written(edgespec, history, tree, tiny_path):
    history.path.parent.parent.mkdir(parents=True)
    history.path.parent.write_text("a file in the place of the directory")
    text, said = edgespec("import", tree, "-t", tiny_path, code=1)
    assert text.startswith("imported 0 of 10 files, 0 tokens")
    assert said.splitlines()[-1].startswith("edgespec: error: the history cannot be written")


def test_import_after_damage(edgespec, history, tree, tiny_path):
    history.append([1])
    history.path.write_bytes(b"damaged" * 100)
    _, said = edgespec("import", tree, "-t", tiny_path)
    assert said.startswith(f"edgespec: {history.path}: file is not a database; set aside as ")
    assert len(history.texts()) == 3
