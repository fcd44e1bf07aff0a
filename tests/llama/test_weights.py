"""Models: loading, tokenizing, chat templates, vocabularies, memory, quantizing."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from edgespec.drafting.vocabulary_match import vocabulary_difference
from edgespec.errors import EdgespecError, UsageError
from edgespec.llama import backend
from edgespec.llama.backend import llama
from edgespec.llama.gguf_header import check_model_file
from edgespec.llama.quantize import QUANT_TYPES, quantize
from edgespec.llama.session import Session
from edgespec.llama.weights import Model
from edgespec.models.footprint import fits_in_memory, required_bytes
from edgespec.platform.machine import available_bytes
from tiny_gguf import BOS, EOS, IM_END, N_WORDS, write_tiny_gguf

HELLO = [{"role": "user", "content": "hello <|im_end|>"}]

# --- backend


def test_nothing_is_printed_and_errors_are_kept(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = write_tiny_gguf(tmp_path / "odd.gguf", architecture="martian")
    with pytest.raises(EdgespecError, match=r"cannot load it: .*unknown model architecture: 'martian'"):
        Model(path)
    assert "martian" in (backend.last_log_error() or "")
    backend.clear_log()
    assert backend.last_log_error() is None
    assert capfd.readouterr() == ("", "")


def test_quant_types_are_the_library_s() -> None:
    for name, ftype in QUANT_TYPES.items():
        described = llama.llama_ftype_name(ftype).decode().lower()
        stem = name.removesuffix("_s").removesuffix("_m").removesuffix("_l")
        assert stem in described.replace("all ", ""), (name, described)


def test_a_failed_assertion_ends_in_one_line(child_environment: dict[str, str]) -> None:
    program = (
        "from edgespec.llama import backend; import ctypes;"
        "backend.foreign_function('gguf_get_key', None, ctypes.c_void_p, ctypes.c_int64)"
        "(backend.foreign_function('gguf_init_empty', ctypes.c_void_p)(), 7)"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=child_environment, check=False
    )
    assert run.returncode == 1
    assert run.stderr.count("\n") == 1
    assert run.stderr.startswith("edgespec: error: llama.cpp stopped: gguf.cpp:")
    assert "edgespec models verify" in run.stderr


def test_ctrl_c_inside_a_callback_is_not_lost() -> None:
    def interrupted(_progress: float, _data: object) -> bool:
        raise KeyboardInterrupt

    callback = llama.llama_progress_callback(interrupted)
    hook = sys.unraisablehook
    with pytest.raises(KeyboardInterrupt), backend.interruptible() as interruption:
        callback(0.5, None)
        assert interruption.requested
    assert sys.unraisablehook is hook


def test_other_errors_inside_a_callback_are_reported_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    reported = []
    monkeypatch.setattr(sys, "unraisablehook", reported.append)

    def broken(_progress: float, _data: object) -> bool:
        raise RuntimeError

    callback = llama.llama_progress_callback(broken)
    with backend.interruptible() as interruption:
        callback(0.5, None)
    assert len(reported) == 1
    assert not interruption.requested


def test_off_the_main_thread_nothing_is_hooked() -> None:
    seen = []

    def look() -> None:
        with backend.interruptible():
            seen.append(sys.unraisablehook)

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [sys.unraisablehook]


def test_ctrl_c_stops_the_loading(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_callback = llama.llama_progress_callback
    calls = []

    def with_ctrl_c(keep_going: Callable[[float, object], bool]) -> object:
        def progress(fraction: float, data: object) -> bool:
            calls.append(fraction)
            if len(calls) == 1:
                signal.raise_signal(signal.SIGINT)
            return keep_going(fraction, data)

        return make_callback(progress)

    monkeypatch.setattr(llama, "llama_progress_callback", with_ctrl_c)
    with pytest.raises(KeyboardInterrupt):
        Model(tiny_path)
    assert 1 <= len(calls) <= 2
    monkeypatch.undo()
    Model(tiny_path).close()


# --- loading and closing


def test_properties(tiny_target: Model, tiny_path: Path) -> None:
    model = tiny_target
    assert (model.path, model.name) == (tiny_path, "tiny 1")
    assert (model.n_vocab, model.n_ctx_train) == (N_WORDS + 4, 512)
    assert model.n_params * 4 == model.size_bytes < tiny_path.stat().st_size
    assert "F32" in model.ftype
    assert "llama" in model.description
    assert (model.bos, model.eos, model.eot, model.add_bos) == (BOS, EOS, EOS, False)
    assert (model.tokenizer_type, model.can_rewind) == ("BPE", True)
    assert [model.is_eog(token) for token in (EOS, IM_END, BOS, 5)] == [True, True, False, False]
    assert [model.is_control(token) for token in (EOS, BOS, 5)] == [True, True, False]


@pytest.mark.parametrize("options", [{"repack": False}, {"check_tensors": False}])
def test_ways_of_loading(tiny_path: Path, options: dict[str, bool]) -> None:
    with Model(tiny_path, header=check_model_file(tiny_path), **options) as model:
        assert model.n_vocab == N_WORDS + 4


def test_impossible_weights_are_refused(tmp_path: Path, tiny_path: Path) -> None:
    data = bytearray(tiny_path.read_bytes())
    data[-4096:] = b"\xff" * 4096  # NaN
    path = tmp_path / "nan.gguf"
    path.write_bytes(data)
    with pytest.raises(EdgespecError, match="invalid data"):
        Model(path)


def test_close_twice_then_use(tiny_path: Path) -> None:
    model = Model(tiny_path)
    model.close()
    model.close()
    for use in (
        lambda: model.handle,
        lambda: model.piece(1),
        lambda: model.is_eog(1),
        lambda: model.tokenize("a", add_special=False, parse_special=False),
    ):
        with pytest.raises(EdgespecError, match="closed"):
            use()


def test_closing_a_model_closes_its_sessions(tiny_path: Path) -> None:
    model = Model(tiny_path)
    sessions = [Session(model, n_ctx=32, n_threads=1) for _ in range(2)]
    sessions[0].close()
    model.close()
    for session in sessions:
        session.close()
        with pytest.raises(EdgespecError, match="closed"):
            session.eval([1])


@pytest.mark.parametrize("order", [("model", "session"), ("session", "model"), ("cycle",)])
def test_collected_in_any_order(tiny_path: Path, order: tuple[str, ...]) -> None:
    alive: dict[str, object] = {"model": Model(tiny_path)}
    session = Session(alive["model"], n_ctx=32, n_threads=1)
    session.eval([1])
    alive["session"] = session
    if order == ("cycle",):
        session.cycle = alive  # type: ignore[attr-defined]
        del alive, session
        gc.collect()
        return
    del session
    for name in order:
        del alive[name]
        gc.collect()


def test_left_open_at_exit(tiny_path: Path, child_environment: dict[str, str]) -> None:
    program = (
        "import sys; from edgespec.llama.weights import Model; from edgespec.llama.session import Session;"
        "m = Model(sys.argv[1]); s, t = (Session(m, n_ctx=32, n_threads=n) for n in (1, 2));"
        "s.eval([1, 2])"
    )
    run = subprocess.run(
        [sys.executable, "-c", program, str(tiny_path)],
        capture_output=True,
        text=True,
        env=child_environment,
        check=False,
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


# --- tokens


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "the cat and\tthe\r\n\nother",
        "ñandú, naïve",
        "日本語のテキスト",
        "😀 👩‍👩‍👧 🏳️‍🌈",
        "a\0b",
        "<|im_end|>",
        "the " * 50_000,
    ],
)
def test_text_round_trips(tiny_target: Model, text: str) -> None:
    tokens = tiny_target.tokenize(text, add_special=False, parse_special=False)
    assert b"".join(map(tiny_target.piece, tokens)).decode() == text
    assert all(0 <= token < N_WORDS for token in tokens)


def test_special_tokens(tmp_path: Path, tiny_target: Model) -> None:
    assert tiny_target.tokenize("<|im_end|>", add_special=True, parse_special=True) == [IM_END]
    assert tiny_target.piece(IM_END) == b""
    assert tiny_target.piece(IM_END, special=True) == b"<|im_end|>"
    with Model(write_tiny_gguf(tmp_path / "bos.gguf", add_bos=True)) as model:
        assert model.add_bos
        assert model.tokenize("a", add_special=True, parse_special=True)[0] == BOS
        assert BOS not in model.tokenize("a", add_special=False, parse_special=True)


def test_a_piece_longer_than_the_buffer(tmp_path: Path) -> None:
    with Model(write_tiny_gguf(tmp_path / "long.gguf", texts={7: "x" * 1000})) as model:
        assert model.piece(7) == b"x" * 1000
        assert model.piece(8) != b""


def test_invalid_text_and_tokens(tiny_target: Model) -> None:
    with pytest.raises(UsageError, match="not valid Unicode at character 1"):
        tiny_target.tokenize("a\udcff", add_special=False, parse_special=False)
    for token in (-1, tiny_target.n_vocab):
        with pytest.raises(ValueError, match="not in"):
            tiny_target.piece(token)


# --- chat templates


def test_render_and_tokenize_chat(tiny_target: Model) -> None:
    prompt = "<|im_start|>user\nhello <|im_end|><|im_end|>\n<|im_start|>assistant\n"
    assert tiny_target.render_chat(HELLO) == prompt
    tokens = tiny_target.tokenize_chat(HELLO)
    assert b"".join(tiny_target.piece(token, special=True) for token in tokens).decode() == prompt


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (None, "has no chat template"),
        ("{{ raise_exception('System role not supported') }}", "System role not supported"),
        ("{{ 1 / 0 }}", "division by zero"),
    ],
)
def test_broken_templates(tmp_path: Path, template: str | None, reason: str) -> None:
    with Model(write_tiny_gguf(tmp_path / "model.gguf", chat_template=template)) as model:
        with pytest.raises(EdgespecError, match=reason) as caught:
            model.tokenize_chat(HELLO)
        assert "a raw prompt needs none" in str(caught.value)
        assert "\n" not in str(caught.value)


# --- vocabularies


def test_equal_vocabularies(tiny_target: Model, tiny_draft: Model) -> None:
    assert vocabulary_difference(tiny_target, tiny_draft) == ""


def test_padding_is_allowed(tmp_path: Path, tiny_target: Model) -> None:
    with Model(write_tiny_gguf(tmp_path / "padded.gguf", n_padding=12)) as padded:
        assert padded.n_vocab == N_WORDS + 16
        for pair in ((tiny_target, padded), (padded, tiny_target)):
            assert vocabulary_difference(*pair) == ""


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"texts": {65: "@@"}}, "first difference at id 65: "),
        ({"texts": {0: "a!"}, "n_padding": 3}, "first difference at id 0: '\\x00' against 'a!'"),
        ({"kinds": {65: 3}}, "id 65 is no control token in the target, a control token in the draft"),
        ({"eos": IM_END}, f"EOS is {EOS} '<|endoftext|>' against {IM_END} '<|im_end|>'"),
        ({"add_bos": True}, f"BOS is none against {BOS} '<|begin|>'"),
    ],
)
def test_mismatch_states_both_facts(tmp_path: Path, tiny_target: Model, changes: dict, reason: str) -> None:
    changes = {"texts": {}, **changes}
    with Model(write_tiny_gguf(tmp_path / "other.gguf", **changes)) as other:
        difference = vocabulary_difference(tiny_target, other)
        facts = f"target has {N_WORDS + 4} tokens (BPE), draft has {other.n_vocab} (BPE); "
        assert difference.startswith(facts)
        assert reason in difference


# --- memory


def fake_machine(root: Path, available_kb: int | None, cgroups: dict[str, tuple[str, int, int]]) -> Path:
    """A root with /proc and cgroups: path -> (memory.max, memory.current, cached file bytes)."""
    (root / "proc/self").mkdir(parents=True)
    if available_kb is not None:
        (root / "proc/meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable:   {available_kb} kB\n")
    (root / "proc/self/cgroup").write_text("1:name=systemd:/x\n0::/a/b\n")
    for path, (limit, used, cached) in cgroups.items():
        group = root / "sys/fs/cgroup" / path
        group.mkdir(parents=True, exist_ok=True)
        (group / "memory.max").write_text(f"{limit}\n")
        (group / "memory.current").write_text(f"{used}\n")
        (group / "memory.stat").write_text(f"anon 5\ninactive_file {cached}\nactive_file 0\n")
    return root


@pytest.mark.parametrize(
    ("available_kb", "cgroups", "expected"),
    [
        (1000, {}, 1000 * 1024),
        (1000, {"a/b": ("max", 5, 5), "a": ("max", 5, 5)}, 1000 * 1024),
        (1000, {"a/b": ("500000", 200000, 50000)}, 350000),
        (1000, {"a/b": ("max", 1, 0), "a": ("400000", 100000, 0)}, 300000),
        (1000, {"a": ("100", 300, 0)}, 0),
        (None, {"a": ("400000", 100000, 0)}, 300000),
        (None, {}, None),
    ],
)
def test_available_memory(
    tmp_path: Path, available_kb: int | None, cgroups: dict, expected: int | None
) -> None:
    assert available_bytes(fake_machine(tmp_path, available_kb, cgroups)) == expected


def test_models_that_do_not_fit_are_refused_with_figures(tmp_path: Path, tiny_path: Path) -> None:
    header = check_model_file(tiny_path)
    need = required_bytes(header, 512)
    assert need > header.file_bytes + header.kv_bytes(512)
    enough = fake_machine(tmp_path / "enough", (64 << 10) + 2 * need // 1024 + 1, {})
    fits_in_memory([(header, 512), (header, 512)], enough)
    short = fake_machine(tmp_path / "short", 65536 + need // 1024, {})
    with pytest.raises(EdgespecError) as caught:
        fits_in_memory([(header, 512), (header, 512)], short)
    message = str(caught.value)
    assert message.startswith("not enough memory: about 0.0")
    assert message.count("target.gguf") == 2
    assert "for 512 tokens of context" in message
    assert "0.07 GiB available" in message
    fits_in_memory([(header, 1 << 30)], fake_machine(tmp_path / "unknown", None, {}))


def test_this_machine_is_understood() -> None:
    assert (available_bytes() or 0) > 1 << 20


# --- quantize


@pytest.fixture(scope="module")
def wide_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of 32 and 256 numbers: every type's blocks divide one of them."""
    directory = tmp_path_factory.mktemp("wide")
    return write_tiny_gguf(directory / "wide.gguf", n_layer=1, n_embd=256, n_ff=256)


