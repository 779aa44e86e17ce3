"""Instructor: reads models from answers in the modes that send a schema: whole, partial, lists."""

from __future__ import annotations

import asyncio
from typing import Any

import instructor
import openai
from pydantic import BaseModel, Field

from checks import MAX_TOKENS, PERSON_QUESTION, System, run

MESSAGES: Any = [{"role": "user", "content": PERSON_QUESTION}]
# The others put the schema into the prompt alone, and what comes is up to the model.
MODES = (
    instructor.Mode.TOOLS,
    instructor.Mode.TOOLS_STRICT,
    instructor.Mode.JSON_SCHEMA,
    instructor.Mode.RESPONSES_TOOLS,
)


class Person(BaseModel):
    """A person whom a sentence describes."""

    name: str = Field(max_length=40)
    age: int = Field(ge=0, le=150)


def asked(system: System, **fields: Any) -> dict[str, Any]:
    return {
        "model": system.model, "messages": MESSAGES, "max_tokens": 2 * MAX_TOKENS, "temperature": 0,
        "max_retries": 0, **fields,
    }  # fmt: skip


def every_mode(system: System) -> None:
    for mode in MODES:
        raw = openai.OpenAI(base_url=system.base_url, api_key="none", max_retries=0)
        client = instructor.from_openai(raw, mode=mode)
        found = client.chat.completions.create(**asked(system), response_model=Person)
        assert isinstance(found, Person), mode


def async_and_with_the_completion(system: System) -> None:
    async def ask() -> Any:
        async with openai.AsyncOpenAI(base_url=system.base_url, api_key="none") as raw:
            client = instructor.from_openai(raw)
            return await client.chat.completions.create_with_completion(
                **asked(system), response_model=Person
            )

    found, completion = asyncio.run(ask())
    assert isinstance(found, Person)
    assert completion.usage.completion_tokens > 0


def parts_of_an_answer_as_they_come(system: System) -> None:
    raw = openai.OpenAI(base_url=system.base_url, api_key="none", max_retries=0)
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(raw, mode=mode)
        parts = list(client.chat.completions.create_partial(**asked(system), response_model=Person))
        assert len(parts) > 1
        assert Person.model_validate(parts[-1].model_dump())


def a_list_of_answers(system: System) -> None:
    raw = openai.OpenAI(base_url=system.base_url, api_key="none", max_retries=0)
    client = instructor.from_openai(raw)
    given = asked(system, max_tokens=4 * MAX_TOKENS)
    found = list(client.chat.completions.create_iterable(**given, response_model=Person))
    assert all(isinstance(one, Person) for one in found)  # the model may find nobody


if __name__ == "__main__":
    run(
        every_mode,
        async_and_with_the_completion,
        parts_of_an_answer_as_they_come,
        a_list_of_answers,
    )
