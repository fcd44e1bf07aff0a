"""An engine whose target has layers on nodes: the same text, and what becomes of it when a node is lost."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from edgespec.apps.nodes import remote_target
from edgespec.apps.nodes.remote_target import home_part
from edgespec.decoding.sampling import SamplingParams
from edgespec.drafting import draft as draft_heads
from edgespec.engine.engine import Engine
from edgespec.errors import EdgespecError, NodeLost, UsageError
from edgespec.llama.node_addresses import read_addresses
from edgespec.llama.quantize import quantize
from edgespec.platform.signals import Cancellation
from running_node import child_of, node, placement
from slow_network import Proxy
from tiny_gguf import write_tiny_gguf
from tiny_states import tiny

PROMPT = "the quick brown fox and the lazy dog, and then the quick brown fox and the "


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A target of four layers with matrices that edgespec's kernels take."""
    folder = tmp_path_factory.mktemp("deep")
    source = write_tiny_gguf(folder / "f32.gguf", seed=1, n_layer=4, n_embd=256, n_ff=512, peak=0.4)
    quantize(source, folder / "q4_k_m.gguf", "q4_k_m")
    return folder / "q4_k_m.gguf"


def engine(path, draft=None, nodes="", **keywords):
    addresses = read_addresses(nodes, unsafe=False) if nodes else ()
    return Engine(path, draft, n_threads=1, profile=False, nodes=addresses, **keywords)


def at(ready, n_layers):
    return f"127.0.0.1:{ready['port']}={n_layers}"


GREEDY, SAMPLED = SamplingParams(temperature=0.0), SamplingParams(temperature=1.0)
WAYS = [
    {"params": GREEDY, "gamma": 0},
    {"params": GREEDY, "gamma": 3},
    {"params": SAMPLED, "seed": 3, "gamma": 0},
    {"params": SAMPLED, "seed": 3, "gamma": 3},
]


def texts(found):
    return [found.generate(PROMPT, n_predict=24, chat=False, **way).text for way in WAYS]


@pytest.mark.slow
def test_texts_are_those_of_one_machine(kernels, tmp_path, path, tiny_draft_path):
    with engine(path, tiny_draft_path) as found:
        here = texts(found)
    assert len(set(here)) == 2  # greedy and sampled
    with node(tmp_path, kernels=True) as (first, _), node(tmp_path, kernels=True) as (second, _):
        for n_home, nodes in ((2, at(first, 2)), (1, f"{at(first, 1)},{at(second, 2)}")):
            with engine(path, tiny_draft_path, nodes) as found:
                assert found.kernels.startswith(f"{kernels.name}, {n_home} + 127.0.0.1:")
                assert texts(found) == here
                assert found.generate(PROMPT, n_predict=24, gamma=3, params=GREEDY).stats.n_drafted > 0


def test_several_texts_at_once(kernels, tmp_path, path):
    with engine(path) as found:
        here = [found.generate(PROMPT[i:], n_predict=16, params=GREEDY, chat=False).text for i in range(3)]
    with (
        node(tmp_path, kernels=True) as (ready, _),
        engine(path, nodes=at(ready, 3), parallel=3, prefix_cache=1 << 20) as found,
    ):
        streams = [found.stream(PROMPT[i:], n_predict=16, params=GREEDY, chat=False) for i in range(3)]
        while not all(stream.finished for stream in streams):
            found.step()
            for stream in streams:
                stream.made()
        assert [stream.result.text for stream in streams] == here


def test_nodes_are_part_of_what_a_profile_is_of(tmp_path, path):
    with node(tmp_path) as (ready, _), engine(path, nodes=at(ready, 3), kernels="off") as found:
        assert found.kernels == f"stock, 1 + 127.0.0.1:{ready['port']} 3"


def test_a_killed_node_ends_the_text_and_is_taken_again(tmp_path, path):
    with (
        node(tmp_path) as (ready, process),
        Cancellation() as signals,
        engine(path, nodes=at(ready, 3), kernels="off", signals=signals) as found,
    ):
        here = found.generate(PROMPT, n_predict=40, params=GREEDY, chat=False).text
        stream = found.stream(PROMPT, n_predict=40, params=GREEDY, chat=False)
        began = [next(stream) for _ in range(5)]
        os.kill(child_of(process.pid), signal.SIGKILL)
        with pytest.raises(NodeLost, match=r"the node 127\.0\.0\.1:\d+ is lost: it closed"):
            for token in stream:
                began.append(token)
        result = stream.result
        assert result.stop_reason == "interrupted"
        assert result.text == "".join(token.text for token in began)
        assert here.startswith(result.text)
        assert result.stats.total_s > 0
        assert process.stdout.readline()  # it serves again
        assert found.generate(PROMPT, n_predict=40, params=GREEDY, chat=False).text == here
        child = child_of(process.pid)
        process.kill()
        os.kill(child, signal.SIGKILL)
        for _ in range(3):  # each of them at once, without a new try
            with pytest.raises(NodeLost):
                found.generate(PROMPT, n_predict=4, chat=False)


def test_of_two_nodes_one_is_lost_and_comes_back(tmp_path, path):
    with (
        node(tmp_path) as (first, _),
        node(tmp_path) as (second, process),
        engine(path, nodes=f"{at(first, 1)},{at(second, 2)}", kernels="off") as found,
    ):
        here = found.generate(PROMPT, n_predict=8, params=GREEDY, chat=False).text
        os.kill(child_of(process.pid), signal.SIGKILL)
        assert process.stdout.readline()
        with pytest.raises(NodeLost, match=f"the node 127.0.0.1:{second['port']} is lost: it closed"):
            found.generate(PROMPT, n_predict=8, params=GREEDY, chat=False)
        assert found.generate(PROMPT, n_predict=8, params=GREEDY, chat=False).text == here


