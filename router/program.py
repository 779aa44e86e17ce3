"""Assemble a router from its parts, and serve until told to stop."""

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
from baton.checkpoint.model_folder import ModelLimits, find_model_folder, read_limits
from baton.checkpoint.model_identity import folder_identity
from baton.link.words import BEAT_INTERVAL_S
from baton.processes.process import num_descriptors_allowed, stop_event
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
from router.api.admin.service import AdminService
from router.api.grpc.inference_service import InferenceService
from router.api.grpc.journal import Journal, JournalOptions
from router.api.grpc.link_service import NodeLinkService
from router.calls.dispatcher import Dispatcher
from router.calls.recovery.recovery import Recoveries
from router.calls.recovery.retry_budget import RetryOptions
from router.config import RouterConfig, check_exposure, drain_delay_s, requires_client_certs
from router.connection_budget import ConnectionBudget, share_descriptors
from router.fleet.node_pool import NodePool
from router.gate.admission import Admission, make_admission
from router.gate.overload import Level, Overload
from router.gate.resources import watch_resources
from router.gate.scaling import ScalingSignals
from router.intake.cache_salts import make_salts
from router.intake.fleet_metrics import ScalingCollector
from router.intake.intake import Intake
from router.intake.metrics import RouterMetrics
from router.intake.prompt_reader import EarlyReaders
from router.policies import POLICIES
from router.request_spans import RequestSpans
from router.served_names import read_defaults, read_names
from router.stopping import LAST_WORDS_S, HttpApi, stop_router

logger = logging.getLogger(__name__)

_RETRY_S = 1.0  # pause after a failed start of the workers
# Largest priority accepted.
_LEAST_URGENT = {Level.NORMAL: math.inf, Level.SHED: 0, Level.CRITICAL: -math.inf}


