"""EventExchange: answers one chat over an API whose answers are streams of events.

    body -> ChatRequest -> a call -> ChatDialect's chunks -> AnswerEvents -> a stream or one answer

Anthropic's Messages API and OpenAI's Responses API each bring their own `AnswerEvents` and
`FieldNames`.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
from aiohttp import web

from baton.api.errors import BatonError, InvalidRequestError
from baton.api.outputs import TextDelta
from router.api.http.chat import ChatDialect, open_chat
from router.api.http.errors import ApiError
from router.api.http.exchange import ENTRY, SERVED, respond_in_events
from router.api.http.responses import MessageDelta
from router.api.http.sampling import TOGETHER, as_client_wrote
from router.api.http.schema import ChatRequest
from router.api.http.sse import EventStream
from router.calls.call import Call
from router.intake.intake import Intake

FieldNames = Mapping[str, str]
"""Field of the chat request -> the field that the client wrote, whose name errors show."""


class AnswerEvent(msgspec.Struct):
    """An event of a streamed answer; its ``type`` is also its name in the stream."""

    type: str


class AnswerEvents(Protocol):
    """Builds one answer step by step, and the events that stream it."""

    def first_events(self) -> Iterator[AnswerEvent]:
        """Return the events that begin the answer, before the first token's text."""
        ...

    def push(self, message: MessageDelta, num_tokens: int) -> Iterator[AnswerEvent]:
        """Return the events for the next ``num_tokens`` tokens of the answer."""
        ...

    def last_events(self, reason: str, delta: TextDelta) -> Iterator[AnswerEvent]:
        """Return the events that end the answer.

        Args:
            reason: the chat's finish reason.
            delta: the last piece of the output, which has the receipt.
        """
        ...

    def fail(self, error: BatonError | ApiError) -> AnswerEvent:
        """Return the event that ends a failed answer."""
        ...

    def whole(self) -> Any:
        """Return the whole answer, for requests without ``stream``.

        Raises ApiError if the answer failed.
        """
        ...


@contextmanager
def as_fields(names: FieldNames) -> Iterator[None]:
    """Rename fields of the chat request in errors to the fields that the client wrote.

    An index of a chat message is dropped, because the client's messages have other indexes.
    """
    try:
        yield
    except InvalidRequestError as error:
        field, problem = error.field, error.problem
        if field.startswith("messages["):
            field = "messages"
        found, other = (_named(names, name) for name in (field, problem.removeprefix(TOGETHER)))
        if problem.startswith(TOGETHER):
            problem = TOGETHER + other
        if problem != error.problem:
            raise InvalidRequestError(found, problem) from None
        if found != error.field:
            raise error.of_field(found) from None
        raise


def _named(names: FieldNames, field: str) -> str:
    """Return the client's field that became this field of the chat request."""
    for ours, theirs in names.items():
        if field == ours or field.startswith((f"{ours}[", f"{ours}.")):
            return theirs + field[len(ours) :]
    return field


async def answer_in_events(
    request: web.Request,
    body: ChatRequest,
    *,
    received_at: float,
    names: FieldNames,
    make_events: Callable[[Call], AnswerEvents],
    grammars: Mapping[str, str] | None = None,
) -> web.StreamResponse:
    """Answer a request through a chat; `web.middleware` turns raised errors into responses.

    Args:
        names: the client's names of the chat request's fields, for errors.
        make_events: makes the writer of the answer's events.
        grammars: the Lark grammars of custom tools (`conversation.Grammars`).
    """
    with as_fields(names):
        (call,), dialect = await open_chat(request, body, received_at, grammars)
    return await EventExchange(
        request=request,
        intake=request[SERVED].intake,
        body=body,
        call=call,
        dialect=dialect,
        events=make_events(call),
        names=names,
    ).respond()


@dataclass(frozen=True, slots=True, kw_only=True)
class EventExchange:
    """One checked request, which `respond` answers."""

    request: web.Request
    intake: Intake
    body: ChatRequest
    call: Call
    dialect: ChatDialect
    events: AnswerEvents
    names: FieldNames

    async def respond(self) -> web.StreamResponse:
        """Run the call and return its response; if the client disconnects, end the call."""
        self.request[ENTRY].num_prompt_tokens = len(self.call.prompt_token_ids)
        if self.body.stream:
            return await respond_in_events(self.request, [self.call], self._send, self._fail)
        async with contextlib.aclosing(self._run()) as events:
            async for _ in events:
                pass
        body = msgspec.json.encode(self.events.whole())
        return web.Response(body=body, content_type="application/json")

    async def _send(self, stream: EventStream) -> None:
        async with contextlib.aclosing(self._run()) as events:
            async for event in events:
                await stream.send(event, kind=event.type)
        await stream.end_response()

    async def _fail(self, stream: EventStream, error: BatonError | ApiError) -> None:
        event = self.events.fail(error)
        await stream.send(event, kind=event.type)
        await stream.end_response()

    async def _run(self) -> AsyncGenerator[AnswerEvent, None]:
        """Yield the answer's events from the first token on.

        Raises an error that occurs before the first token, so that it becomes an HTTP status.
        """
        has_begun = False
        with as_fields(self.names), as_client_wrote(self.body):
            stream = self.intake.stream(self.call, self.dialect.parser(0))
            async with contextlib.aclosing(stream) as deltas:
                async for delta in deltas:
                    if not has_begun:
                        has_begun = True
                        for event in self.events.first_events():
                            yield event
                    self.request[ENTRY].note_tokens(len(delta.token_ids))
                    choice = self.dialect.chunk(0, delta)
                    for event in self.events.push(choice.delta, len(delta.token_ids)):
                        yield event
                    if choice.finish_reason is not None:
                        for event in self.events.last_events(choice.finish_reason, delta):
                            yield event
