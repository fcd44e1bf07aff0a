"""LangChain's ChatOpenAI, through both of OpenAI's APIs."""

from __future__ import annotations

from functools import reduce
from operator import add
from typing import Any

from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import SecretStr

from asked import ASKED, URL, check, read_file


def conversation(**options: Any) -> str:  # noqa: ANN401 - ChatOpenAI's
    """Return the text of the last answer; the answers stream."""
    reader = tool(read_file)
    model = ChatOpenAI(
        model="edgespec", base_url=f"{URL}/v1", api_key=SecretStr("none"), max_retries=0, **options
    ).bind_tools([reader])
    messages: list[Any] = [HumanMessage(ASKED)]
    while True:
        answer: Any = reduce(add, model.stream(messages))
        messages.append(answer)
        if not answer.tool_calls:
            return str(answer.text)
        messages += [reader.invoke(call) for call in answer.tool_calls]


check("/v1/chat/completions", conversation())
check("/v1/responses", conversation(use_responses_api=True))
check("/v1/responses, stored", conversation(use_responses_api=True, use_previous_response_id=True))
