"""Nodes that join over mutual TLS: real links of this process, simulated nodes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from baton.access.access import Access
from baton.access.tls import TlsFiles, TlsOptions
from baton.api.errors import ConfigError, NodeUnavailableError
from baton.checkpoint.model_folder import config_digest
from baton.serving.call_gate import CallGate
from baton.serving.rpc import RpcServer
from baton.v1 import node_pb2, node_pb2_grpc
from router.api.grpc.link_service import NodeLinkService
from router.fleet.node_pool import NodePool
from sim_node.cluster import SimCluster
from tests.fakes.checkpoints.demo_model import DEMO_MODEL
from tests.fakes.network.certificates import Authority

pytestmark = pytest.mark.medium


@contextlib.asynccontextmanager
async def router(
    tls: TlsOptions, listen: str = "127.0.0.1:0"
) -> AsyncIterator[tuple[str, NodePool]]:
    pool = NodePool(own_identity={"model": config_digest(DEMO_MODEL)}, max_model_len=2048)
    server = RpcServer(
        [node_pb2.DESCRIPTOR.services_by_name["NodeLink"]],
        lambda it: node_pb2_grpc.add_NodeLinkServicer_to_server(NodeLinkService(pool), it),  # type: ignore[no-untyped-call]  # generated
        CallGate(Access(by_certificate=True)),
        tls=TlsFiles(tls),
        require_client_certs=True,
    )
    try:
        yield await server.start(listen), pool
    finally:
        await server.stop(0)


def nodes(address: str, tls: TlsOptions, *, join_timeout_s: float = 20) -> SimCluster:
    return SimCluster(
        address,
        str(DEMO_MODEL),
        num_prefill=1,
        num_decode=1,
        tls=tls,
        join_timeout_s=join_timeout_s,
    )


async def until_joined(pool: NodePool) -> None:
    async with asyncio.timeout(30):
        while len(pool.nodes) < 2:  # noqa: ASYNC110  # what is waited for is another object's
            await asyncio.sleep(0.02)


def test_one_certificate_is_for_the_simulated_nodes_of_a_process(tmp_path: Path) -> None:
    authority = Authority(tmp_path)

    async def run() -> None:
        async with (
            router(authority.issue("router")) as (address, pool),
            nodes(address, authority.issue("sim", "node/sim/sim")),
        ):
            assert [node.name for node in pool.nodes] == ["sim-d0", "sim-p0"]

    asyncio.run(run())


@pytest.mark.parametrize(
    ("uri_path", "problem"),
    [
        ("node/sim/other", "certificate: is for spiffe://baton/node/sim/other, not for node/"),
        ("node/prefill/sim-p0", "certificate: is for spiffe://baton/node/prefill/sim-p0, not for"),
        ("infer/sim", "authorization: sim must have the role join for this"),
        ("", "must have the role join for this"),
    ],
)
def test_any_other_is_refused_at_once_in_one_line(
    tmp_path: Path, uri_path: str, problem: str
) -> None:
    authority = Authority(tmp_path)

    async def run() -> None:
        async with router(authority.issue("router")) as (address, pool):
            with pytest.raises(ConfigError) as caught:
                await nodes(address, authority.issue("sim", uri_path)).start()
            said = str(caught.value)
            assert said.startswith("the router refused this node: ")
            assert problem in said
            assert "\n" not in said
            assert not [node for node in pool.nodes if node.name != "sim-p0"]

    asyncio.run(run())


def test_a_node_whose_links_break_comes_back_with_new_certificates_and_says_what_hinders_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.link.router_link._ASK_WHY_INTERVAL_S", 0.1)
    old, new = Authority(tmp_path, "old"), Authority(tmp_path, "new")
    caplog.set_level(logging.WARNING)

    def told(words: str) -> list[logging.LogRecord]:
        links = [one for one in caplog.records if one.name == "baton.link.router_link"]
        return [one for one in links if words in one.getMessage()]

    async def until_both_told(words: str) -> None:
        async with asyncio.timeout(20):
            while len(told(words)) < 2:  # noqa: ASYNC110  # logs have no callback
                await asyncio.sleep(0.05)

    async def run() -> None:
        own = old.issue("sim", "node/sim/sim")
        async with contextlib.AsyncExitStack() as stack:
            async with router(old.issue("router")) as (address, pool):
                await stack.enter_async_context(nodes(address, own))
                await until_joined(pool)
            await until_both_told("it cannot be reached")
            caplog.clear()
            async with router(new.issue("router"), address) as (_, pool):
                await until_both_told("its certificate is of no CA in")
                await asyncio.sleep(1)
                assert not pool.nodes
                # Each node logs a reason once, not at each try.
                assert len(told("its certificate is of no CA in")) == 2
                new.issue("sim", "node/sim/sim")
                old.ca_file.write_bytes(new.ca_file.read_bytes())
                await until_joined(pool)

    asyncio.run(run())


def test_who_gives_up_says_why(tmp_path: Path) -> None:
    authority, folder = Authority(tmp_path), tmp_path / "stranger"
    folder.mkdir()
    stranger = Authority(folder).issue("sim", "node/sim/sim", trusts=authority)

    async def run() -> None:
        async with router(authority.issue("router")) as (address, _):
            with pytest.raises(NodeUnavailableError) as caught:
                await nodes(address, stranger, join_timeout_s=15).start()
            assert str(caught.value) == (
                f"router: {address} cannot be reached (tried for 15 s): it hangs up on our "
                f"certificate {stranger.cert}; does it trust the CA of that?"
            )

    asyncio.run(run())
