"""States of prompts on disk: their bits, what is written, damage, limits, other processes, whole engines."""

from __future__ import annotations

import os
import resource
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from command_line import python_path
from edgespec import Engine, SamplingParams
from edgespec.errors import UsageError
from edgespec.llama.cache_types import with_cache_type
from edgespec.llama.choices import StateRoom
from edgespec.llama.kv_cache import KVCache, KVCacheSize
from edgespec.llama.prompt_states import LEAST, PromptStates, StateFolder, model_key
from edgespec.llama.sequence_pool import SequencePool
from edgespec.llama.weights import Model
from edgespec.models.footprint import target_rollback
from tiny_gguf import write_tiny_gguf
from tiny_states import tiny

PLENTY = 1 << 30
N = 256
TAIL = 100
GREEDY = SamplingParams(temperature=0.0)
WRITER = """
import sys
from array import array
from pathlib import Path
import numpy as np
from edgespec.llama.choices import StateRoom
from edgespec.llama.prompt_states import StateFolder
folder = StateFolder(StateRoom(Path(sys.argv[1]), int(sys.argv[4])), print)
for i in range(int(sys.argv[2]), int(sys.argv[3])):
    state = np.full(4 << 20, i % 251, np.uint8)
    folder.write("0" * 16, array("i", [i]), iter([(1, state)]), state.nbytes + 100)
"""


def text(seed: int, n: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 200, n).tolist()


PROMPT = text(1, N + TAIL)


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    path = write_tiny_gguf(tmp_path_factory.mktemp("states") / "tiny.gguf", seed=1, n_ctx=4096)
    with Model(path) as model:
        yield model