def test_an_interrupted_text_leaves_the_nodes_usable(tmp_path, path):
    with (
        node(tmp_path) as (ready, _),
        Cancellation() as signals,
        engine(path, nodes=at(ready, 3), kernels="off", signals=signals) as found,
    ):
        stream = found.stream(PROMPT, n_predict=40, params=GREEDY, chat=False)
        next(stream)
        signals.cancel()
        with pytest.raises(KeyboardInterrupt):
            for _ in stream:
                pass
        assert found.generate(PROMPT, n_predict=4, chat=False).token_ids


def test_after_an_interrupted_pass_that_does_not_end_the_next_text_comes(tmp_path, path):
    with node(tmp_path) as (ready, _), Proxy(ready["port"]) as proxy, Cancellation() as signals:
        options = {"kernels": "off", "signals": signals}
        with engine(path, nodes=f"127.0.0.1:{proxy.port}=3", **options) as found:
            here = found.generate(PROMPT, n_predict=8, params=GREEDY, chat=False).text
            stream = found.stream(PROMPT, n_predict=40, params=GREEDY, chat=False)
            next(stream)
            proxy.stop_forwarding()
            signals.cancel()
            with pytest.raises(KeyboardInterrupt):
                for _ in stream:
                    pass
            proxy.go_on()
            assert found.generate(PROMPT, n_predict=8, params=GREEDY, chat=False).text == here


def test_a_new_number_of_tokens_costs_no_round_trip_of_its_own(kernels, tmp_path, path):
    with node(tmp_path, kernels=True) as (ready, _), Proxy(ready["port"]) as proxy:
        with engine(path, nodes=f"127.0.0.1:{proxy.port}=3") as found:
            before = proxy.traffic()
            stats = found.generate(PROMPT, n_predict=24, params=GREEDY, gamma=5, drafter="suffix").stats
            now = proxy.traffic()
        assert len(stats.histogram) > 1  # numbers of tokens that no pass had before
        asked = {name for name, counted in now.requests.items() if counted != before.requests.get(name)}
        assert "get_alloc_size" not in now.requests
        memory = {"alloc_buffer", "buffer_get_base", "buffer_clear", "free_buffer"}
        assert asked <= memory | {"set_tensor", "get_tensor", "graph_compute", "graph_recompute"}


def test_no_node_at_an_address(path):
    with pytest.raises(EdgespecError, match="nothing listens on that port"):
        engine(path, nodes="127.0.0.1:9=1")


def test_the_first_pass_may_take_as_long_as_weights_are_packed(tmp_path, path, monkeypatch):
    monkeypatch.setenv("EDGESPEC_NODE_WAIT", "0.3")
    with (
        node(tmp_path) as (ready, _),
        Proxy(ready["port"]) as proxy,
        engine(path, nodes=f"127.0.0.1:{proxy.port}=3", kernels="off") as found,
    ):
        monkeypatch.setattr(remote_target, "PACKED_BYTES_PER_S", 1e3)
        proxy.stop_forwarding()
        threading.Timer(1.0, proxy.go_on).start()
        found._pair._remote.warm_up(found.target, None)
        proxy.stop_forwarding()
        with pytest.raises(NodeLost, match="no answer"):  # later ones may not
            found.generate(PROMPT, n_predict=4, params=GREEDY, chat=False)


def test_a_head_in_the_targets_file_drafts_unless_layers_go_to_a_node(tmp_path):
    path, said = tiny("glm4-moe-mtp"), []
    with node(tmp_path) as (ready, _):
        nodes = f"127.0.0.1:{ready['port']}"
        with engine(path, nodes=nodes, kernels="off", on_message=said.append) as found:
            assert found.draft_name == "mtp"
            assert any("all layers fit here" in line for line in said)
            # A number of tokens is asked for: `auto` may leave the head alone, by what passes cost just now.
            assert found.generate([3, 7, 9] * 5, n_predict=16, params=GREEDY, gamma=2).stats.n_drafted > 0
        with engine(path, nodes=f"{nodes}=1", kernels="off", on_message=said.append) as found:
            assert (found.draft_name, found.draft) == (None, None)
            assert said[-1] == f"nothing but text seen before drafts: {draft_heads.LAYERS_ON_NODES}"
            assert found.generate([3, 7, 9] * 5, n_predict=4, params=GREEDY).token_ids
        with pytest.raises(UsageError, match=draft_heads.LAYERS_ON_NODES):
            engine(path, nodes=f"{nodes}=1", kernels="off", drafter="mtp")


@pytest.mark.slow
def test_more_layers_than_there_are(tmp_path, path):
    with node(tmp_path) as (ready, _), pytest.raises(UsageError, match="nodes"):
        engine(path, nodes=at(ready, 5))


def test_the_part_that_is_here(path):
    from edgespec.llama.gguf_header import check_model_file

    header = check_model_file(path)
    part = home_part(header, placement(1, ({"port": 1}, 3)))
    assert part.kv_bytes(256) * 4 == header.kv_bytes(256)
    assert 0 < part.file_bytes < header.file_bytes
