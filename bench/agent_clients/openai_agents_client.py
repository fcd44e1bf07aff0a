"""The OpenAI Agents SDK, through both of OpenAI's APIs."""

from __future__ import annotations

import asyncio

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

from asked import ASKED, URL, check, read_file


async def main() -> None:
    set_tracing_disabled(True)  # else it tells OpenAI of each run
    for name, kind in (
        ("/v1/chat/completions", OpenAIChatCompletionsModel),
        ("/v1/responses", OpenAIResponsesModel),
    ):
        model = kind(
            model="edgespec", openai_client=AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
        )
        agent = Agent(name="reader", instructions="Be brief.", tools=[function_tool(read_file)], model=model)
        run = Runner.run_streamed(agent, ASKED)
        async for _ in run.stream_events():
            pass
        check(name, str(run.final_output))


asyncio.run(main())