class Disk:
    """A folder of states, and the lines that were told of it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines: list[str] = []

    @property
    def files(self) -> list[Path]:
        return sorted(self.path.glob("*.state"))

    @contextmanager
    def pool(
        self, model: Model, *, limit: int = PLENTY, n_cells: int = 2048, key: str = ""
    ) -> Iterator[SequencePool]:
        """Open a pool as a new process would, and end it as one does."""
        size = KVCacheSize(n_ctx=n_cells, n_sequences=3, rollback=target_rollback(model.header))
        cache = KVCache(model, size, n_threads=1)
        key = key or model_key(model, "a hash", n_ctx=n_cells, n_threads=1)
        folder = StateFolder(StateRoom(self.path, limit), self.lines.append)
        with SequencePool(cache, states=PromptStates(folder, key, cache)) as pool:
            yield pool

    def restored(self) -> int:
        """Take note of all lines; return how many tokens they say were restored."""
        found, self.lines[:] = [line for line in self.lines if line.startswith("restored")], []
        return sum(int(line.split()[1].replace(",", "")) for line in found)


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path / "states")


def read(pool: SequencePool, tokens: list[int]) -> tuple[int, np.ndarray]:
    """Do as the engine does with a prompt; return how much was known, and the logits after it."""
    session = pool.begin(tokens)
    n_known = session.n_past
    if n_known < len(tokens) - 1:
        session.eval(tokens[n_known:-1])
    rows = session.eval(tokens[-1:]).copy()
    pool.end(session)
    return n_known, rows


@pytest.mark.parametrize("cache_type", ["f16", "q8_0", "q4_0"])
@pytest.mark.parametrize("kernels", [True, False])
def test_what_is_read_again_has_the_same_bits(
    disk: Disk, packable_path: Path, kernels: bool, cache_type: str
) -> None:
    with Model(packable_path, kernels=kernels) as model:
        model.header = with_cache_type(model.header, cache_type)
        with disk.pool(model) as pool:
            n_known, expected = read(pool, PROMPT)
            assert n_known == 0
        assert len(disk.files) == 1
        assert {file.stat().st_mode & 0o777 for file in disk.files} == {0o600}
        assert disk.path.stat().st_mode & 0o777 == 0o700
        with disk.pool(model) as pool:
            n_known, rows = read(pool, PROMPT)
        assert (n_known, disk.restored()) == (len(PROMPT) - 1, len(PROMPT) - 1)
        assert np.array_equal(rows, expected)


@pytest.mark.parametrize("name", ["lfm2", "mamba2", "gemma3"])
def test_states_and_windows_are_kept_as_a_whole(disk: Disk, name: str) -> None:
    """Only the whole sequence can be had, or what its copies go back to."""
    with Model(tiny(name)) as model:
        with disk.pool(model) as pool:
            read(pool, PROMPT)
            _, expected = read(pool, [*PROMPT, 7, 8])
        assert len(disk.files) == 1, "it says all that a shorter one does"
        with disk.pool(model) as pool:
            n_known, rows = read(pool, [*PROMPT, 7, 8, *text(3, LEAST)])
            assert n_known == disk.restored() == len(PROMPT) + 2
        with disk.pool(model) as pool:
            n_known, rows = read(pool, [*PROMPT, 7, 8])
        if model.keeps_state:
            assert n_known >= len(PROMPT) - 8, "a copy of its state"
            assert np.allclose(rows, expected, atol=1e-3)


def test_a_prompt_goes_on_from_the_longest_beginning(disk: Disk, long_model: Model) -> None:
    with disk.pool(long_model) as pool:
        read(pool, PROMPT)
        read(pool, PROMPT[:N] + text(2, TAIL))
    assert len(disk.files) == 2
    with disk.pool(long_model) as pool:
        assert read(pool, PROMPT + text(3, TAIL))[0] == len(PROMPT)
    assert len(disk.files) == 2, "the longer one replaces the one that it begins with"
    assert disk.restored() == len(PROMPT)
    with disk.pool(long_model) as pool:
        assert read(pool, PROMPT[:N] + PROMPT[N : N + 50] + text(4, 50))[0] == N + 50
        memory = disk.restored()
        assert read(pool, PROMPT[: N - 1])[0] == N - 2
        assert (memory, disk.restored()) == (N + 50, 0), "what memory has is not read from the disk"


def test_a_sequence_that_is_there_is_not_written_again(disk: Disk, long_model: Model) -> None:
    for prompt in (PROMPT, PROMPT, PROMPT[:-20]):
        with disk.pool(long_model) as pool:
            read(pool, prompt)
        (file,) = disk.files
        inode = file.stat().st_ino
    assert file.stat().st_ino == inode
    assert disk.restored() == len(PROMPT) - 1 + len(PROMPT) - 21


def test_what_leaves_memory_is_written_and_goes_on_where_memory_ends(disk: Disk, long_model: Model) -> None:
    first, second = text(1, 600), text(2, 600)
    with disk.pool(long_model, n_cells=768) as pool:
        _, expected = read(pool, first)
        assert pool.make_room(600)
        assert pool.n_kept == 0
        read(pool, second)
        n_known, rows = read(pool, first)
        assert n_known == disk.restored() == 599
        assert np.array_equal(rows, expected)
    with disk.pool(long_model) as pool:
        read(pool, first[:300])
        disk.restored()
        assert read(pool, first)[0] == 599
        assert disk.restored() == 599 - 300


def test_what_was_told_to_be_forgotten_is_not_written(disk: Disk, long_model: Model) -> None:
    with disk.pool(long_model) as pool:
        read(pool, PROMPT)
        pool.forget()
    assert disk.files == []


@pytest.mark.parametrize(
    "damage", ["a flipped bit", "a cut file", "another's content", "nothing in it", "no header"]
)
def test_a_damaged_file_is_deleted_in_one_line(disk: Disk, long_model: Model, damage: str) -> None:
    with disk.pool(long_model) as pool:
        _, expected = read(pool, PROMPT)
    with disk.pool(long_model, key="f" * 16) as pool:
        read(pool, text(5, 100))
    file, other = disk.files
    content = bytearray(file.read_bytes())
    match damage:
        case "a flipped bit":
            content[1000] ^= 4
        case "a cut file":
            del content[-10:]
        case "another's content":
            content = bytearray(other.read_bytes())
        case "no header":
            content[:100] = content[:32] + bytes(68)
        case _:
            content.clear()
    file.write_bytes(content)
    disk.lines.clear()
    with disk.pool(long_model) as pool:
        n_known, rows = read(pool, PROMPT)
        assert n_known == 0
        assert np.allclose(rows, expected, atol=1e-3)
        (line,) = disk.lines
        assert line.startswith(f"{file}: damaged") and line.endswith("; deleted")
    assert disk.files == [file, other], "it is written again"


def test_files_of_others_are_left_alone(disk: Disk, long_model: Model) -> None:
    """Another model's, another type of cache, and what others may have written."""
    with disk.pool(long_model) as pool:
        read(pool, PROMPT)
    kept = disk.files
    with disk.pool(long_model, key="f" * 16) as pool:
        assert read(pool, PROMPT)[0] == 0
    assert {*kept} < {*disk.files}
    assert disk.lines == []
    kept[0].chmod(0o644)
    with disk.pool(long_model) as pool:
        assert read(pool, PROMPT)[0] == 0
    assert f"{kept[0]}: others can read or write it; not used" in disk.lines
    assert kept[0].exists()


