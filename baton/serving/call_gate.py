"""CallGate: authenticates and authorizes the callers of gRPC calls, and turns errors into statuses.

Only this file calls `context.abort`. Callers are checked before their messages are read, and before
they learn whether the method exists.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import grpc
import grpc.aio
from google.protobuf.message import Message

from baton.access.access import Access
from baton.access.audit_log import AuditKind
from baton.access.call_roles import ANY, INFER, JOIN, OPEN, ROLES_OF_CALL, Roles
from baton.access.credentials import grpc_credentials, trace_headers
from baton.access.identity import ANYBODY_HERE, Principal, Role
from baton.api.errors import BatonError, InvalidRequestError, RequestCancelledError, status_name
from baton.serving.access_log import AccessEntry, AccessLog
from baton.serving.error_details import details_trailer, receipt_trailer
from baton.serving.held_calls import HeldCalls
from baton.serving.stall_watch import StallWatch
from baton.telemetry.tracing import NO_TRACING, Tracing
from baton.wire.reading import MAX_LINK_PARTS, MAX_PARTS, Unread, forgiving, patient

logger = logging.getLogger(__name__)

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
_Raw: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

_NOBODY: Roles = frozenset()
# Logged in place of an unknown method's name, which may not be UTF-8
_UNKNOWN_METHOD = "of this name"
# Maximum number of bytes of a message for health checks or reflection, which holds only the name of
# a service.
MAX_OPEN_BYTES = 2**16
_NOT_TOLD = ("prompt",)  # fields with clients' texts, which the audit log leaves out


class Context:
    """The context of a call, as the implementation of a service sees it.

    Attributes:
        principal: the caller.
        entry: the request's entry for the access log.
        address: the caller's address without a port. The address is read when the call begins,
            because gRPC crashes when asked for the peer of a call that has ended.
    """

    __slots__ = ("_context", "address", "entry", "principal")

    def __init__(
        self, context: _Raw, principal: Principal, address: str, entry: AccessEntry
    ) -> None:
        self._context = context
        self.principal = principal
        self.address = address
        self.entry = entry

    def time_remaining(self) -> float | None:
        """Return the seconds until the caller's deadline, or None without a deadline."""
        return self._context.time_remaining()

    def auth_context(self) -> Mapping[str, Iterable[bytes]]:
        """Return the caller's TLS properties as gRPC names them; empty without TLS."""
        return self._context.auth_context()

    def set_trailing_metadata(self, trailers: tuple[tuple[str, str | bytes], ...]) -> None:
        """Set the metadata that follows the last response."""
        self._context.set_trailing_metadata(trailers)


