"""Lets an agent use `edgespec serve` without a network: it reads a file by a tool and says what is in it.

    npm install --prefix /tmp/qwen @qwen-code/qwen-code
    unshare -rn sh -c 'ip link set lo up; exec "$@"' - \
        .venv/bin/python bench/run_agent.py qwen --program /tmp/qwen/node_modules/.bin/qwen
    .venv/bin/python bench/run_agent.py claude --server http://127.0.0.1:8080   # a real model

`aider` has no tools: it changes the file. The Python clients (`litellm`, `openai-agents`, `langchain`,
`pydantic-ai`) are programs in `agent_clients/`; `--program` is the Python of an environment that has the
client. They do it through each API that they know.

Without `--server` a tiny random model is served, and a grammar holds its answers to a script: what is tested
is the wire. The agent has a home of its own, and must end with 0.
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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from chat_templates import HERMES
from script import start
from servers import Server
from tiny_gguf import write_tiny_gguf

N_CTX = 131072  # the tiny model's tokens are short: Claude Code's prompt has some 60,000
FOUND, WANTED = "pelican", "heron"
SAID = f"The word is {FOUND}."
_CLIENTS = Path(__file__).parent / "agent_clients"
_SHOWN = 300  # characters of a line


@dataclass(frozen=True)
class AgentSetup:
    """How an agent is started. In texts {url}, {file} and {asked} stand for what a run has."""

    program: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    tool: str = ""
    """The tool that reads a file; "": it has none, and changes the file."""
    argument: str = ""
    """The tool's argument with the path."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Files of JSON, by their place in the agent's home."""


_OPENAI = {"OPENAI_BASE_URL": "{url}/v1", "OPENAI_API_KEY": "none"}
_CLAUDE_MODELS = ("MODEL", "SMALL_FAST_MODEL", *(f"DEFAULT_{n}_MODEL" for n in ("HAIKU", "SONNET", "OPUS")))


def _client(name: str) -> AgentSetup:
    return AgentSetup(
        "python3",
        (str(_CLIENTS / f"{name}_client.py"), "{url}", "{file}", "{asked}"),
        {"OPENAI_API_KEY": "none", "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        "read_file",
        "path",
    )


SETUPS = {
    "claude": AgentSetup(
        "claude",
        ("-p", "{asked}", "--allowedTools", "Read", "--output-format", "stream-json", "--verbose"),
        {
            "ANTHROPIC_BASE_URL": "{url}",
            "ANTHROPIC_AUTH_TOKEN": "none",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "API_TIMEOUT_MS": "3600000",
            **{f"ANTHROPIC_{name}": "edgespec" for name in _CLAUDE_MODELS},
        },
        "Read",
        "file_path",
    ),
    "qwen": AgentSetup(
        "qwen",
        ("--auth-type", "openai", "-p", "{asked}"),
        {**_OPENAI, "OPENAI_MODEL": "edgespec"},
        "read_file",
        "file_path",
        {
            ".qwen/settings.json": {
                "privacy": {"usageStatisticsEnabled": False},
                "model": {"generationConfig": {"contextWindowSize": N_CTX}},
            }
        },
    ),
    "aider": AgentSetup(
        "aider",
        ("--model", "openai/edgespec", "--no-git", "--yes-always", "--message", "{asked}", "{file}"),
        {
            "OPENAI_API_BASE": "{url}/v1",
            "OPENAI_API_KEY": "none",
            "AIDER_ANALYTICS": "false",
            "AIDER_CHECK_UPDATE": "false",
            "AIDER_SHOW_MODEL_WARNINGS": "false",
        },
    ),
    **{
        name: _client(name.replace("-", "_"))
        for name in ("litellm", "openai-agents", "langchain", "pydantic-ai")
    },
}


def rules(setup: AgentSetup, file: Path) -> list[tuple[list[str], str]]:
    """Return the script: what the model writes to which prompts."""
    if not setup.tool:
        return [([], f"{file.name}\n```\nThe word is {WANTED}.\n```")]
    call = json.dumps({"name": setup.tool, "arguments": {setup.argument: str(file)}})
    return [
        ([FOUND], SAID),
        ([f'"{setup.tool}"'], f"I read it.\n<tool_call>\n{call}\n</tool_call>"),
        ([], "A word"),  # to requests besides, such as for a title
    ]


def run(setup: AgentSetup, program: str | None, url: str, file: Path) -> tuple[int, str]:
    """Have the agent ask the server at `url` about `file`; return its exit code and what it printed."""
    asked = f"Read {file} and say in one short sentence what the word is."
    if not setup.tool:
        asked = f"Write {WANTED} instead of {FOUND}."
    home = file.parents[1]
    for place, found in setup.settings.items():
        (home / place).parent.mkdir(parents=True)
        (home / place).write_text(json.dumps(found))
    given = {"url": url, "file": str(file), "asked": asked}
    environment = {name: text.format(**given) for name, text in setup.environment.items()}
    began, printed = time.perf_counter(), ""
    with subprocess.Popen(
        [program or setup.program, *(text.format(**given) for text in setup.arguments)],
        cwd=file.parent,
        env={"PATH": os.environ["PATH"], "HOME": str(home), **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as agent:
        for line in agent.stdout or ():
            printed += line
            print(f"{time.perf_counter() - began:6.1f} s  {line.rstrip()[:_SHOWN]}", flush=True)
    return agent.returncode, printed


@contextlib.contextmanager
def scripted(setup: AgentSetup, file: Path, kept: Path | None) -> Iterator[str]:
    """Serve a tiny model that follows the script while entered; yield its address.

    Then what it was asked is printed, and the requests are stored in `kept`.
    """
    home = file.parents[1]
    script = home / "script.json"
    script.write_text(json.dumps(rules(setup, file)))
    model = write_tiny_gguf(home / "tiny.gguf", seed=1, n_ctx=N_CTX, n_layer=1, chat_template=HERMES)
    command = [sys.executable, str(Path(__file__).with_name("scripted_server.py")), str(script)]
    options = ["serve", "--target", str(model), "--ctx", str(N_CTX), "--max-seconds", "3600"]
    with Server("edgespec", [*command, *options]) as server:
        yield server.address
        print("\n".join(line for line in server.log(None).splitlines() if "/health" not in line))
    requests = script.with_suffix(".requests").read_text()
    if kept:
        kept.write_text(requests)
    for line in requests.splitlines():
        print(described(json.loads(line)))


def described(request: Mapping[str, Any]) -> str:
    """Return a line on what a request has."""
    body = request["body"]
    fields = {name: value for name, value in body.items() if name not in ("messages", "input", "system")}
    tools = fields.pop("tools", None) or []
    said = body.get("messages") or body.get("input") or []
    said = [said] if isinstance(said, str) else said
    told = f"{len(said)} items, {len(tools)} tools of {len(json.dumps(tools))} bytes"
    return f"{request['path']}: {len(json.dumps(body))} bytes, {told}, {json.dumps(fields)[:600]}"


def main() -> None:
    """Run one agent."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("agent", choices=SETUPS)
    parser.add_argument("--program", help="default: its name, or python3 for a client")
    parser.add_argument("--server", help="default: a tiny model's, scripted")
    parser.add_argument(
        "--requests", type=Path, metavar="FILE", help="where the scripted server's requests go"
    )
    args = parser.parse_args()
    setup = SETUPS[args.agent]
    with tempfile.TemporaryDirectory(prefix="edgespec-agent-") as home:
        file = Path(home, "project", "word.txt")
        file.parent.mkdir()
        file.write_text(f"{SAID}\n")
        given = contextlib.nullcontext(args.server) if args.server else scripted(setup, file, args.requests)
        with given as url:
            code, printed = run(setup, args.program, url, file)
        done = FOUND in printed if setup.tool else WANTED in file.read_text()
    print(f"ended with {code}, its task is {'done' if done else 'NOT done'}")
    raise SystemExit(code or not done)


if __name__ == "__main__":
    start(main)
