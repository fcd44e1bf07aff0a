"""Profiles: what is stored comes back, what makes no sense is set aside, and nobody's update is lost."""

from __future__ import annotations

import dataclasses
import json
import math
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from edgespec.drafting.profile import (
    N_MAX,
    CostCurve,
    Profile,
    ProfileKey,
    TimedCurve,
    from_json,
    load,
    store,
    store_learned,
)
from edgespec.llama.gguf_header import check_model_file
from edgespec.platform.machine import read_cpu

KEY = ProfileKey("A CPU", "b1", "avx2", 4, "a" * 64, "b" * 64, "big-q4", "small-q8")
ALONE = dataclasses.replace(KEY, draft=None, draft_name=None)


def curve(scale: float = 1e-3) -> CostCurve:
    near = tuple(scale * n for n in range(1, N_MAX + 1))
    return CostCurve((near, tuple(1.5 * seconds for seconds in near)), scale / 2)


FULL = Profile(
    key=KEY,
    target=curve(0.017),
    draft=curve(0.005),
    target_watts=14.5,
    draft_watts=12.0,
    measured="2026-01-02T03:04:05+01:00",
    spread=0.021,
    reliable=True,
    acceptance={"sampled": {"accepted": [[1.25, 2.0], [0.0, 3.5]]}, "text": "[a,  b]\n", "none": None},
    runs=3,
)


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/edgespec/profiles"


@pytest.fixture
def lines() -> list[str]:
    """Takes the lines of on_message: `on_message=lines.append`."""
    return []


def save(profile: Profile, **more: object) -> Path:
    return store(profile.key, lambda _stored: profile, **more)


def assert_like(found: Profile | None, wanted: Profile) -> None:
    """Equal, but for rounding."""
    assert found is not None
    plain = {"target": None, "draft": None}
    target = CostCurve(((1.0,), (1.0,)), 1.0)
    assert replace(found, **plain | {"target": target}) == replace(wanted, **plain | {"target": target})
    for name in ("target", "draft"):
        mine, other = getattr(found, name), getattr(wanted, name)
        assert (mine is None) == (other is None)
        if mine:
            for side, expected in zip(mine.passes, other.passes, strict=True):
                assert side == pytest.approx(expected, rel=1e-5)
            assert mine.read == pytest.approx(other.read, rel=1e-5)


# ---- kept ----


@pytest.mark.parametrize(
    "profile",
    [FULL, Profile(KEY, curve(), curve()), Profile(ALONE, curve())],
    ids=["full", "learnt", "alone"],
)
def test_what_is_saved_comes_back(profile, directory, lines):
    assert load(profile.key) is None
    file = save(profile, on_message=lines.append)
    assert file == directory / profile.key.file_name
    assert_like(load(profile.key, on_message=lines.append), profile)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert lines == []
    assert sorted(path.name for path in directory.iterdir()) == [".lock", file.name], "nothing left over"


_positive = st.floats(1e-9, 1e6)
_curves = st.builds(
    lambda near, far, read: CostCurve((tuple(near), tuple(far)), read),
    *[st.lists(_positive, min_size=N_MAX, max_size=N_MAX)] * 2,
    _positive,
)
_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@given(target=_curves, draft=_curves, acceptance=st.dictionaries(st.text(), _json, max_size=3))
def test_any_profile_survives_its_text(target, draft, acceptance):
    profile = replace(FULL, target=target, draft=draft, acceptance=acceptance)
    assert_like(from_json(json.loads(profile.as_text())), profile)


def test_file_names():
    assert KEY.file_name.startswith("big-q4+small-q8-")
    assert len(KEY.file_name) == len("big-q4+small-q8-.json") + 16
    assert ALONE.file_name.startswith("big-q4-")
    odd = dataclasses.replace(KEY, target_name="../a b/\n" + "x" * 400, draft_name="ü")
    assert "/" not in odd.file_name
    assert len(odd.file_name) < 150
    assert odd.file_name.isprintable()
    others = {
        "cpu": "Another", "llama_cpp": "b2", "kernels": "stock", "threads": 5, "target": "c", "draft": "d"
    }  # fmt: skip
    names = {dataclasses.replace(KEY, **{name: value}).file_name for name, value in others.items()}
    assert len(names | {KEY.file_name}) == 7, "every fact makes another file"


