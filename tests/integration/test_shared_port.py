"""Several routers on one public port: each gets a part of the connections."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator

import grpc
import pytest

from baton.api.errors import ConfigError
from baton.processes.free_address import free_address
from baton.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc
from router.config import RouterConfig
from tests.fakes.checkpoints.demo_model import DEMO_MODEL

MODELS = (str(DEMO_MODEL), f"{DEMO_MODEL}/")  # one model under two names


@contextlib.contextmanager
def router(model: str, listen: str, node_listen: str) -> Iterator[None]:
    command = [sys.executable, "-m", "baton", "router", "--model", model, "--listen", listen]
    options = ["--node-listen", node_listen, "--reuse-port", "--http-listen", ""]
    process = subprocess.Popen([*command, *options])
    try:
        with grpc.insecure_channel(node_listen) as channel:
            grpc.channel_ready_future(channel).result(timeout=30)
            yield
    finally:
        process.terminate()
        assert process.wait(timeout=10) == 0


def model_of(listen: str) -> str:
    """The name that whoever takes a new connection gives its model."""
    with grpc.insecure_channel(listen, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]  # generated
        request = inference_pb2.ListModelsRequest()
        return str(stub.ListModels(request, wait_for_ready=True, timeout=10).models[0].name)


@pytest.mark.timeout(90)
def test_two_routers_share_the_public_port_and_keep_their_nodes_apart() -> None:
    listen, first, second = (free_address() for _ in range(3))
    with router(MODELS[0], listen, first):
        assert model_of(listen) == MODELS[0]
        with router(MODELS[1], listen, second):
            names: set[str] = set()
            give_up_at = time.monotonic() + 30
            while len(names) < 2:
                assert time.monotonic() < give_up_at
                names.add(model_of(listen))
            assert names == set(MODELS)
            with grpc.insecure_channel(listen) as channel:  # nodes would join either of the two
                admin = admin_pb2_grpc.AdminStub(channel)  # type: ignore[no-untyped-call]  # generated
                with pytest.raises(grpc.RpcError) as caught:
                    admin.ListNodes(admin_pb2.ListNodesRequest())
                assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert model_of(listen) == MODELS[0]


def test_a_shared_port_needs_another_one_for_nodes() -> None:
    with pytest.raises(ConfigError, match="reuse_port: needs node_listen"):
        RouterConfig(model="m", reuse_port=True)
