"""NodeProgram: a node's asyncio side: gRPC server, router links, signals, and shutdown.

All kinds of node run this program. The engine and the connector run on other threads; this file
exchanges commands and events with them through queues.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import faulthandler
import functools
import logging
import os
import signal
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from prometheus_client.registry import Collector

from baton.access.access import Access
from baton.access.exposure import Exposure
from baton.access.tls import NO_TLS, TlsFiles, TlsOptions, describe
from baton.api.errors import EngineDeadError
from baton.link.beat_pace import BeatPace
from baton.link.drain import Drain
from baton.link.router_links import RouterLinks
from baton.link.words import (
    BEAT_INTERVAL_S,
    AbortAll,
    NodeBeat,
    NodeEvent,
    NodeRegistration,
    RequestView,
    RouterCommand,
)
from baton.processes.process import END_AFTER_DEATH_S, end_dead, end_within, stop_event
from baton.serving.call_gate import CallGate
from baton.serving.rpc import FEW_STREAMS, RpcServer
from baton.telemetry.ledger import Ledger
from baton.telemetry.logs import close_logging
from baton.telemetry.round_watch import Rounds, RoundWatch
from node_runtime.node_admin import ChangedAdapters, NodeAdmin
from node_runtime.weights.weights_admin import EngineWeights, WeightsAdmin

if TYPE_CHECKING:
    from baton.serving.metrics_page import MetricsPage

logger = logging.getLogger(__name__)

# If a thread stays in one round for this many seconds, health checks fail.
STALLED_S = 10.0


class NodeProgram(Protocol):
    """A node, as its program sees it; all methods are safe from any thread."""

    @property
    def adapters(self) -> ChangedAdapters | None:
        """Return the part that loads and unloads adapters; None: the node has no adapters."""

    @property
    def weights(self) -> EngineWeights | None:
        """Return the part that changes weights; None: the node's weights cannot be changed."""

    def compute_first_steps(self) -> Future[None]:
        """Compute steps before any request, on the thread that will compute all steps.

        Call once, before `registration`, which reports the measured times.
        """

    def registration(self, address: str) -> NodeRegistration:
        """Return the node's registration, given the address of its own server."""

    def submit(self, command: RouterCommand | AbortAll) -> None:
        """Queue a command, and wake the engine's thread."""

    def beat(self) -> NodeBeat: ...

    def requests(self) -> Iterable[RequestView]: ...

    def ledger(self) -> Future[Ledger]:
        """Return which requests hold which blocks, read between two steps."""

    def flush_prefix_cache(self) -> Future[int]:
        """Drop all cached prefixes or encodings between two steps; return their number."""

    def rounds(self) -> Mapping[str, Rounds]:
        """Return by thread name how many rounds each of the node's threads has completed."""

    def dump(self, error: Exception) -> None:
        """Write the node's state to a file or log; works even if the engine's thread is stuck."""

    def collector(self) -> Collector:
        """Return the collector for the node's metrics page."""

    def close(self) -> None:
        """End the engine's and the connector's threads."""


