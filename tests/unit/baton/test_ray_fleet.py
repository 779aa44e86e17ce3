"""Unit tests of `baton up` with Ray: Ray's options, and the router's address on other machines."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from baton.api.errors import ConfigError
from baton.cli.app import app
from baton.deployment.local_deployment import LocalDeploymentConfig, threads_of


@pytest.mark.parametrize(
    ("arguments", "address", "node_args"),
    [
        ([], None, []),
        (["--executor", "multiproc"], None, ["--executor", "multiproc"]),
        (["--executor", "ray"], "", ["--executor", "ray"]),
        (["--ray-address", "auto"], "auto", ["--executor", "ray"]),
        (
            ["--ray-address", "head:6379", "--executor", "multiproc"],
            "head:6379",
            ["--executor", "multiproc"],
        ),
    ],
)
def test_ray_places_nodes_if_asked(
    arguments: list[str],
    address: str | None,
    node_args: list[str],
    started: list[LocalDeploymentConfig],
) -> None:
    result = CliRunner().invoke(app, ["up", "--model", "m", *arguments])
    assert (result.exit_code, result.stderr) == (0, "")
    [config] = started
    assert (config.ray_address, config.node_args) == (address, node_args)


@pytest.mark.parametrize(
    ("listen", "machines", "address"),
    [
        ("0.0.0.0:50051", 3, "10.0.0.7:50051"),
        ("[::]:50051", 1, "10.0.0.7:50051"),
        ("127.0.0.1:50051", 1, "127.0.0.1:50051"),
        ("10.0.0.8:50051", 3, "10.0.0.8:50051"),
    ],
)
def test_nodes_look_for_the_router_where_they_can_reach_it(
    listen: str, machines: int, address: str
) -> None:
    cluster: Any = SimpleNamespace(num_machines=machines, own_host="10.0.0.7")
    config = LocalDeploymentConfig(model="m", listen=listen)
    assert config.router_address_on(cluster) == address


def test_a_router_that_no_other_machine_reaches_is_refused() -> None:
    cluster: Any = SimpleNamespace(num_machines=2, own_host="10.0.0.7")
    config = LocalDeploymentConfig(model="m", listen="localhost:50051")
    with pytest.raises(ConfigError, match=r"listen: nodes on the 2 machines .* 0.0.0.0:50051"):
        config.router_address_on(cluster)


def test_a_node_claims_the_cores_that_it_computes_on() -> None:
    assert threads_of(["prefill", "--num-threads", "1", "--name", "p0"]) == 1
    assert threads_of(["prefill", "--num-threads", "1", "--num-threads=4"]) == 4
    assert threads_of(["prefill", "--num-threads", "0"]) == 1
