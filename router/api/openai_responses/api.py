"""`POST /v1/responses`: OpenAI's Responses API, answered by chat requests; stores nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from aiohttp import web

from baton.api.errors import BatonError
from baton.api.outputs import TextDelta
from router.api.http.chat import note_effort
from router.api.http.errors import REQUEST_ID, ApiError, error_code, error_message
from router.api.http.event_exchange import answer_in_events
from router.api.http.exchange import ENTRY, HttpOptions, read_body
from router.api.http.ignored_fields import note_ignored
from router.api.http.responses import MessageDelta, usage_of
from router.api.openai_responses.output import Event, Items, ResponseHead, response_usage
from router.api.openai_responses.request import FIELD_NAMES, ResponsesRequest, chat_request
from router.api.openai_responses.tools import OfferedTools, read_tools
from router.calls.call import Call

# With any other finish reason, the answer is completed
_STATUS = {"length": "incomplete", "abort": "failed"}
_CUT_SHORT = {"code": "server_error", "message": "the output was cut short on a node"}


class ResponseEvents:
    """Builds the events that stream one answer; events are numbered from 0."""

    def __init__(self, head: ResponseHead, offered: OfferedTools) -> None:
        self._head = head
        self._items = Items(offered)
        self._num_events = 0
        self._whole: dict[str, Any] = {}

    def first_events(self) -> Iterator[Event]:
        for kind in ("created", "in_progress"):
            response = self._head.response("in_progress")
            yield self._numbered(Event(f"response.{kind}", response=response))

    def push(self, message: MessageDelta, num_tokens: int) -> Iterator[Event]:
        yield from map(self._numbered, self._items.push(message, num_tokens))

    def last_events(self, reason: str, delta: TextDelta) -> Iterator[Event]:
        status = _STATUS.get(reason, "completed")
        of_items = "completed" if status == "completed" else "incomplete"
        yield from map(self._numbered, self._items.end_answer(of_items))
        assert delta.receipt is not None
        self._whole = self._head.response(
            status,
            self._items.items,
            usage=response_usage(usage_of([delta.receipt], 1), self._items.num_reasoning_tokens),
            error=_CUT_SHORT if status == "failed" else None,
        )
        yield self._numbered(Event(f"response.{status}", response=self._whole))

    def fail(self, error: BatonError | ApiError) -> Event:
        told = {"code": error_code(error) or "server_error", "message": error_message(error)}
        response = self._head.response("failed", error=told)
        return self._numbered(Event("response.failed", response=response))

    def whole(self) -> dict[str, Any]:
        return self._whole

    def _numbered(self, event: Event) -> Event:
        event.sequence_number = self._num_events
        self._num_events += 1
        return event


async def responses(request: web.Request, options: HttpOptions) -> web.StreamResponse:
    """Answer a Responses request; `web.middleware` turns raised errors into responses."""
    received_at = request[ENTRY].began_at
    given = await read_body(request, ResponsesRequest, options)
    if given.store:
        note_ignored(request, ["store"])
    offered = read_tools(given.tools)
    note_ignored(request, offered.dropped)
    body = chat_request(given, offered)
    note_effort(request, body, "reasoning.effort")

    def make_events(call: Call) -> ResponseEvents:
        head = ResponseHead(given, request[REQUEST_ID], call.sampling_params)
        return ResponseEvents(head, offered)

    return await answer_in_events(
        request,
        body,
        received_at=received_at,
        names=FIELD_NAMES,
        make_events=make_events,
        grammars=offered.grammars,
    )
