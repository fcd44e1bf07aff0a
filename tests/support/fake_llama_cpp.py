"""Programs that print what those of llama.cpp printed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

VERSION = "version: 0.5.0-dev (build 1, commit 0c1e570)\nbuilt with GNU 12.2.0 for Linux x86_64\n"
PLAIN_LOG = """\
0.00.001.153 I llama_completion: llama backend init
0.00.511.950 W load: control-looking token: 128247 '</s>' was not control-type; this is probably a bug
0.03.449.041 I generate: n_ctx = 512, n_batch = 2048, n_predict = 64, n_keep = 0
0.05.995.284 I common_perf_print:    sampling time =      12.47 ms
0.05.995.302 I common_perf_print:    samplers time =       3.73 ms /   100 tokens
0.05.995.321 I common_perf_print:        load time =    3048.05 ms
0.05.995.336 I common_perf_print: prompt eval time =     390.71 ms /    36 tokens (   10.85 ms per token)
0.05.995.351 I common_perf_print:        eval time =    2136.38 ms /    63 runs   (   33.91 ms per token)
0.05.995.365 I common_perf_print:       total time =    2547.15 ms /    99 tokens
"""
DRAFTED_LOG = """\
0.01.561.721 I common_speculative_init_result: loading draft model '/models/draft.gguf'
0.06.870.658 I encoded   36 tokens in    0.496 seconds, speed:   72.551 t/s
0.06.870.677 I decoded   67 tokens in    2.856 seconds, speed:   23.462 t/s
0.06.870.743 I n_accept  = 48
0.06.870.916 I common_perf_print: prompt eval time =    2657.72 ms /   113 tokens (   23.52 ms per token)
0.06.870.930 I common_perf_print:        eval time =       0.00 ms /     1 runs   (    0.00 ms per token)
"""
FAKE = """\
#!{python}
import json, os, sys, time
from pathlib import Path
from typing import Any
here = Path(__file__)
say = json.loads(here.with_suffix(".json").read_text())
if "--version" in sys.argv:
    sys.stderr.write({version!r})
    sys.exit()
given = dict(zip(sys.argv, sys.argv[1:]))
files = {{option: Path(given[option]).read_text() for option in ("-f", "--prompts") if option in given}}
asked = dict(argv=sys.argv[1:], files=files, cwd=os.getcwd(), pid=os.getpid())
here.with_suffix(".asked").write_text(json.dumps(asked))
calls = here.with_suffix(".calls")
with calls.open("a") as file:
    file.write("x")
if calls.stat().st_size <= say["silent"]:
    sys.exit()
sys.stdout.buffer.write(bytes(say["out"], "latin-1"))
sys.stdout.flush()
sys.stderr.buffer.write(bytes(say["log"], "latin-1"))
sys.stderr.flush()
time.sleep(say["sleep"])
if say["signal"]:
    os.kill(os.getpid(), say["signal"])
sys.exit(say["code"])
"""


def fake(
    program: Path,
    *,
    out: str = "",
    log: str = "",
    code: int = 0,
    sleep: float = 0,
    signal: int = 0,
    silent: int = 0,
) -> None:
    """Write a program that prints, sleeps and ends like that, but for its first `silent` calls."""
    program.write_text(FAKE.format(python=sys.executable, version=VERSION))
    program.chmod(0o755)
    say = {"out": out, "log": log, "code": code, "sleep": sleep, "signal": signal, "silent": silent}
    program.with_suffix(".json").write_text(json.dumps(say))


def asked(program: Path) -> dict[str, Any]:
    """What the fake was last called with."""
    found: dict[str, Any] = json.loads(program.with_suffix(".asked").read_text())
    return found


def option(argv: list[str], name: str) -> str:
    assert argv.count(name) == 1, argv
    return argv[argv.index(name) + 1]