@pytest.mark.parametrize("name", ["q8_0", "q4_0", "q4_k_m", "f16"])
@pytest.mark.parametrize("pure", [False, True])
def test_quantize_round_trip(tmp_path: Path, wide_path: Path, name: str, pure: bool) -> None:
    path = tmp_path / "out.gguf"
    path.write_bytes(b"older")
    quantize(wide_path, path, name, pure=pure, n_threads=1)
    assert path.stat().st_size < wide_path.stat().st_size
    with Model(path) as model, Model(wide_path) as source, Session(model, n_ctx=32, n_threads=1) as session:
        assert name.partition("_")[0] in model.ftype.lower()
        assert vocabulary_difference(source, model) == ""
        assert session.eval([1, 2, 3]).shape == (1, model.n_vocab)
    assert list(tmp_path.iterdir()) == [path]


def test_requantize(tmp_path: Path, wide_path: Path) -> None:
    quantize(wide_path, tmp_path / "a.gguf", "q8_0")
    quantize(tmp_path / "a.gguf", tmp_path / "b.gguf", "q4_0", pure=True)
    assert (tmp_path / "b.gguf").stat().st_size < (tmp_path / "a.gguf").stat().st_size


def test_quantize_failures_leave_nothing(tmp_path: Path, tiny_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(tiny_path.read_bytes()[:9000])
    out = tmp_path / "out" / "q.gguf"
    with pytest.raises(EdgespecError, match=r"cannot write to .*No such file"):
        quantize(tiny_path, out, "q8_0")
    out.parent.mkdir()
    with pytest.raises(EdgespecError, match=r"cannot quantize .*broken\.gguf to q8_0: ") as caught:
        quantize(broken, out, "q8_0")
    assert "\n" not in str(caught.value)
    with pytest.raises(UsageError, match="unknown quantization type 'q9_9'; known: q4_0"):
        quantize(tiny_path, out, "q9_9")
    with pytest.raises(UsageError, match="needs another name"):
        quantize(tiny_path, tiny_path, "q8_0")
    assert list(out.parent.iterdir()) == []


def test_interrupted_quantize_leaves_nothing(
    tmp_path: Path, wide_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    children = []
    popen = subprocess.Popen

    class Interrupted(popen):  # type: ignore[misc,valid-type]
        def wait(self, timeout: float | None = None) -> int:
            if self not in children:
                children.append(self)
                raise KeyboardInterrupt
            return super().wait(timeout)

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        quantize(wide_path, tmp_path / "q.gguf", "q8_0")
    assert children[0].returncode == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []


# --- the real pair


@pytest.mark.pair
def test_real_pair_speaks_one_vocabulary(pair: tuple[Path, Path]) -> None:
    with Model(pair[0]) as target, Model(pair[1]) as draft:
        assert vocabulary_difference(target, draft) == ""
        text = "def f(x):\n\treturn '日本 😀'"
        tokens = target.tokenize(text, add_special=False, parse_special=False)
        assert tokens == draft.tokenize(text, add_special=False, parse_special=False)
        assert b"".join(map(target.piece, tokens)).decode() == text
        assert "<|im_start|>user\nhello" in target.render_chat(HELLO)
