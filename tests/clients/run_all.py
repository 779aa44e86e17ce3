"""Runs every client of the table, in its own environment, against a split system with a real model.

`make test-clients` runs this; pytest does not find it by itself, as it fetches a model and
gigabytes of packages. `-k litellm` runs one of them.
"""

from __future__ import annotations

import re
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from baton.checkpoint.gguf.folder import folder_of_gguf
from baton.checkpoint.packaged_model import SMOLLM2
from baton.deployment.local_deployment import LocalDeployment
from examples.demo import fetch_model
from tests.clients.environments import installed_version, interpreter
from tests.clients.table import CLIENTS, Client
from tests.fakes.checkpoints.pooling_models import make_reranker
from tests.fakes.processes.deployments import run_deployment
from tests.fakes.time.waiting import wait_until

pytestmark = [pytest.mark.nixl, pytest.mark.large, pytest.mark.timeout(1800)]

_OUTCOME = re.compile(r'^baton_router_requests_total\{outcome="(\w+)"\} (\S+)', re.MULTILINE)
_OPEN = re.compile(r"^baton_router_requests_open (\S+)", re.MULTILINE)
# Outcomes that no client may bring about.
WRONG = {"internal", "unknown", "unavailable", "data_loss"}


@pytest.fixture(scope="module")
def system() -> Iterator[LocalDeployment]:
    """A router, a prefill node and a decode node; every prompt is handed over."""
    model = fetch_model(Console(), SMOLLM2)
    assert model is not None, f"{SMOLLM2.requirement} cannot be had"
    with run_deployment(
        "--kv-cache-memory", "512M", "--long-prefill-token-threshold", "256",
        model=model,
        dtype="auto",
        http=True,
        router_args=["--served-model-name", SMOLLM2.name],
        decode_args=["--local-prefill-threshold", "0"],
    ) as running:  # fmt: skip
        yield running


@pytest.fixture(scope="module")
def ranking_system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalDeployment]:
    """A router, and a prefill node with a small random model that ranks documents."""
    folder = tmp_path_factory.mktemp("reranker")
    make_reranker(folder)
    with run_deployment(
        *("--num-blocks", "256"),
        model=str(folder),
        num_decode=0,
        http=True,
        router_args=["--served-model-name", SMOLLM2.name],
    ) as running:
        yield running


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.package)
def test_client(client: Client, request: pytest.FixtureRequest) -> None:
    python = interpreter(client.package)
    system = request.getfixturevalue("ranking_system" if client.ranks else "system")
    version = installed_version(python, client.package)
    model = Path(system.config.model)
    before = requests_by_outcome(system)
    done = subprocess.run(
        [
            str(python), str(client.script), "--model", SMOLLM2.name,
            "--http", system.config.http_listen, "--grpc", system.config.listen,
            "--tokenizer", str(model if model.is_dir() else folder_of_gguf(model)),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=client.timeout_s,
        check=False,
    )  # fmt: skip
    print(f"\n{client.package} {version}\n{done.stdout}")
    assert done.returncode == 0
    wait_until(lambda: float(_OPEN.findall(metrics(system))[0]) == 0, "that no request is open")
    now = requests_by_outcome(system)
    new = {outcome: now[outcome] - before.get(outcome, 0) for outcome in now}
    assert new.get("stop", 0) + new.get("length", 0) > 0
    assert not [outcome for outcome in WRONG if new.get(outcome)]


def metrics(system: LocalDeployment) -> str:
    url = f"http://{system.config.http_listen}/metrics"
    with urllib.request.urlopen(url, timeout=10) as answer:
        return str(answer.read(), "utf-8")


def requests_by_outcome(system: LocalDeployment) -> dict[str, float]:
    return {outcome: float(count) for outcome, count in _OUTCOME.findall(metrics(system))}
