r"""Other programs that speculate on a CPU, run as a user runs them, on the prompts of bench/speed.py.

llama.cpp of the commit inside the pinned llama-cpp-python, so that nothing differs but the program
(vendor/llama.cpp of its source package; about 15 minutes on one core):

    pip download llama-cpp-python==0.3.36 --no-deps --no-binary :all: && tar xf llama_cpp_python-0.3.36.tar.gz
    cmake -S llama_cpp_python-0.3.36/vendor/llama.cpp -B build -DCMAKE_BUILD_TYPE=Release \
        -DGGML_NATIVE=ON -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_APP=OFF \
        -DLLAMA_BUILD_TESTS=OFF -DLLAMA_USE_PREBUILT_UI=OFF
    cmake --build build --target llama-speculative-simple llama-bench

ik_llama.cpp's `llama-spec-bench` is built as its own README says; it runs with run-time repacking.

Both get the prompt as the model's chat template renders it. Speeds are the programs' own, of decoding
alone: both report the reading of the prompt apart (ik_llama.cpp's benchmark computes the logits of
every prompt token, so its time for the prompt says little).
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class PeerError(Exception):
    """A program is missing, failed, or took too long; `str()` is one line."""


@dataclass(frozen=True)
class Decoded:
    """What a peer says of one prompt."""

    tokens: int
    decode_s: float


@dataclass(frozen=True)
class Peer:
    """A program that speculates with `target` and `draft`."""

    program: Path
    target: Path
    draft: Path
    n_threads: int
    n_ctx: int
    n_predict: int
    timeout_s: float

    name = "peer"

    def decode(self, prompts: list[str], gamma: int) -> list[Decoded]:
        """Continue each prompt greedily, drafting `gamma` tokens; raises PeerError."""
        raise NotImplementedError

    def _run(self, *options: str) -> str:
        command = [self.program, "-m", self.target.absolute(), "-md", self.draft.absolute()]
        command += [
            "-t",
            str(self.n_threads),
            "-td",
            str(self.n_threads),
            "-c",
            str(self.n_ctx),
            "-n",
            str(self.n_predict),
        ]
        return output([*map(str, command), "--temp", "0", "--top-k", "1", *options], self.timeout_s)


class LlamaSpeculativeSimple(Peer):
    """llama.cpp's own program; one process a prompt. Flash attention off is its faster choice here."""

    name = "llama-speculative-simple"

    def decode(self, prompts: list[str], gamma: int) -> list[Decoded]:
        """Continue each prompt greedily, drafting `gamma` tokens; raises PeerError."""
        found = []
        for prompt in prompts:
            with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as file:
                file.write(f"{prompt}\n")  # it takes the last newline of a file away
                file.flush()
                options = ["--spec-type", "draft-simple", "--spec-draft-n-max", str(gamma)]
                text = self._run("-f", file.name, "--no-escape", "-fa", "off", *options)
            match = re.search(r"decoded +(\d+) tokens in +([\d.]+) seconds", text)
            if not match:
                raise PeerError(f"{self.program.name} did not say how fast it decoded")
            found.append(Decoded(int(match[1]), float(match[2])))
        return found


class IkSpecBench(Peer):
    """ik_llama.cpp's benchmark of speculation; one process for all prompts."""

    name = "ik_llama.cpp"

    def decode(self, prompts: list[str], gamma: int) -> list[Decoded]:
        """Continue each prompt greedily, drafting `gamma` tokens; raises PeerError."""
        with tempfile.NamedTemporaryFile("w", suffix=".jsonl", encoding="utf-8") as file:
            for prompt in prompts:
                file.write(json.dumps({"prompt": prompt}) + "\n")
            file.flush()
            options = ["-rtr", "--spec-type", f"draft:n_max={gamma}", "--in-suffix", ""]  # no second template
            text = self._run("--prompts", file.name, "--output-format", "jsonl", *options)
        rows = [json.loads(line) for line in text.splitlines() if line.startswith('{"row_type":"attempt"')]
        if len(rows) != len(prompts) or not all(row["ok"] for row in rows):
            raise PeerError(f"{self.program.name} did not finish all of {len(prompts)} prompts")
        return [Decoded(row["generated"], row["decode_s"]) for row in rows]


def llama_bench(program: Path, model: Path, n_threads: int, timeout_s: float) -> dict[str, float]:
    """Return the tokens a second of llama.cpp's own benchmark, without and with flash attention."""
    command = [str(program), "-m", str(model.absolute()), "-t", str(n_threads), "-fa", "off,on"]
    text = output([*command, "-r", "3", "-o", "json", "-p", "512", "-n", "128"], timeout_s)
    try:
        rows: list[dict[str, Any]] = json.loads(text[text.index("[") : text.rindex("]") + 1])
    except ValueError:
        raise PeerError(f"{program.name} printed no results") from None
    return {
        f"{'tg128' if row['n_gen'] else 'pp512'}{' flash' if row['flash_attn'] else ''}": float(row["avg_ts"])
        for row in rows
    }


def output(command: list[str], timeout_s: float) -> str:
    """Run a program to its end; return what it wrote to both streams."""
    name = Path(command[0]).name
    try:
        with tempfile.TemporaryDirectory() as directory:  # some leave a log where they run
            done = subprocess.run(
                [str(Path(command[0]).absolute()), *command[1:]],
                cwd=directory,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                encoding="utf-8",
                errors="replace",
                timeout=timeout_s,
                check=False,
            )
    except OSError as error:
        raise PeerError(f"{command[0]}: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise PeerError(f"{name} took more than {timeout_s:g} s") from None
    if done.returncode != 0:
        words = [line.strip() for line in done.stdout.splitlines() if line.strip()]
        raise PeerError(f"{name} ended with code {done.returncode}: {words[-1] if words else 'no output'}")
    return done.stdout
