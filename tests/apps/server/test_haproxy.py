"""HAProxy with docs/haproxy.cfg, as it stands there, before real servers.

Three nodes on tiny models, killed and started again. Which node answered is in the header X-Node.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx
import pytest

from server_nodes import AUTHORIZATION, Node, free_port
from tiny_gguf import write_tiny_gguf

CONFIGURATION = (Path(__file__).parents[3] / "docs" / "haproxy.cfg").read_text(encoding="utf-8")
HAPROXY = shutil.which("haproxy") or shutil.which("haproxy", path="/usr/sbin")

pytestmark = pytest.mark.skipif(HAPROXY is None, reason="haproxy is not installed: apt install haproxy")


def until(holds: Callable[[], bool], seconds: float = 30.0) -> None:
    """Wait until something is so."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not become so"
        time.sleep(0.02)


class Balanced:
    """The nodes, by their names in the configuration, and the balancer's client."""

    def __init__(self, nodes: dict[str, Node], url: str) -> None:
        self.nodes = nodes
        self.client = httpx.Client(base_url=url, headers=AUTHORIZATION, timeout=60)

    def ask(self, messages: list[dict[str, Any]], n: int = 8, **fields: Any) -> tuple[str, dict[str, Any]]:
        """Which node answered, and what."""
        body = {"model": "edgespec", "messages": messages, "max_tokens": n, "temperature": 0, **fields}
        answer = self.client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        return answer.headers["x-node"], answer.json()

    @contextlib.contextmanager
    def streaming(self, messages: list[dict[str, Any]], n: int = 7000) -> Iterator[tuple[str, Iterator[str]]]:
        """An answer of which text has come: its node, and its further lines."""
        body = {"model": "edgespec", "messages": messages, "max_tokens": n, "temperature": 0, "stream": True}
        with self.client.stream("POST", "/v1/chat/completions", json=body) as answer:
            assert answer.status_code == 200
            lines = (line for line in answer.iter_lines() if line)
            for line in lines:
                if json.loads(line.removeprefix("data: "))["choices"][0]["delta"].get("content"):
                    break
            yield answer.headers["x-node"], lines


@contextlib.contextmanager
def balancing(nodes: dict[str, Node], directory: Path, **variables: str) -> Iterator[Balanced]:
    """Run HAProxy before these nodes, which it finds by the configuration's own variables."""
    assert HAPROXY is not None
    file = directory / "haproxy.cfg"
    file.write_text(CONFIGURATION, encoding="utf-8")
    listen = f"127.0.0.1:{free_port()}"
    places = {f"NODE_{name.removeprefix('node')}": node.address for name, node in nodes.items()}
    environment = {**os.environ, "LISTEN": listen, **places, **variables}
    log = directory / "haproxy.log"
    with log.open("wb") as said:
        process = subprocess.Popen([HAPROXY, "-db", "-f", file], stderr=said, stdout=said, env=environment)
    balanced = Balanced(nodes, f"http://{listen}")

    def answers() -> bool:
        assert process.poll() is None, log.read_text()
        with contextlib.suppress(httpx.ConnectError):
            return balanced.client.get("/health").status_code == 200
        return False

    try:
        until(answers)
        yield balanced
    finally:
        process.kill()
        process.wait(30)


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Node]]:
    directory = tmp_path_factory.mktemp("nodes")
    # Its longest answers take seconds: time to kill a node.
    model = write_tiny_gguf(directory / "model.gguf", n_layer=4, n_embd=256, n_ctx=8192)
    nodes = {f"node{i}": Node(model, directory) for i in (1, 2, 3)}
    for node in nodes.values():
        node.start()
    for node in nodes.values():
        node.wait()
    yield nodes
    for node in nodes.values():
        node.kill()


@pytest.fixture(scope="module")
def balanced(nodes: dict[str, Node], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Balanced]:
    with balancing(nodes, tmp_path_factory.mktemp("haproxy")) as balanced:
        yield balanced


