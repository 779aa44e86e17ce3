"""`POST /v1/responses`: items in, items out; a chat in other words, and nothing is stored.

ResponsesRequest -> ChatRequest -> calls -> ChatDialect's chunks -> Items -> events or an answer
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass

import msgspec
from aiohttp import web

from baton.errors import BatonError
from router.call import Call
from router.http.chat import ChatDialect, note_effort, open_chat
from router.http.errors import ApiError, error_code
from router.http.exchange import ENTRY, REQUEST_ID, read_body, respond_in_events
from router.http.ignored_fields import note_ignored
from router.http.options import HttpOptions
from router.http.response_output import Event, Items, ResponseHead, response_usage
from router.http.response_request import ResponsesRequest, as_response_fields, chat_request
from router.http.responses import usage_of
from router.http.sampling import as_client_wrote
from router.http.schema import ChatRequest
from router.http.sse import EventStream
from router.intake import Intake

_STATUS = {"length": "incomplete", "abort": "failed"}  # of what ends otherwise: completed
_CUT_SHORT = {"code": "server_error", "message": "the output was cut short on a node"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesExchange:
    """A checked request."""

    request: web.Request
    intake: Intake
    body: ChatRequest
    call: Call
    dialect: ChatDialect
    head: ResponseHead

    async def respond(self) -> web.StreamResponse:
        """Run the call; ends it when the client goes away."""
        self.request[ENTRY].num_prompt_tokens = len(self.call.prompt_token_ids)
        if self.body.stream:
            return await respond_in_events(self.request, [self.call], self._send, self._fail)
        response = None
        with as_response_fields(), as_client_wrote(self.body):
            async with contextlib.aclosing(self._events()) as events:
                async for event in events:
                    response = event.response  # the last event's is the whole answer
        return web.Response(body=msgspec.json.encode(response), content_type="application/json")

    async def _send(self, stream: EventStream) -> None:
        with as_response_fields(), as_client_wrote(self.body):
            async with contextlib.aclosing(self._events()) as events:
                async for event in events:
                    event.sequence_number = stream.num_sent
                    await stream.send(event, kind=event.type)
        await stream.end()

    async def _fail(self, stream: EventStream, error: BatonError | ApiError) -> None:
        told = {"code": error_code(error), "message": str(error)}
        event = Event("response.failed", response=self.head.response("failed", error=told))
        event.sequence_number = stream.num_sent
        await stream.send(event, kind=event.type)
        await stream.end()

    async def _events(self) -> AsyncGenerator[Event, None]:
        """From the first token on: what fails before it has a status of its own."""
        items = Items()
        has_begun = False
        async with contextlib.aclosing(self.intake.stream(self.call)) as deltas:
            async for delta in deltas:
                if not has_begun:
                    has_begun = True
                    for kind in ("created", "in_progress"):
                        yield Event(f"response.{kind}", response=self.head.response("in_progress"))
                self.request[ENTRY].note_tokens(len(delta.token_ids))
                choice = self.dialect.chunk(0, delta)
                for event in items.push(choice.delta, len(delta.token_ids)):
                    yield event
                if choice.finish_reason is None:
                    continue
                status = _STATUS.get(choice.finish_reason, "completed")
                for event in items.finish("completed" if status == "completed" else "incomplete"):
                    yield event
                assert delta.receipt is not None
                response = self.head.response(
                    status,
                    items.items,
                    usage=response_usage(usage_of([delta.receipt], 1), items.num_reasoning_tokens),
                    error=_CUT_SHORT if status == "failed" else None,
                )
                yield Event(f"response.{status}", response=response)


async def responses(
    request: web.Request, intake: Intake, options: HttpOptions
) -> web.StreamResponse:
    """Raises what `web.middleware` turns into a response."""
    received_at = time.perf_counter()
    given = await read_body(request, ResponsesRequest, options)
    if given.store:
        note_ignored(request, ["store"])
    body = chat_request(given)
    note_effort(request, intake, body, "reasoning.effort")
    with as_response_fields():
        (call,), dialect = await open_chat(request, intake, body, received_at)
    return await ResponsesExchange(
        request=request,
        intake=intake,
        body=body,
        call=call,
        dialect=dialect,
        head=ResponseHead(given, request[REQUEST_ID], call.sampling_params),
    ).respond()