def _make_pool(config: RouterConfig, folder: Path, limits: ModelLimits) -> NodePool:
    return NodePool(
        own_identity=folder_identity(folder),
        max_model_len=limits.max_position_embeddings,
        max_missed_beats=round(config.node_timeout_s / BEAT_INTERVAL_S),
        may_self_prefill=config.may_self_prefill(config.policy),
        engine_timeout_s=config.engine_timeout_s,
        vocab_size=limits.vocab_size,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """Hold the parts of a router."""

    config: RouterConfig
    dispatcher: Dispatcher
    intake: Intake
    metrics: RouterMetrics
    access: Access
    budget: ConnectionBudget
    overload: Overload
    files: TlsFiles | None
    tracing: Tracing
    admin: AdminService
    scaling: ScalingSignals

    @property
    def model_name(self) -> str:
        """Name that clients use for the model."""
        return self.config.served_model_name or self.config.model


async def serve(config: RouterConfig, readers: EarlyReaders | None = None) -> None:
    """Serve until told to stop; raises ConfigError for errors at the start.

    Args:
        readers: parts made before threads began; None: make them here.
    """
    check_exposure(config)
    files = TlsFiles(config.tls) if config.tls else None
    if files is not None:
        logger.info("certificate: %s", describe(config.tls, files.current()))
    folder = find_model_folder(config.model, weights=False)
    limits = read_limits(folder)
    pool = _make_pool(config, folder, limits)
    options = RetryOptions(
        max_attempts=config.max_attempts,
        pair_timeout_s=config.pair_timeout_s,
        return_timeout_s=config.return_timeout_s,
    )
    admission = make_admission(pool, config.admission)
    policy, recoveries = POLICIES.load(config.policy)(), Recoveries(pool, options)
    dispatcher = Dispatcher(pool, policy, recoveries, admission)
    overload = Overload(on_change=lambda level: admission.shed(_LEAST_URGENT[level]))
    metrics = RouterMetrics(pool, admission, overload, recoveries.suspects)
    if config.metrics_compat == "vllm":
        metrics.show_names_of(config.served_model_name or config.model)
    scaling = _make_scaling(config, pool, admission)
    metrics.show(ScalingCollector(scaling))
    tracing = _make_tracing(config, dispatcher)
    intake = _make_intake(config, folder, limits, dispatcher, metrics, readers)
    intake.reader.start()
    num_descriptors, is_split = num_descriptors_allowed(), bool(config.node_listen)
    parts = _Parts(
        config=config,
        dispatcher=dispatcher,
        intake=intake,
        metrics=metrics,
        access=_make_access(config),
        budget=share_descriptors(
            num_descriptors, config.connections, own_address_for_nodes=is_split
        ),
        overload=overload,
        files=files,
        tracing=tracing,
        admin=_make_admin(config, dispatcher, intake, overload),
        scaling=scaling,
    )
    await _run(parts)


async def _run(parts: _Parts) -> None:
    """Serve until told to stop."""
    config, access, dispatcher = parts.config, parts.access, parts.dispatcher
    servers = _make_servers(parts)
    stopping = stop_event(loop := asyncio.get_running_loop())
    loop.add_signal_handler(signal.SIGHUP, access.read_again)
    try:
        for listen, server in servers.items():
            await server.set_serving(False)  # until workers can read requests
            address = await server.start(listen)
            logger.info("router of %s listens on %s", config.model, address)
        async with (
            _watching(dispatcher.pool, parts.scaling),
            _serving_http(parts) as http,
            _in_background(
                watch_resources(
                    parts.overload, _share_at_work(http), config.memory_limit_mib * 2**20
                )
            ),
            _in_background(_become_ready(parts.intake, servers.values(), stopping)),
        ):
            gc.freeze()  # long-lived objects: collecting them would pause all streams
            await stopping.wait()
            await stop_router(
                dispatcher,
                servers.values(),
                http,
                delay_s=drain_delay_s(config),
                timeout_s=config.drain_timeout_s,
            )
    finally:
        await asyncio.gather(*(server.stop(0) for server in servers.values()))
        parts.intake.close()
        for last in (parts.tracing.close, access.audit.close):
            await asyncio.to_thread(last)


async def _become_ready(
    intake: Intake, servers: Iterable[RpcServer], stopping: asyncio.Event
) -> None:
    """Report the router as serving once its workers can read requests."""
    while True:
        try:
            await intake.reader.prepare()
            break
        except NodeUnavailableError as error:
            logger.warning("not ready: %s", error)
            await asyncio.sleep(_RETRY_S)
    for server in servers:
        if not stopping.is_set():
            await server.set_serving(True)


def _make_intake(
    config: RouterConfig,
    folder: Path,
    limits: ModelLimits,
    dispatcher: Dispatcher,
    metrics: RouterMetrics,
    readers: EarlyReaders | None,
) -> Intake:
    readers = readers or EarlyReaders(config.texts.make_tokenizer(folder))
    return Intake(
        dispatcher,
        readers.tokenizer,
        vocab_size=limits.vocab_size,
        default_timeout_s=config.request_timeout_s,
        metrics=metrics,
        cache_salts=make_salts(
            config.cache_salt_secret_file, has_tenants=bool(config.api_keys_file)
        ),
        parsers=config.texts.make_parsers(readers.tokenizer),
        readers=readers,
        sampling_defaults=config.texts.sampling_defaults(folder),
        trusts_templates=config.texts.trust_request_chat_template,
        cuts_changing_lines=config.texts.cut_changing_lines,
        logs_prompts=config.log_prompts,
    )


def _make_access(config: RouterConfig) -> Access:
    """Make the access checks; raises ConfigError."""
    access = Access(
        keys_file=Path(config.api_keys_file) if config.api_keys_file else None,
        admin_token=config.admin_token,
        node_token=config.node_token,
        model=config.served_model_name or config.model,
        audit=AuditLog(config.audit_log, program="router"),
        by_certificate=config.tls.verifies_clients,
    )
    access.warn_of_gaps((Role.INFER, Role.JOIN))
    return access


def _make_tracing(config: RouterConfig, dispatcher: Dispatcher) -> Tracing:
    """Make the tracing; raises ConfigError."""
    router_id = {"service.instance.id": dispatcher.pool.router_id}
    tracing = Tracing(config.trace, service="baton-router", resource=router_id)
    if tracing.sink is not None:
        spans = RequestSpans(config.served_model_name or config.model, tracing.sink)
        dispatcher.log.on_traced = spans.on_request_end
    return tracing


def _make_scaling(config: RouterConfig, pool: NodePool, admission: Admission) -> ScalingSignals:
    def queue_s() -> float:
        state = admission.state()
        return state.expected_wait_s if state.num_queued else 0.0

    return ScalingSignals(pool, config.scaling, queue_s=queue_s, clock=pool.clock)


def _share_at_work(http: HttpApi | None) -> Callable[[], float]:
    return lambda: 0.0 if http is None else http.share_at_work


@contextlib.asynccontextmanager
async def _serving_http(parts: _Parts) -> AsyncIterator[HttpApi | None]:
    """Serve the HTTP API inside this context; yields None if it is disabled."""
    config, dispatcher, files = parts.config, parts.dispatcher, parts.files
    if not config.http_listen:
        yield None
        return
    # Imported here, because a router without HTTP need not load it.
    from router.api.http_server import HttpServer
    from router.api.ui.page import StatusPage

    tls = None
    if files is not None:
        tls = ServerContext.of(files, require_client_certs=config.tls.require_client_certs)
    page = StatusPage(
        dispatcher,
        model=parts.model_name,
        policy=lambda: parts.admin.policy,
        overload=parts.overload,
    )
    names = read_names(parts.model_name, config.served_model_aliases)
    server = HttpServer(
        parts.intake,
        dispatcher.pool,
        parts.metrics,
        model_name=parts.model_name,
        served=read_defaults(names, config.request_defaults),
        strict_fields=config.strict_fields,
        access=parts.access,
        cors_origin=config.http_cors_origin,
        grace_s=LAST_WORDS_S,
        limits=parts.budget.http,
        overload=parts.overload,
        tls=tls,
        access_log=AccessLog(parts.model_name, is_on=config.access_log),
        status_page=page,
        tracing=parts.tracing,
    )
    parts.metrics.show_connections(server.connections)
    address = await server.start(config.http_listen)
    logger.info("HTTP API on %s://%s", "https" if files else "http", address)
    try:
        async with _in_background(page.history.run()):
            yield server
    finally:
        await server.stop()


@contextlib.asynccontextmanager
async def _watching(pool: NodePool, scaling: ScalingSignals) -> AsyncIterator[None]:
    """Notice silent nodes and update scaling signals inside this context."""

    async def count() -> None:
        while True:
            await asyncio.sleep(BEAT_INTERVAL_S)
            try:
                pool.count_missed_beats()
                scaling.tick()
            except Exception:  # the loop's top: without this loop no silent node would be noticed
                logger.exception("missed beats could not be counted")

    async with _in_background(count()):
        yield


@contextlib.asynccontextmanager
async def _in_background(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run a coroutine until the context ends; log its failure and go on without it."""
    task = asyncio.create_task(work)
    task.add_done_callback(_tell_failure)
    try:
        yield
    finally:
        task.cancel()


def _tell_failure(task: asyncio.Task[None]) -> None:
    """Log the error that ended a background task, unless the task was cancelled."""
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("%s has failed and is given up", task.get_coro(), exc_info=error)


def _make_servers(parts: _Parts) -> dict[str, RpcServer]:
    """Return servers by address: one for all, or one each for clients and for nodes."""
    config, budget = parts.config, parts.budget
    inference = inference_pb2.DESCRIPTOR.services_by_name["Inference"]
    link = node_pb2.DESCRIPTOR.services_by_name["NodeLink"]
    admin = admin_pb2.DESCRIPTOR.services_by_name["Admin"]

    journal = Journal(JournalOptions(grace_s=config.resume_grace_s))
    service = InferenceService(
        parts.intake,
        model=parts.model_name,
        journal=journal,
        max_timeout_s=config.max_request_timeout_s,
    )

    def add_public(server: object) -> None:
        inference_pb2_grpc.add_InferenceServicer_to_server(service, server)  # type: ignore[no-untyped-call]  # generated

    def add_private(server: object) -> None:
        links = NodeLinkService(parts.dispatcher.pool, parts.access)
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
    config: RouterConfig, dispatcher: Dispatcher, intake: Intake, overload: Overload
) -> AdminService:
    return AdminService(
        dispatcher,
        intake,
        model=config.model,
        policy=config.policy,
        overload=overload,
        on_policy=lambda name: dispatcher.pool.allow_self_prefill(config.may_self_prefill(name)),
    )
