"""Nodes that die, hang or answer nonsense: an error in one line, within a bounded time, in this process."""

from __future__ import annotations

import os
import signal
import struct
import threading
from contextlib import contextmanager

import numpy as np
import pytest

from edgespec.decoding.session import SequenceTokens
from edgespec.errors import NodeLost
from edgespec.llama.gguf_header import read_header
from edgespec.llama.kv_cache import KVCache, KVCacheSize
from edgespec.llama.placement import Placement, RemoteLayers
from edgespec.llama.session import Session
from edgespec.llama.weights import Model
from edgespec.platform.signals import Cancellation
from running_node import answering, child_of, node, placement
from slow_network import Proxy
from tiny_gguf import write_tiny_gguf
from tiny_models import make_tiny


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", n_layer=3)


@pytest.fixture(autouse=True)
def short_wait(monkeypatch):
    monkeypatch.setenv("EDGESPEC_NODE_WAIT", "0.5")


def opened(model, interrupt=None):
    return Session(model, n_ctx=256, n_threads=1, interrupt=interrupt)


@contextmanager
def on_a_node(tmp_path, path):
    """A model with all but its first layer on a node, and the process id of the node's server."""
    with node(tmp_path) as (ready, process):
        where = placement(1, (ready, read_header(path).n_layer - 1))
        with Model(path, placement=where, kernels=False) as model:
            yield model, child_of(process.pid)


def lost(model, session, *, why):
    """The session's next pass says that the node was lost, and why; everything can be closed."""
    with pytest.raises(NodeLost, match=f"is lost: {why}; look whether"):
        session.eval([5, 6])
    assert model.remote.is_lost
    with pytest.raises(NodeLost, match=f"is lost: {why}"):
        session.eval([5, 6])
    with pytest.raises(NodeLost, match=f"is lost: {why}"):
        session.state()
    session.clear()
    session.close()


def test_a_node_that_is_killed_and_comes_back(tmp_path, path):
    with Model(path, kernels=False) as model, opened(model) as session:
        here = session.eval([5, 6]).copy()
    with node(tmp_path) as (ready, process):
        where = placement(1, (ready, 2))
        model = Model(path, placement=where, kernels=False)
        with model, opened(model) as session:
            session.eval([5, 6])
            os.kill(child_of(process.pid), signal.SIGKILL)
            assert process.stdout.readline()  # it serves again, and has forgotten all
            lost(model, session, why="it closed the connection")
            assert model.tokenize("a", add_special=False, parse_special=False)
            model.reopen(where)
            assert not model.remote.is_lost
            with opened(model) as again:
                np.testing.assert_array_equal(again.eval([5, 6]), here)
            os.kill(child_of(process.pid), signal.SIGKILL)
            process.kill()
            with pytest.raises(NodeLost, match=r"is lost: (Connection refused|it closed)"):
                model.reopen(where)
            assert model.tokenize("a", add_special=False, parse_special=False)


def test_what_is_known_of_the_way_there_is_said(tmp_path, path):
    with on_a_node(tmp_path, path) as (model, server):
        session = opened(model)
        session.eval([5, 6])
        name = model.remote.placement.nodes[0].name
        model.remote.explain = {name: "board1: Timeout, server board1 not responding."}.get
        os.kill(server, signal.SIGKILL)
        lost(model, session, why="board1: Timeout, server board1 not responding.")


@pytest.mark.parametrize("name", ["rwkv7", "qwen35"])
def test_a_model_that_keeps_a_state(tmp_path, name):
    path = make_tiny(name, tmp_path / "tiny.gguf")
    with on_a_node(tmp_path, path) as (model, server):
        session = opened(model)
        session.eval([5, 6, 7])
        os.kill(server, signal.SIGKILL)
        lost(model, session, why="it closed the connection")


def test_a_state_is_copied_from_a_lost_node(tmp_path):
    path = make_tiny("rwkv7", tmp_path / "tiny.gguf")
    with on_a_node(tmp_path, path) as (model, server):
        session = opened(model)
        session.eval([5, 6, 7])
        os.kill(server, signal.SIGKILL)
        with pytest.raises(NodeLost, match="it closed the connection"):
            session.keep()
        lost(model, session, why="it closed the connection")


