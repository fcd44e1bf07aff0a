r"""Runs programs other than those of edgespec/apps/bench/measure.py for bench/speed.py.

Build llama.cpp's programs from the commit inside the pinned llama-cpp-python, so that only the program
differs (vendor/llama.cpp of its source package; about 15 minutes on one core):

    pip download llama-cpp-python==0.3.36 --no-deps --no-binary :all: && tar xf llama_cpp_python-0.3.36.tar.gz
    cmake -S llama_cpp_python-0.3.36/vendor/llama.cpp -B build -DCMAKE_BUILD_TYPE=Release \
        -DGGML_NATIVE=ON -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_APP=OFF \
        -DLLAMA_BUILD_TESTS=OFF -DLLAMA_USE_PREBUILT_UI=OFF
    cmake --build build --target llama-server llama-bench

ik_llama.cpp's `llama-spec-bench` is built as its own README says; it runs with run-time repacking.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgespec import Engine
from edgespec.apps.bench.measure import BenchSettings, rendered
from edgespec.apps.bench.runs import Run
from edgespec.apps.bench.suites import Prompt
from edgespec.errors import EdgespecError
from script import run_program

IK = "ik_llama.cpp"


@dataclass(frozen=True)
class IkSpecBench:
    """ik_llama.cpp's benchmark of speculation, greedy, as a peer of `bench.measure`: a process a prompt.

    It computes the logits of every prompt token, so its time for the prompt says little: only decoding is
    timed.
    """

    program: Path
    engine: Engine
    """Whose models, threads and chat template it uses."""
    settings: BenchSettings
    n_ctx: int
    gammas: Sequence[int]
    name = IK

    def runs(self, prompt: Prompt, round_: int) -> Iterator[Run]:
        """Yield a run of each of `gammas`. Raises EdgespecError."""
        for gamma in self.gammas:
            row = self._attempt(rendered(self.engine, prompt.text), gamma)
            yield Run(
                prompt=prompt.id,
                category=prompt.category,
                variant=f"{IK} model-{gamma}",
                round=round_,
                prompt_tokens=len(self.engine.prompt_tokens(prompt.text)),
                tokens=row["generated"],
                total_s=row["decode_s"],
                ttft_s=0.0,
                prefill_s=None,
            )

    def _attempt(self, text: str, gamma: int) -> dict[str, Any]:
        engine = self.engine
        assert engine.draft is not None
        command = [self.program, "-m", engine.target.path.absolute(), "-md", engine.draft.path.absolute()]
        command += ["-t", engine.n_threads, "-td", engine.n_threads]
        command += ["-c", self.n_ctx, "-n", self.settings.n_predict, "--temp", "0", "--top-k", "1"]
        command += ["-rtr", "--spec-type", f"draft:n_max={gamma}", "--in-suffix", ""]  # no second template
        with tempfile.NamedTemporaryFile("w", suffix=".jsonl", encoding="utf-8") as file:
            file.write(json.dumps({"prompt": text}) + "\n")
            file.flush()
            command += ["--prompts", file.name, "--output-format", "jsonl"]
            done = run_program([str(part) for part in command])
        lines = (done.stdout + done.stderr).splitlines()
        rows = [json.loads(line) for line in lines if line.startswith('{"row_type":"attempt"')]
        if len(rows) != 1 or not rows[0]["ok"]:
            raise EdgespecError(f"{self.program.name} did not finish the prompt")
        return dict(rows[0])


def llama_bench(program: Path, engine: Engine) -> dict[str, float]:
    """Return the tokens a second of llama.cpp's own benchmark, without and with flash attention."""
    command = [str(program.absolute()), "-m", str(engine.target.path.absolute()), "-t", str(engine.n_threads)]
    command += ["-fa", "off,on", "-r", "3", "-o", "json", "-p", "512", "-n", "128"]
    text = run_program(command).stdout
    try:
        rows: list[dict[str, Any]] = json.loads(text[text.index("[") : text.rindex("]") + 1])
    except ValueError:
        raise EdgespecError(f"{program.name} printed no results") from None
    return {
        f"{'tg128' if row['n_gen'] else 'pp512'}{' flash' if row['flash_attn'] else ''}": float(row["avg_ts"])
        for row in rows
    }
