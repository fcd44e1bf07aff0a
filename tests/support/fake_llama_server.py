"""A stand-in for llama.cpp's `llama-server`, run as a program: options as there, answers that it invents.

An answer is the prompt's last word again and again. With `--forget`, an answer depends on how many clients it
serves.
"""

from __future__ import annotations

import argparse
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def main() -> None:
    parse = argparse.ArgumentParser()
    parse.add_argument("-m", required=True)
    parse.add_argument("-t", type=int, required=True)
    parse.add_argument("-np", type=int, required=True)
    parse.add_argument("-c", type=int, required=True)
    parse.add_argument("--host", required=True)
    parse.add_argument("--port", type=int, required=True)
    parse.add_argument("--forget", action="store_true")
    args = parse.parse_args()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            word = asked["messages"][-1]["content"].split()[-1]
            if args.forget:
                word += str(args.np)
            self.send_response(200)
            self.end_headers()
            n = asked["max_tokens"]
            for _ in range(n):
                self._say({"choices": [{"delta": {"content": f"{word} "}}]})
            self._say({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": n}})
            self.wfile.write(b"data: [DONE]\n\n")

        def _say(self, event: dict[str, object]) -> None:
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())

        def log_message(self, *_: object) -> None:
            pass

    ThreadingHTTPServer((args.host, args.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
