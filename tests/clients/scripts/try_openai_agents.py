"""`openai-agents`: an agent with a tool, streamed and not, and typed answers, by both APIs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel, Field

from checks import ANSWER, MAX_TOKENS, PERSON_QUESTION, QUESTION, WEATHER_QUESTION, System, run

MODELS = (OpenAIChatCompletionsModel, OpenAIResponsesModel)


class Person(BaseModel):
    """A person whom a sentence describes."""

    name: str = Field(max_length=40)
    age: int = Field(ge=0, le=150)


def agent_of(
    system: System, kind: Any, client: AsyncOpenAI, calls: list[str] | None = None, **fields: Any
) -> Any:
    """A greedy agent; with ``calls``, one that must call a tool, which notes the city there."""
    tools = []
    if calls is not None:

        @function_tool
        def get_weather(city: str) -> str:
            """The weather of a city."""
            calls.append(city)
            return "4 degrees, light rain"

        tools = [get_weather]
    return Agent(
        name="helper",
        instructions="Answer in one sentence.",
        model=kind(model=system.model, openai_client=client),
        model_settings=ModelSettings(
            temperature=0, max_tokens=MAX_TOKENS, tool_choice="required" if tools else None
        ),
        tools=tools,
        **fields,
    )


def by_each_api(system: System, ask: Callable[[Any, AsyncOpenAI], Awaitable[None]]) -> None:
    """Run a check by chats, then by responses."""

    async def run_it(kind: Any) -> None:
        url = system.base_url
        async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            await ask(kind, client)

    for kind in MODELS:
        asyncio.run(run_it(kind))


def an_answer(system: System) -> None:
    async def ask(kind: Any, client: AsyncOpenAI) -> None:
        result = await Runner.run(agent_of(system, kind, client), QUESTION)
        assert ANSWER in result.final_output, result.final_output

    by_each_api(system, ask)


def a_tool_is_called_and_its_result_told(system: System) -> None:
    async def ask(kind: Any, client: AsyncOpenAI) -> None:
        calls: list[str] = []
        result = await Runner.run(agent_of(system, kind, client, calls), WEATHER_QUESTION)
        assert len(calls) == 1
        assert len(result.raw_responses) == 2
        assert result.final_output

    by_each_api(system, ask)


def a_tool_is_called_in_a_stream(system: System) -> None:
    async def ask(kind: Any, client: AsyncOpenAI) -> None:
        calls: list[str] = []
        result = Runner.run_streamed(agent_of(system, kind, client, calls), WEATHER_QUESTION)
        kinds = [event.type async for event in result.stream_events()]
        assert len(calls) == 1
        assert "raw_response_event" in kinds
        assert result.final_output

    by_each_api(system, ask)


def a_typed_answer(system: System) -> None:
    async def ask(kind: Any, client: AsyncOpenAI) -> None:
        agent = agent_of(system, kind, client, output_type=Person)
        result = await Runner.run(agent, PERSON_QUESTION)
        assert result.final_output == Person(name="Anna Schmidt", age=34)

    by_each_api(system, ask)


if __name__ == "__main__":
    set_tracing_disabled(True)  # traces go to OpenAI
    run(
        an_answer,
        a_tool_is_called_and_its_result_told,
        a_tool_is_called_in_a_stream,
        a_typed_answer,
    )
