"""Real processes for the tests in this folder: router, prefill and decode nodes with NIXL."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.deployment.local_deployment import LocalDeployment
from sim_node.node import Simulation
from tests.fakes.checkpoints.demo_model import DEMO_MODEL
from tests.fakes.checkpoints.tool_model import link_model_with_tools
from tests.fakes.engine.dead_engines import let_die
from tests.fakes.processes.deployments import run_deployment


@pytest.fixture(autouse=True)
def what_is_killed_frees_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat killed simulated nodes as killed processes, whose engines free nothing."""
    end = Simulation.kill

    def end_for_good(self: Simulation) -> None:
        let_die(self.engine)
        end(self)

    monkeypatch.setattr(Simulation, "kill", end_for_good)


@pytest.fixture(scope="module")
def demo_model() -> Path:
    return DEMO_MODEL


@pytest.fixture(scope="module")
def deployment() -> Iterator[LocalDeployment]:
    """One router, one prefill and one decode node; blocks and chunks small enough to matter."""
    with run_deployment("--long-prefill-token-threshold", "256") as running:
        yield running


@pytest.fixture(scope="module")
def model_with_tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model with a chat template that takes tools."""
    folder = tmp_path_factory.mktemp("model")
    link_model_with_tools(DEMO_MODEL, folder)
    return folder


@pytest.fixture(scope="module")
def api(model_with_tools: Path) -> Iterator[LocalDeployment]:
    """A router with HTTP and one pair of nodes."""
    with run_deployment(
        model=model_with_tools,
        http=True,
        local_prefill=True,
        router_args=["--served-model-name", "demo"],
    ) as running:
        yield running
