"""Assembles a router from its parts, and serves until told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import math
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.access.access import Access
from baton.access.audit_log import AuditLog
from baton.access.exposure import is_public
from baton.access.identity import ANYBODY, ANYBODY_HERE, Role
from baton.access.tls import ServerContext, TlsFiles, describe
from baton.api.errors import NodeUnavailableError
from baton.link.beat_pace import INTERVALS_AT_REST
from baton.link.words import BEAT_INTERVAL_S
from baton.processes.process import num_descriptors_allowed, stop_event
from baton.processes.shared_ticks import sleep_until_tick
from baton.processes.ticks import SOON
from baton.serving.access_log import AccessLog
from baton.serving.call_gate import CallGate
from baton.serving.connection_limits import RpcLimits
from baton.serving.rpc import RpcServer
from baton.telemetry.tracing import Tracing
from baton.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
    node_pb2,
    node_pb2_grpc,
)
from router.api.admin.adapters import AdapterAdmin
from router.api.admin.service import AdminService
from router.api.grpc.inference_service import InferenceService
from router.api.grpc.journal import Journal, JournalOptions
from router.api.grpc.link_service import NodeLinkService, NodePools
from router.base_parts import BaseParts, Common, join_pools, make_all_bases, make_names
from router.calls.dispatcher import Dispatcher
from router.config import RouterConfig, check_exposure, drain_delay_s, requires_client_certs
from router.connection_budget import ConnectionBudget, share_descriptors
from router.fleet.node_pool import NodePool
from router.gate.overload import Level, Overload
from router.gate.resources import watch_resources
from router.gate.scaling import ScalingSignals
from router.intake.intake import Intake
from router.intake.prompt_reader import EarlyReaders
from router.names.base_model import BaseModel
from router.names.metrics_page import MetricsPage
from router.names.table import NameTable
from router.request_spans import RequestSpans
from router.stopping import LAST_WORDS_S, HttpApi, stop_router

logger = logging.getLogger(__name__)

_RETRY_S = 1.0  # seconds until worker processes that could not be started are started again
# Level of overload -> the largest priority number that is accepted.
_LEAST_URGENT = {Level.NORMAL: math.inf, Level.SHED: 0, Level.CRITICAL: -math.inf}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """All parts of a router."""

    config: RouterConfig
    names: NameTable
    bases: Sequence[BaseParts]
    access: Access
    budget: ConnectionBudget
    overload: Overload
    files: TlsFiles | None
    tracing: Tracing
    adapters: AdapterAdmin
    admin: AdminService
    pools: NodePools

    @property
    def model_name(self) -> str:
        """The default model name, which requests without a model name get."""
        return self.names.names[0]

    @property
    def dispatchers(self) -> list[Dispatcher]:
        """Dispatchers of all base models."""
        return [base.dispatcher for base in self.names.bases]


async def serve(config: RouterConfig, readers: Sequence[EarlyReaders] = ()) -> None:
    """Serve until told to stop; raises ConfigError for errors at the start.

    Args:
        readers: tokenizer and template processes of each base model, made before threads began;
            empty: make them now.
    """
    check_exposure(config)
    files = TlsFiles(config.tls) if config.tls else None
    if files is not None:
        logger.info("certificate: %s", describe(config.tls, files.current()))
    overload = Overload(on_change=lambda level: _shed(bases, level))
    bases = make_all_bases(Common(config=config, overload=overload), readers)
    names = make_names(config, [one.base for one in bases])
    pools = join_pools(config, names.bases)
    for base in names.bases:
        base.intake.reader.start()
    for base in names.bases if config.metrics_compat == "vllm" else ():
        base.metrics.show_names_of(_name_of(names, base))
    num_descriptors, is_split = num_descriptors_allowed(), bool(config.node_listen)
    parts = _Parts(
        config=config,
        names=names,
        bases=bases,
        access=_make_access(config, names),
        budget=share_descriptors(
            num_descriptors, config.connections, own_address_for_nodes=is_split
        ),
        overload=overload,
        files=files,
        tracing=_make_tracing(config, names),
        adapters=(adapters := AdapterAdmin(names, config.adapter_root)),
        admin=_make_admin(config, names, overload, adapters),
        pools=pools,
    )
    await _run(parts)


def _shed(bases: Iterable[BaseParts], level: Level) -> None:
    """Make all base models' gates refuse less urgent requests, as the overload level demands."""
    for one in bases:
        one.base.dispatcher.admission.shed(_LEAST_URGENT[level])


