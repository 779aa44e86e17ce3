"""The parts of an output (text, reasoning, calls), and the protocol of output parsers."""

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
    """The next piece of the arguments of the call that began last, as JSON text."""

    text: str


CLOSE_SIGN = "\ud800"
"""Text that parsers get in place of the token that ends reasoning; no model writes it."""
MakeId = Callable[[str], str]
"""Function that makes the id of the next call in an output, given the function's name."""
Part = str | Reasoning | CallBegins | CallArguments
"""A part of an output; a string is a part of the answer's text."""


class OutputParser(Protocol):
    """Divides one output, whose text arrives in pieces, into parts. Never raises.

    The joined parts do not depend on how the output is cut into pieces. The total time is linear in
    the output's length.
    """

    def push(self, text: str) -> Iterator[Part]:
        """Add text; yield the parts that are certain, and hold back text that may begin a mark."""
        ...

    def flush(self) -> Iterator[Part]:
        """End the output; yield the parts of the text that was held back."""
        ...


@dataclass(frozen=True, slots=True)
class ParserContext:
    """Facts about a request that the parser of its output may need.

    Attributes:
        tools: JSON Schema of each offered function's parameters, by name.
        prompt_end: the end of the prompt that is already part of the answer, such as a mark of
            reasoning, with special tokens.
        num_calls: number of calls in the conversation before this output.
        closes_by_token: whether only the closing token (`CLOSE_SIGN`) ends reasoning. Then the same
            text in other tokens does not.
    """

    tools: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    prompt_end: str = ""
    num_calls: int = 0
    closes_by_token: bool = False
