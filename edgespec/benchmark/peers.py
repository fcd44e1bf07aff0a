"""llama.cpp's own programs on the same prompts and files, each run in a process of its own.

    plain     llama-completion            the target alone
    drafted   llama-speculative-simple    the target, drafted by the draft model

They run as their users run them, with llama.cpp's defaults. So flash attention is "auto",
which is on wherever the processor's kernels have it. Times are the programs' own: reading the prompt, and
decoding with the choice of tokens; loading is in neither.

llama-speculative-simple reads the last token of the prompt with its first draft, so that its time for the
prompt ends before the first token. It also goes on until it has more tokens than it was asked for, by up to a
draft: those count, since it tells the time of all.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from edgespec.benchmark.bench import Settings
from edgespec.benchmark.runs import PEER, PLAIN, Run
from edgespec.engine import Engine
from edgespec.errors import EdgespecError, UsageError, describe_os_error
from edgespec.sampling import SamplingParams
from edgespec.suites import Prompt

TIMEOUT_S = 1800.0
"""Seconds that a program may take for one prompt, loading included."""

PLAIN_PROGRAM = "llama-completion"
DRAFTED_PROGRAM = "llama-speculative-simple"

_VERSION_TIMEOUT_S = 60.0
_ATTEMPTS = 3  # a program may end before its log is written, llama.cpp's issue 22142
_MARGIN = 64  # tokens of context: for drafts beyond the end
_LONGEST_LINE = 200  # characters of a program's last line that are shown
_LEAST_BATCH = 2048  # llama.cpp's default
_NUMBER = r" *(\d+(?:\.\d*)?)"
_PROMPT_TIME = re.compile(rf"prompt eval time ={_NUMBER} ms / *(\d+) tokens")
_EVAL_TIME = re.compile(rf"eval time ={_NUMBER} ms / *(\d+) runs")
_SAMPLING_TIME = re.compile(rf"sampling time ={_NUMBER} ms")
_ENCODED = re.compile(rf"encoded +(\d+) tokens in{_NUMBER} seconds")
_DECODED = re.compile(rf"decoded +(\d+) tokens in{_NUMBER} seconds")
_END_OF_TEXT = "[end of text]"  # llama-completion's words for an end-of-generation token
_LOG_PREFIX = re.compile(r"^\d+(?:\.\d+)+ [A-Z](?: |$)")


class LlamaCpp:
    """The programs in `directory`, on a pair of model files; plain decoding needs no draft.

    Raises UsageError when a program is missing, EdgespecError when it cannot be run.
    """

    def __init__(
        self,
        directory: Path,
        target: Path,
        draft: Path | None,
        *,
        n_threads: int,
        n_ctx: int,
        timeout_s: float = TIMEOUT_S,
        flash_attention: bool | None = None,
    ) -> None:
        needed = (PLAIN_PROGRAM, *((DRAFTED_PROGRAM,) if draft else ()))
        missing = [name for name in needed if not _executable(directory / name)]
        if missing:
            problem = (
                f"no executable {' and no '.join(missing)} there; in llama.cpp's source run cmake -B build "
                f"&& cmake --build build --target {' '.join(needed)}, then give its build/bin"
            )
            raise UsageError(problem, field="bin", value=directory)
        self.directory, self.target, self.draft = directory, target, draft
        self.n_threads, self.n_ctx, self.timeout_s = n_threads, n_ctx, timeout_s
        self.flash_attention = flash_attention
        """None: llama.cpp's default, which is what its users have."""
        self.version = self._read_version()
        """As llama-completion prints it."""

    def plain(self, prompt: Prompt, settings: Settings, round_: int = 0) -> Run:
        """Answer a prompt, whose text is as `rendered` returns it, without drafting.

        The whole is the time of reading, of the passes and of choosing the tokens. Raises EdgespecError.
        """
        program = self.directory / PLAIN_PROGRAM
        done, (read, passes, sampling) = self._run(
            program,
            prompt.text,
            (_PROMPT_TIME, _EVAL_TIME, _SAMPLING_TIME),
            *("-n", str(settings.n_predict), "--perf", "-no-cnv", "--no-display-prompt", "--simple-io"),
            *_sampling_options(settings.params, settings.seed + round_),
        )
        # It never says 0 passes, but 1 in no time. The last token has none, nor one that ends the text.
        n_passes = int(passes[2]) if float(passes[1]) > 0 else 0
        ended = done.stdout.rstrip().endswith(_END_OF_TEXT)
        prefill_s = float(read[1]) / 1e3
        return Run(
            prompt=prompt.id,
            category=prompt.category,
            way=f"{PEER}{PLAIN}",
            round=round_,
            prompt_tokens=int(read[2]),
            tokens=n_passes if ended else n_passes + 1,
            total_s=prefill_s + (float(passes[1]) + float(sampling[1])) / 1e3,
            ttft_s=prefill_s,
            prefill_s=prefill_s,
        )

    def drafted(self, prompt: Prompt, settings: Settings, gamma: int, round_: int = 0) -> Run:
        """Answer a prompt, whose text is as `rendered` returns it, drafting `gamma` tokens a step.

        Raises EdgespecError.
        """
        if self.draft is None:
            raise EdgespecError(f"{DRAFTED_PROGRAM} needs a draft model")
        program = self.directory / DRAFTED_PROGRAM
        _, (encoded, decoded) = self._run(
            program,
            prompt.text,
            (_ENCODED, _DECODED),
            *("-md", str(self.draft.absolute()), "-td", str(self.n_threads)),
            *("--spec-type", "draft-simple", "--spec-draft-n-max", str(gamma)),
            *("-n", str(settings.n_predict - 1)),  # it goes on until it has more
            *("-b", str(max(self.n_ctx, _LEAST_BATCH))),  # it refuses longer prompts
            *_sampling_options(settings.params, settings.seed + round_),
        )
        n_decoded = int(decoded[1])
        ended = n_decoded < settings.n_predict  # and then the end-of-generation token was counted
        return Run(
            prompt=prompt.id,
            category=prompt.category,
            way=f"{PEER}model-{gamma}",
            round=round_,
            prompt_tokens=int(encoded[1]),
            tokens=max(n_decoded - 1, 0) if ended else n_decoded,
            total_s=float(encoded[2]) + float(decoded[2]),
            ttft_s=float(encoded[2]),
            prefill_s=float(encoded[2]),
        )

    def _run(
        self, program: Path, text: str, figures: Sequence[re.Pattern[str]], *options: str
    ) -> tuple[subprocess.CompletedProcess[str], list[re.Match[str]]]:
        """Return what the program wrote, and the figures as found in its log."""
        flash = {None: (), True: ("-fa", "on"), False: ("-fa", "off")}[self.flash_attention]
        command = [str(program), "-m", str(self.target.absolute()), "-t", str(self.n_threads)]
        command += ["-c", str(self.n_ctx), *flash, *options, "--no-escape"]
        for _ in range(_ATTEMPTS):
            try:
                with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8", newline="") as file:
                    file.write(f"{text}\n")  # the last newline of a file is taken away
                    file.flush()
                    done = run_program([*command, "-f", file.name], self.timeout_s)
            except OSError as error:
                raise EdgespecError(describe_os_error(error)) from None
            # Only of the log: stdout has the text of the model, which may say anything.
            found = [match for figure in figures if (match := figure.search(done.stderr))]
            if len(found) == len(figures):
                return done, found
        raise EdgespecError(f"{program.name} did not say how long it took; its last line: {_last_line(done)}")

    def _read_version(self) -> str:
        program = self.directory / PLAIN_PROGRAM
        done = run_program([str(program), "--version"], _VERSION_TIMEOUT_S)
        lines = [line.strip() for line in (done.stdout + done.stderr).splitlines()]
        for line in lines:
            if line.startswith("version:"):
                return line.removeprefix("version:").strip()
        raise EdgespecError(f"{program} --version names no version: {_last_line(done)}")


