"""Lets Claude Code read a file with one of its tools and say what is in it, without a network.

    npm install --prefix /tmp/claude @anthropic-ai/claude-code
    .venv/bin/python bench/claude_code.py --claude /tmp/claude/node_modules/.bin/claude
    .venv/bin/python bench/claude_code.py --server http://127.0.0.1:8080   # what a real model makes of it

Without `--server` a tiny random model answers in this process, and a grammar holds it to a call of the tool
and to the answer after it: what is tested is the wire. The agent has a home of its own and must end with 0.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from chat_templates import HERMES
from scripted_texts import writing
from server_app import serving
from tiny_gguf import write_tiny_gguf

N_CTX = 131072  # the tiny model's tokens are short: its prompt has some 60,000
SAID = "The word is pelican."


def run_agent(claude: str, url: str, file: Path) -> int:
    """Have the agent at `claude` ask the server at `url` about `file`; return its exit code."""
    models = ("MODEL", "SMALL_FAST_MODEL", *(f"DEFAULT_{size}_MODEL" for size in ("HAIKU", "SONNET", "OPUS")))
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(file.parents[1]),
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_AUTH_TOKEN": "none",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "API_TIMEOUT_MS": "3600000",
        **{f"ANTHROPIC_{name}": "edgespec" for name in models},
    }
    asked = f"Read {file} and say in one short sentence what the word is."
    options = ["-p", asked, "--allowedTools", "Read", "--output-format", "stream-json", "--verbose"]
    began = time.perf_counter()
    with subprocess.Popen(
        [claude, *options], cwd=file.parent, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
    ) as agent:
        for line in agent.stdout or ():
            told = json.loads(line)
            if told["type"] in ("assistant", "user", "result"):
                shown = told.get("message", {}).get("content") or told.get("result")
                print(
                    f"{time.perf_counter() - began:6.1f} s  {told['type']}: {json.dumps(shown)[:300]}",
                    flush=True,
                )
    return agent.returncode


@contextlib.contextmanager
def scripted(folder: Path, file: Path) -> Iterator[str]:
    """Serve a tiny model that reads `file` and says what it is to say, while entered; yield its address."""
    call = json.dumps({"name": "Read", "arguments": {"file_path": str(file)}})
    model = write_tiny_gguf(folder / "tiny.gguf", seed=1, n_ctx=N_CTX, n_layer=1, chat_template=HERMES)
    with (
        serving(model, worker_options={"max_seconds": 3600}) as served,
        writing(served, f"I read it.\n<tool_call>\n{call}\n</tool_call>", SAID) as prompts,
    ):
        yield served.url
        assert "pelican" in prompts[1] and "pelican" not in prompts[0], "the tool's result came"
        print(f"prompts of {' and '.join(str(len(prompt)) for prompt in prompts)} characters; {served.log=}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--server", help="default: a tiny model's, scripted")
    parser.add_argument("--claude", default="claude")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        file = Path(home, "project", "word.txt")
        file.parent.mkdir()
        file.write_text("The word is pelican.\n")
        given = contextlib.nullcontext(options.server) if options.server else scripted(Path(home), file)
        with given as url:
            code = run_agent(options.claude, url, file)
    print(f"ended with {code}")
    raise SystemExit(code)


if __name__ == "__main__":
    main()
