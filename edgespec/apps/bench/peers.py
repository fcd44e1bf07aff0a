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
from dataclasses import dataclass
from pathlib import Path

from edgespec.apps.bench.measure import BenchSettings
from edgespec.apps.bench.runs import PEER, PLAIN, Run
from edgespec.apps.bench.suites import Prompt
from edgespec.engine.engine import Engine
from edgespec.errors import EdgespecError, UsageError, describe_os_error

TIMEOUT_S = 1800.0
"""Seconds that a program may take for one prompt, loading included."""

PLAIN_PROGRAM = "llama-completion"
DRAFTED_PROGRAM = "llama-speculative-simple"

_ATTEMPTS = 3  # a program may end before its log is written (llama.cpp's issue 22142)
_MARGIN = 64  # tokens of context: for drafts beyond the end
_LONGEST_LINE = 200  # characters of a program's last line that are shown
_PROMPT = "prompt.txt"
_LEAST_BATCH = 2048  # llama.cpp's default
_N = r" *(\d+(?:\.\d*)?)"
_PLAIN_FIGURES = (  # reading the prompt, passes, sampling
    rf"prompt eval time ={_N} ms / *(\d+) tokens",
    rf"eval time ={_N} ms / *(\d+) runs",
    rf"sampling time ={_N} ms",
)
_DRAFTED_FIGURES = (rf"encoded +(\d+) tokens in{_N} seconds", rf"decoded +(\d+) tokens in{_N} seconds")
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


@dataclass
class LlamaCpp:
    """The programs in a folder as a peer of `bench.measure`: plain, then drafted with each of `gammas`.

    Raises UsageError when a program is missing, EdgespecError when it cannot be run.
    """

    directory: Path
    engine: Engine
    """Whose target and number of threads they use; its chat template makes the prompts."""
    draft: Path | None
    """None: only plain decoding."""
    settings: BenchSettings
    n_ctx: int
    gammas: Sequence[int] = ()
    options: Sequence[str] = ()
    """More options of both programs."""
    timeout_s: float = TIMEOUT_S

    def __post_init__(self) -> None:
        """Check the programs, and ask for their version."""
        check_programs(self.directory, drafts=self.draft is not None)
        done = run_program([f"{self.directory / PLAIN_PROGRAM}", "--version"], self.timeout_s)
        version = re.search(r"^\s*version:(.*)", done.stdout + done.stderr, re.MULTILINE)
        if not version:
            last = _last_line(done.stderr, done.stdout)
            raise EdgespecError(f"{PLAIN_PROGRAM} --version names no version: {last}")
        drafted = f", drafted by {self.draft.stem}" if self.draft else ""
        self.name = f"{PEER}{version[1].strip()}{drafted}"
        """Name, version, and what drafts."""

    def runs(self, prompt: Prompt, round_: int) -> Iterator[Run]:
        """Yield a run of each variant. Raises EdgespecError."""
        text, n = rendered(self.engine, prompt.text), self.settings.n_predict

        def run(variant: str, n_prompt: float, n_tokens: float, read_s: float, decode_s: float) -> Run:
            name, whole_s = f"{PEER}{variant}", read_s + decode_s
            counts = int(n_prompt), int(n_tokens)
            return Run(prompt.id, prompt.category, name, round_, *counts, whole_s, read_s, read_s)

        options = f"-n {n} --perf -no-cnv --no-display-prompt --simple-io".split()
        out, found = self._figures(PLAIN_PROGRAM, text, round_, options, _PLAIN_FIGURES)
        read_ms, n_prompt, passes_ms, n_passes, sampling_ms = found
        # For 0 passes it prints 1 pass in 0 ms. The last token needs no pass, nor does an end-of-text token.
        n_tokens = (n_passes if passes_ms > 0 else 0) + (not out.rstrip().endswith(_END_OF_TEXT))
        yield run(PLAIN, n_prompt, n_tokens, read_ms / 1e3, (passes_ms + sampling_ms) / 1e3)
        for gamma in self.gammas if self.draft else ():
            # It stops only after more than -n tokens, and refuses prompts longer than a batch.
            options = f"-n {n - 1} -b {max(self.n_ctx, _LEAST_BATCH)} -td {self.engine.n_threads}".split()
            options += f"--spec-type draft-simple --spec-draft-n-max {gamma}".split()
            options += ["-md", str(self.draft and self.draft.absolute())]
            _, found = self._figures(DRAFTED_PROGRAM, text, round_, options, _DRAFTED_FIGURES)
            n_prompt, read_s, n_tokens, decode_s = found
            if n_tokens < n:  # it counted the end-of-generation token
                n_tokens = max(n_tokens - 1, 0)
            yield run(f"model-{gamma}", n_prompt, n_tokens, read_s, decode_s)

    def _figures(
        self, program: str, text: str, round_: int, options: Sequence[str], figures: Sequence[str]
    ) -> tuple[str, list[float]]:
        """Return what a program wrote, and the numbers that match `figures` in its log."""
        params, seed = (
            self.settings.params,
            (self.settings.seed + round_) % 0xFFFFFFFF,
        )  # that is a random one
        top_k = 1 if params.greedy else params.top_k  # the same token, but faster
        chosen = f"--temp {params.temperature} --top-k {top_k} --top-p {params.top_p} --min-p {params.min_p}"
        common = f"{chosen} --seed {seed} --no-escape -t {self.engine.n_threads} -c {self.n_ctx}".split()
        model = str(self.engine.target.path.absolute())
        command = [str(self.directory / program), "-m", model, *common, *self.options, *options]
        for _ in range(_ATTEMPTS):
            # The program removes a file's last newline.
            done = run_program([*command, "-f", _PROMPT], self.timeout_s, f"{text}\n")
            # Search only the log: the model's text on stdout may look like a figure.
            found = [match for figure in figures if (match := re.search(figure, done.stderr))]
            if len(found) == len(figures):
                return done.stdout, [float(number) for match in found for number in match.groups()]
        last = _last_line(done.stderr, done.stdout)
        raise EdgespecError(f"{program} did not say how long it took; its last line: {last}")


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


def run_program(
    command: Sequence[str], timeout_s: float, prompt: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end and return its output; an exception, such as Ctrl-C, ends the program too.

    `prompt`: what the file prompt.txt holds, in the folder where it runs.
    Raises EdgespecError with the program's last line if it fails or takes more than `timeout_s`.
    """
    name = Path(command[0]).name
    try:
        with tempfile.TemporaryDirectory() as directory:  # some write a log to the working directory
            Path(directory, _PROMPT).write_text(prompt, encoding="utf-8", newline="")
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
        last = _last_line(error.stderr, error.stdout)
        raise EdgespecError(f"{name} took more than {timeout_s:g} s; its last line: {last}") from None
    if done.returncode != 0:
        last = _last_line(done.stderr, done.stdout)
        raise EdgespecError(f"{name} ended with code {done.returncode}: {last}")
    return done


def _last_line(*outputs: str | bytes | None) -> str:
    """Return the last line of the first output that has one, without what a log writes before it."""
    for output in outputs:
        text = output.decode(errors="replace") if isinstance(output, bytes) else output or ""
        for line in reversed(text.splitlines()):
            if words := _LOG_PREFIX.sub("", " ".join(line.split())):
                return words[:_LONGEST_LINE]
    return "no output"
