"""`edgespec run` beside a running `edgespec serve`: real processes, a tiny model."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

import httpx
import pytest

from command_line import COMMAND, run_cli, started, user_environment
from tiny_gguf import write_tiny_gguf

LOADED = ("--drafter", "suffix", "--threads", "1", "--kernels", "off")


@pytest.fixture(scope="module")
def slow_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose longest answer takes some seconds."""
    return write_tiny_gguf(tmp_path_factory.mktemp("slow") / "slow.gguf", n_layer=4, n_embd=256, n_ctx=8192)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return user_environment(tmp_path_factory.mktemp("served"))


class Server:
    """A server's process, which is ready."""

    def __init__(self, path: Path, environment: dict[str, str], *options: str) -> None:
        command = [
            *COMMAND,
            "serve",
            "--target",
            str(path),
            *LOADED,
            "--port",
            "0",
            "--json",
            "--quiet",
            *options,
        ]
        self.process = Popen(command, stdout=PIPE, stderr=PIPE, env=environment)
        assert self.process.stdout
        self.address = json.loads(self.process.stdout.readline())["address"]

    def running(self) -> int:
        return int(httpx.get(f"{self.address}/health").json()["running"])


@pytest.fixture(scope="module")
def server(slow_path: Path, environment: dict[str, str]) -> Iterator[Server]:
    key = {"EDGESPEC_API_KEY": "unknown-to-run"}
    one = Server(slow_path, environment | key)
    yield one
    one.process.send_signal(signal.SIGINT)
    _, said = one.process.communicate(timeout=60)
    assert (one.process.returncode, said) == (0, b"")
    assert not list(announced(environment).iterdir())


def announced(environment: dict[str, str]) -> Path:
    return Path(environment["XDG_CACHE_HOME"]) / "edgespec" / "servers"


def run(path: Path, environment: dict[str, str], *options: object, loaded: tuple[str, ...] = LOADED) -> Any:
    return run_cli("run", "--target", path, *loaded, "-n", 24, *options, "abc def", env=environment)


@pytest.mark.parametrize(
    "options",
    [
        ("--temp", 0),
        ("--seed", 3, "--temp", 1.5, "--top-k", 0, "--repeat-penalty", 1.3, "--logit-bias", "5=-inf"),
        ("--seed", 7, "--raw", "--stop", "a"),
        ("--seed", 7, "--regex", "[0-9]{5}"),
        ("--seed", 7, "--json-schema", '{"enum": ["one", "two"]}'),
        ("--seed", 7, "--grammar", "GRAMMAR"),
        ("--seed", 7, "--gamma", 2, "--rule", "match"),
        ("--seed", 7, "-n", -1, "--stop", "b"),
    ],
)
def test_the_text_is_that_of_an_engine_here(
    server: Server, slow_path: Path, environment: dict[str, str], tmp_path: Path, options: tuple[object, ...]
) -> None:
    (tmp_path / "GRAMMAR").write_text('root ::= "x"+ "y"')
    given = [tmp_path / one if one == "GRAMMAR" else one for one in options]
    served = run(slow_path, environment, "--json", *given)
    here = run(slow_path, environment, "--json", "--here", *given)
    assert (served.returncode, here.returncode) == (0, 0), served.stderr
    assert server.address in served.stderr and "--here" in served.stderr
    assert server.address not in here.stderr
    found, expected = json.loads(served.stdout), json.loads(here.stdout)
    assert set(found) == set(expected)
    for name in ("text", "token_ids", "prompt_tokens", "stop_reason", "exact", "target", "energy"):
        assert found[name] == expected[name], name
    assert "--seed" not in options or found["seed"] == expected["seed"]


def test_text_and_statistics_look_as_ever(
    server: Server, slow_path: Path, environment: dict[str, str]
) -> None:
    served = run(slow_path, environment, "--seed", 7, "--stats", "full")
    here = run(slow_path, environment, "--seed", 7, "--stats", "full", "--here")
    assert served.stdout == here.stdout
    first, *lines = served.stderr.splitlines()
    assert f"answered by the server at {server.address}" in first
    for label in ("prompt", "text", "time", "memory", "models", "kernels", "ended"):
        assert sum(line.startswith(f"{label} ") for line in lines) == 1, label
        assert sum(line.startswith(f"{label} ") for line in here.stderr.splitlines()) == 1, label


def test_a_server_that_learns_is_not_asked_where_nothing_may_be_kept(slow_path: Path, tmp_path: Path) -> None:
    environment = user_environment(tmp_path)
    server = Server(slow_path, environment, "--learn")
    try:
        kept, unkept = (run(slow_path, environment, *options) for options in ((), ("--no-cache",)))
    finally:
        server.process.kill()
        server.process.communicate(timeout=60)
    assert server.address in kept.stderr
    assert (unkept.returncode, server.address in unkept.stderr) == (0, False)


