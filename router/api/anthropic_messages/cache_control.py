"""Reads ``cache_control``: which prefixes of a prompt a Messages request asks to keep.

    tools ... | system ... | message, message ...        in the order of the request
            ^ mark       ^ mark              ^ mark

A mark before a later mark with an equal or longer time does not count.

A mark at the end of the conversation keeps the whole prompt and the answer. The length of another
marked prefix is the number of tokens of the conversation up to the mark. Chat templates write tools
and the system prompt in either order, so a mark of a tool keeps the system prompt, too.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
from aiohttp import web

from baton.api.errors import BatonError
from baton.kv.pins import PrefixPin
from router.api.anthropic_messages.request import CacheControl, MessagesRequest, chat_request
from router.api.http.conversation import chat_prompt
from router.api.http.exchange import PRINCIPAL, SERVED
from router.api.http.schema import ChatRequest, Message

TTL_S = {"5m": 300.0, "1h": 3600.0}
_DEFAULT_TTL_S = TTL_S["5m"]


@dataclass(frozen=True, slots=True)
class _Mark:
    """The end of a prefix.

    Attributes:
        num_system: number of blocks of the system prompt in the prefix; None: all.
        num_messages: number of messages in the prefix, the last one up to block ``num_blocks``.
        is_end: whether the prefix is the whole conversation.
    """

    ttl_s: float
    num_system: int | None = None
    num_messages: int = 0
    num_blocks: int = 0
    is_end: bool = False


async def pinned_prefixes(
    request: web.Request, given: MessagesRequest, body: ChatRequest
) -> tuple[PrefixPin, ...]:
    """Return the prefixes that a request asks to keep, at most one for each time.

    A mark is only a hint: a prefix without tokens, or one that the chat template refuses to write,
    is left out.

    Args:
        body: the chat request that ``given`` was converted to.
    """
    served = request[SERVED]
    prefixes = []
    for mark in _last_marks(_marks(given)):
        if mark.is_end:
            prefixes.append(PrefixPin(mark.ttl_s))
            continue
        try:
            prompt = chat_prompt(_up_to(given, body, mark), served.chat_template)
            token_ids = await served.intake.reader.tokenize(prompt, request[PRINCIPAL])
        except BatonError:
            continue
        if token_ids:  # a length of 0 would stand for the whole prompt and the answer
            prefixes.append(PrefixPin(mark.ttl_s, len(token_ids)))
    return tuple(prefixes)


def _marks(given: MessagesRequest) -> list[_Mark]:
    """Return all marks of a request, in the order of the prompt."""
    marks = [_Mark(_ttl_s(tool.cache_control)) for tool in given.tools or () if tool.cache_control]
    if given.system and not isinstance(given.system, str):
        marks += [
            _Mark(_ttl_s(block.cache_control), number)
            for number, block in enumerate(given.system, 1)
            if block.cache_control
        ]
    for place, turn in enumerate(given.messages, 1):
        blocks = () if isinstance(turn.content, str) else turn.content
        is_last = place == len(given.messages)
        marks += [
            _Mark(
                _ttl_s(block.cache_control), None, place, number, is_last and number == len(blocks)
            )
            for number, block in enumerate(blocks, 1)
            if block.cache_control
        ]
    if given.cache_control is not None:
        marks.append(_Mark(_ttl_s(given.cache_control), is_end=True))
    return marks


def _ttl_s(control: CacheControl | None) -> float:
    ttl = control.ttl if control is not None else None
    return TTL_S.get(ttl or "", _DEFAULT_TTL_S)


def _last_marks(marks: list[_Mark]) -> list[_Mark]:
    """Leave out each mark before a later mark with the same or a longer time."""
    kept: list[_Mark] = []
    for mark in reversed(marks):
        if all(mark.ttl_s > later.ttl_s for later in kept):
            kept.append(mark)
    return kept[::-1]


def _up_to(given: MessagesRequest, body: ChatRequest, mark: _Mark) -> ChatRequest:
    """Return the chat request whose prompt ends at a mark."""
    if mark.num_messages:
        turns = given.messages[: mark.num_messages]
        last = turns[-1]
        turns[-1] = msgspec.structs.replace(last, content=last.content[: mark.num_blocks])
        cut = chat_request(msgspec.structs.replace(given, messages=turns))
    else:
        cut = msgspec.structs.replace(body, messages=_system(body, mark.num_system))
    if cut.continue_final_message:
        return cut
    return msgspec.structs.replace(cut, add_generation_prompt=False)


def _system(body: ChatRequest, num_blocks: int | None) -> list[Message]:
    """Return the first blocks of the system prompt (None: all) as a message."""
    first = body.messages[0]
    content = first.content if first.role == "system" else ""
    if not isinstance(content, str) and content is not None:
        content = content[:num_blocks]
    return [Message(role="system", content=content or "")]
