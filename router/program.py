"""What a router is made of, put together; serves until told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from baton.admin_gate import AdminGate
from baton.client import DEFAULT_ADDRESS
from baton.errors import ConfigError
from baton.link import BEAT_INTERVAL_S
from baton.model_folder import config_digest, find_model_folder, read_limits
from baton.process import stop_event
from baton.rpc import RpcServer, is_public, warn_if_public
from baton.tokenizer import Tokenizer
from baton.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
    node_pb2,
    node_pb2_grpc,
)
from router.admin.node_calls import NodeCalls
from router.admin.service import AdminService
from router.dispatcher import Dispatcher
from router.intake import Intake
from router.link_service import NodeLinkService
from router.node_pool import NodePool
from router.policies import POLICIES
from router.retry_budget import RetryOptions
from router.service import InferenceService

logger = logging.getLogger(__name__)

STOP_GRACE_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """Options of the router; see `baton router --help`."""

    model: str
    listen: str = DEFAULT_ADDRESS
    policy: str = "least_tokens"
    request_timeout_s: float = 600.0
    max_attempts: int = 3
    pair_timeout_s: float = 5.0
    node_timeout_s: float = 1.0
    node_token: str = field(default="", repr=False)
    admin_token: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        if not self.node_timeout_s >= 2 * BEAT_INTERVAL_S:
            raise ConfigError(
                f"node_timeout_s: must be {2 * BEAT_INTERVAL_S:g} or more (two beats), "
                f"got {self.node_timeout_s:g}"
            )


async def serve(config: RouterConfig) -> None:
    """Serve until told to stop; raises ConfigError when something is wrong at the start."""
    folder = find_model_folder(config.model, weights=False)
    limits = read_limits(folder)
    pool = NodePool(
        model_digest=config_digest(folder),
        max_model_len=limits.max_position_embeddings,
        max_missed_beats=round(config.node_timeout_s / BEAT_INTERVAL_S),
    )
    options = RetryOptions(max_attempts=config.max_attempts, pair_timeout_s=config.pair_timeout_s)
    dispatcher = Dispatcher(pool, POLICIES.load(config.policy)(), options)
    intake = Intake(
        dispatcher,
        Tokenizer(folder) if Tokenizer.exists_in(folder) else None,
        vocab_size=limits.vocab_size,
        default_timeout_s=config.request_timeout_s,
    )
    admin = admin_pb2.DESCRIPTOR.services_by_name["Admin"]
    server = RpcServer(
        [
            inference_pb2.DESCRIPTOR.services_by_name["Inference"],
            node_pb2.DESCRIPTOR.services_by_name["NodeLink"],
            admin,
        ],
        lambda grpc_server: _register(grpc_server, dispatcher, intake, config),
        [
            AdminGate(
                admin.full_name, config.admin_token, is_public=is_public("listen", config.listen)
            )
        ],
    )
    stopping = stop_event(asyncio.get_running_loop())
    address = await server.start(config.listen)
    await server.set_serving(True)
    warn_if_public(address)
    logger.info("router of %s listens on %s", config.model, address)
    async with _watching(pool):
        await stopping.wait()
    logger.info("stopping")
    await server.stop(STOP_GRACE_S)


@contextlib.asynccontextmanager
async def _watching(pool: NodePool) -> AsyncIterator[None]:
    """Notice nodes that are silent: stopped, or behind a network that swallows all."""

    async def count() -> None:
        while True:
            await asyncio.sleep(BEAT_INTERVAL_S)
            pool.count_missed_beats()

    task = asyncio.create_task(count())
    try:
        yield
    finally:
        task.cancel()


def _register(server: object, dispatcher: Dispatcher, intake: Intake, config: RouterConfig) -> None:
    links = NodeLinkService(dispatcher.pool, config.node_token)
    admin = AdminService(
        dispatcher,
        intake,
        model=config.model,
        policy=config.policy,
        calls=NodeCalls(config.admin_token),
    )
    inference_pb2_grpc.add_InferenceServicer_to_server(InferenceService(intake), server)  # type: ignore[no-untyped-call]  # generated
    node_pb2_grpc.add_NodeLinkServicer_to_server(links, server)  # type: ignore[no-untyped-call]  # generated
    admin_pb2_grpc.add_AdminServicer_to_server(admin, server)  # type: ignore[no-untyped-call]  # generated
