"""What an output consists of: text, reasoning and calls; and what divides it into these."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Reasoning:
    """What the model thinks before it answers; the next piece of it."""

    text: str


def new_call_id(name: str = "", number: int = 0) -> str:
    """Make the id of a call as OpenAI's API has them, whatever the function and the number."""
    return f"call_{uuid.uuid4().hex}"


@dataclass(frozen=True, slots=True)
class CallBegins:
    """A call of a function; its arguments follow."""

    name: str
    call_id: str = field(default_factory=new_call_id, compare=False)


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next piece of the arguments of the call that began last: JSON, as the model wrote it."""

    text: str


CLOSE_SIGN = "\ud800"
"""Stands for a token that closes a thought; no output has it as text."""
MakeId = Callable[[str], str]
"""Makes the id of an output's next call, of the function with this name."""
Part = str | Reasoning | CallBegins | CallArguments
"""A text is what the assistant says."""


class OutputParser(Protocol):
    """Divides one output that comes in pieces, in its order. It never raises.

    However the output is cut into pieces, the joined parts are the same; and the time that it
    takes grows with the output only.
    """

    def push(self, text: str) -> Iterator[Part]:
        """What is certain now: a tag's beginning is held back until it is whole or none."""
        ...

    def finish(self) -> Iterator[Part]:
        """The rest; the output is at its end."""
        ...


@dataclass(frozen=True, slots=True)
class ParserContext:
    """What a parser may know of its request.

    Attributes:
        tools: the parameters (a JSON schema) of each function that is offered, by its name.
        prompt_end: what the prompt already has of the answer, special tokens included.
        num_calls: how many calls the conversation has so far.
        closes_by_token: `CLOSE_SIGN` ends a thought. The mark's text, spelled out of other tokens,
            closes nothing.
    """

    tools: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    prompt_end: str = ""
    num_calls: int = 0
    closes_by_token: bool = False
