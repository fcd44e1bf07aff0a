"""llama.cpp's programs: fakes that print what the real ones printed, and the real ones where they are."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edgespec import Engine, SamplingParams
from edgespec.apps.bench.measure import (
    DRAFTED_PROGRAM,
    PLAIN_PROGRAM,
    BenchSettings,
    LlamaCpp,
    LlamaServer,
    rendered,
)
from edgespec.apps.bench.runs import Run
from edgespec.apps.bench.suites import Prompt
from edgespec.errors import EdgespecError
from fake_llama_cpp import DRAFTED_LOG, PLAIN_LOG, asked, fake, option
from server_app import on_a_port, serving
from tiny_gguf import write_tiny_gguf

NO_MODEL_LOG = """\
0.00.002.581 E gguf_init_from_file: failed to open GGUF file '/none.gguf' (No such file or directory)
0.00.002.742 E cmn  common_init_: failed to load model '/none.gguf'
0.00.002.745 E llama_completion: error: unable to create context
"""
PROMPT = Prompt("own/1", "code", "<|im_start|>user\nWrite a quicksort.\\n<|im_end|>\n<|im_start|>assistant\n")
SETTINGS = BenchSettings(variants=(), n_predict=64)


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A directory with both programs, that print what the real ones printed."""
    directory = tmp_path / "bin"
    directory.mkdir()
    fake(directory / PLAIN_PROGRAM, out="Certainly! The sub-\n\n", log=PLAIN_LOG)
    fake(directory / DRAFTED_PROGRAM, out=f"\n\n{PROMPT.text}Sure!\n\n\n\n", log=DRAFTED_LOG)
    return directory


def opened(directory: Path, settings: BenchSettings = SETTINGS, **changed: Any) -> LlamaCpp:
    """Return the programs on a target without a chat template."""
    target = SimpleNamespace(path=Path("target.gguf"), chat_template=None)
    engine: Any = SimpleNamespace(target=target, n_threads=2)
    options: dict[str, Any] = {"draft": Path("draft.gguf"), "n_ctx": 512, "gammas": (3,)} | changed
    return LlamaCpp(directory, engine, settings=settings, **{"timeout_s": 60.0} | options)


def plain_run(directory: Path, settings: BenchSettings = SETTINGS, round_: int = 0) -> Run:
    return next(opened(directory, settings).runs(PROMPT, round_))


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_plain_run(programs: Path):
    assert plain_run(programs, round_=2) == Run(
        prompt="own/1",
        category="code",
        variant="llama.cpp plain",
        round=2,
        prompt_tokens=36,
        tokens=64,
        total_s=pytest.approx(0.39071 + 2.13638 + 0.01247),
        ttft_s=pytest.approx(0.39071),
        prefill_s=pytest.approx(0.39071),
    )


def test_drafted_run(programs: Path):
    assert list(opened(programs).runs(PROMPT, 1))[1] == Run(
        prompt="own/1",
        category="code",
        variant="llama.cpp model-3",
        round=1,
        prompt_tokens=36,
        tokens=67,
        total_s=pytest.approx(0.496 + 2.856),
        ttft_s=0.496,
        prefill_s=0.496,
    )


def test_end_of_generation_token_does_not_count(programs: Path):
    log = PLAIN_LOG.replace("63 runs", "20 runs")
    fake(programs / PLAIN_PROGRAM, out="Yes [end of text]\n\n\n", log=log)
    fake(programs / DRAFTED_PROGRAM, log=DRAFTED_LOG.replace("decoded   67", "decoded   21"))
    assert [run.tokens for run in opened(programs).runs(PROMPT, 0)] == [20, 20]


def test_prompt_goes_by_a_file_as_it_is(programs: Path):
    list(opened(programs).runs(PROMPT, 0))
    for name in (PLAIN_PROGRAM, DRAFTED_PROGRAM):
        call = asked(programs / name)
        assert call["files"]["-f"] == PROMPT.text + "\n", "the programs take one newline away"
        assert "--no-escape" in call["argv"]
        assert not Path(option(call["argv"], "-f")).exists(), "left behind"
        assert not Path(call["cwd"]).exists(), "left behind"


