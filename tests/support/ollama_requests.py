"""What the tests of Ollama's API ask, and how they look at a refusal."""

from __future__ import annotations

import re
from typing import Any

import ollama
import pytest

HELLO = [{"role": "user", "content": "hello"}]
GREEDY = {"temperature": 0, "num_predict": 24}
DURATIONS = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")


def refused(client: ollama.Client, status: int, words: str, **fields: Any) -> None:
    asked = {"model": "edgespec", "messages": HELLO, "options": {"num_predict": 2}} | fields
    with pytest.raises(ollama.ResponseError) as caught:
        client.chat(**asked)
    assert caught.value.status_code == status, caught.value
    assert re.search(words, caught.value.error), caught.value.error
