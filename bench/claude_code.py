"""Lets Claude Code ask a running server, in whose first answer it must call a tool.

    npm install --prefix /tmp/claude @anthropic-ai/claude-code
    edgespec serve --port 8080 --max-seconds 3600
    .venv/bin/python bench/claude_code.py --claude /tmp/claude/node_modules/.bin/claude

Between both stands a proxy, as a small model does not lead an agent by itself: the first request's
`tool_choice` becomes the tool that reads a file, which may be the file of this run alone; what follows is
left as it is. Each request is told in a line: what it holds, and the time to its first block and to its end.
The agent has a home of its own, asks no other host, and must end with 0.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx

TOOL = "Read"


def proxy(server: str, file: Path) -> ThreadingHTTPServer:
    """Return a proxy before `server`, which lets the agent read `file`."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_args: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.send_response(200)
            self.end_headers()

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            results = sum(map(_is_result, asked["messages"]))
            for tool in asked.get("tools", ()):
                if tool["name"] == TOOL:
                    path = {"file_path": {"enum": [str(file)]}}
                    tool["input_schema"] = {"type": "object", "properties": path, "required": ["file_path"]}
                    if not results:
                        asked["tool_choice"] = {"type": "tool", "name": TOOL}
            began, first_s = time.perf_counter(), 0.0
            events: list[str] = []
            with httpx.stream("POST", server + self.path, json=asked, timeout=None) as answer:
                self.send_response(answer.status_code)
                self.send_header("Content-Type", answer.headers["content-type"])
                self.end_headers()
                for line in answer.iter_lines():
                    if line.startswith("event: "):
                        events.append(line[7:])
                    if line == "event: content_block_start":
                        first_s = first_s or time.perf_counter() - began
                    if line.startswith('data: {"type":"message_delta"'):
                        end = json.loads(line[6:])
                        print(f"  {end['delta']['stop_reason']}, {_without_ours(end['usage'])}")
                    self.wfile.write(f"{line}\n".encode())
                    self.wfile.flush()
            self.close_connection = True
            print(
                f"{self.path} {answer.status_code}: {len(json.dumps(asked))} bytes, "
                f"{len(asked['messages'])} messages, {results} results, "
                f"{len(asked.get('tools', ()))} tools; {len(events)} events, "
                f"first block after {first_s:.1f} s, end after {time.perf_counter() - began:.1f} s",
                flush=True,
            )

    return ThreadingHTTPServer(("127.0.0.1", 0), Handler)


def _is_result(message: dict[str, Any]) -> bool:
    content = message["content"]
    return isinstance(content, list) and any(block["type"] == "tool_result" for block in content)


def _without_ours(usage: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in usage.items() if name != "edgespec"}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--server", default="http://127.0.0.1:8080")
    parser.add_argument("--claude", default="claude")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        file = Path(home, "project", "word.txt")
        file.parent.mkdir()
        file.write_text("The word is pelican.\n")
        between = proxy(options.server, file)
        threading.Thread(target=between.serve_forever, daemon=True).start()
        names = (
            "MODEL",
            "SMALL_FAST_MODEL",
            *(f"DEFAULT_{size}_MODEL" for size in ("HAIKU", "SONNET", "OPUS")),
        )
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": home,
            "ANTHROPIC_BASE_URL": f"http://127.0.0.1:{between.server_port}",
            "ANTHROPIC_AUTH_TOKEN": "none",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "API_TIMEOUT_MS": "3600000",
            **{f"ANTHROPIC_{name}": "edgespec" for name in names},
        }
        asked = f"Read {file} and say in one short sentence what the word is."
        done = subprocess.run(
            [options.claude, "-p", asked, "--allowedTools", TOOL],
            cwd=file.parent,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
    print(f"claude said: {done.stdout.strip()!r}{done.stderr.strip()}, and ended with {done.returncode}")
    raise SystemExit(done.returncode)


if __name__ == "__main__":
    main()
