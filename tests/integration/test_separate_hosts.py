"""Router, prefill node, decode node and operator on hosts of their own; KV crosses the network.

Once with tokens and no TLS (``--insecure``) and KV by UCX over TCP, once with certificates on every
connection and KV over TLS.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.checkpoints.demo_model import DEMO_MODEL
from tests.fakes.network.hosts import Hosts, can_make_hosts, hosts
from tests.fakes.processes.deployments import READY_TIMEOUT_S

pytestmark = [
    pytest.mark.large,
    pytest.mark.skipif(
        not can_make_hosts(), reason="needs root and iproute2, to make network namespaces"
    ),
]

ROOT = Path(__file__).parents[2]
# (Namespaces share the kernel: without UCX_TLS the nodes would copy memory and use no network.)
ENVIRONMENT = {
    **os.environ,
    "UCX_NET_DEVICES": "eth0",
    "UCX_TLS": "tcp,self",
    "COLUMNS": "200",
}
TOKENS = {
    "BATON_ADMIN_TOKEN": "an operator's, 32 characters long",
    "BATON_API_KEY": "an operator's, 32 characters long",
    "BATON_NODE_TOKEN": "a node's token, 32 characters long",
}
PROMPT = "def read_config(path):"
ROUTER = "router"
OPERATOR = "operator"


class Fleet:
    """A split system over hosts, and commands that run beside it.

    Args:
        folder: folder of certificates; None: ``--insecure``.
    """

    def __init__(self, network: Hosts, folder: Path | None) -> None:
        self._network = network
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []
        self._environment = {**ENVIRONMENT, **(TOKENS if folder is None else {})}
        self.router = f"{network.addresses[ROUTER]}:50051"
        self.nodes = f"{network.addresses[ROUTER]}:50052"

    def tls(self, name: str) -> list[str]:
        if self._folder is None:
            return []
        own = self._folder / name
        return [
            *("--tls-ca", str(self._folder / "ca.crt")),
            *("--tls-cert", f"{own}.crt", "--tls-key", f"{own}.key"),
        ]

    def start(self, host: str, *arguments: str) -> None:
        command = self._network.command(host, sys.executable, "-m", "baton", *arguments)
        self._processes.append(subprocess.Popen(command, cwd=ROOT, env=self._environment))

    def run(self, name: str, *arguments: str) -> str:
        """Run a command on the operator's host; returns all that it prints."""
        command = [sys.executable, "-m", "baton", *arguments, *self.tls(name)]
        result = subprocess.run(
            self._network.command(OPERATOR, *command),
            cwd=ROOT,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert result.returncode == 0, (arguments, result.stdout, result.stderr)
        return result.stdout + result.stderr

    def admin(self, *arguments: str) -> str:
        return self.run("operator", "admin", *arguments, "--router", self.nodes)

    def generate(self) -> str:
        limits = ["--max-tokens", "8", "--temperature", "0"]
        return self.run("client", "generate", "--router", self.router, *limits, PROMPT)

    def stop(self) -> None:
        for process in reversed(self._processes):
            process.terminate()
        for process in self._processes:
            process.wait(timeout=40)


@pytest.fixture(scope="module", params=["insecure", "tls"])
def fleet(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Fleet]:
    names = {"p0": "p0", "d0": "d0"}
    with hosts(ROUTER, OPERATOR, *names) as network:
        folder = None
        if request.param == "tls":
            folder = tmp_path_factory.mktemp("certs")
            dev = [sys.executable, "-m", "baton", "certs", "dev", "--out", str(folder)]
            for address in network.addresses.values():
                dev += ["--host", address]
            subprocess.run(dev, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
        made = Fleet(network, folder)
        open_to_all = ["--insecure"] if folder is None else ["--tls-require-client-certs"]
        try:
            model = ["--model", str(DEMO_MODEL)]
            listen = ["--listen", made.router, "--node-listen", made.nodes, "--http-listen", ""]
            made.start(
                ROUTER, "router", *model, *listen, *open_to_all, "--no-local-prefill",
                *made.tls("router"),
            )  # fmt: skip
            for name in names:
                address = network.addresses[name]
                kv = (
                    []
                    if folder is None
                    else ["--kv-connector", "tls", "--kv-listen", f"{address}:0"]
                )
                role = "prefill" if name.startswith("p") else "decode"
                made.start(
                    name, role, *model, "--router", made.nodes, "--name", name, *kv,
                    "--listen", f"{address}:50060", "--num-blocks", "128", "--num-threads", "1",
                    *(["--insecure"] if folder is None else []), *made.tls(name),
                )  # fmt: skip
            wait_until_paired(made)
            yield made
        finally:
            made.stop()


def wait_until_paired(fleet: Fleet) -> None:
    give_up_at = time.monotonic() + READY_TIMEOUT_S
    while True:
        try:
            fleet.generate()
            return
        except AssertionError:
            if time.monotonic() > give_up_at:
                raise
        time.sleep(0.5)


def test_a_prompt_is_split_between_hosts(fleet: Fleet) -> None:
    assert "pushed" in (printed := fleet.generate())
    assert "cma" not in printed  # bytes crossed the network, not the kernel's memory
    assert "p0" in printed
    assert "d0" in printed


@pytest.mark.parametrize(
    "command",
    [
        ["nodes"],
        ["node", "d0"],
        ["audit"],
        ["requests", "p0"],
        ["flush-cache"],
        ["log-level", "d0", "info"],
        ["profile", "p0", "--seconds", "0.2"],
        ["version"],
        ["stats"],
    ],
    ids=" ".join,
)
def test_operators_reach_every_node_through_the_router(fleet: Fleet, command: list[str]) -> None:
    assert fleet.admin(*command)
