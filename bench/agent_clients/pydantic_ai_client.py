"""pydantic-ai, through both of OpenAI's APIs."""

from __future__ import annotations

from collections.abc import AsyncIterable

from pydantic_ai import Agent, RunContext
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

from asked import ASKED, URL, check, read_file


async def streamed(_context: RunContext[object], events: AsyncIterable[object]) -> None:
    """Read the events of an answer, without which it would not stream."""
    async for _ in events:
        pass


for name, kind in (("/v1/chat/completions", OpenAIChatModel), ("/v1/responses", OpenAIResponsesModel)):
    provider = OpenAIProvider(base_url=f"{URL}/v1", api_key="none")
    agent = Agent(kind("edgespec", provider=provider), instructions="Be brief.", tools=[read_file])
    check(name, agent.run_sync(ASKED, event_stream_handler=streamed).output)