def test_the_history_has_what_a_server_wrote(
    server: Server, slow_path: Path, environment: dict[str, str]
) -> None:
    assert run_cli("cache", "clear", "--yes", env=environment).returncode == 0
    for options in (("--no-cache",), ()):
        assert run(slow_path, environment, "--seed", 7, *options).returncode == 0
        info = json.loads(run_cli("cache", "info", "--json", env=environment).stdout)
        assert sum(one["documents"] for one in info["histories"]) == (0 if options else 1)


def test_the_way_to_a_server_loads_neither_a_model_nor_what_loads_one(
    server: Server, slow_path: Path, environment: dict[str, str]
) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "edgespec", "run", "--target", str(slow_path)]
    done = subprocess.run(
        [*command, *LOADED, "-n", "2", "--no-cache", "abc"],
        check=False,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and server.address in done.stderr
    imported = set(re.findall(r"^import time:.*\| +(\S+)$", done.stderr, re.MULTILINE))
    assert "edgespec.cli.served" in imported
    assert not imported & {"numpy", "llama_cpp.llama_cpp", "llguidance", "jinja2", "edgespec.engine.engine"}


@pytest.mark.parametrize(
    "options",
    [
        ("--ctx", 128),
        ("--explain", "steps"),
        ("--assume-watts", 5),
        ("--chat-template", "chatml"),
        ("--lenience", 0.9, "--drafter", "suffix"),
        ("--cache-type", "q8_0"),
        ("--threads", 2),
    ],
)
def test_what_a_server_cannot_do_is_done_here(
    server: Server, slow_path: Path, environment: dict[str, str], options: tuple[object, ...]
) -> None:
    done = run(slow_path, environment, "--seed", 7, *options)
    assert done.returncode == 0, done.stderr
    assert server.address not in done.stderr


def test_another_file_and_other_users_files_are_not_asked(
    server: Server, slow_path: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    copy = shutil.copy(slow_path, tmp_path / "copy.gguf")
    assert server.address not in run(Path(copy), environment, "--seed", 7).stderr
    (file,) = announced(environment).iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    file.chmod(0o644)
    try:
        assert server.address not in run(slow_path, environment, "--seed", 7).stderr
    finally:
        file.chmod(0o600)
    assert server.address in run(slow_path, environment, "--seed", 7).stderr


def test_the_route_is_for_who_can_read_the_file(server: Server) -> None:
    for headers in ({}, {"Authorization": "Bearer unknown-to-run"}):
        answer = httpx.post(f"{server.address}/edgespec/run", json={"prompt": "abc"}, headers=headers)
        assert answer.status_code == 401


def test_a_prompt_that_is_too_long_for_the_server_says_what_it_says_here(
    server: Server, slow_path: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "long.txt").write_text("abc " * 9000)
    done = run_cli("run", "--target", slow_path, *LOADED, "--file", tmp_path / "long.txt", env=environment)
    assert done.returncode == 1
    first, last = done.stderr.splitlines()
    assert server.address in first and "here" in first
    assert last.startswith("edgespec: error: the prompt has ")


def test_ctrl_c_ends_the_text_on_the_server(
    server: Server, slow_path: Path, environment: dict[str, str]
) -> None:
    command = ("run", "--target", slow_path, *LOADED, "-n", 8000, "--temp", 0, "abc")
    with started(*command, env=environment) as process:
        assert process.stdout and process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"interrupted" in said and b"Traceback" not in said
    give_up = time.monotonic() + 60
    while server.running() and time.monotonic() < give_up:
        time.sleep(0.05)
    assert server.running() == 0


def test_a_server_that_dies(slow_path: Path, environment: dict[str, str], tmp_path: Path) -> None:
    own = environment | {"XDG_CACHE_HOME": str(tmp_path)}
    server = Server(slow_path, own)
    command = ("run", "--target", slow_path, *LOADED, "-n", 8000, "--temp", 0, "abc")
    with started(*command, env=own) as process:
        assert process.stdout and process.stdout.read(1)
        server.process.kill()
        server.process.communicate(timeout=60)
        text, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert text.endswith(b"\n")
    assert said.decode().splitlines()[-1].startswith(f"edgespec: error: {server.address}: the server ended")
    assert len(list(announced(own).iterdir())) == 1  # it could not take its file away
    done = run(slow_path, own, "--seed", 7)
    assert done.returncode == 0 and server.address not in done.stderr
    assert not list(announced(own).iterdir())