def test_options(programs: Path):
    list(opened(programs, n_ctx=4096, gammas=(5,), options=("-fa", "off")).runs(PROMPT, 0))
    argv = asked(programs / PLAIN_PROGRAM)["argv"]
    assert option(argv, "-m") == str(Path("target.gguf").absolute())
    assert [option(argv, name) for name in ("-t", "-c", "-n")] == ["2", "4096", "64"]
    assert option(argv, "-fa") == "off"
    assert {"-no-cnv", "--no-display-prompt", "--simple-io", "--perf"} <= set(argv)
    argv = asked(programs / DRAFTED_PROGRAM)["argv"]
    assert option(argv, "-md") == str(Path("draft.gguf").absolute())
    assert [option(argv, name) for name in ("-t", "-td", "-c", "-n")] == ["2", "2", "4096", "63"]
    assert option(argv, "--spec-type") == "draft-simple"
    assert option(argv, "--spec-draft-n-max") == "5"
    assert option(argv, "-b") == "4096", "else a long prompt is refused"


def test_tokens_are_chosen_as_edgespec_does(programs: Path):
    def given(temperature: float, seed: int, round_: int) -> dict[str, float]:
        settings = BenchSettings(variants=(), n_predict=64, temperature=temperature, seed=seed)
        plain_run(programs, settings, round_)
        argv = asked(programs / PLAIN_PROGRAM)["argv"]
        return {
            name: float(option(argv, name)) for name in ("--temp", "--top-k", "--top-p", "--min-p", "--seed")
        }

    params = SamplingParams(temperature=0.7)
    greedy, random = given(0.0, 3, 0), given(0.7, 3, 2)
    assert (greedy["--temp"], greedy["--top-k"]) == (0, 1)
    assert list(random.values()) == [0.7, params.top_k, params.top_p, params.min_p, 5]
    assert given(0.7, 2**64 - 1, 0)["--seed"] < 2**32 - 1, "that one means any seed"


def test_without_a_draft_only_plain(programs: Path):
    (programs / DRAFTED_PROGRAM).unlink()
    assert [run.variant for run in opened(programs, draft=None).runs(PROMPT, 0)] == ["llama.cpp plain"]


@pytest.mark.parametrize(
    ("says", "line"),
    [
        (
            {"log": NO_MODEL_LOG, "code": 1},
            "llama-completion ended with code 1: llama_completion: error: unable to create context",
        ),
        (
            {"log": "error: invalid argument: --perf\n", "code": 1},
            "llama-completion ended with code 1: error: invalid argument: --perf",
        ),
        ({"out": "only here\n\n", "code": 3}, "llama-completion ended with code 3: only here"),
        ({"code": 1}, "llama-completion ended with code 1: no output"),
        (
            {"log": "0.00.001.153 I loading\n0.00.001.200 I \n\n", "code": 1},
            "llama-completion ended with code 1: loading",
        ),
        ({"signal": signal.SIGSEGV}, f"llama-completion ended with code -{int(signal.SIGSEGV)}: no output"),
        ({}, "llama-completion did not say how long it took; its last line: no output"),
        (
            {"log": "\xff\xfe\x00 garbage \x80\n"},
            "llama-completion did not say how long it took; its last line: \ufffd\ufffd\x00 garbage \ufffd",
        ),
        (
            {"out": PLAIN_LOG, "log": "quiet\n"},  # as the model may write
            "llama-completion did not say how long it took; its last line: quiet",
        ),
        (
            {"log": PLAIN_LOG.replace("2136.38", "inf")},
            "llama-completion did not say how long it took; its last line: common_perf_print: total time = "
            "2547.15 ms / 99 tokens",
        ),
    ],
)
def test_failures_are_one_line(programs: Path, says: dict[str, Any], line: str):
    fake(programs / PLAIN_PROGRAM, **says)
    with pytest.raises(EdgespecError) as caught:
        plain_run(programs)
    assert str(caught.value) == line


