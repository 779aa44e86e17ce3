"""Chats that an engine answers in this process, through the router's code for requests."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from baton.api.sampling_params import SamplingParams
from baton.text.stop_strings import DetokenizeOptions
from baton.text.tokenizer import Tokenizer
from router.api.http.chat import divide
from router.api.http.conversation import (
    asked_thinking,
    chat_prompt,
    held_output,
    parser_context,
)
from router.api.http.sampling import sampling_params
from router.api.http.schema import ChatRequest
from router.intake.answers.divided_text import DividedText
from router.intake.parsers.base import Part
from router.intake.parsers.choice import OutputParsers


@dataclass(frozen=True, slots=True)
class Said:
    """An answer as its client gets it."""

    reasoning: str
    text: str
    calls: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class AskedChat:
    """A chat request as an engine gets it."""

    prompt: list[int]
    params: SamplingParams
    make_parser: Any
    tokenizer: Tokenizer
    shown_token_ids: frozenset[int]

    def read(self, token_ids: Sequence[int], *, ended_by_token: bool = True) -> Said:
        """Divide an output, token by token."""
        options = DetokenizeOptions(shown_token_ids=self.shown_token_ids)
        params = dataclasses.replace(self.params, stop=())
        text = DividedText(self.tokenizer, params, options, self.make_parser())
        parts = list[Part]()
        for index, token_id in enumerate(token_ids):
            is_last = index == len(token_ids) - 1
            text.push([token_id], last=is_last, ended_by_token=is_last and ended_by_token)
            parts += text.parts
        said = divide(parts, 0)
        calls = tuple((one.function.name or "", one.function.arguments) for one in said.calls)
        return Said(said.reasoning, said.text, calls)


def ask(tokenizer: Tokenizer, body: dict[str, Any]) -> AskedChat:
    """Make a chat from a body, as `router.api.http.chat.open_chat` does."""
    given = {"model": "m", "messages": [{"role": "user", "content": "Go."}], **body}
    request = msgspec.convert(given, ChatRequest, strict=False)
    parsers = OutputParsers(tokenizer)
    held = held_output(request, parsers)
    asked = asked_thinking(request, tokenizer.chat_template)
    chat = chat_prompt(request)
    prompt = tokenizer.encode_chat(
        chat.messages, tools=chat.tools, template_options=chat.template_options
    )
    params = sampling_params(
        request,
        max_tokens=request.max_tokens or 400,
        structured_output=held.output if held is not None else None,
    )
    is_constrained = params.structured_output is not None
    thinking = parsers.thinking(
        prompt,
        asked,
        is_constrained=is_constrained,
        before_calls=held is not None and not held.is_common_call,
    )
    is_free = held is not None and held.is_free
    make = functools.partial(
        parsers.make,
        parser_context(request, parsers.prompt_end(prompt), thinking=thinking),
        is_forced=held is not None and held.is_common_call,
        is_constrained=is_constrained and not is_free,
        is_either=held is not None and held.is_either,
        thinks=thinking is not None,
        several=request.parallel_tool_calls is not False,
    )
    shown = parsers.shown_token_ids(with_tools=bool(request.tools))
    return AskedChat(prompt, dataclasses.replace(params, thinking=thinking), make, tokenizer, shown)