@dataclass(frozen=True)
class LlamaCppPeer:
    """`programs` as a peer of `bench.measure`: plain, then drafted with each of `gammas`."""

    programs: LlamaCpp
    engine: Engine
    """Whose target's chat template makes the prompts."""
    settings: Settings
    gammas: Sequence[int] = ()

    @property
    def name(self) -> str:
        """As messages call it, with the version it tells."""
        return f"llama.cpp {self.programs.version}"

    def runs(self, prompt: Prompt, round_: int) -> Iterator[Run]:
        """Yield a run of each way. Raises EdgespecError."""
        prompt = replace(prompt, text=rendered(self.engine, prompt.text))
        yield self.programs.plain(prompt, self.settings, round_)
        for gamma in self.gammas:
            yield self.programs.drafted(prompt, self.settings, gamma, round_)


def rendered(engine: Engine, prompt: str) -> str:
    """Return the text of which llama.cpp's programs make the very tokens of `Engine.prompt_tokens`.

    They put a BOS before it where the model wants one, also where the chat template has written it.
    """
    target = engine.target
    if target.chat_template is None:
        return prompt
    text = target.render_chat([{"role": "user", "content": prompt}])
    bos = "" if target.bos is None else target.piece(target.bos, special=True).decode(errors="replace")
    bare = text.removeprefix(bos)
    again = target.tokenize(bare, add_special=True, parse_special=True)
    return bare if again == engine.prompt_tokens(prompt) else text