@pytest.mark.parametrize("silent", [1, 2])
def test_lost_log_is_asked_for_again(programs: Path, silent: int):
    fake(programs / PLAIN_PROGRAM, log=PLAIN_LOG, silent=silent)
    assert plain_run(programs).tokens == 64
    assert (programs / f"{PLAIN_PROGRAM}.calls").stat().st_size == silent + 1


def test_drafted_program_that_fails(programs: Path):
    fake(programs / DRAFTED_PROGRAM, log="0.01.565.168 E main: the prompt exceeds the batch size\n", code=1)
    with pytest.raises(
        EdgespecError, match=r"^llama-speculative-simple ended with code 1: main: the prompt ex"
    ):
        list(opened(programs).runs(PROMPT, 0))


def test_hanging_program_is_ended(programs: Path, monkeypatch: pytest.MonkeyPatch):
    """Its time begins when it hangs, on a busy machine too."""
    peer = opened(programs, timeout_s=2.0)
    fake(programs / PLAIN_PROGRAM, log="0.00.001.153 I loading\n", sleep=600)
    calls, communicate = (programs / PLAIN_PROGRAM).with_suffix(".calls"), subprocess.Popen.communicate

    def when_it_hangs(self: Any, *arguments: Any, **options: Any) -> Any:
        while not calls.exists():
            time.sleep(0.01)
        return communicate(self, *arguments, **options)

    monkeypatch.setattr(subprocess.Popen, "communicate", when_it_hangs)
    with pytest.raises(EdgespecError, match=r"^llama-completion took more than 2 s; its last line: loading$"):
        next(peer.runs(PROMPT, 0))
    assert not alive(asked(programs / PLAIN_PROGRAM)["pid"])