def test_key_of_files(tiny_path, tiny_draft_path):
    target, draft = check_model_file(tiny_path), check_model_file(tiny_draft_path)
    key = ProfileKey.of(target, draft, kernels="stock", threads=2)
    assert (key.cpu, key.kernels, key.threads) == (read_cpu().model, "stock", 2)
    assert (key.target_name, key.draft_name) == ("target", "draft")
    assert key.target != key.draft
    assert key.llama_cpp
    alone = ProfileKey.of(target, None, kernels="stock", threads=2)
    assert (alone.draft, alone.draft_name) == (None, None)


# ---- files that make no sense ----


def damaged(**changes: object) -> str:
    return json.dumps(json.loads(FULL.as_text()) | changes)


def with_number(number: object) -> str:
    document = json.loads(FULL.as_text())
    document["target"]["passes"][1][7] = number
    return json.dumps(document)


def without(name: str) -> str:
    document = json.loads(FULL.as_text())
    del document[name]
    return json.dumps(document)


UNUSABLE = {
    "empty": b"",
    "truncated": FULL.as_text().encode()[:1000],
    "binary": b"\xff\xfe\x00\x01",
    "foreign": b'{"name": "something else"}',
    "no version": damaged(version=None).encode(),
    "version true": damaged(version=True).encode(),
    "another key": replace(FULL, key=dataclasses.replace(KEY, cpu="Other")).as_text().encode(),
    "no key": damaged(key=None).encode(),
    "missing": without("acceptance").encode(),
    "nan": with_number(math.nan).encode(),
    "infinity": with_number(math.inf).encode(),
    "1e999": with_number(77.5).replace("77.5", "1e999").encode(),
    "huge": with_number(10**400).encode(),
    "negative": with_number(-1.0).encode(),
    "true": with_number(True).encode(),
    "short": damaged(target=json.loads(FULL.as_text())["target"] | {"passes": [[1.0], [1.0]]}).encode(),
    "acceptance": damaged(acceptance=[1]).encode(),
    "measured": damaged(measured="yesterday\n").encode(),
    "runs": damaged(runs=1.5).encode(),
    "reliable": damaged(reliable=1).encode(),
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_a_file_without_sense_is_set_aside(name, directory, lines):
    file = directory / KEY.file_name
    for i in (1, 2, 3):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(UNUSABLE[name])
        assert load(KEY, on_message=lines.append) is None
        aside = directory / f"{file.name}.set-aside"
        assert aside.read_bytes() == UNUSABLE[name], "the last one is kept"
        assert not file.exists()
        assert len(lines) == i
        assert lines[-1].startswith(str(file))
        assert lines[-1].endswith(f"set aside as {aside.name}")
        assert lines[-1].isprintable()
    assert load(KEY, on_message=lines.append) is None
    assert len(lines) == 3
    assert save(FULL) == file
    assert_like(load(KEY), FULL)


@given(data=st.data())
def test_a_damaged_byte_is_never_a_crash(data, tmp_path_factory):
    raw = bytearray(FULL.as_text().encode())
    raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    with pytest.MonkeyPatch.context() as monkeypatch:
        root = tmp_path_factory.mktemp("cache")
        monkeypatch.setenv("XDG_CACHE_HOME", str(root))
        file = root / "edgespec/profiles" / KEY.file_name
        file.parent.mkdir(parents=True)
        file.write_bytes(raw)
        messages: list[str] = []
        found = load(KEY, on_message=messages.append)
        assert len(messages) == (found is None)
        if found:
            found.as_text()


def test_updating_sets_aside_too(directory, lines):
    directory.mkdir(parents=True)
    (directory / KEY.file_name).write_text("{")
    assert store_learned(
        KEY, target=TimedCurve(curve(), 9), draft=TimedCurve(curve(), 0), on_message=lines.append
    )
    assert len(lines) == 1
    assert_like(load(KEY), Profile(KEY, curve(), runs=1))


@pytest.mark.parametrize(
    "changes",
    [
        {"spread": math.nan},
        {"target": CostCurve(((1.0,), (1.0,)), 1.0)},
        {"draft": CostCurve(((1.0,), (1.0,)), 1.0)},
        {"acceptance": {"a": math.inf}},
        {"runs": -1},
    ],
)
def test_impossible_numbers_are_not_stored(changes, directory):
    with pytest.raises(ValueError):
        save(replace(FULL, **changes))
    assert load(KEY) is None
    assert [path.name for path in directory.iterdir()] == [".lock"]


# ---- directories that cannot be used ----


def test_nowhere_to_write(tmp_path, monkeypatch, lines):
    (tmp_path / "file").write_text("")
    for root in (tmp_path / "file", Path("/proc/self")):
        monkeypatch.setenv("XDG_CACHE_HOME", str(root))
        assert load(KEY, on_message=lines.append) is None
        assert store_learned(KEY, target=TimedCurve(curve(), 1), draft=TimedCurve(curve(), 0)) is None
    monkeypatch.setenv("XDG_CACHE_HOME", "~nobody-of-this-name/x")
    assert load(KEY, on_message=lines.append) is None
    assert lines == []


def test_a_directory_in_the_way(directory, lines):
    (directory / KEY.file_name).mkdir(parents=True)
    assert load(KEY, on_message=lines.append) is None
    assert len(lines) == 1
    assert store_learned(KEY, TimedCurve(curve(), 1)) is None


def test_what_cannot_be_moved_away_stays(directory, lines, monkeypatch):
    directory.mkdir(parents=True)
    (directory / KEY.file_name).write_text("{")

    def refuse(*_: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "replace", refuse)
    assert load(KEY, on_message=lines.append) is None
    assert lines == [f"{directory / KEY.file_name}: damaged: not JSON; it is not used"]


def test_interrupted_while_writing(directory, monkeypatch):
    save(FULL)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        save(replace(FULL, runs=9))
    assert_like(load(KEY), FULL)
    assert len(list(directory.iterdir())) == 2, "no half-written file"


# ---- what runs learn ----


def test_the_first_run_is_taken_as_it_is():
    learned = {"next": [1, 2]}
    store_learned(
        KEY, target=TimedCurve(curve(0.02), 3), draft=TimedCurve(curve(0.004), 8), acceptance=learned
    )
    wanted = Profile(KEY, curve(0.02), curve(0.004), acceptance=learned, runs=1)
    assert_like(load(KEY), wanted)


def test_a_few_passes_are_no_first_curve_of_a_draft_model():
    """It would be used as if it had been measured, and the draft model perhaps never again."""
    for draft, stored in ((TimedCurve(curve(0.4), 7), None), (TimedCurve(curve(0.004), 8), curve(0.004))):
        store_learned(KEY, target=TimedCurve(curve(), 9), draft=draft)
        found = load(KEY)
        assert (found.draft is None) == (stored is None)
    assert_like(found, Profile(KEY, curve(), curve(0.004), runs=2))


@pytest.mark.parametrize(("passes", "weight"), [(0, 0.0), (20, 0.05), (200, 0.5), (10**9, 0.5)])
def test_a_run_moves_a_curve_half_the_way_at_most(passes, weight):
    save(FULL)
    store_learned(KEY, target=TimedCurve(curve(0.17), passes))
    found = load(KEY)
    moved = replace(FULL, target=curve(0.017 * 10**weight), runs=4)
    assert_like(found, moved)


MERGE = """
import sys
from pathlib import Path
from edgespec.drafting.profile import CostCurve, N_MAX, ProfileKey, TimedCurve, store_learned
key = ProfileKey("A CPU", "b1", "avx2", 4, "a" * 64, None, "big-q4", None)
flat = CostCurve(((1.0,) * N_MAX,) * 2, 1.0)
for i in range(40):
    assert store_learned(key, target=TimedCurve(flat, 1), acceptance={"by": sys.argv[1]}, on_message=print)
"""


def test_two_processes_lose_nothing(child_environment, directory):
    children = [
        subprocess.Popen(
            [sys.executable, "-c", MERGE, name], env=child_environment, stdout=subprocess.PIPE, text=True
        )
        for name in ("one", "two")
    ]
    for child in children:
        assert child.communicate(timeout=60)[0] == ""
        assert child.returncode == 0
    found = load(ALONE)
    assert found is not None
    assert found.runs == 80
    assert found.acceptance["by"] in ("one", "two")
    assert len(list(directory.iterdir())) == 2