def context_for(n_prompt: int, n_predict: int) -> int:
    """Return a context for `n_prompt` tokens and an answer of `n_predict`, a multiple of 256."""
    return -(-(n_prompt + n_predict + _MARGIN) // 256) * 256


def run_program(command: Sequence[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Run a program to its end and return what it wrote; an exception, as of Ctrl-C, ends it too.

    Raises EdgespecError, with the program's last line, when it fails or takes longer.
    """
    name = Path(command[0]).name
    try:
        with tempfile.TemporaryDirectory() as directory:  # some leave a log where they run
            done = subprocess.run(
                [str(Path(command[0]).absolute()), *command[1:]],
                cwd=directory,
                env={**os.environ, "GGML_NO_BACKTRACE": "1"},  # else a debugger has the last line
                stdin=subprocess.DEVNULL,
                capture_output=True,
                encoding="utf-8",
                errors="replace",
                timeout=timeout_s,
                check=False,
            )
    except OSError as error:
        raise EdgespecError(describe_os_error(error)) from None
    except subprocess.TimeoutExpired as error:
        wrote = _shortened(error.stderr or error.stdout)
        raise EdgespecError(f"{name} took more than {timeout_s:g} s; its last line: {wrote}") from None
    if done.returncode != 0:
        raise EdgespecError(f"{name} ended with code {done.returncode}: {_last_line(done)}")
    return done


def _sampling_options(params: SamplingParams, seed: int) -> list[str]:
    options = {
        "--temp": params.temperature,
        "--top-k": 1 if params.greedy else params.top_k,  # the same token, sooner
        "--top-p": params.top_p,
        "--min-p": params.min_p,
        "--seed": seed % 0xFFFFFFFF,  # that one means a random seed
    }
    return [str(part) for option in options.items() for part in option]


def _executable(program: Path) -> bool:
    return program.is_file() and os.access(program, os.X_OK)


def _last_line(done: subprocess.CompletedProcess[str]) -> str:
    return _shortened(done.stderr if done.stderr.strip() else done.stdout)


def _shortened(output: str | bytes | None) -> str:
    text = output.decode(errors="replace") if isinstance(output, bytes) else output or ""
    lines = [_LOG_PREFIX.sub("", " ".join(line.split())) for line in text.splitlines()]
    return next((line[:_LONGEST_LINE] for line in reversed(lines) if line), "no output")
