"""A child of `check_architectures` in which the library crashes on the second architecture."""

from __future__ import annotations

import os

from architecture_check import Check, _Request
from edgespec.platform.processes import answer, say


def main() -> int:
    return answer(_Request, _work)


def _work(request: _Request) -> None:
    for name in request.names:
        if name == "qwen2":
            os.abort()
        say("check", Check(name, (), claimed=1))