def test_ctrl_c_ends_the_program(programs: Path, child_environment: dict[str, str]):
    fake(programs / PLAIN_PROGRAM, sleep=600)
    source = (
        "import sys; from pathlib import Path; from edgespec.apps.bench.measure import run_program\n"
        "run_program([sys.argv[1]], 600)"
    )
    call = programs / f"{PLAIN_PROGRAM}.asked"
    # A group of its own, and the signal to the one process: nobody but edgespec ends the program.
    user = subprocess.Popen(
        [sys.executable, "-c", source, str(programs / PLAIN_PROGRAM)],
        env=child_environment,
        start_new_session=True,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        while not (call.exists() and call.read_text().endswith("}")):
            assert user.poll() is None
            time.sleep(0.02)
        user.send_signal(signal.SIGINT)
        assert "KeyboardInterrupt" in user.communicate(timeout=60)[1]
    finally:
        user.kill()
    assert not alive(asked(programs / PLAIN_PROGRAM)["pid"])


def test_peer_runs_each_variant_on_the_rendered_prompt(programs: Path, tiny_path: Path):
    with Engine(tiny_path, drafter="none", n_threads=1) as engine:
        peer = LlamaCpp(programs, engine, Path("draft.gguf"), SETTINGS, 512, (3, 5))
        runs = list(peer.runs(Prompt("own/1", "code", "Hello"), 4))
        wanted = engine.target.render_chat([{"role": "user", "content": "Hello"}])
    assert [run.variant for run in runs] == ["llama.cpp plain", "llama.cpp model-3", "llama.cpp model-5"]
    assert {(run.prompt, run.round) for run in runs} == {("own/1", 4)}
    assert asked(programs / DRAFTED_PROGRAM)["files"]["-f"] == wanted + "\n"


BOS_TEMPLATE = "{{ bos_token }}{% for message in messages %}[{{ message.content }}]{% endfor %}"


@pytest.mark.parametrize("add_bos", [True, False])
@pytest.mark.parametrize("template", [BOS_TEMPLATE, "{{ messages[0].content }}:", None])
def test_rendered_text_has_the_tokens_of_the_prompt(tmp_path: Path, add_bos: bool, template: str | None):
    path = write_tiny_gguf(tmp_path / "model.gguf", add_bos=add_bos, chat_template=template)
    with Engine(path, drafter="none", n_threads=1) as engine:
        text = rendered(engine, "the rain")
        tokens = engine.target.tokenize(text, add_special=True, parse_special=True)
        assert tokens == engine.prompt_tokens("the rain")


@pytest.mark.parametrize("n_kept", [0, 1 << 24])
def test_a_server_is_asked_from_outside(tiny_path: Path, n_kept: int):
    prompt, settings = Prompt("own/1", "code", "Write a quicksort."), BenchSettings(variants=(), n_predict=8)
    with serving(tiny_path, engine_options={"prefix_cache": n_kept}) as served:
        peer = LlamaServer(f"{served.url}/", served.engine, settings)
        assert peer.name == f"llama.cpp at {served.url}/ with {tiny_path.stem}"
        (run,) = peer.runs(prompt, 1)
        assert (run.prompt, run.variant, run.round) == ("own/1", "llama.cpp served", 1)
        assert run.prompt_tokens == len(served.engine.prompt_tokens(prompt.text))
        assert 0 < run.tokens <= 8
        assert run.ttft_s is not None
        assert 0 < run.ttft_s <= run.total_s
        if n_kept:
            with pytest.raises(EdgespecError, match=r"keeps prompts: start it without"):
                list(peer.runs(prompt, 1))


def test_what_is_no_server_of_completions():
    async def other(scope: Any, _receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            status = 200 if scope["path"] == "/v1/models" else 404
            await send({"type": "http.response.start", "status": status, "headers": []})
            await send({"type": "http.response.body", "body": b"<html>\nelsewhere"})

    engine: Any = SimpleNamespace()
    with on_a_port(other) as url:
        with pytest.raises(EdgespecError, match=rf"^{url}/v1/models does not answer as OpenAI's API does$"):
            LlamaServer(url, engine, SETTINGS)
        with pytest.raises(EdgespecError, match=rf"^{url}/sub/v1/models answers 404: <html> elsewhere$"):
            LlamaServer(f"{url}/sub", engine, SETTINGS)
    with pytest.raises(EdgespecError, match=rf"^{url}: .*refused"):
        LlamaServer(url, engine, SETTINGS)


@pytest.fixture
def real() -> Path:
    """The directory of llama.cpp's programs, where they were built."""
    found = os.environ.get("LLAMA_CPP_BIN")
    if not found:
        pytest.skip("LLAMA_CPP_BIN does not name a directory with llama.cpp's programs")
    return Path(found)


@pytest.mark.parametrize("template", [BOS_TEMPLATE, "{{ messages[0].content }}:"])
def test_real_programs(real: Path, tmp_path: Path, template: str, monkeypatch: pytest.MonkeyPatch):
    # With a model so tiny they often lose their log.
    monkeypatch.setattr("edgespec.apps.bench.measure._ATTEMPTS", 50)
    target = write_tiny_gguf(tmp_path / "target.gguf", seed=1, add_bos=True, chat_template=template)
    draft = write_tiny_gguf(tmp_path / "draft.gguf", seed=2, add_bos=True, n_layer=1)
    settings = BenchSettings(variants=(), n_predict=8)
    with Engine(target, drafter="none", n_threads=1) as engine:
        n_prompt = len(engine.prompt_tokens("the rain in Spain"))
        peer = LlamaCpp(real, engine, draft, settings, 256, (3,), timeout_s=60.0)
        plain, drafted = peer.runs(Prompt("own/1", "rain", "the rain in Spain"), 0)
    assert plain.prompt_tokens == drafted.prompt_tokens == n_prompt
    assert 0 < plain.tokens <= 8
    assert 0 < drafted.tokens <= 8 + 3
    assert plain.total_s > plain.ttft_s > 0
    assert drafted.total_s > drafted.ttft_s > 0
