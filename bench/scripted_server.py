"""Runs `edgespec serve` with a model that writes what a script says, whatever it is.

    .venv/bin/python bench/scripted_server.py SCRIPT.json serve --target tiny.gguf --port 8080

SCRIPT.json is a list of rules [[words], answer]: the first rule whose words are all in the prompt has the
answer, which a grammar holds the model to. SCRIPT.prompts and SCRIPT.requests get a line of JSON for each
prompt, and for each request with a body.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from edgespec.apps.server import json_routes
from edgespec.apps.server.worker import Worker
from edgespec.cli import main
from edgespec.decoding.grammars import Grammar
from edgespec.decoding.options import Options


def follow(script: Path) -> None:
    """Have every worker of this process answer as `script` says, and record what it is asked."""
    rules = json.loads(script.read_text())
    run, read = Worker.run, json_routes._StrictRequest.json

    def record(kind: str, found: object) -> None:
        with script.with_suffix(kind).open("a") as file:
            file.write(json.dumps(found) + "\n")

    def answer(self: Worker, tokens: Sequence[int], options: Options, **rest: Any) -> Any:  # noqa: ANN401
        model = self._engine.target
        prompt = b"".join(model.piece(token, special=True) for token in tokens).decode(errors="replace")
        record(".prompts", prompt)
        text = next(text for words, text in rules if all(word in prompt for word in words))
        return run(self, tokens, replace(options, grammar=Grammar.from_choice(model, [text])), **rest)

    async def recorded(self: Any) -> Any:  # noqa: ANN401 - JSON
        body = await read(self)
        if not self.scope.get("recorded"):  # several read it, each by a request of its own
            self.scope["recorded"] = True
            record(".requests", {"path": self.url.path, "headers": dict(self.headers), "body": body})
        return body

    Worker.run = answer  # type: ignore[method-assign]
    json_routes._StrictRequest.json = recorded  # type: ignore[method-assign]


if __name__ == "__main__":
    follow(Path(sys.argv[1]))
    raise SystemExit(main(sys.argv[2:]))