async def run_node_program(
    make_node: Callable[[Callable[[NodeEvent], None], Callable[[Exception], None]], NodeProgram],
    *,
    routers: Sequence[str],
    listen: str,
    join_timeout_s: float,
    drain_timeout_s: float = 0.0,
    ready_with_peer: bool = False,
    engine_timeout_s: float = 60.0,
    node_token: str = "",
    metrics_listen: str = "",
    access: Access | None = None,
    tls: TlsOptions = NO_TLS,
    insecure: bool = False,
) -> None:
    """Run a node until it is told to stop.

    Args:
        make_node: loads the model and starts the node's threads; called before the node registers.
            Its arguments are a function that takes events for routers, and a function to call when
            the engine dies.
        routers: ``host:port`` of each router to join.
        listen: ``host:port`` of the node's own server; port 0: any free port.
        join_timeout_s: seconds to wait for a router that does not answer.
        drain_timeout_s: seconds that open requests have to end when the node is told to stop.
        ready_with_peer: whether health checks succeed only while a node of the other role is
            connected.
        engine_timeout_s: the process ends itself if a thread stays in one round for this long; 0:
            never.
        node_token: authorizes this node to join.
        metrics_listen: ``host:port`` of the node's Prometheus page; empty: no page.
        access: decides who may use the metrics page and gRPC reflection; has the audit log.
        tls: this node's certificates, also for its own server and metrics page.
        insecure: whether the node may listen beyond loopback without TLS or authentication.

    Raises:
        BatonError: the node could not start or join, or its engine died.
    """
    access = access or Access()
    files = _tls_files(tls)
    exposure = _exposure(access, tls, insecure=insecure)
    exposure.check("listen", listen)
    exposure.check("metrics_listen", metrics_listen)
    loop = asyncio.get_running_loop()
    stopping, leaving = stop_event(loop), asyncio.Event()
    loop.add_signal_handler(signal.SIGHUP, access.read_again)
    drain = Drain((pace := BeatPace()).hurry)
    links: list[RouterLinks] = []  # filled in once the node is loaded
    death: list[Exception] = []

    def emit(event: NodeEvent) -> None:
        loop.call_soon_threadsafe(_emit_to, links, event)

    def on_death(error: Exception) -> None:
        end_within(END_AFTER_DEATH_S)  # ends the process even if the code below hangs
        death.append(error)
        with contextlib.suppress(RuntimeError):  # the loop is closed, because the process ends
            loop.call_soon_threadsafe(stopping.set)

    node = await _make_or_stop(lambda: make_node(emit, on_death), stopping, death)
    await _compute_first_steps(node)
    # This server has only health and reflection: operators' questions arrive over the links.
    server = RpcServer(
        [],
        lambda grpc_server: None,
        CallGate(access),
        tls=files,
        require_client_certs=tls.verifies_clients,
        max_streams=FEW_STREAMS,
    )
    serving = _Serving(server.set_serving, needs_peer=ready_with_peer)
    admin = _make_admin(node, access, drain, links)
    page: MetricsPage | None = None
    try:
        if metrics_listen:
            page = _make_page(node, access, files, lambda: serving.is_ready and drain.is_serving)
            await page.start(metrics_listen)
        address = await server.start(listen)
        links.append(
            RouterLinks(
                routers,
                node.registration(address),
                _submit_and_hurry(node, pace),
                drain,
                on_joined=serving.set_joined,
                on_stop=leaving.set,
                join_timeout_s=join_timeout_s,
                node_token=node_token,
                answer=admin.answer,
                tls=tls,
            )
        )
        ends = (
            _drained(stopping, drain, death, drain_timeout_s),
            _wait_remote_stop(leaving, drain),
        )
        await _run_until(ends, links[0], node, serving, pace, engine_timeout_s)
        if death:
            raise _died_of(death[0])
    finally:
        if page is not None:
            await page.close()
        await server.stop(grace_s=0.5)
        await asyncio.to_thread(node.close)
        await asyncio.to_thread(access.audit.close)


def _submit_and_hurry(
    node: NodeProgram, pace: BeatPace
) -> Callable[[RouterCommand | AbortAll], None]:
    """Return a function that gives a command to the node and hurries the node's next beat."""

    def submit(command: RouterCommand | AbortAll) -> None:
        node.submit(command)
        pace.hurry()

    return submit


async def _compute_first_steps(node: NodeProgram) -> None:
    """Let the node compute its first steps; raises EngineDeadError if one of them fails."""
    try:
        await asyncio.wrap_future(node.compute_first_steps())
    except Exception as error:  # the engine's thread has logged this error
        raise _died_of(error) from error


def _make_admin(
    node: NodeProgram,
    access: Access,
    drain: Drain,
    links: Sequence[RouterLinks],
) -> NodeAdmin:
    """Make the object that answers operators; ``links`` may be filled in later."""
    changes = None
    if node.weights is not None:
        register = functools.partial(node.registration, "")  # the links add the address
        changes = WeightsAdmin(node.weights, drain, lambda: links[0], register)
    return NodeAdmin(node, node.registration("").num_blocks, access, node.adapters, changes)


def _died_of(error: Exception) -> EngineDeadError:
    return EngineDeadError(f"the engine cannot continue: {error}")


def _tls_files(tls: TlsOptions) -> TlsFiles | None:
    """Return the TLS files of the node's own server; None: it has no certificate."""
    if not tls.cert:
        return None
    files = TlsFiles(tls)
    logger.info("certificate: %s", describe(tls, files.current()))
    return files


def _make_page(
    node: NodeProgram, access: Access, tls: TlsFiles | None, is_ready: Callable[[], bool]
) -> MetricsPage:
    # Import here, because most nodes have no metrics page, and aiohttp is slow to import.
    from baton.serving.metrics_page import MetricsPage

    return MetricsPage(node.collector(), access=access, tls=tls, is_ready=is_ready)


def _emit_to(links: Sequence[RouterLinks], event: NodeEvent) -> None:
    for link in links:
        link.emit(event)


async def _drained(
    stopping: asyncio.Event, drain: Drain, death: Sequence[Exception], timeout_s: float
) -> None:
    """Wait for a stop signal, and then, up to ``timeout_s``, until open requests have ended."""
    await stopping.wait()
    if death:
        return
    drain.begin()
    try:
        async with asyncio.timeout(timeout_s):
            await drain.drained.wait()
    except TimeoutError:
        if timeout_s:
            logger.warning("stopped with open requests: not drained within %g s", timeout_s)