def says(content: Any, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": content}


def began(name: str, system: str | None = None) -> list[dict[str, Any]]:
    """A conversation that no other one begins like."""
    return [*([says(system, "system")] if system else []), says(f"{name}: " + "the cat and the hat " * 3)]


def test_the_file_is_valid_as_printed(tmp_path: Path) -> None:
    assert HAPROXY is not None
    file = tmp_path / "haproxy.cfg"
    file.write_text(CONFIGURATION, encoding="utf-8")
    checked = subprocess.run([HAPROXY, "-c", "-f", file], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr
    assert "WARNING" not in checked.stderr


def test_conversations_stay_on_their_nodes_and_are_spread(balanced: Balanced) -> None:
    talks = {
        "plain": began("plain"),
        "plain too": began("plain too"),
        "system": began("with a system", "Be kind."),
        "same system": began("another", "Be kind."),
        "developer": [says("Be brief.", "developer"), says("developer's")],
        "parts": [says([{"type": "text", "text": "in parts " * 9}])],
    }
    places: dict[str, str] = {}
    n_prompt: dict[str, int] = {}
    for turn in range(3):
        for name, messages in talks.items():
            node, answer = balanced.ask(messages)
            usage = answer["usage"]
            if turn:
                assert node == places[name]
                # Only what the first turns all share could be known elsewhere.
                assert usage["edgespec"]["cached_tokens"] >= n_prompt[name]
            places[name], n_prompt[name] = node, usage["prompt_tokens"]
            messages += [says(answer["choices"][0]["message"]["content"], "assistant"), says(f"go on {turn}")]
    for name, messages in talks.items():  # one after the other: another node has less to do each time
        assert {balanced.ask(messages)[0] for _ in range(3)} == {places[name]}
    assert set(places.values()) == set(balanced.nodes)
    assert places["system"] != places["same system"]


def test_a_prompt_cache_key_names_a_conversation(balanced: Balanced) -> None:
    for place in range(4):
        nodes = {balanced.ask(began(f"{place} {i}"), prompt_cache_key=f"key {place}")[0] for i in range(4)}
        assert len(nodes) == 1
    bodies = [{"model": "edgespec", "prompt": "a" * i, "prompt_cache_key": "text"} for i in (5, 50, 80)]
    assert len({balanced.client.post("/v1/completions", json=body).headers["x-node"] for body in bodies}) == 1
    # The beginning alone would keep these together.
    same = {balanced.ask(began("same"), prompt_cache_key=f"other {i}")[0] for i in range(6)}
    assert len(same) > 1


def test_a_conversation_of_more_than_the_balancer_looks_at(balanced: Balanced) -> None:
    messages = began("long")
    first, _ = balanced.ask(messages)
    ignored = {"metadata": {"note": "x" * 300_000}}  # not read by the server, and behind the messages
    assert {balanced.ask(messages, **ignored)[0] for _ in range(3)} == {first}


def test_streams_come_while_they_are_written(balanced: Balanced) -> None:
    messages = began("streamed")
    with balanced.streaming(messages, 1500) as (node, lines):
        assert balanced.nodes[node].health()["busy"]
        *_, done = lines
    assert done == "data: [DONE]"


def test_a_client_that_goes_away_ends_its_generation(balanced: Balanced) -> None:
    name = 'edgespec_generations_total{outcome="cancelled"}'
    messages = began("away")
    node = balanced.nodes[balanced.ask(messages)[0]]
    before = node.metric(name)
    with balanced.streaming(messages):
        pass
    until(lambda: node.metric(name) == before + 1)
    body = {"model": "edgespec", "messages": messages, "temperature": 0, "max_tokens": 7000}
    headers = {"Content-Type": "application/json", **AUTHORIZATION}
    leaving = HTTPConnection(balanced.client.base_url.netloc.decode())  # its answer is not streamed
    leaving.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    until(lambda: node.health()["busy"])
    leaving.close()
    until(lambda: node.metric(name) == before + 2)


def test_the_key_is_checked_by_the_nodes_and_health_needs_none(balanced: Balanced) -> None:
    url = balanced.client.base_url
    assert httpx.get(f"{url}/health").status_code == 200
    assert httpx.get(f"{url}/v1/models").status_code == 401
    assert httpx.get(f"{url}/v1/models", headers={"Authorization": "Bearer wrong"}).status_code == 401
    assert balanced.client.get("/v1/models", headers={"Host": "llm.example"}).status_code == 200
    assert balanced.client.get("/metrics").status_code == 404
    assert "<html" in httpx.get(f"{url}/").text


def test_a_killed_node_breaks_its_stream_and_nothing_else(balanced: Balanced) -> None:
    talks = {name: began(name) for name in ("a", "b", "c", "d", "e", "f")}
    places = {name: balanced.ask(messages)[0] for name, messages in talks.items()}
    died = places["a"]
    with balanced.streaming(talks["a"]) as (node, lines):
        assert node == died
        balanced.nodes[died].kill()
        with pytest.raises(httpx.RemoteProtocolError):
            assert "data: [DONE]" not in list(lines)

    # At once, before a health check could have seen it.
    moved, answer = balanced.ask(talks["a"])
    assert moved != died
    for name, place in places.items():
        if place != died:
            assert balanced.ask(talks[name])[0] == place
    longer = [*talks["a"], says(answer["choices"][0]["message"]["content"], "assistant"), says("go on")]
    node, second = balanced.ask(longer)
    assert node == moved
    assert second["usage"]["edgespec"]["cached_tokens"] >= answer["usage"]["prompt_tokens"]

    balanced.nodes[died].start()
    balanced.nodes[died].wait()
    new = iter(range(1000))
    until(lambda: balanced.ask(began(f"new {next(new)}"))[0] == died)
    assert balanced.ask(longer)[0] == moved


def test_an_answer_of_which_nothing_was_sent_is_asked_elsewhere(balanced: Balanced) -> None:
    messages = began("nothing sent")
    died, _ = balanced.ask(messages)
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(balanced.ask, messages, 2000)
        until(lambda: balanced.nodes[died].health()["busy"])
        balanced.nodes[died].kill()
        node, answer = asked.result()
    assert node != died
    assert answer["usage"]["completion_tokens"] == 2000
    balanced.nodes[died].start()
    balanced.nodes[died].wait()


def test_a_node_that_ends_finishes_its_answer_and_gets_no_other(balanced: Balanced) -> None:
    messages = began("ending")
    with balanced.streaming(messages, 400) as (ends, lines):  # well under the 20 s that the node grants it
        node = balanced.nodes[ends]
        node.process.send_signal(signal.SIGTERM)
        until(lambda: node.get("/health").status_code == 503)
        assert balanced.ask(messages)[0] != ends  # the node's own answer to it is 503
        *_, done = lines
    assert done == "data: [DONE]"
    assert node.process.wait(60) == 0
    node.start()
    node.wait()


def test_no_node_is_overfilled(nodes: dict[str, Node], tmp_path: Path) -> None:
    with balancing(nodes, tmp_path, AT_ONCE="1", IN_LINE="1") as balanced:
        messages = began("busy")
        asked: list[Future[tuple[str, dict[str, Any]]]] = []
        with ThreadPoolExecutor() as pool, balanced.streaming(messages) as (busy, _):

            def helped() -> bool:
                """One more asks, until one did not have to wait in line."""
                asked.append(pool.submit(balanced.ask, messages))
                return bool(wait(asked, timeout=1, return_when=FIRST_COMPLETED).done)

            until(helped)
            health = nodes[busy].health()
            assert (health["running"], health["waiting"]) == (1, 0)
            assert next(one for one in asked if one.done()).result()[0] != busy
        assert asked[0].result()[0] == busy


def test_without_any_node_it_says_so(nodes: dict[str, Node], tmp_path: Path) -> None:
    gone = {name: Node(Path("none.gguf"), tmp_path) for name in nodes}
    with balancing(gone, tmp_path) as balanced:
        until(lambda: balanced.client.get("/health").status_code == 503)
        assert balanced.client.get("/v1/models").status_code == 503
