"""LiteLLM: chats, streams, tools, schemas, texts and responses, by both providers that fit."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would fetch a list of prices

import litellm
from pydantic import BaseModel, Field

from checks import (
    ANSWER,
    CITIES,
    MAX_TOKENS,
    MESSAGES,
    PERSON_QUESTION,
    QUESTION,
    SAYS_A_CALL,
    WEATHER,
    WEATHER_FUNCTION,
    System,
    refusal,
    run,
)

litellm.suppress_debug_info = True
PROVIDERS = ("openai", "hosted_vllm")


class Person(BaseModel):
    """A person whom a sentence describes."""

    name: str = Field(max_length=40)
    age: int = Field(ge=0, le=150)


def asked(system: System, provider: str = "openai", **fields: Any) -> dict[str, Any]:
    """A greedy chat."""
    return {
        "model": f"{provider}/{system.model}", "api_base": system.base_url, "api_key": "none",
        "messages": MESSAGES, "max_tokens": MAX_TOKENS, "temperature": 0, "num_retries": 0,
        **fields,
    }  # fmt: skip


def a_chat_streamed_or_not(system: System) -> None:
    for provider in PROVIDERS:
        whole = litellm.completion(**asked(system, provider))
        text = whole.choices[0].message.content
        assert ANSWER in text, text
        assert whole.usage.completion_tokens > 0
        chunks = list(
            litellm.completion(
                **asked(system, provider), stream=True, stream_options={"include_usage": True}
            )
        )
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
        built = litellm.stream_chunk_builder(chunks, messages=MESSAGES)
        assert built.usage.completion_tokens == whole.usage.completion_tokens


def chats_at_once(system: System) -> None:
    async def ask() -> list[str]:
        answers = await asyncio.gather(*(litellm.acompletion(**asked(system)) for _ in range(4)))
        return [answer.choices[0].message.content for answer in answers]

    texts = asyncio.run(ask())
    assert len(set(texts)) == 1
    assert ANSWER in texts[0]


def a_required_tool_and_its_result(system: System) -> None:
    for provider in PROVIDERS:
        given = asked(system, provider, tools=[WEATHER])
        message = litellm.completion(**given, tool_choice="required").choices[0].message
        (call,) = message.tool_calls
        assert call.function.name == "get_weather"
        assert json.loads(call.function.arguments)["city"] in CITIES
        result = {"role": "tool", "tool_call_id": call.id, "content": "4 degrees, light rain"}
        history = [*MESSAGES, message.model_dump(), result]
        follow_up = litellm.completion(**{**given, "messages": history})
        assert follow_up.choices[0].message.content


def a_streamed_tool_call(system: System) -> None:
    given = asked(system, tools=[WEATHER], extra_body=SAYS_A_CALL, stream=True)
    chunks = list(litellm.completion(**given))
    message = litellm.stream_chunk_builder(chunks, messages=MESSAGES).choices[0].message
    (call,) = message.tool_calls
    assert json.loads(call.function.arguments)["city"] in CITIES


def an_answer_that_fits_a_schema(system: System) -> None:
    messages = [{"role": "user", "content": PERSON_QUESTION}]
    for provider in PROVIDERS:
        given = asked(system, provider, messages=messages, response_format=Person)
        text = litellm.completion(**given).choices[0].message.content
        assert Person.model_validate_json(text) == Person(name="Anna Schmidt", age=34)


def a_text_completion(system: System) -> None:
    answer = litellm.text_completion(
        model=f"text-completion-openai/{system.model}", api_base=system.base_url, api_key="none",
        prompt="The capital of France is", max_tokens=8, temperature=0,
    )  # fmt: skip
    assert ANSWER in answer.choices[0].text


def response_fields(system: System) -> dict[str, Any]:
    return {
        "model": f"openai/{system.model}", "api_base": system.base_url, "api_key": "none",
        "input": QUESTION, "max_output_tokens": MAX_TOKENS, "temperature": 0,
    }  # fmt: skip


def text_of(response: Any) -> str:
    return "".join(
        part.text for item in response.output if item.type == "message" for part in item.content
    )


def a_response_streamed_or_not(system: System) -> None:
    whole = litellm.responses(**response_fields(system))
    assert ANSWER in text_of(whole)
    events = list(litellm.responses(**response_fields(system), stream=True))
    told = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert told == text_of(whole)
    assert events[-1].type == "response.completed"


def a_response_with_a_tool(system: System) -> None:
    tool = {"type": "function", **WEATHER_FUNCTION}
    answer = litellm.responses(**response_fields(system), tools=[tool], tool_choice="required")
    (call,) = answer.output
    assert call.name == "get_weather"
    assert json.loads(call.arguments)["city"] in CITIES


def errors_are_its_own(system: System) -> None:
    cases: Any = (
        ({"temperature": -1}, litellm.BadRequestError),
        ({"model": "openai/other"}, litellm.NotFoundError),
    )
    for fields, kind in cases:
        error = refusal(kind, litellm.completion, **{**asked(system), **fields})
        assert next(iter(fields)) in str(error)


if __name__ == "__main__":
    run(
        a_chat_streamed_or_not,
        chats_at_once,
        a_required_tool_and_its_result,
        a_streamed_tool_call,
        an_answer_that_fits_a_schema,
        a_text_completion,
        a_response_streamed_or_not,
        a_response_with_a_tool,
        errors_are_its_own,
    )
