"""What the command line refuses: a row of refusals.txt each, in one folder of good and bad files."""

from __future__ import annotations

import os
import shlex
import shutil
import wave
from pathlib import Path

import pytest

from command_line import failed, run_cli, user_environment
from random_heads import write_random_head
from refusals import check_all_asked, check_message, rows
from tiny_gguf import N_WORDS, write_tiny_gguf
from tiny_whisper import write_tiny_whisper
from user_models import write_user_models

ROWS = rows(Path(__file__).with_name("refusals.txt"))
WORDS = {
    "A": ["qwen2.5-0.5b-q4_k_m"],  # of the registry, and not here: it would be pulled
    "TARGET": ["-t", "target.gguf", "--drafter", "none"],
    "PAIR": ["-t", "target.gguf", "-d", "draft.gguf"],
}
TEXTS = {
    "text.txt": "a text\n",
    "empty.txt": "",
    "blank.txt": " \n",
    "empty.jsonl": "",
    "broken.jsonl": "{\n",
    "old.jsonl": "mine\n",
    "old.gguf": "mine\n",
    "html.gguf": "<!DOCTYPE html>" * 100,
    "broken.jinja": "\n{% for m in messages %}",
    "two.key": "two words",
    "umlaut.key": "schlüssel",
    "suite.jsonl": '{"question_id": 1, "category": "code", "turns": ["abc"]}\n',
    "no-category.jsonl": '{"question_id": 1, "category": "", "turns": ["x"]}\n',
    "no-turn.jsonl": '{"question_id": 1, "category": "x", "turns": []}\n',
    "blank-turn.jsonl": '{"question_id": 1, "category": "x", "turns": [" "]}\n',
    "twice.jsonl": '{"question_id": 1, "category": "x", "turns": ["x"]}\n' * 2,
    "long.jsonl": '{"question_id": "a", "category": "b", "turns": ["%s"]}\n' % ("x" * 600),
    "text.mp3": "a text, no sound",
    "empty.wav": "",
    "mine.py": "class Again:\n def begin(self, t): pass\n def draft(self, t, room, sample): return []\n"
    " def accept(self, t, n): pass\nclass Broken(Again):\n def __init__(self): raise OSError('no table')\n",
}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, tiny_path: Path, tiny_draft_path: Path) -> Path:
    """A folder with two models and files of many faults, and a user who has names for some of them."""
    world = tmp_path_factory.mktemp("world")
    for name, text in TEXTS.items():
        (world / name).write_text(text)
    (world / "same").mkdir()
    shutil.copy(tiny_path, world / "target.gguf")
    for name in ("draft", "same/target", "same/none"):
        shutil.copy(tiny_draft_path, world / f"{name}.gguf")
    (world / "latin1.txt").write_bytes("Größe\n".encode("latin-1"))
    (world / "cut.gguf").write_bytes(tiny_path.read_bytes()[:-5000])
    write_tiny_gguf(world / "other.gguf", texts={i: f"@{i}@" for i in range(N_WORDS)})
    write_tiny_gguf(world / "raw.gguf", chat_template=None)
    write_tiny_gguf(world / "short.gguf", n_ctx=50)
    write_tiny_gguf(world / "mmproj.gguf", architecture="clip")
    write_tiny_gguf(world / "bert.gguf", architecture="bert")
    write_random_head(world / "head.gguf", tiny_path)
    write_tiny_whisper(world / "speech.gguf", n_text_ctx=40)
    for name, frames in (("talk.wav", 16000), ("mute.wav", 0)):
        with wave.open(str(world / name), "wb") as sound:
            sound.setparams((1, 2, 16000, 0, "NONE", ""))
            sound.writeframes(os.urandom(2 * frames))
    os.mkfifo(world / "pipe.gguf")
    (world / "folder").mkdir()
    (world / "taken" / "talk.txt").mkdir(parents=True)
    named = {name: world / f"{name}.gguf" for name in ("target", "draft", "head")}
    pair = '[pairs.{}]\ntarget = "target"\ndraft = "{}"\n'
    write_user_models(world / ".config", named, pair.format("both", "draft") + pair.format("of-head", "head"))
    return world


def asked_by(row: str) -> str:
    """Return the command of a row: what comes after the exit code and the option or file that is named."""
    return row.split(None, 2)[2]


def files_of(world: Path) -> list[Path]:
    """What is there, but for what Python compiled of a user's drafter."""
    return sorted(path for path in world.rglob("*") if "__pycache__" not in path.parts)


@pytest.mark.proof
@pytest.mark.parametrize("row", ROWS, ids=asked_by)
def test_a_refusal(row: str, world: Path, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """One line that names the option or the file; nothing was pulled or written by then."""
    code, field, *words = shlex.split(row)
    variables = dict(word.split("=", 1) for word in words if word.startswith("EDGESPEC_"))
    asked = [one for word in words[len(variables) :] for one in WORDS.get(word, [word])]
    stdin = b""
    if "<" in asked:
        asked, stdin = asked[:-2], (world / asked[-1]).read_bytes()
    nothing_answers = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "0"}
    before = files_of(world)
    environment = user_environment(tmp_path) | {"XDG_CONFIG_HOME": str(world / ".config")}
    process = run_cli(*asked, env=environment | nothing_answers | variables, cwd=world, stdin=stdin)
    line = failed(process, int(code), field)
    assert not (tmp_path / "models").exists(), "a pull began"
    assert files_of(world) == before
    said = line.replace(str(world), "WORLD").replace(str(tmp_path), "HOME").removeprefix("edgespec: error: ")
    check_message(f"edgespec {asked_by(row)}", said.rstrip("\n"), write=pytestconfig.option.write_messages)


def test_every_message_has_a_row(pytestconfig: pytest.Config) -> None:
    check_all_asked({f"edgespec {asked_by(row)}" for row in ROWS}, write=pytestconfig.option.write_messages)