def _exposure(access: Access, tls: TlsOptions, *, insecure: bool) -> Exposure:
    """Return how the node's listeners are protected; it decides where they may listen."""
    return Exposure(
        authentication="--tls-ca or --api-keys-file",
        is_authenticated=not access.is_open,
        is_encrypted=bool(tls.cert),
        insecure=insecure,
    )


async def _make_or_stop(
    make: Callable[[], NodeProgram], stopping: asyncio.Event, death: Sequence[Exception]
) -> NodeProgram:
    """Load the node in a thread that ends before this function returns.

    The loading thread must end, because a living thread that has called a kernel keeps a team of
    OpenMP threads, which torch's OpenMP counts, too. With more threads than cores, torch's threads
    would sleep at every barrier.

    A stop signal, or a death of the engine, during loading ends the process, because loading cannot
    be interrupted.
    """
    loader = ThreadPoolExecutor(1, thread_name_prefix="load-model")
    making = asyncio.get_running_loop().run_in_executor(loader, make)
    stop = asyncio.ensure_future(stopping.wait())
    ends: list[asyncio.Future[Any]] = [making, stop]
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    if not making.done():
        if death:
            end_dead(_died_of(death[0]))
        logger.info("stopped while loading")
        close_logging()
        os._exit(0)
    stop.cancel()
    loader.shutdown()
    return making.result()


async def _wait_remote_stop(leaving: asyncio.Event, drain: Drain) -> None:
    """Wait until an operator stops the node through a router, and then until it is drained."""
    await leaving.wait()
    logger.info("told to leave by an operator; stops when no request is open")
    await drain.drained.wait()


class _Serving:
    """Computes health: the node has joined, no thread stalls, a required peer is connected."""

    def __init__(self, tell: Callable[[bool], Awaitable[None]], *, needs_peer: bool) -> None:
        self._tell = tell
        self._needs_peer = needs_peer
        self._is_joined = self._is_stalled = self._has_peer = False

    @property
    def is_ready(self) -> bool:
        is_placed = self._is_joined and (self._has_peer or not self._needs_peer)
        return is_placed and not self._is_stalled

    async def set_joined(self, is_joined: bool) -> None:
        self._is_joined = is_joined
        await self._tell(self.is_ready)

    async def set_reaching(self, has_peer: bool) -> None:
        """Record whether any node of the other role is connected."""
        if has_peer is not self._has_peer:
            self._has_peer = has_peer
            await self._tell(self.is_ready)

    async def set_stalled(self, is_stalled: bool) -> None:
        if is_stalled is not self._is_stalled:
            self._is_stalled = is_stalled
            await self._tell(self.is_ready)


def _end_stalled(node: NodeProgram, watch: RoundWatch) -> NoReturn:
    """Write dumps and end the process, because a stalled thread would block its shutdown."""
    end_within(END_AFTER_DEATH_S)  # ends the process even if the dump hangs
    error = EngineDeadError(
        f"the {watch.stalled_thread} thread has been in one round for {watch.stalled_s:g} s"
    )
    with contextlib.suppress(RuntimeError, OSError, ValueError):  # standard error may be closed
        faulthandler.dump_traceback(all_threads=True)
    node.dump(error)
    end_dead(error)


def _with_rounds(beat: NodeBeat, watch: RoundWatch) -> NodeBeat:
    """Add the number of rounds and the name of a stalled thread, if any, to a beat."""
    return dataclasses.replace(
        beat,
        num_rounds=watch.num_rounds,
        stalled_s=watch.stalled_s,
        stalled_thread=watch.stalled_thread,
        longest_round_s=watch.longest_round_s,
    )


async def _run_until(
    ends: Iterable[Coroutine[Any, Any, None]],
    links: RouterLinks,
    node: NodeProgram,
    serving: _Serving,
    pace: BeatPace,
    engine_timeout_s: float,
) -> None:
    async def beats() -> None:
        watch, num_intervals = RoundWatch(node.rounds, BEAT_INTERVAL_S), 1
        while True:
            watch.tick(num_intervals)
            pause = links.beat(_with_rounds(node.beat(), watch), num_intervals)
            await serving.set_reaching(bool(links.reached))
            await serving.set_stalled(watch.stalled_s >= STALLED_S)
            if engine_timeout_s and watch.stalled_s >= engine_timeout_s:
                _end_stalled(node, watch)
            num_intervals = await pace.wait(pause)

    tasks = [
        *map(asyncio.create_task, ends),
        asyncio.create_task(links.run()),
        asyncio.create_task(beats()),
    ]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()  # raises the error of the task
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
