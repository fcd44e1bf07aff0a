"""`edgespec profile` as a user types it: in a process of its own, with tiny models."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import pytest

from command_line import COMMAND, run_cli
from edgespec.cli.profile import _store
from edgespec.drafting.measure import Measured
from edgespec.drafting.profile import N_MAX, CostCurve, ProfileKey
from user_models import write_user_models


@pytest.fixture
def profile(environment):
    def profile(*arguments, **more):
        return run_cli("profile", *arguments, env={**environment, **more})

    return profile


def stored(cache: Path) -> list[Path]:
    return sorted(cache.glob("edgespec/profiles/*.json"))


def progress_lines(text: str) -> list[str]:
    """What is on stderr beside the lines of a machine that is busy with other tests."""
    return [line for line in text.splitlines() if not line.startswith("edgespec: the machine was busy")]


def test_a_pair(profile, tiny_path, tiny_draft_path, cache):
    process = profile("--target", tiny_path, "--draft", tiny_draft_path, "--threads", 1)
    assert process.returncode == 0, process.stderr
    assert progress_lines(process.stderr) == ["reading 128 tokens", "reading 479 tokens", "timing passes"]
    (file,) = stored(cache)
    lines = process.stdout.splitlines()
    assert lines[0] == "target, drafted by draft"
    assert lines[1].startswith("stock, 1 threads")
    assert lines[-1] == str(file)
    assert [line.split()[0] for line in lines if line.strip()[:1].isdigit() and "repeats" not in line] == [
        *map(str, (1, 2, 3, 4, 6, 8, 12, 16, 24, 32))
    ]
    for word in ("target 128", "target 2048", "draft 2048", "tokens/s", "repeats"):
        assert word in process.stdout
    assert "\x1b[" not in process.stdout + process.stderr, "piped output is plain"
    assert file.name.startswith("target+draft-")
    document = json.loads(file.read_text())
    assert (document["format"], document["version"]) == ("edgespec profile", 1)
    assert document["key"]["kernels"] == "stock"
    assert document["measured"]
    assert document["draft"]["passes"]


def test_json_and_a_second_time(profile, tiny_path, cache):
    first = profile("-t", tiny_path, "--threads", 1, "--json")
    assert first.returncode == 0, first.stderr
    (file,) = stored(cache)
    assert first.stdout == file.read_text()
    document = json.loads(first.stdout)
    assert (document["draft"], document["key"]["draft"]) == (None, None)

    document |= {"acceptance": {"learnt": [1, 2]}, "runs": 7, "answer_tokens": 55.0}  # as files had it before
    file.write_text(json.dumps(document))
    second = json.loads(profile("-t", tiny_path, "--threads", 1, "--json").stdout)
    assert (second["acceptance"], second["runs"]) == ({"learnt": [1, 2]}, 7)
    assert stored(cache) == [file]
    assert "draft" not in profile("-t", tiny_path, "--threads", 1).stdout


def test_a_pair_by_name(profile, tiny_path, tiny_draft_path, tmp_path, cache):
    pair = '[pairs.mine]\ntarget = "big"\ndraft = "small"\n'
    write_user_models(tmp_path / "config", {"big": tiny_path, "small": tiny_draft_path}, pair)
    for choice in (("--pair", "mine"), ("--target", "big")):
        process = profile(*choice, "--threads", 1, "--kernels", "off", "--json")
        assert process.returncode == 0, process.stderr
        assert json.loads(process.stdout)["key"]["draft_name"] == "draft"
    assert len(stored(cache)) == 1


@pytest.mark.parametrize(
    ("was_reliable", "is_reliable", "force", "replaced"),
    [
        (True, False, False, False),
        (True, False, True, True),
        (True, True, False, True),
        (False, False, False, True),
    ],
)
def test_what_is_not_reliable_does_not_replace_what_is(
    tmp_path, monkeypatch, capsys, was_reliable, is_reliable, force, replaced
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    key = ProfileKey("cpu", "1", "stock", 1, "a" * 64, None, "target", None)

    def costs(seconds, *, reliable):
        curve = CostCurve(((seconds,) * N_MAX,) * 2, seconds)
        warnings = () if reliable else ("the machine was busy",)
        return Measured(curve, None, None, None, 0.0, warnings, 1, 3)

    for seconds, reliable in ((1.0, was_reliable), (2.0, is_reliable)):
        _store(key, costs(seconds, reliable=reliable), json=False, force=force)
    (file,) = stored(tmp_path)
    assert json.loads(file.read_text())["target"]["read"] == (2.0 if replaced else 1.0)
    assert ("--force" in capsys.readouterr().err) != replaced


def test_what_cannot_be_kept_is_printed_all_the_same(profile, tiny_path, tmp_path):
    (tmp_path / "file").write_text("")
    process = profile("-t", tiny_path, "--threads", 1, "--json", XDG_CACHE_HOME=str(tmp_path / "file"))
    assert process.returncode == 1
    assert json.loads(process.stdout)["target"]
    assert "could not be kept" in process.stderr.splitlines()[-1]


def test_interrupted(environment, tiny_path, cache):
    process = subprocess.Popen(
        [*COMMAND, "profile", "--target", str(tiny_path), "--threads", "1"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr
    while process.stderr.readline().strip() != "timing passes":
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stdout) == (130, "")
    assert stderr.splitlines()[-1] == "edgespec: error: interrupted"
    assert list(cache.rglob("*profiles/*")) == []