def test_a_key_stands_for_all_that_the_bits_depend_on(packable_path: Path) -> None:
    with Model(packable_path) as model, Model(packable_path, kernels=False) as stock:
        keys = [model_key(one, "a", n_ctx=512, n_threads=2) for one in (model, stock)]
        keys += [model_key(model, "b", n_ctx=512, n_threads=2), model_key(stock, "a", n_ctx=512, n_threads=1)]
        model.header = with_cache_type(model.header, "q8_0")
        keys.append(model_key(model, "a", n_ctx=512, n_threads=2))
        assert len({*keys}) == len(keys)
    with Model(tiny("phi3")) as model:
        short, long, longer = (model_key(model, "a", n_ctx=n, n_threads=1) for n in (64, 256, 1024))
        assert short != long == longer


def test_those_unused_for_longest_go_first(disk: Disk, long_model: Model) -> None:
    prompts = [text(seed, N + 1) for seed in range(3)]
    with disk.pool(long_model) as pool:
        read(pool, prompts[0])
        read(pool, prompts[1])
    size = disk.files[0].stat().st_size
    with disk.pool(long_model) as pool:
        read(pool, prompts[0])  # which is used again
    with disk.pool(long_model, limit=2 * size + size // 2) as pool:
        read(pool, prompts[2])
    disk.restored()
    with disk.pool(long_model) as pool:
        assert [read(pool, prompt)[0] for prompt in prompts] == [N, 0, N]


STRANGE = f"{'0' * 16}-{'0' * 32}.state"


@pytest.mark.parametrize("name", ["notes.state", STRANGE, "x.state"])
@pytest.mark.parametrize("kind", ["a file", "a folder", "a pipe", "a link", "a socket"])
def test_what_edgespec_did_not_write_is_neither_counted_nor_deleted(
    disk: Disk, long_model: Model, name: str, kind: str
) -> None:
    with disk.pool(long_model) as pool:
        read(pool, text(1, N + 1))
    (own,) = disk.files
    size, stranger = own.stat().st_size, disk.path / name
    match kind:
        case "a file":
            stranger.write_bytes(b"x" * 10 * size)
        case "a folder":
            stranger.mkdir()
            (stranger / "a").write_text("b")
        case "a pipe":
            os.mkfifo(stranger)
        case "a link":
            (target := disk.path.with_name("elsewhere")).write_bytes(own.read_bytes())
            stranger.symlink_to(target)
        case _:
            os.mknod(stranger, stat.S_IFSOCK | 0o600)
    os.utime(stranger, (0, 0), follow_symlinks=False)
    before = stranger.lstat()
    with disk.pool(long_model, limit=size + size // 2) as pool:
        read(pool, text(2, N + 1))
        assert read(pool, text(2, N + 1))[0] == N
    assert disk.lines == []
    assert not own.exists() and len(disk.files) == 2, "the other one was written"
    assert (stranger.lstat().st_ino, stranger.lstat().st_mtime) == (before.st_ino, 0)


def test_a_limit_below_one_state_keeps_none(disk: Disk, long_model: Model) -> None:
    with disk.pool(long_model, limit=1000) as pool:
        read(pool, PROMPT)
    assert disk.files == []
    assert len(disk.lines) == 1
    assert "the limit, 0 MB, is too small" in disk.lines[0]


def test_files_of_the_format_before_are_not_used_and_make_room(disk: Disk, long_model: Model) -> None:
    disk.path.mkdir(mode=0o700)
    old = disk.path / f"{'0' * 16}-{'0' * 32}-{'1' * 32}.state"
    old.write_bytes(b"edgespec prompt state 1\n" + bytes(1_000_000))
    old.chmod(0o600)
    with disk.pool(long_model, limit=1_000_000) as pool:
        assert read(pool, PROMPT)[0] == 0
    assert not old.exists()
    assert len(disk.files) == 1
    assert disk.lines == []


def test_a_full_disk_is_one_line(disk: Disk, long_model: Model) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        with disk.pool(long_model) as pool:
            resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
            read(pool, PROMPT)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert disk.lines == [f"states of prompts are not kept: {disk.path}: File too large"]
    assert [file.name for file in disk.path.iterdir()] == [".lock"]


def test_a_folder_that_cannot_be_had_is_one_line(disk: Disk, long_model: Model) -> None:
    disk.path.write_text("no folder")
    with disk.pool(long_model) as pool:
        assert read(pool, PROMPT)[0] == read(pool, text(2, 40))[0] == 0
        assert read(pool, PROMPT)[0] == len(PROMPT) - 1, "memory is none of the disk's"
    assert disk.lines == [f"states of prompts are not kept: {disk.path}: File exists"]


# ---- other processes ----


def writer(disk: Disk, start: int, stop: int, limit: int = PLENTY) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITER, str(disk.path), str(start), str(stop), str(limit)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={"PYTHONPATH": python_path()})


def check_files(disk: Disk) -> int:
    """Check that every file is whole; return how many there are."""
    folder = StateFolder(StateRoom(disk.path, PLENTY), disk.lines.append)
    stored = folder.sequences("0" * 16)
    for one in stored:
        (state,) = folder.states(one)
        assert (state == one.tokens[0] % 251).all()
    assert disk.lines == []
    return len(stored)


def test_a_process_killed_while_it_writes_leaves_whole_files(disk: Disk, long_model: Model) -> None:
    with writer(disk, 0, 1 << 30) as process:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if len(disk.files) > 3 and [*disk.path.glob(".edgespec-*.tmp")]:
                break
        process.kill()
    assert check_files(disk) > 3
    with disk.pool(long_model) as pool:
        read(pool, PROMPT)
    assert [*disk.path.glob(".edgespec-*.tmp")] == [], "what it left is deleted"


def test_two_processes_write_into_one_folder(disk: Disk) -> None:
    limit = 10 * (4 << 20) + 100_000
    with writer(disk, 0, 30, limit) as one, writer(disk, 15, 45, limit) as other:
        assert (one.wait(60), other.wait(60)) == (0, 0)
    assert 0 < check_files(disk) <= 10


# ---- whole engines ----


@pytest.mark.parametrize("case", ["a draft model", "a head", "several at once", "no prefix cache"])
def test_a_text_after_a_restore_is_the_same_text(
    tmp_path: Path, tiny_path: Path, tiny_draft_path: Path, case: str
) -> None:
    target, draft = (tiny("qwen35-mtp"), None) if case == "a head" else (tiny_path, tiny_draft_path)
    drafter = "mtp" if case == "a head" else "model"
    options: dict = {"n_threads": 1, "profile": False, "n_ctx": 512, "drafter": drafter}  # type: ignore[type-arg]
    if case == "several at once":
        options |= {"parallel": 2, "prefix_cache": 1 << 20}
    elif case == "no prefix cache":
        options |= {"prefix_cache": None}

    def generate(states: StateRoom | None, n_predict: int = 40) -> tuple[int, tuple[int, ...], int]:
        with Engine(target, draft, states=states, **options) as engine:
            found = engine.generate(PROMPT, params=GREEDY, n_predict=n_predict, gamma=3)
            return found.n_cached, found.token_ids, found.stats.n_drafted

    _, expected, _ = generate(None)
    room = StateRoom(tmp_path / "states", PLENTY)
    assert generate(room, 2)[:2] == (0, expected[:2])
    n_cached, token_ids, n_drafted = generate(room)
    assert n_cached >= len(PROMPT) - 8
    assert token_ids == expected
    assert n_drafted > 0


def test_states_and_nodes_are_refused(tiny_path: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="states: cannot be kept of a target on nodes"):
        Engine(tiny_path, rpc=("127.0.0.1:1",), states=StateRoom(tmp_path, PLENTY))