def test_a_node_that_hangs(tmp_path, path):
    with on_a_node(tmp_path, path) as (model, server):
        session = opened(model)
        session.eval([5, 6])
        os.kill(server, signal.SIGSTOP)
        try:
            lost(model, session, why="no answer for 1 s")
        finally:
            os.kill(server, signal.SIGCONT)


@pytest.mark.parametrize("sequence", [0, 1])
def test_a_pass_that_asks_nothing_back_is_waited_for(tmp_path, path, sequence):
    size = KVCacheSize(n_ctx=256, n_sequences=2)
    with on_a_node(tmp_path, path) as (model, server), KVCache(model, size, n_threads=1) as cache:
        cache.forward([SequenceTokens(sequence, [5, 6], n_logits=0)])
        os.kill(server, signal.SIGSTOP)
        try:
            with pytest.raises(NodeLost, match="no answer for 1 s"):
                cache.forward([SequenceTokens(sequence, [5, 6], n_logits=0)])
        finally:
            os.kill(server, signal.SIGCONT)


def test_an_interruption_of_a_pass_that_does_not_end(tmp_path, path, monkeypatch):
    monkeypatch.setenv("EDGESPEC_NODE_WAIT", "60")
    with node(tmp_path) as (ready, _), Proxy(ready["port"]) as proxy, Cancellation() as cancellation:
        where = Placement(1, (RemoteLayers("board1", f"127.0.0.1:{proxy.port}", 2),))
        with Model(path, placement=where, kernels=False) as model:
            session = opened(model, cancellation.interrupt)
            session.eval([5, 6])
            proxy.stop_forwarding()
            threading.Timer(0.2, cancellation.cancel).start()
            with pytest.raises(KeyboardInterrupt):
                session.eval([5, 6])
            assert model.remote.is_lost
            with pytest.raises(NodeLost, match="board1 is lost: an earlier pass was interrupted"):
                session.eval([5, 6])  # which may be for others, who did not interrupt anything
            cancellation.drain()
            proxy.go_on()
            model.reopen(where)
            with opened(model, cancellation.interrupt) as session:
                session.eval([5, 6])


def test_loading_again_is_interrupted(tmp_path, path):
    with node(tmp_path) as (ready, _), Cancellation() as cancellation:
        where = placement(1, (ready, 2))
        with Model(path, placement=where, kernels=False) as model:
            cancellation.cancel()
            with pytest.raises(KeyboardInterrupt):
                model.reopen(where, cancellation.interrupt)
            assert model.remote is None
            cancellation.drain()
            model.reopen(where, cancellation.interrupt)
            with opened(model) as session:
                session.eval([5, 6])


# ---- nodes that lie ----

HELLO = bytes([7, 0, 0, 0]) + bytes(24)


SENSIBLE = {
    14: HELLO,
    15: struct.pack("<I", 1),
    11: struct.pack("<QQ", 1 << 30, 1 << 30),
    1: struct.pack("<Q", 64),
    2: struct.pack("<Q", 1 << 40),
    0: struct.pack("<QQ", 4096, 1 << 40),
    3: struct.pack("<Q", 1 << 20),
}


@pytest.mark.parametrize(
    ("command", "answer"),
    [
        (0, struct.pack("<QQ", 4096, 1)),
        (1, struct.pack("<Q", 0)),
        (1, struct.pack("<Q", 3)),
        (2, struct.pack("<Q", 0)),
        (3, struct.pack("<Q", 0)),
        (14, bytes([6]) + HELLO[1:]),
        (14, bytes([7, 1]) + HELLO[2:]),
        (15, struct.pack("<I", 0)),
        (15, struct.pack("<I", 1 << 31)),
    ],
)
def test_sizes_that_cannot_be(path, command, answer):
    with answering(SENSIBLE | {command: answer}) as port:
        where = Placement(1, (RemoteLayers("board1", f"127.0.0.1:{port}", 2),))
        with pytest.raises(NodeLost, match="its answer has impossible numbers"):
            Model(path, placement=where, kernels=False)


def test_an_answer_of_another_length(path):
    with answering(SENSIBLE | {15: b"\1"}) as port:
        where = Placement(1, (RemoteLayers("board1", f"127.0.0.1:{port}", 2),))
        with pytest.raises(NodeLost, match="its answer has 1 bytes, not 4"):
            Model(path, placement=where, kernels=False)