def _name_of(names: NameTable, base: BaseModel) -> str:
    """Return the first name of a base model, or the model itself if it has no name."""
    return next((one.name for one in names.served if one.base is base), base.model)


async def _run(parts: _Parts) -> None:
    """Start the servers of an assembled router, and serve until told to stop."""
    config, access = parts.config, parts.access
    servers, intakes = _make_servers(parts), [base.intake for base in parts.names.bases]
    stopping = stop_event(loop := asyncio.get_running_loop())
    loop.add_signal_handler(signal.SIGHUP, access.read_again)
    for base in parts.names.bases:  # a request may come as soon as the first server listens
        base.pool.lost_nodes.expect_newcomers(config.join_grace_s)
    try:
        for listen, server in servers.items():
            # Health checks fail until the worker processes can read requests.
            await server.set_serving(False)
            address = await server.start(listen)
            logger.info("router of %s listens on %s", ", ".join(config.models), address)
        async with (
            _watching_all(parts.bases),
            _serving_http(parts) as http,
            _in_background(
                watch_resources(
                    parts.overload, _share_at_work(http), config.memory_limit_mib * 2**20
                )
            ),
            _in_background(
                _become_ready([one.intake for one in parts.names.bases], servers.values(), stopping)
            ),
        ):
            # The garbage collector must not visit long-lived objects: that would pause all streams
            gc.freeze()
            await stopping.wait()
            await stop_router(
                parts.dispatchers,
                servers.values(),
                http,
                delay_s=drain_delay_s(config),
                timeout_s=config.drain_timeout_s,
            )
    finally:
        await asyncio.gather(*(server.stop(0) for server in servers.values()))
        for intake in intakes:
            intake.close()
        for last in (parts.tracing.close, access.audit.close):
            await asyncio.to_thread(last)


async def _become_ready(
    intakes: Iterable[Intake], servers: Iterable[RpcServer], stopping: asyncio.Event
) -> None:
    """Wait until the worker processes can read requests, then report the router as serving."""
    while True:
        try:
            await asyncio.gather(*(intake.reader.prepare() for intake in intakes))
            break
        except NodeUnavailableError as error:
            logger.warning("not ready: %s", error)
            await asyncio.sleep(_RETRY_S)
    for server in servers:
        if not stopping.is_set():
            await server.set_serving(True)


def _make_access(config: RouterConfig, names: NameTable) -> Access:
    """Make the access checks; raises ConfigError."""
    access = Access(
        keys_file=Path(config.api_keys_file) if config.api_keys_file else None,
        admin_token=config.admin_token,
        node_token=config.node_token,
        audit=AuditLog(config.audit_log, program="router"),
        by_certificate=config.tls.verifies_clients,
    )
    access.note_names(lambda: names.names)
    access.warn_of_gaps((Role.INFER, Role.JOIN))
    return access


def _make_tracing(config: RouterConfig, names: NameTable) -> Tracing:
    """Make the tracing; raises ConfigError."""
    router_id = {"service.instance.id": names.bases[0].pool.router_id}
    tracing = Tracing(config.trace, service="baton-router", resource=router_id)
    if tracing.sink is not None:
        for base in names.bases:
            spans = RequestSpans(_name_of(names, base), tracing.sink)
            base.dispatcher.log.on_traced = spans.on_request_end
    return tracing


def _share_at_work(http: HttpApi | None) -> Callable[[], float]:
    return lambda: 0.0 if http is None else http.share_at_work


@contextlib.asynccontextmanager
async def _serving_http(parts: _Parts) -> AsyncIterator[HttpApi | None]:
    """Serve the HTTP API inside this context; yield None if the router has no HTTP address."""
    config, files = parts.config, parts.files
    if not config.http_listen:
        yield None
        return
    # Import only here, because a router without HTTP does not need this module.
    from router.api.http_server import HttpServer
    from router.api.ui.page import StatusPage

    tls = None
    if files is not None:
        tls = ServerContext.of(files, require_client_certs=config.tls.require_client_certs)
    page = StatusPage(
        parts.names,
        policy=lambda: parts.admin.policy,
        overload=parts.overload,
    )
    server = HttpServer(
        parts.names,
        MetricsPage({base.model: base.metrics for base in parts.names.bases}),
        strict_fields=config.strict_fields,
        access=parts.access,
        cors_origin=config.http_cors_origin,
        grace_s=LAST_WORDS_S,
        limits=parts.budget.http,
        overload=parts.overload,
        tls=tls,
        access_log=AccessLog(parts.model_name, is_on=config.access_log),
        status_page=page,
        adapters=parts.adapters,
        tracing=parts.tracing,
        images=config.images,
    )
    parts.names.bases[0].metrics.show_connections(server.connections)
    address = await server.start(config.http_listen)
    logger.info("HTTP API on %s://%s", "https" if files else "http", address)
    try:
        async with _in_background(page.run()):
            yield server
    finally:
        await server.stop()


