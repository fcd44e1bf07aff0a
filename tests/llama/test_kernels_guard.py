"""The kernels' guards: whatever is wrong with the plugin, the text comes from the stock kernels."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from command_line import copy_self_test
from edgespec.llama import kernels as room
from edgespec.llama.backend import foreign_function
from edgespec.llama.kernels import Kernels
from edgespec.llama.packed_file import PackedTensor
from edgespec.llama.session import Session
from edgespec.llama.weights import Model
from fake_plugin import compile_library, fake_plugin

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run(tmp_path: Path, child_environment: dict[str, str]) -> Run:
    """Run the command line with `plugin` in the plugin's place, each test with a cache of its own."""

    def run(plugin: Path, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
        program = (
            "import sys; from pathlib import Path; from edgespec.llama import kernels, selftest\n"
            "selftest.TIMEOUT_S = 4.0 if 'hangs' in sys.argv[1] else 40.0\n"
            "kernels.plugin_path = lambda: Path(sys.argv[1])\n"
            "from edgespec.cli import main; sys.exit(main(sys.argv[2:]))"
        )
        return subprocess.run(
            [sys.executable, "-c", program, str(plugin), *map(str, arguments)],
            capture_output=True,
            text=True,
            env={
                **child_environment,
                "XDG_CACHE_HOME": str(tmp_path / "cache"),
                "EDGESPEC_KERNELS": "auto",
                "EDGESPEC_KERNELS_ISA": "",
                **environment,
            },
            timeout=60,
            check=False,
        )

    return run


@pytest.fixture
def generate(run: Run, tiny_path: Path) -> Run:
    """Generate a little, greedily, with the tiny model."""
    options = ("run", "-t", tiny_path, "--drafter", "none", "abc", "-n", 8, "--temp", 0)

    def generate(plugin: Path, *more: object, **environment: str) -> subprocess.CompletedProcess[str]:
        return run(plugin, *options, *more, **environment)

    return generate


def fell_back(process: subprocess.CompletedProcess[str], *words: str) -> None:
    """The text came, and one line says why not from edgespec's kernels."""
    assert process.returncode == 0, process.stderr
    assert process.stdout.strip()
    (line,) = process.stderr.splitlines()
    assert line.startswith("edgespec: stock kernels: ")
    for word in words:
        assert word in line


@pytest.mark.parametrize(
    ("init", "words"),
    [
        ("crashes", ["the self-test of edgespec's kernels crashed (SIGSEGV)"]),
        ("hangs", ["the self-test of edgespec's kernels did not end within 4 s"]),
        ("is illegal", ["the self-test of edgespec's kernels crashed (SIGILL)"]),
        ("of another version", ["incompatible API version"]),
        ("refuses", ["the self-test of edgespec's kernels failed: ggml 9.9.9 is unknown"]),
        ("packs nothing", ["failed: nothing was packed"]),
    ],
)
def test_a_bad_plugin_is_one_line(generate: Run, tmp_path: Path, init: str, words: list[str]) -> None:
    refusal = "ggml 9.9.9 is unknown" if init == "refuses" else ""
    plugin = fake_plugin(tmp_path / f"{init}.so", init, refusal=refusal)
    first = generate(plugin, "--no-stats")
    fell_back(first, *words)
    again = generate(plugin, "--no-stats")  # from the cache: a hang would be waited for once more
    fell_back(again, *words)
    assert again.stdout == first.stdout


def test_no_plugin(generate: Run, tmp_path: Path) -> None:
    fell_back(generate(tmp_path / "none.so", "--no-stats"), "not installed", "none.so")


def test_an_old_plugin(generate: Run, tmp_path: Path) -> None:
    plugin = fake_plugin(tmp_path / "old.so", old=True)
    fell_back(generate(plugin, "--no-stats"), "es_kernels_packed", "install edgespec again")


def test_no_library_at_all(generate: Run, tmp_path: Path) -> None:
    plugin = tmp_path / "text.so"
    plugin.write_text("not a library")
    fell_back(generate(plugin, "--no-stats"), "text.so", "install edgespec again")


def test_a_processor_without_avx2(generate: Run, tmp_path: Path) -> None:
    fell_back(generate(fake_plugin(tmp_path / "p.so", isa=""), "--no-stats"), "AVX2")


@pytest.mark.parametrize("how", ["option", "environment"])
def test_off_is_no_news(generate: Run, tmp_path: Path, how: str) -> None:
    """Nothing is loaded, tested or said."""
    plugin = fake_plugin(tmp_path / "p.so", "crashes")
    if how == "option":
        process = generate(plugin, "--json", "--kernels", "off")
    else:
        process = generate(plugin, "--json", EDGESPEC_KERNELS="off")
    assert (process.returncode, process.stderr) == (0, "")
    assert json.loads(process.stdout)["kernels"] == "stock"
    assert not (tmp_path / "cache").exists()


def test_the_statistics_name_the_kernels(generate: Run, tmp_path: Path) -> None:
    assert "kernels  stock\n" in generate(tmp_path / "none.so", "--stats", "full").stderr


@pytest.mark.parametrize(
    ("arguments", "environment", "words"),
    [
        (["--kernels", "fast"], {}, ["--kernels", "fast"]),
        ([], {"EDGESPEC_KERNELS": "on"}, ["EDGESPEC_KERNELS=on", "auto or off"]),
        ([], {"EDGESPEC_KERNELS_ISA": "avx9"}, ["EDGESPEC_KERNELS_ISA=avx9", "avx-vnni"]),
    ],
)
def test_bad_values(
    generate: Run, tmp_path: Path, arguments: list[str], environment: dict[str, str], words: list[str]
) -> None:
    process = generate(fake_plugin(tmp_path / "p.so"), *arguments, **environment)
    assert (process.returncode, process.stdout) == (2, "")
    assert process.stderr.count("\n") == 1
    for word in words:
        assert word in process.stderr


# ---- a model and its kernels, with the plugin's switch watched ----


class Recorder:
    """Takes the place of the plugin: a model's loading packs `n` tensors while it is enabled."""

    isa = "avx2"

    def __init__(self) -> None:
        self.switched: list[bool] = []
        self.loading = threading.Lock()
        self.tensors: list[PackedTensor] = []

    def enable(self, on: bool) -> None:
        self.switched.append(on)

    def hidden_states(self) -> tuple[object, object]:
        return object(), object()

    def n_packed(self) -> int:
        if self.switched and self.switched[-1]:
            self.tensors.append(PackedTensor(f"blk.{len(self.tensors)}", "q4_K", 512, 512, 150_000))
        return len(self.tensors)

    def packed(self, start: int) -> tuple[PackedTensor, ...]:
        return tuple(self.tensors[start:])


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    made = Recorder()
    monkeypatch.setattr(room, "_loaded", Kernels("", plugin=made))  # type: ignore[arg-type]
    yield made


def test_a_model_is_packed_unless_it_is_not_to_be(recorder: Recorder, tiny_path: Path) -> None:
    with Model(tiny_path, kernels=False) as stock:
        assert recorder.switched == [False]
        assert (stock.packed, stock.uses_kernels) == ((), False)
    with Model(tiny_path) as packed, Session(packed, n_ctx=32, n_threads=1) as session:
        assert recorder.switched == [False, True]
        assert packed.uses_kernels
        assert {tensor.type for tensor in packed.packed} == {"q4_K"}
        session.eval([1, 2, 3])


def test_without_the_kernels_nothing_is_switched(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "_loaded", None)
    monkeypatch.setattr(room, "load", lambda: pytest.fail("must not be loaded"))
    with Model(tiny_path, kernels=False) as model:
        assert not model.uses_kernels


def test_models_load_one_at_a_time(recorder: Recorder, tiny_path: Path) -> None:
    """Each thread finds its own switch set from the beginning of its loading to the end."""
    seen: list[tuple[bool, ...]] = []

    def load(wanted: bool) -> None:
        for _ in range(20):
            with room.packing(wanted):
                n = len(recorder.switched)
                with Model(tiny_path, kernels=wanted):
                    pass
                seen.append((wanted, *recorder.switched[n - 1 : n + 1]))

    threads = [threading.Thread(target=load, args=(wanted,)) for wanted in (True, False)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 40
    assert all(len(set(values)) == 1 for values in seen)


# ---- the real plugin ----


@pytest.mark.parametrize("isa", ["", "avx2", "avx2-tiles"])
def test_the_real_kernels_are_used_and_named(
    kernels: Kernels, run: Run, packable_path: Path, isa: str
) -> None:
    """Plain and speculative text are the same, as the logits are, with a prompt that fills tiles."""
    options = ("run", "-t", packable_path, "abc" * 12, "-n", 40, "--temp", 0, "--json")
    texts = []
    for drafting in (
        ("--drafter", "none"),
        ("-d", packable_path, "--gamma", 2),
        ("-d", packable_path, "--gamma", 7),
    ):
        process = run(room.plugin_path(), *options, *drafting, EDGESPEC_KERNELS_ISA=isa)
        assert (process.returncode, process.stderr) == (0, "")
        result = json.loads(process.stdout)
        assert result["kernels"] == (isa or room.Plugin(room.plugin_path()).isa)
        texts.append(result["token_ids"])
    assert texts[0] == texts[1] == texts[2]
    process = run(room.plugin_path(), *options, "--drafter", "none", "--kernels", "off")
    assert json.loads(process.stdout)["kernels"] == "stock"


@pytest.mark.parametrize(
    ("kept", "used"), [((2, 16384), (2, 16384)), ((1, 4096), (1, 4096)), ((7, -5), (2, 8192))]
)
def test_the_kept_choice_of_a_prefetch_is_used(
    kernels: Kernels,
    tmp_path: Path,
    child_environment: dict[str, str],
    kept: tuple[int, int],
    used: tuple[int, int],
) -> None:
    """One that makes no sense leaves the default."""
    program = (
        "import ctypes\n"
        "from edgespec.llama import kernels\n"
        "from edgespec.llama.kernel_timing import CPrefetch\n"
        "library = ctypes.CDLL(str(kernels.load().plugin.path))\n"
        "library.es_kernels_prefetch.restype = CPrefetch\n"
        "found = library.es_kernels_prefetch(); print(found.level, found.bytes)"
    )

    copy_self_test(tmp_path)
    level, ahead = kept
    for file in (tmp_path / "edgespec").iterdir():
        answer = json.loads(file.read_text())
        answer["choice"] |= {"prefetch": {"level": level, "bytes": ahead}, "reason": ""}
        file.write_text(json.dumps(answer))
    process = subprocess.run(
        [sys.executable, "-c", program],
        env={**child_environment, "XDG_CACHE_HOME": str(tmp_path), "EDGESPEC_KERNELS": "auto"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert process.stdout == f"{used[0]} {used[1]}\n"


@pytest.mark.parametrize(
    ("answer", "isa", "why"),
    [
        (0, "amx-int8", ""),
        (0, "avx2", "avx2 is used"),
        (-1, "avx2", "this processor has none"),
        (errno.EINVAL, "avx512-bf16", "5.16"),  # an older Linux does not know the question
        (errno.EOPNOTSUPP, "avx512-bf16", "this Linux gives none"),
        (errno.EPERM, "avx512-bf16", "seccomp"),
        (errno.ENOSPC, "avx512-bf16", "signal stack"),
        (errno.ENOMEM, "avx512-bf16", os.strerror(errno.ENOMEM)),
    ],
)
def test_why_there_are_no_tile_registers(answer: int, isa: str, why: str) -> None:
    assert (why in room.why_no_tiles(answer, isa)) if why else not room.why_no_tiles(answer, isa)


def test_a_model_with_nothing_to_pack_is_stock(kernels: Kernels, generate: Run, tmp_path: Path) -> None:
    copy_self_test(tmp_path / "cache")
    process = generate(room.plugin_path(), "--json")
    assert (process.returncode, process.stderr) == (0, "")
    assert json.loads(process.stdout)["kernels"] == "stock"


def test_stock_and_packed_models_side_by_side(kernels: Kernels, packable_path: Path) -> None:
    """Neither's logits depend on the other; a stock model's are those of a process without the plugin."""
    tokens = list(range(20))

    def logits(model: Model) -> np.ndarray:
        with Session(model, n_ctx=32, n_threads=2) as session:
            return session.eval(tokens, n_logits=20).copy()

    program = (
        "import sys; from edgespec.llama.weights import Model; from edgespec.llama.session import Session\n"
        "with Model(sys.argv[1]) as model, Session(model, n_ctx=32, n_threads=2) as session:\n"
        "    sys.stdout.buffer.write(session.eval(range(20), n_logits=20).tobytes())"
    )
    alone = subprocess.run(
        [sys.executable, "-c", program, packable_path],
        capture_output=True,
        env={**os.environ, "EDGESPEC_KERNELS": "off"},
        check=True,
    ).stdout
    with (
        Model(packable_path) as packed,
        Model(packable_path, kernels=False) as stock,
        Model(packable_path) as third,
    ):
        assert packed.uses_kernels
        assert not stock.uses_kernels
        assert packed.packed == third.packed
        first = logits(packed)
        assert logits(stock).tobytes() == alone
        assert np.array_equal(logits(third), first)
        third.close()
        assert np.array_equal(logits(packed), first)


FAKE_GGML = """
#include <stddef.h>
static const char *ops[] = {OPS}, *types[] = {TYPES}, *glu_ops[] = {GLU_OPS},
    *unary_ops[] = {UNARY_OPS};
const char *ggml_version(void) { return "VERSION"; }
size_t ggml_tensor_overhead(void) { return OVERHEAD; }
const char *ggml_op_name(int op) { return ops[op]; }
const char *ggml_type_name(int type) { return types[type]; }
const char *ggml_glu_op_name(int op) { return glu_ops[op]; }
const char *ggml_unary_op_name(int op) { return unary_ops[op]; }
void ggml_graph_n_nodes(void) {}
void ggml_graph_node(void) {}
void ggml_backend_buffer_init(void) {}
void ggml_backend_buft_is_host(void) {}
void ggml_nbytes(void) {}
void ggml_backend_cpu_buffer_type(void) {}
"""

ASK = """
import ctypes, sys
ggml = ctypes.CDLL(sys.argv[1])
plugin = ctypes.CDLL(sys.argv[2])
plugin.ggml_backend_init.restype = ctypes.c_void_p
plugin.es_kernels_refusal.restype = ctypes.c_char_p
print(bool(plugin.ggml_backend_init()), plugin.es_kernels_refusal().decode())
"""


def _names(function: str, n: int) -> str:
    """The first n names that the real library gives, as C strings."""
    name = foreign_function(function, ctypes.c_char_p, ctypes.c_int)
    return ", ".join(f'"{(name(i) or b"").decode()}"' for i in range(n))


@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        (None, "True"),
        (("VERSION", "9.9.9"), "False ggml 9.9.9 "),
        (("OVERHEAD", "376"), "False ggml's tensors have 376 bytes"),
        (('"MUL_MAT"', '"MUL_MAT_2"'), "False .*MUL_MAT"),
        (('"q4_K"', '"q4_X"'), "False .*q4_K"),
        (("ggml_graph_node(", "ggml_graph_other("), "False .*ggml_graph_node"),
    ],
)
def test_the_real_plugin_refuses_a_ggml_it_does_not_know(
    kernels: Kernels, tmp_path: Path, change: tuple[str, str] | None, refusal: str
) -> None:
    """In a process whose libggml-base is a fake that is like the real one but for `change`."""
    assert kernels.plugin
    words = {
        "GLU_OPS": _names("ggml_glu_op_name", 7),
        "UNARY_OPS": _names("ggml_unary_op_name", 17),
        "OPS": _names("ggml_op_name", 101),
        "TYPES": _names("ggml_type_name", 43),
    }
    source = FAKE_GGML
    for word, text in words.items():
        source = source.replace("{" + word + "}", "{" + text + "}")
    if change:
        assert change[0] in source
        source = source.replace(*change)
    version = foreign_function("ggml_version", ctypes.c_char_p)().decode()
    overhead = foreign_function("ggml_tensor_overhead", ctypes.c_size_t)()
    source = source.replace("VERSION", version).replace("OVERHEAD", str(overhead))
    library = compile_library(source, tmp_path / "libggml-base.so.0", "-Wl,-soname,libggml-base.so.0")
    asked = subprocess.run(
        [sys.executable, "-c", ASK, str(library), str(kernels.plugin.path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert asked.returncode == 0, asked.stderr
    assert re.match(refusal, asked.stdout), asked.stdout
