"""Runs llama.cpp's own programs on the same prompts and files.

    plain     llama-completion            the target alone
    drafted   llama-speculative-simple    the target, drafted by the draft model

They run with llama.cpp's defaults, as users run them. So flash attention is "auto": on wherever the
processor's kernels have it. Times are those that the programs print, for reading the prompt and for decoding
with sampling; neither contains loading.

llama-speculative-simple reads the last token of the prompt together with its first draft, so its time for the
prompt ends before the first token. It also writes up to a draft more tokens than asked for; these count,
because its time includes them.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from edgespec.apps.bench.measure import BenchSettings
from edgespec.apps.bench.runs import PEER, PLAIN, Run
from edgespec.decoding.sampling import SamplingParams
from edgespec.engine.engine import Engine
from edgespec.errors import EdgespecError, UsageError, describe_os_error
from edgespec.models.suites import Prompt

TIMEOUT_S = 1800.0
"""Seconds that a program may take for one prompt, loading included."""

PLAIN_PROGRAM = "llama-completion"
DRAFTED_PROGRAM = "llama-speculative-simple"

_VERSION_TIMEOUT_S = 60.0
_ATTEMPTS = 3  # a program may end before its log is written (llama.cpp's issue 22142)
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


def check_programs(directory: Path, *, drafts: bool) -> None:
    """Raise UsageError if a program that is needed is not in `directory`."""
    needed = (PLAIN_PROGRAM, *((DRAFTED_PROGRAM,) if drafts else ()))
    missing = [name for name in needed if not shutil.which(directory.absolute() / name)]
    if missing:
        problem = (
            f"no executable {' and no '.join(missing)} there; in llama.cpp's source run cmake -B build "
            f"&& cmake --build build --target {' '.join(needed)}, then give its build/bin"
        )
        raise UsageError(problem, field="bin", value=directory)


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
        check_programs(directory, drafts=draft is not None)
        self.directory, self.target, self.draft = directory, target, draft
        self.n_threads, self.n_ctx, self.timeout_s = n_threads, n_ctx, timeout_s
        self.flash_attention = flash_attention
        """None: llama.cpp's default."""
        self.version = self._read_version()
        """The text as llama-completion prints it."""

    def plain(self, prompt: Prompt, settings: BenchSettings, round_: int = 0) -> Run:
        """Answer a prompt, whose text is as `rendered` returns it, without drafting.

        The total time is that of reading, passes and sampling. Raises EdgespecError.
        """
        program = self.directory / PLAIN_PROGRAM
        done, (read, passes, sampling) = self._run(
            program,
            prompt.text,
            (_PROMPT_TIME, _EVAL_TIME, _SAMPLING_TIME),
            *("-n", str(settings.n_predict), "--perf", "-no-cnv", "--no-display-prompt", "--simple-io"),
            *_sampling_options(settings.params, settings.seed + round_),
        )
        # For 0 passes it prints 1 pass in 0 ms. The last token needs no pass, nor does an end-of-text token.
        n_passes = int(passes[2]) if float(passes[1]) > 0 else 0
        ended = done.stdout.rstrip().endswith(_END_OF_TEXT)
        prefill_s = float(read[1]) / 1e3
        return Run(
            prompt=prompt.id,
            category=prompt.category,
            variant=f"{PEER}{PLAIN}",
            round=round_,
            prompt_tokens=int(read[2]),
            tokens=n_passes if ended else n_passes + 1,
            total_s=prefill_s + (float(passes[1]) + float(sampling[1])) / 1e3,
            ttft_s=prefill_s,
            prefill_s=prefill_s,
        )

    def drafted(self, prompt: Prompt, settings: BenchSettings, gamma: int, round_: int = 0) -> Run:
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
            *("-n", str(settings.n_predict - 1)),  # it stops only after more than -n tokens
            *("-b", str(max(self.n_ctx, _LEAST_BATCH))),  # it refuses prompts longer than a batch
            *_sampling_options(settings.params, settings.seed + round_),
        )
        n_decoded = int(decoded[1])
        ended = n_decoded < settings.n_predict  # if so, it counted the end-of-generation token
        return Run(
            prompt=prompt.id,
            category=prompt.category,
            variant=f"{PEER}model-{gamma}",
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
        """Return the program's output and the matches of `figures` in its log."""
        flash = {None: (), True: ("-fa", "on"), False: ("-fa", "off")}[self.flash_attention]
        command = [str(program), "-m", str(self.target.absolute()), "-t", str(self.n_threads)]
        command += ["-c", str(self.n_ctx), *flash, *options, "--no-escape"]
        for _ in range(_ATTEMPTS):
            try:
                with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8", newline="") as file:
                    file.write(f"{text}\n")  # the program removes a file's last newline
                    file.flush()
                    done = run_program([*command, "-f", file.name], self.timeout_s)
            except OSError as error:
                raise EdgespecError(describe_os_error(error)) from None
            # Search only the log: the model's text on stdout may look like a figure.
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
    """The chat template of its target makes the prompts."""
    settings: BenchSettings
    gammas: Sequence[int] = ()

    @property
    def name(self) -> str:
        """Name, version, and what drafts."""
        draft = self.programs.draft
        return f"llama.cpp {self.programs.version}{f', drafted by {draft.stem}' if draft else ''}"

    def runs(self, prompt: Prompt, round_: int) -> Iterator[Run]:
        """Yield a run of each variant. Raises EdgespecError."""
        prompt = replace(prompt, text=rendered(self.engine, prompt.text))
        yield self.programs.plain(prompt, self.settings, round_)
        for gamma in self.gammas:
            yield self.programs.drafted(prompt, self.settings, gamma, round_)


def rendered(engine: Engine, prompt: str) -> str:
    """Return the text that llama.cpp's programs tokenize to exactly `Engine.prompt_tokens`.

    If the model wants a BOS, they add one even when the chat template has already written it.
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
    """Return the context size for `n_prompt` tokens and an answer of `n_predict`, a multiple of 256."""
    return -(-(n_prompt + n_predict + _MARGIN) // 256) * 256


def run_program(command: Sequence[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Run a program to its end and return its output; an exception, such as Ctrl-C, ends the program too.

    Raises EdgespecError with the program's last line if it fails or takes more than `timeout_s`.
    """
    name = Path(command[0]).name
    try:
        with tempfile.TemporaryDirectory() as directory:  # some write a log to the working directory
            done = subprocess.run(
                [str(Path(command[0]).absolute()), *command[1:]],
                cwd=directory,
                env={**os.environ, "GGML_NO_BACKTRACE": "1"},  # otherwise a debugger prints the last line
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
        "--top-k": 1 if params.greedy else params.top_k,  # the same token, but faster
        "--top-p": params.top_p,
        "--min-p": params.min_p,
        "--seed": seed % 0xFFFFFFFF,  # 0xFFFFFFFF means a random seed
    }
    return [str(part) for option in options.items() for part in option]


def _last_line(done: subprocess.CompletedProcess[str]) -> str:
    return _shortened(done.stderr if done.stderr.strip() else done.stdout)


def _shortened(output: str | bytes | None) -> str:
    text = output.decode(errors="replace") if isinstance(output, bytes) else output or ""
    lines = [_LOG_PREFIX.sub("", " ".join(line.split())) for line in text.splitlines()]
    return next((line[:_LONGEST_LINE] for line in reversed(lines) if line), "no output")