@contextlib.asynccontextmanager
async def _watching_all(bases: Iterable[BaseParts]) -> AsyncIterator[None]:
    """Watch the nodes of all base models inside this context."""
    async with contextlib.AsyncExitStack() as stack:
        for one in bases:
            await stack.enter_async_context(_watching(one.base.pool, one.scaling))
        yield


@contextlib.asynccontextmanager
async def _watching(pool: NodePool, scaling: ScalingSignals) -> AsyncIterator[None]:
    """Count missed beats and update scaling signals, inside this context."""

    async def count() -> None:
        num_intervals = 1
        while True:
            pause_s = await sleep_until_tick(num_intervals * BEAT_INTERVAL_S, least=SOON)
            try:
                pool.count_missed_beats(num_intervals if pause_s > 1.5 * BEAT_INTERVAL_S else 1)
                scaling.tick()
                rests = all(node.rests_punctually for node in pool.members)
                num_intervals = INTERVALS_AT_REST if rests else 1
            # Every error is caught: if this task ended, nobody would notice silent nodes.
            except Exception:
                logger.exception("missed beats could not be counted")

    async with _in_background(count()):
        yield


@contextlib.asynccontextmanager
async def _in_background(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run a coroutine in the background until the context ends.

    A failure of the coroutine is logged, and the context continues.
    """
    task = asyncio.create_task(work)
    task.add_done_callback(_tell_failure)
    try:
        yield
    finally:
        task.cancel()


def _tell_failure(task: asyncio.Task[None]) -> None:
    """Log the error of a background task that was not cancelled."""
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("%s has failed and is given up", task.get_coro(), exc_info=error)


def _make_servers(parts: _Parts) -> dict[str, RpcServer]:
    """Return the gRPC servers by address: one for all, or one for clients and one for nodes."""
    config, budget = parts.config, parts.budget
    inference = inference_pb2.DESCRIPTOR.services_by_name["Inference"]
    link = node_pb2.DESCRIPTOR.services_by_name["NodeLink"]
    admin = admin_pb2.DESCRIPTOR.services_by_name["Admin"]

    journal = Journal(JournalOptions(grace_s=config.resume_grace_s))
    service = InferenceService(
        parts.names,
        journal=journal,
        max_timeout_s=config.max_request_timeout_s,
    )

    def add_public(server: object) -> None:
        inference_pb2_grpc.add_InferenceServicer_to_server(service, server)  # type: ignore[no-untyped-call]  # generated

    def add_private(server: object) -> None:
        links = NodeLinkService(parts.pools, parts.access)
        node_pb2_grpc.add_NodeLinkServicer_to_server(links, server)  # type: ignore[no-untyped-call]  # generated
        admin_pb2_grpc.add_AdminServicer_to_server(parts.admin, server)  # type: ignore[no-untyped-call]  # generated

    def add_all(server: object) -> None:
        add_public(server)
        add_private(server)

    def make(
        listen: str, services: Sequence[Any], add: Any, limits: RpcLimits, **options: Any
    ) -> RpcServer:
        return RpcServer(
            services,
            add,
            CallGate(
                parts.access,
                ANYBODY if is_public("listen", listen) else ANYBODY_HERE,
                check_load=parts.overload.check,
                access_log=access_log,
                tracing=parts.tracing,
            ),
            limits=limits,
            tls=parts.files,
            require_client_certs=requires_client_certs(config, listen),
            **options,
        )

    access_log = AccessLog(parts.model_name, is_on=config.access_log)
    private = config.node_listen or config.listen
    if not config.node_listen:
        return {private: make(private, [inference, link, admin], add_all, budget.public)}
    own = config.reuse_port
    return {
        private: make(private, [link, admin], add_private, budget.nodes),
        config.listen: make(config.listen, [inference], add_public, budget.public, reuse_port=own),
    }


def _make_admin(
    config: RouterConfig, names: NameTable, overload: Overload, adapters: AdapterAdmin
) -> AdminService:
    def note_policy(name: str) -> None:
        for base in names.bases:
            base.pool.allow_self_prefill(config.may_self_prefill(name))

    return AdminService(
        names,
        policy=config.policy,
        overload=overload,
        adapters=adapters,
        on_policy=note_policy,
    )