class CallGate(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in stubs only
    """Interceptor that checks all calls of one server, even calls of unknown methods.

    Args:
        access: decides who may call.
        anybody: principal of callers without credentials; see `Access.principal_of`.
        stall_timeout_s: a stream is ended if its client reads nothing for this long.
        check_load: raises an error if the server accepts no requests; called before a message is
            read.
        access_log: log of clients' calls.
        tracing: decides which calls are traced; None: no call is traced.
    """

    def __init__(
        self,
        access: Access | None = None,
        anybody: Principal = ANYBODY_HERE,
        *,
        stall_timeout_s: float = 30.0,
        check_load: Callable[[], None] = lambda: None,
        access_log: AccessLog | None = None,
        tracing: Tracing = NO_TRACING,
    ) -> None:
        self._access = access or Access()
        self._anybody = anybody
        self._stall_timeout_s = stall_timeout_s
        self._check_load = check_load
        self._access_log = access_log or AccessLog()
        self._tracing = tracing
        # Only one thread parses messages: more threads would take too much interpreter time from
        # the event loop.
        self._thread = ThreadPoolExecutor(1, "long-messages")
        self._held = HeldCalls()
        # For each known method: the method's handler, and the handler that guards the method.
        self._made: dict[str, tuple[Handler, Handler]] = {}

    def with_stall_timeout(self, stall_timeout_s: float) -> CallGate:
        """Return a copy with another time limit for clients that read nothing."""
        return CallGate(
            self._access,
            self._anybody,
            stall_timeout_s=stall_timeout_s,
            check_load=self._check_load,
            access_log=self._access_log,
            tracing=self._tracing,
        )

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        handler = await continuation(handler_call_details)
        method: str = handler_call_details.method
        if handler is None:
            return self._make_guarded(method, None)
        made = self._made.get(method)
        if made is None or made[0] is not handler:
            made = self._made[method] = handler, self._make_guarded(method, handler)
        return made[1]

    def _make_guarded(self, method: str, handler: Handler | None) -> Handler:
        """Return a handler that admits calls before the method's own handler reads them."""
        roles = ROLES_OF_CALL.get(method, _NOBODY)
        if handler is None:
            roles = ANY
        elif roles is OPEN:
            return _open(handler)
        # Every method is registered as a stream of messages, so that the caller is checked before
        # the first message is read. On the wire, a single message looks like a stream of one
        # message.
        deserialize = handler.request_deserializer if handler else None
        if deserialize is not None:
            if roles is ANY:  # gRPC's own services: health checks and reflection
                deserialize = forgiving(deserialize, max_bytes=MAX_OPEN_BYTES)
            else:
                deserialize = patient(deserialize, MAX_LINK_PARTS if roles == JOIN else MAX_PARTS)
        return grpc.stream_stream_rpc_method_handler(
            self._guard(method, handler, roles),
            deserialize,
            handler.response_serializer if handler else None,
        )

    async def refuse_unknown(self, raw: _Raw) -> None:
        """Refuse a call of an unknown method; only known callers are told that it is unknown."""
        async for _ in self._guard(_UNKNOWN_METHOD, None, ANY)(_no_messages(), raw):
            raise AssertionError("a refused call has no responses")

    def _join_trace(self, entry: AccessEntry, raw: _Raw, roles: Roles) -> None:
        # Import here, because clients import this module but do not need structlog.
        from structlog.contextvars import bind_contextvars

        tracing = self._tracing if Role.INFER in roles else NO_TRACING
        entry.join_trace(tracing, *trace_headers(raw))
        bind_contextvars(trace_id=entry.trace_id or None)

    def _guard(self, method: str, handler: Handler | None, roles: Roles) -> Callable[..., Any]:
        behavior = None if handler is None else _behavior(handler)
        makes_stream = inspect.isasyncgenfunction(behavior)

        async def guarded(requests: AsyncIterator[Any], raw: _Raw) -> AsyncIterator[Any]:
            watch: StallWatch | None = None
            entry, principal, status = AccessEntry(call=method), None, "CANCELLED"
            held = contextlib.ExitStack()
            try:
                shown = grpc_credentials(raw)
                entry.address = shown.address
                self._join_trace(entry, raw, roles)
                principal = self._access.admit(shown, roles, method, self._anybody)
                if Role.INFER in roles:
                    self._check_load()
                if handler is None or behavior is None:
                    await raw.abort(grpc.StatusCode.UNIMPLEMENTED, f"there is no call {method}")
                    return
                context = Context(raw, principal, shown.address, entry)
                caller = principal.name or shown.address
                if roles is ANY:
                    has_messages = handler.request_streaming
                    held.enter_context(self._held.hold_stream(caller, has_messages=has_messages))
                messages = _readable(requests, None if roles == JOIN else self._thread)
                request: Any = messages
                if not handler.request_streaming:
                    request = await self._held.only_message(caller, messages)
                if makes_stream:
                    watch = StallWatch(
                        shown.address, self._stall_timeout_s, functools.partial(_say_last, raw)
                    )
                    async with contextlib.aclosing(behavior(request, context)) as responses:
                        async for response in responses:
                            if not watch.num_sent:
                                # Send headers now: the client may not read the first message.
                                await raw.send_initial_metadata(())
                            watch.is_sending = True
                            yield response  # resumes once gRPC has accepted the message
                            watch.is_sending = False
                            watch.num_sent += 1
                    status = "OK"
                    return
                # The method is implemented by a library, which sends its answers itself.
                if handler.response_streaming:
                    await behavior(request, raw)
                    return
                try:
                    response = await behavior(request, context)
                except BatonError as error:
                    self._note(method, context, request, str(error))
                    raise
                self._note(method, context, request)
                status = "OK"
                yield response
            except grpc.aio.BaseError:  # gRPC's own error, for example a client that disconnected
                raise
            except Exception as error:
                status = status_name(error) if isinstance(error, BatonError) else "INTERNAL"
                await _abort(raw, error)
            finally:
                held.close()
                if roles is INFER:
                    self._access_log.write(entry, principal, status)
                if watch is not None:
                    watch.close()

        return guarded

    def _note(self, method: str, context: Context, request: Any, problem: str = "") -> None:
        """Write an operator's call, and its error if there is one, to the audit log."""
        roles = ROLES_OF_CALL.get(method) or _NOBODY
        if roles.isdisjoint((Role.LOOK, Role.OPERATE)) or not isinstance(request, Message):
            return
        kind = AuditKind.LOOKED if Role.LOOK in roles else AuditKind.CHANGED
        arguments = {
            field.name: f"{len(value)} characters" if field.name in _NOT_TOLD else value
            for field, value in request.ListFields()
        }
        self._access.note(kind, context.principal, context.address, method, arguments, problem)


def _open(handler: Handler) -> Handler:
    """Wrap the handler of a method for all callers, so that unreadable messages are not logged."""
    answer: Callable[..., Any] | None = handler.unary_unary
    if answer is None or handler.request_deserializer is None:
        return handler

    async def answer_message(request: Any, context: _Raw) -> Any:
        if isinstance(request, InvalidRequestError):
            await _abort(context, request)
        return await answer(request, context)

    return grpc.unary_unary_rpc_method_handler(
        answer_message,
        request_deserializer=forgiving(handler.request_deserializer, max_bytes=MAX_OPEN_BYTES),
        response_serializer=handler.response_serializer,
    )


async def _no_messages() -> AsyncIterator[Any]:
    """Yield no message."""
    nothing: tuple[Any, ...] = ()
    for message in nothing:
        yield message


async def _readable(
    requests: AsyncIterator[Any], thread: ThreadPoolExecutor | None
) -> AsyncIterator[Any]:
    """Yield a call's messages; raises the error of a message that could not be read.

    Args:
        thread: thread that parses long messages; None: long messages are passed on unparsed.
    """
    async for request in requests:
        if isinstance(request, InvalidRequestError):
            raise request
        if isinstance(request, Unread) and thread is not None:
            request = await asyncio.get_running_loop().run_in_executor(thread, request.message)
        yield request


async def _say_last(context: _Raw, problem: str) -> None:
    """Send an error to a client that does not read, in case it reads again."""
    with contextlib.suppress(grpc.aio.BaseError):
        await _abort(context, RequestCancelledError(problem))


def _behavior(handler: Handler) -> Callable[..., Any]:
    found = (
        handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
    )
    assert found is not None
    return found


async def _abort(context: _Raw, error: Exception) -> None:
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if isinstance(error, BatonError):
        status, message = status_of(error), str(error)
        trailers = [details_trailer(status.value[0], message, error)]
        if error.receipt is not None:
            trailers.append(receipt_trailer(error.receipt))
        await context.abort(status, message, tuple(trailers))
    logger.error("unexpected error in a call", exc_info=error)
    await context.abort(grpc.StatusCode.INTERNAL, f"internal error: {type(error).__name__}")


def status_of(error: BatonError) -> grpc.StatusCode:
    """Return the gRPC status code of an error."""
    return grpc.StatusCode[status_name(error)]
