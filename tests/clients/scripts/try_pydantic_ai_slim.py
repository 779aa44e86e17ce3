"""Pydantic AI: answers, streams, tools and typed results, by chats and by responses."""

from __future__ import annotations

import asyncio
from typing import Any

from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

from checks import (
    ANSWER,
    CITIES,
    MAX_TOKENS,
    PERSON_QUESTION,
    QUESTION,
    SAYS_A_CALL,
    WEATHER_QUESTION,
    System,
    run,
)

MODELS = (OpenAIChatModel, OpenAIResponsesModel)


class Person(BaseModel):
    """A person whom a sentence describes."""

    name: str = Field(max_length=40)
    age: int = Field(ge=0, le=150)


def agent_of(system: System, kind: Any, **fields: Any) -> Any:
    """A greedy agent."""
    provider = OpenAIProvider(base_url=system.base_url, api_key="none")
    settings = {"temperature": 0.0, "max_tokens": MAX_TOKENS, **fields.pop("settings", {})}
    return Agent(kind(system.model, provider=provider), model_settings=settings, **fields)


def an_answer_streamed_or_not(system: System) -> None:
    async def stream(agent: Any) -> str:
        async with agent.run_stream(QUESTION) as result:
            return "".join([delta async for delta in result.stream_text(delta=True)])

    for kind in MODELS:
        agent = agent_of(system, kind)
        answer = asyncio.run(agent.run(QUESTION))
        assert ANSWER in answer.output
        assert answer.usage.output_tokens > 0
        assert asyncio.run(stream(agent)) == answer.output


def a_typed_result(system: System) -> None:
    for kind in MODELS:
        for mode in (ToolOutput, NativeOutput):
            agent = agent_of(system, kind, output_type=mode(Person), retries=0)
            result = asyncio.run(agent.run(PERSON_QUESTION))
            assert isinstance(result.output, Person), (kind, mode)


def a_tool_that_the_model_calls_itself(system: System) -> None:
    """The first step has a grammar write the call; the next has the tool's result."""

    def settings(context: Any) -> Any:
        return {"extra_body": SAYS_A_CALL} if context.run_step == 1 else {}

    cities: list[str] = []

    def get_weather(city: str) -> str:
        """The weather of a city."""
        cities.append(city)
        return "4 degrees, light rain"

    for kind in MODELS:
        cities.clear()
        agent = agent_of(system, kind, tools=[get_weather])
        result = asyncio.run(agent.run(WEATHER_QUESTION, model_settings=settings))
        assert len(cities) == 1
        assert cities[0] in CITIES
        assert result.output


if __name__ == "__main__":
    run(an_answer_streamed_or_not, a_typed_result, a_tool_that_the_model_calls_itself)
