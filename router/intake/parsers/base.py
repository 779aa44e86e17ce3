"""Parts of an output (text, reasoning, calls), and the protocol of output parsers."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The next piece of the model's reasoning before its answer."""

    text: str


def new_call_id(name: str = "", number: int = 0) -> str:
    """Return a random call id in the form of OpenAI's API; the arguments are ignored."""
    return f"call_{uuid.uuid4().hex}"


@dataclass(frozen=True, slots=True)
class CallBegins:
    """The beginning of a call, before its arguments."""

    name: str
    call_id: str = field(default_factory=new_call_id, compare=False)


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next piece of the last call's arguments, as JSON that the model wrote."""

    text: str


CLOSE_SIGN = "\ud800"
"""Stands for the token that closes a thought; no output contains this text."""
MakeId = Callable[[str], str]
"""Makes the id of an output's next call from the function's name."""
Part = str | Reasoning | CallBegins | CallArguments
"""A string is a part of the message's text."""


class OutputParser(Protocol):
    """Divides one output, which arrives in pieces, into parts. Never raises.

    The joined parts do not depend on how the output is cut into pieces. The total time is linear in
    the output's length.
    """

    def push(self, text: str) -> Iterator[Part]:
        """Yield the parts that are certain now; hold back text that may begin a tag."""
        ...

    def flush(self) -> Iterator[Part]:
        """Yield the rest of an output that has ended."""
        ...


@dataclass(frozen=True, slots=True)
class ParserContext:
    """Facts about a request that its parser may use.

    Attributes:
        tools: JSON Schema of each offered function's parameters, by name.
        prompt_end: the end of the prompt that belongs to the answer, with special tokens.
        num_calls: number of calls in the conversation so far.
        closes_by_token: whether only the closing token (`CLOSE_SIGN`) ends a thought; the same text
            in other tokens then does not.
    """

    tools: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    prompt_end: str = ""
    num_calls: int = 0
    closes_by_token: bool = False
