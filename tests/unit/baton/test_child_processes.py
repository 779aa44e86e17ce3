"""Tests that child processes execute nothing from the user's current folder."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

import pytest

from baton.api.errors import ConfigError
from baton.deployment.local_deployment import LocalDeployment, LocalDeploymentConfig
from baton.processes.child_processes import fleet_environment
from baton.processes.free_address import free_address
from baton.processes.worker_processes import WorkerProcesses, WorkLimits

pytestmark = pytest.mark.medium

TAKEN = (
    "baton", "router", "models", "engine", "kvconnector", "prefill_node", "decode_node",
    "baton_kernels", "msgspec", "grpc", "logging", "asyncio",
)  # fmt: skip


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a folder of files with our modules' names; importing one leaves `executed` there."""
    folder = tmp_path / "project"
    folder.mkdir()
    marker = tmp_path / "executed"
    for name in TAKEN:
        (folder / f"{name}.py").write_text(
            f"open({str(marker)!r}, 'a').write('{name} ')\nraise SystemExit('{name} of the user')\n"
        )
    monkeypatch.chdir(folder)
    return marker


def test_a_deployment_runs_no_file_of_the_current_folder(trap: Path) -> None:
    model = trap.parent / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")  # enough to start programs, which then refuse it
    config = LocalDeploymentConfig(
        model=str(model), listen=free_address(), num_prefill=1, num_decode=0
    )
    with LocalDeployment(config) as deployment, pytest.raises(ConfigError, match="ended: "):
        deployment.wait_ready(60)
    assert not trap.exists()


def test_workers_run_no_file_of_the_current_folder(trap: Path) -> None:
    limits = WorkLimits(cpu_s=10, wall_s=30, memory_bytes=2**26)
    workers = WorkerProcesses(
        "tests.fakes.processes.costly_work:make_work", {}, limits, num_workers=2
    )
    try:
        assert asyncio.run(workers.run(b"1")) == b"1"
    finally:
        workers.close()
    assert not trap.exists()


def test_a_fleet_inherits_settings_and_not_what_one_process_has_for_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shared = {"BATON_LOG_LEVEL": "debug", "BATON_MAX_NUM_REQUESTS": "8", "PATH": os.environ["PATH"]}
    own = {
        "BATON_LISTEN": "a:1", "BATON_NAME": "me", "BATON_METRICS_LISTEN": "a:2",
        "BATON_KV_LISTEN": "a:3", "BATON_NODE_LISTEN": "a:4", "BATON_CPU_LIST": "0",
        "BATON_TLS_CERT": "c", "BATON_TLS_KEY": "k",
    }  # fmt: skip
    for name, text in {**shared, **own}.items():
        monkeypatch.setenv(name, text)
    inherited = fleet_environment()
    assert {name: inherited.get(name) for name in shared} == shared
    assert not own.keys() & inherited.keys()


@pytest.mark.parametrize("option", ["listen", "http_listen"])
def test_where_another_fleet_listens_nothing_is_started(option: str) -> None:
    """Refuse to start, as our nodes would join the other fleet and be `ready` there."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        config = LocalDeploymentConfig(
            model="./no/such/model",
            listen=address if option == "listen" else free_address(),
            http_listen=address if option == "http_listen" else "",
        )
        deployment = LocalDeployment(config)
        with pytest.raises(ConfigError, match=rf"^{option}: cannot listen on {address} \(Address"):
            deployment.__enter__()
        assert deployment.children == []
