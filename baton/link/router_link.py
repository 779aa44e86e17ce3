"""RouterLink: a node's end of its stream to one router.

A link joins, carries events to the router and commands to the node, and joins again when the stream
breaks. `NodeEnd` decides what is sent and what messages mean.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import grpc
import grpc.aio

from baton.access.tls import NO_TLS, TlsOptions, read_tls
from baton.access.tls_refusal import why_refused
from baton.api.errors import ConfigError, NodeUnavailableError
from baton.link.admin_answers import AdminAnswers, Answer
from baton.link.message_cuts import has_many_logprobs
from baton.link.node_end import NodeEnd, merge_reports, merge_steps
from baton.link.words import (
    AbortAll,
    AdminCall,
    AdminReply,
    NodeEvent,
    NodeRegistration,
    PeerReport,
    PeerReports,
    RouterCommand,
)
from baton.serving.rpc import bearer, open_channel
from baton.v1 import node_pb2, node_pb2_grpc

logger = logging.getLogger(__name__)

RETRY_INTERVAL_S = 0.5
_ASK_WHY_INTERVAL_S = 5.0
CONNECT_TIMEOUT_S = 2.0
# A router answers late if a thousand nodes join at once. A node that gives up joins again, which is
# more work for the router.
REGISTER_TIMEOUT_S = 10.0
_PART_PAUSE_S, _MOST_PART_PAUSES = 0.002, 10
# Status codes after which retrying does not help, because the node's identity or rights are wrong.
_REFUSALS = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
_TOLD = (grpc.StatusCode.INTERNAL, grpc.StatusCode.RESOURCE_EXHAUSTED)


class RouterLink:
    """One node's link to one router.

    Args:
        router: address of the router, ``host:port``.
        registration: this node's registration.
        submit: receives commands; returns at once.
        on_joined: called with True after joining, with False when the link is lost.
        join_timeout_s: longest time for the first join.
        node_token: authorizes this node to join.
        answer: answers operators' questions; None: questions are not answered.
        tls: this node's certificates, which are read again for each new stream.
        server_name: name that the router's certificate must have; empty: the address's host.
        connected_peers: returns the latest report on each peer to which this node is connected.
        turns: limits how many links of this process connect at a time; None: no limit.

    Attributes:
        problem: why TLS prevents the link; empty if TLS does not prevent it.
    """

    def __init__(
        self,
        router: str,
        registration: NodeRegistration,
        submit: Callable[[RouterCommand | AbortAll], None],
        *,
        on_joined: Callable[[bool], Awaitable[None]],
        join_timeout_s: float,
        node_token: str = "",
        answer: Answer | None = None,
        tls: TlsOptions = NO_TLS,
        server_name: str = "",
        connected_peers: Callable[[], Iterable[PeerReport]] = tuple,
        turns: asyncio.Semaphore | None = None,
    ) -> None:
        self.router = router
        self.problem = ""
        self._end = NodeEnd(registration)
        self._node_name = registration.node_name
        self._asking: asyncio.Task[None] | None = None
        self._ask_at = 0.0  # monotonic time from which `_tell_why` may ask for the reason again
        self._told: str | None = None  # the reason that was logged last
        self._events: asyncio.Queue[NodeEvent] = asyncio.Queue()
        self._is_silent = asyncio.Event()
        self._submit = submit
        self._on_joined = on_joined
        self._join_timeout_s = join_timeout_s
        self._metadata = bearer(node_token)
        self._tls = tls
        self._server_name = server_name
        self._connected_peers = connected_peers
        self._turns: contextlib.AbstractAsyncContextManager[None] = (
            turns or contextlib.nullcontext()
        )
        self._admin = AdminAnswers(answer, self._send_part)

    @property
    def router_id(self) -> str:
        """Implement `NodeEnd.router_id`."""
        return self._end.router_id

    @property
    def joined(self) -> bool:
        return self._end.joined

    @property
    def obstacle(self) -> str:
        return self._end.obstacle

    def emit(self, event: NodeEvent) -> None:
        """Queue an event for the router, or drop the event if the node is not joined.

        Call this on the thread of the event loop.
        """
        if self.joined:
            self._events.put_nowait(event)

    @property
    def intervals_at_rest(self) -> int:
        """Implement `NodeEnd.intervals_at_rest`."""
        return self._end.intervals_at_rest

    @property
    def awaits_answer(self) -> bool:
        """Return whether the router's answer is late, so that the router may be silent."""
        return self._end.awaits_answer

    def count_beat(self, num_intervals: int) -> None:
        """Count a beat of this node; end the link if the router sends nothing any more."""
        if self.joined and self._end.miss_beat(num_intervals):
            logger.warning("the router is silent")
            self._is_silent.set()

    def leave(self) -> AbortAll | None:
        """Implement `NodeEnd.leave`; call this after `run` was cancelled."""
        return self._end.leave()

    async def run(self) -> None:
        """Keep the link up, reconnecting when it breaks; never returns.

        Raises:
            NodeUnavailableError: the router did not answer within ``join_timeout_s``.
            ConfigError: the router refused this node.
        """
        give_up_at = time.monotonic() + self._join_timeout_s
        ever_joined = False
        try:
            while True:
                await self._connect()
                lost = self._end.leave()
                if lost is not None:
                    ever_joined = True
                    self._ask_at = time.monotonic() + _ASK_WHY_INTERVAL_S
                    self._submit(lost)
                    await self._on_joined(False)
                self._tell_why(is_first=not ever_joined)
                if not ever_joined and time.monotonic() > give_up_at:
                    raise NodeUnavailableError(
                        f"router: {self.router} cannot be reached (tried for "
                        f"{self._join_timeout_s:g} s)"
                    )
                await asyncio.sleep(RETRY_INTERVAL_S)
        finally:
            self._stop_telling()

    def _tell_why(self, *, is_first: bool) -> None:
        """Log why the last attempt failed, if the reason has changed.

        Now and then, asks first whether TLS is the reason. That takes a connection of its own. All
        nodes lose a router that restarts, so a node that lost its link does not ask at once.

        Args:
            is_first: whether this node has never joined. If both start now, the router does not
                answer yet, so no warning is logged.
        """
        if self._asking is not None and not self._asking.done():
            return  # the reason will be logged
        now = time.monotonic()
        if self.obstacle or now < self._ask_at:
            self._log_why(is_first=is_first)
        else:
            self._ask_at = now + _ASK_WHY_INTERVAL_S
            self._asking = asyncio.create_task(self._ask_why(is_first=is_first))

    async def _ask_why(self, *, is_first: bool) -> None:
        self.problem = await asyncio.to_thread(
            why_refused, self.router, self._tls, self._server_name
        )
        self._log_why(is_first=is_first)

    def _log_why(self, *, is_first: bool) -> None:
        known = self.obstacle or self.problem
        why = known or "it cannot be reached"
        if why != self._told:
            self._told = why
            log = logger.info if is_first and not known else logger.warning
            log("router %s is tried again: %s", self.router, why)

    def _stop_telling(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
            self._asking = None
        self._ask_at, self._told, self.problem = 0.0, None, ""

    async def _connect(self) -> None:
        """Open a link with the current certificates, and keep the link up until it breaks."""
        try:
            tls = await asyncio.to_thread(read_tls, self._tls) if self._tls else None
        except ConfigError:  # logged by `_ask_why`; the next try may find valid certificates
            return
        async with open_channel(self.router, tls, server_name=self._server_name) as channel:
            try:
                await self._hold(channel)
            except grpc.aio.AioRpcError as error:
                if error.code() in _REFUSALS:
                    raise ConfigError(f"the router refused this node: {error.details()}") from None
                if error.code() in _TOLD:
                    logger.warning("link to the router broke: %s", error.details())

    async def _hold(self, channel: grpc.aio.Channel) -> None:
        """Register, then carry messages until the stream breaks."""
        stub = node_pb2_grpc.NodeLinkStub(channel)  # type: ignore[no-untyped-call]  # generated
        try:
            async with self._turns:  # the router waits for a registration once the call is open
                call = stub.Link(metadata=self._metadata)
                first = await self._register(call)
        except TimeoutError:  # the router accepts connections but sends nothing
            return
        if not isinstance(first, node_pb2.RouterMessage):
            return
        self._end.take_first(first)
        if not self.joined:
            return
        while not self._events.empty():  # events left over from an earlier link
            self._events.get_nowait()
        if self._end.batches_peers:  # the router waits even for an empty message
            self._events.put_nowait(PeerReports(tuple(self._connected_peers())))
        self._stop_telling()
        self._is_silent.clear()
        await self._on_joined(True)
        logger.info("joined router %s as %s", self.router, self._node_name)
        jobs = (self._write(call), self._read(call), self._is_silent.wait())
        tasks = [asyncio.create_task(job) for job in jobs]
        try:
            # If one task ends, the link ends: a link that only reads or only writes is useless.
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            self._admin.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _register(self, call: grpc.aio.StreamStreamCall[Any, Any]) -> Any:
        """Register the node; return the router's answer; raises TimeoutError."""
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            await call.wait_for_connection()
        async with asyncio.timeout(REGISTER_TIMEOUT_S):
            # If the router refused the call, `write` fails, and `read` raises the reason.
            with contextlib.suppress(asyncio.InvalidStateError):
                await call.write(self._end.register())
            return await call.read()

    async def _send_part(self, reply: AdminReply) -> None:
        """Queue a part of an operator's answer when no event waits, so that tokens are not delayed.

        If events are always waiting, the part is queued after `_MOST_PART_PAUSES` pauses.
        """
        for _ in range(_MOST_PART_PAUSES):
            if self._events.empty():
                break
            await asyncio.sleep(_PART_PAUSE_S)
        self.emit(reply)

    async def _read(self, call: grpc.aio.StreamStreamCall[Any, Any]) -> None:
        while isinstance(message := await call.read(), node_pb2.RouterMessage):
            match self._end.take(message):
                case None:
                    pass
                case AdminCall() as asked:
                    self._admin.take(asked)
                case tuple() as deltas:
                    self._events.put_nowait(deltas)
                case command:
                    self._submit(command)

    async def _say(self, event: NodeEvent) -> list[node_pb2.NodeMessage]:
        """Return the messages of an event; if it has many logprobs, a thread makes the messages."""
        if isinstance(event, tuple) and has_many_logprobs(event):
            # If no thread can start, the event loop makes the messages and blocks for a moment.
            with contextlib.suppress(RuntimeError):
                return await asyncio.to_thread(self._end.say, event, time.monotonic())
        return self._end.say(event, time.monotonic())

    async def _write(self, call: grpc.aio.StreamStreamCall[Any, Any]) -> None:
        while True:
            events = [await self._events.get()]
            while isinstance(events[-1], tuple | PeerReport) and not self._events.empty():
                events.append(self._events.get_nowait())
            if self._end.batches_peers:
                events = merge_reports(events)
            messages = [one for event in merge_steps(events) for one in await self._say(event)]
            for message in messages:
                try:
                    await call.write(message)
                # The router ended the call because it took this node for dead.
                except asyncio.InvalidStateError:
                    return
