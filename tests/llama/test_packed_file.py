"""Packed weights on the disk: a model that is mapped says the same, and no damaged file is used."""

import os
import shutil
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from edgespec import Engine, SamplingParams
from edgespec._core import Interrupt
from edgespec.errors import EdgespecError, UsageError
from edgespec.llama import packed_file as room
from edgespec.llama.choices import StateRoom
from edgespec.llama.kernels import Kernels
from edgespec.llama.session import Session
from edgespec.llama.weights import Model
from edgespec.platform import turns
from edgespec.platform.files import locked
from edgespec.platform.kept import write_all as write_for_real
from edgespec.platform.machine import cached_share
from edgespec.platform.processes import Cancellation

PROMPT = [1, 2, 3, 4, 5]


@pytest.fixture
def model_path(
    kernels: Kernels, packable_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """A model of a user who keeps packed weights, small ones too."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv(room.SWITCH, "auto")
    monkeypatch.setattr(room, "LEAST_BYTES", 1)
    monkeypatch.setattr(room, "LEAST_FREE_SHARE", 0.0)
    yield Path(shutil.copy(packable_path, tmp_path / "model.gguf"))


def logits(model: Model) -> np.ndarray:
    with Session(model, n_ctx=32, n_threads=1) as session:
        return session.eval(PROMPT).copy()


def load(path: Path, *, interrupt: Interrupt | None = None) -> tuple[bool, np.ndarray, list[str]]:
    """Load as `edgespec run` does: whether it was mapped, what it says, and what the user is told."""
    lines: list[str] = []
    with Model(path) as model:
        assert model.packed
        model.keep_packed(interrupt, lines.append)
        return model.is_mapped, logits(model), lines


def kept() -> list[Path]:
    return sorted(room.PACKED_WEIGHTS.path().glob("*.weights"))


def test_the_second_start_maps_what_the_first_packed(model_path: Path) -> None:
    mapped, packed, lines = load(model_path)
    assert not mapped
    assert len(lines) == 1 and str(room.PACKED_WEIGHTS.path()) in lines[0] and room.SWITCH in lines[0]
    (file,) = kept()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    for _ in range(2):  # what one start does to the weights, the next one must not see
        mapped, same, lines = load(model_path)
        assert mapped and not lines
        np.testing.assert_array_equal(same, packed)
    assert kept() == [file]
    assert [path.name for path in file.parent.iterdir() if path != file] == [".lock"]


def overwrite(offset: int) -> Callable[[Path], None]:
    def damage(file: Path) -> None:
        with file.open("r+b") as stream:
            stream.seek(offset)
            stream.write(b"\xff" * 64)

    return damage


def flip_bit(offset: int) -> Callable[[Path], None]:
    def damage(file: Path) -> None:
        with file.open("r+b") as stream:
            stream.seek(offset)
            byte = stream.read(1)[0]
            stream.seek(offset)
            stream.write(bytes([byte ^ 1]))

    return damage


def resealed(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    """Change the file's description of itself, and its time back: what a disk's error may leave."""

    def damage(file: Path) -> None:
        data = file.read_bytes()
        magic, head, _ = data[: 2 << 20].split(b"\n", 2)
        file.write_bytes((magic + b"\n" + change(head) + b"\n").ljust(2 << 20, b"\0") + data[2 << 20 :])
        os.utime(file, ns=(0, room._SEAL_NS))

    return damage


def unseen(damage: Callable[[Path], None]) -> Callable[[Path], None]:
    """Damage the weights and set the time back."""

    def damaged(file: Path) -> None:
        damage(file)
        os.utime(file, ns=(0, room._SEAL_NS))

    return damaged


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 4096)


def as_link(file: Path) -> None:
    shutil.move(file, file.with_suffix(".elsewhere"))
    file.symlink_to(file.with_suffix(".elsewhere"))


@pytest.mark.parametrize(
    "damage",
    [
        overwrite(0),
        overwrite(3 << 20),
        truncate,
        unseen(truncate),
        resealed(lambda head: head[:-20]),
        resealed(lambda head: head.replace(b"blk.0.attn_q", b"blk.0.attn_x")),
        resealed(lambda head: head.replace(b'"size":', b'"size":1')),
        lambda file: file.chmod(0o644),
        lambda file: file.write_bytes(b""),
    ],
)
def test_a_damaged_file_is_replaced(model_path: Path, damage: Callable[[Path], None]) -> None:
    _, expected, _ = load(model_path)
    (file,) = kept()
    damage(file)
    mapped, found, _ = load(model_path)
    assert not mapped
    np.testing.assert_array_equal(found, expected)
    mapped, found, _ = load(model_path)
    assert mapped
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("damage", [overwrite, flip_bit])
def test_weights_that_the_disk_changed_are_packed_anew(
    model_path: Path, damage: Callable[[int], Callable[[Path], None]]
) -> None:
    """Whoever loads the model computes with what its file has, and the damaged file is gone."""
    _, expected, _ = load(model_path)
    (file,) = kept()
    unseen(damage((2 << 20) + 5000))(file)
    mapped, found, _ = load(model_path)
    assert mapped
    np.testing.assert_array_equal(found, expected)
    assert not kept()
    load(model_path)
    assert load(model_path)[0]


@pytest.mark.parametrize("is_known", ["before", "while it is written", "at its end"])
def test_no_text_is_complete_that_damaged_weights_wrote(
    model_path: Path, monkeypatch: pytest.MonkeyPatch, is_known: str, tmp_path: Path
) -> None:
    """An engine begins before the check has ended. The text under way is ended, and nothing of it kept."""
    go_on = threading.Event()
    check = room.WeightCheck._run
    monkeypatch.setattr(room.WeightCheck, "_run", lambda self: (go_on.wait(60), check(self)))
    states = StateRoom(tmp_path / "states", 1 << 30)

    def engine(lines: list[str]) -> Engine:
        return Engine(
            model_path, drafter="none", n_threads=1, profile=False, states=states, on_message=lines.append
        )

    def text(engine: Engine) -> tuple[int, ...]:
        return engine.generate(PROMPT * 10, params=SamplingParams(temperature=0.0), n_predict=8).token_ids

    go_on.set()
    with engine([]) as sound:
        expected = text(sound)
    shutil.rmtree(states.path)
    load(model_path)
    unseen(overwrite((2 << 20) + 5000))(kept()[0])
    go_on.clear()
    lines: list[str] = []
    with engine(lines) as damaged:
        assert damaged.target.is_mapped
        if is_known == "before":
            go_on.set()
            damaged.target.condition(wait=True)
        else:
            stream = damaged.stream(PROMPT * 10, params=SamplingParams(temperature=0.0), n_predict=8)
            next(stream)
            threading.Timer(0 if is_known == "while it is written" else 1, go_on.set).start()
            with pytest.raises(EdgespecError, match="damaged"):
                list(stream)
        assert text(damaged) == expected
    assert len([line for line in lines if "its checksum is another" in line]) == 1
    with engine([]) as restored:
        assert text(restored) == expected


def test_a_link_is_not_followed(model_path: Path) -> None:
    _, expected, _ = load(model_path)
    as_link(kept()[0])
    mapped, found, _ = load(model_path)
    assert not mapped
    np.testing.assert_array_equal(found, expected)


def test_another_model_in_the_file_s_place_is_packed_anew(model_path: Path) -> None:
    _, before, _ = load(model_path)
    data = bytearray(model_path.read_bytes())
    at = len(data) - 200_000
    data[at : at + 4096] = data[at - 4096 : at]  # the same size, and the samples of its hash may be the same
    model_path.write_bytes(data)
    mapped, after, _ = load(model_path)
    assert not mapped
    assert load(model_path)[0]
    with Model(model_path, kernels=False) as stock:
        np.testing.assert_allclose(after, logits(stock), atol=0.3)
    assert not np.array_equal(before, after)
    assert len(kept()) <= 2


def test_an_interrupt_leaves_no_part(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes after the first part was written."""
    reader, writer = os.pipe()

    def write_all(file: int, data: memoryview, at: int) -> None:
        write_for_real(file, data, at)
        os.write(writer, b"x")

    monkeypatch.setattr(room, "write_all", write_all)
    load(model_path, interrupt=Interrupt(reader))
    os.close(reader)
    os.close(writer)
    assert [path.name for path in room.PACKED_WEIGHTS.path().iterdir()] == [".lock"]


def test_two_processes_do_not_write_at_once(model_path: Path) -> None:
    room.PACKED_WEIGHTS.path().mkdir(parents=True)
    with locked(room.PACKED_WEIGHTS.path() / ".lock"):
        load(model_path)
    assert not kept()
    left, other = (room.PACKED_WEIGHTS.path() / f".edgespec-1-{no}.tmp" for no in (1, 2))
    left.write_bytes(room._MAGIC + b"half")  # of a process that was killed
    other.write_bytes(b"half a result of another edgespec")
    load(model_path)
    assert kept() and not left.exists() and other.exists()


def test_what_was_unused_for_longest_makes_room(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = room.PACKED_WEIGHTS.path()
    folder.mkdir(parents=True)
    names = [f"{no}123456789abcdef-avx2-0123456789abcdef.weights" for no in range(5)]
    magics = [room._MAGIC] * 3 + [room._FIRST_MAGIC, b"not ours"]
    for age, (name, magic) in enumerate(zip(names, magics, strict=True)):
        (folder / name).write_bytes(magic.ljust(1000 if age < 2 else 100))
        os.utime(folder / name, (time.time() - 10 * age - (age == 2) * 5e6, 0))
    (folder / "my.weights").write_bytes(b"x" * 10**6)
    size = sum(tensor.bytes for tensor in packed_tensors(model_path))
    monkeypatch.setattr(room, "MOST_BYTES", size + 1500)
    load(model_path)
    assert {names[0], names[4], "my.weights"} == {path.name for path in kept()} - {kept_name(model_path)}


def packed_tensors(path: Path) -> tuple[room.PackedTensor, ...]:
    with Model(path) as model:
        return model.packed


def kept_name(path: Path) -> str:
    with Model(path) as model:
        assert model._file
        return model._file.name


def test_a_disk_that_would_be_full_is_left_alone(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "LEAST_FREE_SHARE", 0.1)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(total=10**12, free=10**11))
    _, _, lines = load(model_path)
    assert not kept()
    assert len(lines) == 1 and "100.00 GB of the disk are free" in lines[0]


def test_a_folder_that_cannot_be_made_is_one_line(model_path: Path) -> None:
    room.PACKED_WEIGHTS.path().parent.parent.mkdir()
    room.PACKED_WEIGHTS.path().parent.write_text("")
    mapped, _, lines = load(model_path)
    assert not mapped
    assert len(lines) == 1 and str(room.PACKED_WEIGHTS.path()) in lines[0]


def test_weights_on_the_disk_are_not_waited_for(model_path: Path) -> None:
    load(model_path)
    (file,) = kept()
    with file.open("rb") as stream:
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if cached_share(stream.fileno(), 2 << 20, file.stat().st_size - (2 << 20)) > 0.5:
            pytest.skip("this file system keeps its files in memory")
    mapped, _, lines = load(model_path)
    assert not mapped and not lines
    assert kept() == [file]


def test_small_models_and_off_keep_nothing(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "LEAST_BYTES", 32 << 20)
    assert not load(model_path)[2]
    monkeypatch.setattr(room, "LEAST_BYTES", 1)
    monkeypatch.setenv(room.SWITCH, "OFF")
    assert not load(model_path)[2]
    assert not room.PACKED_WEIGHTS.path().exists()
    monkeypatch.setenv(room.SWITCH, "maybe")
    with pytest.raises(UsageError, match=f"{room.SWITCH}=maybe: must be auto or off"):
        load(model_path)


def test_nothing_is_written_while_a_text_is_under_way(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But when the last one ended; an interruption of a text is none of the writing."""
    monkeypatch.setattr(turns, "QUIET_S", 3600.0)
    under_way: list[int] = []
    written = threading.Event()

    def write_all(file: int, data: memoryview, at: int) -> None:
        under_way.append(engine._requests.n_running)
        write_for_real(file, data, at)
        written.set()

    monkeypatch.setattr(room, "write_all", write_all)
    monkeypatch.setattr(room, "_PIECE", 4096)
    with Cancellation() as signals:
        engine = Engine(model_path, keep_packed=True, signals=signals, parallel=2)
        with engine:
            first, second = (engine.stream([1, 2, 3], n_predict=n) for n in (4, 40))
            monkeypatch.setattr(turns, "QUIET_S", 0.0)
            assert len([*first]) == 4
            assert len([*zip(second, range(20), strict=False)]) == 20
            assert not written.is_set()
            signals.cancel()
            second.close()
            assert written.wait(60)
            end = time.monotonic() + 60  # the engine's end would break it off, after that cancelling
            while [file.suffix for file in kept()] != [".weights"] and time.monotonic() < end:
                time.sleep(0.01)
    assert [file.suffix for file in kept()] == [".weights"]
    assert not any(under_way) and len(under_way) > 2
    assert load(model_path)[0]


def test_a_text_that_was_left_does_not_keep_the_program_waiting(model_path: Path) -> None:
    code = f"""
from edgespec.engine.engine import Engine
from edgespec.llama import packed_file
packed_file.LEAST_BYTES, packed_file.LEAST_FREE_SHARE = 1, 0.0
engine = Engine({str(model_path)!r}, keep_packed=True)
next(text := engine.stream([1, 2, 3]))
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    assert len(kept()) == 1


def test_a_description_has_what_a_tensor_has() -> None:
    """`_Contents` stores the fields of PackedTensor but its address."""
    tensor = room.PackedTensor("a", "q4_K", 1, 2, 3, 4, 5)
    facts = (tensor.name, tensor.type, tensor.rows, tensor.columns, tensor.bytes, tensor.offset)
    data = msgspec.json.encode(room._Contents((facts,), 3, 4))
    assert room.PackedTensor(*msgspec.json.decode(data, type=room._Contents).tensors[0]) == tensor
