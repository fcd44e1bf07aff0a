"""`edgespec batch --ray` on a real Ray cluster: nodes on this machine, tiny models, killed processes."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from edgespec.apps.batch.lines import BatchAnswer, BatchRequest
from edgespec.cli import main
from edgespec.errors import EdgespecError
from tiny_gguf import write_tiny_gguf

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="ray is not installed: pip install 'edgespec[ray]'"
)
N_LINES, N_TOKENS = 48, 300


def until(holds: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait until something is so."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not become so"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of which an answer takes a noticeable part of a second."""
    path = tmp_path_factory.mktemp("ray") / "model.gguf"
    return write_tiny_gguf(path, n_layer=4, n_embd=256, n_ctx=2048)


class Nodes:
    """A cluster whose head takes no work, as it has no processor for it."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self._cluster = Cluster()
        self.add(num_cpus=0)
        self.address = self._cluster.address

    def add(self, num_cpus: int = 1, **variables: str) -> Any:
        """Start a node; its workers get these environment variables."""
        return self._cluster.add_node(
            num_cpus=num_cpus, object_store_memory=80 << 20, include_dashboard=False, env_vars=variables
        )

    def kill(self, node: Any) -> None:
        """End a node as a power cut would; Ray notices it after some seconds."""
        self._cluster.remove_node(node, allow_graceful=False)

    def have(self, n: int) -> list[Any]:
        """Start or end nodes, each of which takes seconds, until `n` take work; return these."""
        nodes = self._cluster.worker_nodes
        while len(nodes) > n:
            self._cluster.remove_node(next(iter(nodes)))
        while len(nodes) < n:
            self.add()
        return list(nodes)

    @contextmanager
    def only(self, **variables: str) -> Iterator[None]:
        """Have this node and no other while entered."""
        self.have(0)
        self.add(**variables)
        yield
        self.have(0)

    def close(self) -> None:
        self._cluster.shutdown()


@pytest.fixture(scope="module")
def nodes(model: Path) -> Iterator[Nodes]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        nodes = Nodes()
        yield nodes
        nodes.close()


def writer(nodes: Nodes, target: object, said: list[str] | None = None) -> Any:
    from edgespec.apps.batch.ray_cluster import NodeSettings, RayWriter

    settings = NodeSettings(target=str(target), drafter="none", n_threads=1, kernels="off", parallel=2)
    tell = said.append if said is not None else print
    return closing(RayWriter(nodes.address, settings, on_message=tell))


def batch(file: Path, model: Path, *options: str) -> list[str]:
    command = [sys.executable, "-m", "edgespec", "batch", str(file), "-o", f"{file}.out", "--restart"]
    models = ["--target", str(model), "--drafter", "none", "--threads", "1", "--kernels", "off"]
    return [*command, *models, "--temp", "0", "-n", str(N_TOKENS), *options]


def texts(file: Path) -> list[str]:
    """The answers, in the order of their custom_ids."""
    lines = map(json.loads, Path(f"{file}.out").read_text().splitlines())
    named = {
        line["custom_id"]: line["response"]["body"]["choices"][0]["message"]["content"] for line in lines
    }
    return [named[name] for name in sorted(named, key=lambda name: int(name.removeprefix("line-")))]


@needs_ray
def test_a_node_dies_another_joins_and_no_line_is_lost_or_changed(
    nodes: Nodes, model: Path, tmp_path: Path
) -> None:
    prompts = [json.dumps(f"the cat {i % 4}") + "\n" for i in range(N_LINES)]
    alone = tmp_path / "alone.jsonl"
    alone.write_text("".join(prompts[:4]))
    subprocess.run(batch(alone, model), check=True, capture_output=True, timeout=60)

    dies, _ = nodes.have(2)
    file = tmp_path / "all.jsonl"
    file.write_text("".join(prompts))
    command = batch(file, model, "--ray", nodes.address, "--as-they-come", "--parallel", "3")
    with (tmp_path / "said").open("w+") as said:
        process = subprocess.Popen(command, stdout=said, stderr=said)
        until(lambda: (tmp_path / "said").read_text().count("is ready: ") == 2)
        results, partial = Path(f"{file}.out"), Path(f"{file}.out.partial")
        until(lambda: partial.exists() and partial.read_text().count("\n") >= 5)
        nodes.kill(dies)
        nodes.add()
        assert process.wait(120) == 0, (tmp_path / "said").read_text()
    told = (tmp_path / "said").read_text()
    assert "raylet" not in told  # Ray's own words
    assert told.count("is ready: ") == 3
    assert "lost its worker; requests reassigned: " in told
    assert results.read_text().count("\n") == N_LINES
    assert texts(file) == texts(alone) * (N_LINES // 4)


@needs_ray
def test_a_line_that_kills_three_workers_becomes_an_error_and_the_others_do_not(
    nodes: Nodes, model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    body = {"prompt": "abc", "max_tokens": 300, "temperature": 0}
    bad, waiting = 3, [BatchRequest(i, f"line {i}", "", body) for i in range(8)]
    waiting[bad] = replace(waiting[bad], body={**body, "max_tokens": 1900})  # time to kill whoever has it
    said: list[str] = []
    answers: dict[int, BatchAnswer] = {}
    killed: set[int] = set()
    nodes.have(2)
    with writer(nodes, model, said) as cluster:
        while waiting or cluster.n_running:
            while waiting and cluster.n_free:
                cluster.begin(waiting.pop(0))
            for request, answer in cluster.finished():
                assert request.place not in answers
                answers[request.place] = answer
            for worker in cluster._workers:
                unsent = {request.place for request in worker.unsent}  # it would be no death with the line
                if bad in worker.given.keys() - unsent and worker.pid not in killed:
                    os.kill(worker.pid, signal.SIGKILL)
                    killed.add(worker.pid)
    assert len(killed) == 3
    assert sum("lost its worker" in line for line in said) == 3
    assert capfd.readouterr() == ("", "")
    assert sorted(answers) == list(range(8))
    assert {place for place, answer in answers.items() if answer.status != 200} == {bad}
    assert json.loads(answers[bad].body)["error"]["code"] == "worker_died"
    assert len({json.loads(answers[i].body)["choices"][0]["message"]["content"] for i in (0, 1, 7)}) == 1


@needs_ray
def test_nodes_that_differ_are_refused_before_work(nodes: Nodes, model: Path, tmp_path: Path) -> None:
    other = tmp_path / "edgespec-9.9.9.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: edgespec\nVersion: 9.9.9\n")
    offered = metadata.distribution("edgespec").read_text("entry_points.txt")
    (other / "entry_points.txt").write_text(offered or "")
    with nodes.only(PYTHONPATH=str(tmp_path)), pytest.raises(EdgespecError) as error:
        writer(nodes, model)
    assert "cannot be used: edgespec differs: 9.9.9 there, " in str(error.value)

    for place in ("here", "there"):
        (tmp_path / place).mkdir()
        write_tiny_gguf(tmp_path / place / "model.gguf", seed=len(place))
    with pytest.MonkeyPatch.context() as patch, nodes.only(HOME=str(tmp_path / "there")):
        patch.setenv("HOME", str(tmp_path / "here"))
        with pytest.raises(
            EdgespecError, match=r"the target model differs: SHA-256 .* there, SHA-256 .* here"
        ):
            writer(nodes, "~/model.gguf")
        (tmp_path / "there" / "model.gguf").unlink()
        with pytest.raises(EdgespecError, match=r"cannot be used: ~/model\.gguf: no such file") as error:
            writer(nodes, "~/model.gguf")
    assert "\n" not in str(error.value)


@needs_ray
def test_a_cluster_without_a_processor_to_use(nodes: Nodes, model: Path) -> None:
    nodes.have(0)
    with pytest.raises(EdgespecError, match="no node of this cluster has a processor to use"):
        writer(nodes, model)


@needs_ray
@pytest.mark.parametrize("listens", [True, False])
def test_an_address_that_does_not_answer(monkeypatch: pytest.MonkeyPatch, listens: bool) -> None:
    from edgespec.apps.batch import ray_cluster

    monkeypatch.setattr(ray_cluster, "CONNECT_S", 3.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        if not listens:
            silent.close()
        with pytest.raises(EdgespecError, match=f"^ray {address}: no Ray cluster answers there"):
            ray_cluster.connect(address)


@pytest.fixture
def refused(capfd: pytest.CaptureFixture[str], model: Path, tmp_path: Path) -> Callable[..., str]:
    """The one line of a batch that does not begin."""
    (tmp_path / "in.jsonl").write_text('"abc"\n')

    def refused(code: int, *options: str) -> str:
        assert main([*batch(tmp_path / "in.jsonl", model)[3:], *options]) == code
        said, line = capfd.readouterr()
        assert (said, line.count("\n")) == ("", 1), line
        return line

    return refused


def test_without_the_extra_one_line_says_what_to_install(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "ray" else find(name))
    assert "--ray needs ray: pip install 'edgespec[ray]'" in refused(1, "--ray", "127.0.0.1:6379")
