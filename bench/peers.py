r"""Programs that speculate on a CPU, run as a user runs them, on the prompts of bench/speed.py.

llama.cpp's are in edgespec/benchmark/peers.py. They should be of the commit inside the pinned
llama-cpp-python, so that nothing differs but the program (vendor/llama.cpp of its source package; about
15 minutes on one core):

    pip download llama-cpp-python==0.3.36 --no-deps --no-binary :all: && tar xf llama_cpp_python-0.3.36.tar.gz
    cmake -S llama_cpp_python-0.3.36/vendor/llama.cpp -B build -DCMAKE_BUILD_TYPE=Release \
        -DGGML_NATIVE=ON -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_APP=OFF \
        -DLLAMA_BUILD_TESTS=OFF -DLLAMA_USE_PREBUILT_UI=OFF
    cmake --build build --target llama-completion llama-speculative-simple llama-bench

ik_llama.cpp's `llama-spec-bench` is built as its own README says; it runs with run-time repacking.

All get the prompt as the model's chat template renders it. Speeds are the programs' own, of decoding
alone: they report the reading of the prompt apart (ik_llama.cpp's benchmark computes the logits of
every prompt token, so its time for the prompt says little).
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgespec.benchmark.bench import Settings
from edgespec.benchmark.peers import DRAFTED_PROGRAM, LlamaCpp, run_program
from edgespec.errors import EdgespecError
from edgespec.suites import Prompt


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
        """Continue each prompt greedily, drafting `gamma` tokens; raises EdgespecError."""
        raise NotImplementedError


class LlamaSpeculativeSimple(Peer):
    """llama.cpp's own program; one process a prompt. Flash attention off is its faster choice here."""

    name = DRAFTED_PROGRAM

    def decode(self, prompts: list[str], gamma: int) -> list[Decoded]:
        """Continue each prompt greedily, drafting `gamma` tokens; raises EdgespecError."""
        programs = LlamaCpp(
            self.program.parent,
            self.target,
            self.draft,
            n_threads=self.n_threads,
            n_ctx=self.n_ctx,
            timeout_s=self.timeout_s,
            flash_attention=False,
        )
        settings = Settings(ways=(), n_predict=self.n_predict)
        runs = [programs.drafted(Prompt("", "", text), settings, gamma) for text in prompts]
        return [Decoded(run.tokens, run.total_s - (run.prefill_s or 0.0)) for run in runs]


class IkSpecBench(Peer):
    """ik_llama.cpp's benchmark of speculation; one process for all prompts."""

    name = "ik_llama.cpp"

    def decode(self, prompts: list[str], gamma: int) -> list[Decoded]:
        """Continue each prompt greedily, drafting `gamma` tokens; raises EdgespecError."""
        command = [self.program, "-m", self.target.absolute(), "-md", self.draft.absolute()]
        command += ["-t", self.n_threads, "-td", self.n_threads, "-c", self.n_ctx, "-n", self.n_predict]
        command += ["--temp", "0", "--top-k", "1"]
        command += ["-rtr", "--spec-type", f"draft:n_max={gamma}", "--in-suffix", ""]  # no second template
        with tempfile.NamedTemporaryFile("w", suffix=".jsonl", encoding="utf-8") as file:
            for prompt in prompts:
                file.write(json.dumps({"prompt": prompt}) + "\n")
            file.flush()
            command += ["--prompts", file.name, "--output-format", "jsonl"]
            done = run_program([str(part) for part in command], self.timeout_s)
        lines = (done.stdout + done.stderr).splitlines()
        rows = [json.loads(line) for line in lines if line.startswith('{"row_type":"attempt"')]
        if len(rows) != len(prompts) or not all(row["ok"] for row in rows):
            raise EdgespecError(f"{self.program.name} did not finish all of {len(prompts)} prompts")
        return [Decoded(row["generated"], row["decode_s"]) for row in rows]


def llama_bench(program: Path, model: Path, n_threads: int, timeout_s: float) -> dict[str, float]:
    """Return the tokens a second of llama.cpp's own benchmark, without and with flash attention."""
    command = [str(program), "-m", str(model.absolute()), "-t", str(n_threads), "-fa", "off,on"]
    text = run_program([*command, "-r", "3", "-o", "json", "-p", "512", "-n", "128"], timeout_s).stdout
    try:
        rows: list[dict[str, Any]] = json.loads(text[text.index("[") : text.rindex("]") + 1])
    except ValueError:
        raise EdgespecError(f"{program.name} printed no results") from None
    return {
        f"{'tg128' if row['n_gen'] else 'pp512'}{' flash' if row['flash_attn'] else ''}": float(row["avg_ts"])
        for row in rows
    }
