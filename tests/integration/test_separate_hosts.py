"""Router, prefill node, decode node and operator on hosts of their own; KV crosses the network.

Once with tokens and no TLS (``--insecure``) and KV by UCX over TCP, once with certificates on every
connection and KV over TLS.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.checkpoints.demo_model import DEMO_MODEL
from tests.fakes.processes.deployments import READY_TIMEOUT_S
from tests.hosts.network import Network, why_no_hosts
from tests.hosts.programs import HostPrograms

pytestmark = [
    pytest.mark.large,
    pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "hosts can be made"),
]

ROOT = Path(__file__).parents[2]
TOKENS = {
    "BATON_ADMIN_TOKEN": "an operator's, 32 characters long",
    "BATON_API_KEY": "an operator's, 32 characters long",
    "BATON_NODE_TOKEN": "a node's token, 32 characters long",
}
PROMPT = "def read_config(path):"
ROUTER = "router"
OPERATOR = "operator"
NODES = ("p0", "d0")


class Fleet:
    """A split system over hosts, and commands that run beside it.

    Args:
        folder: folder of certificates; None: ``--insecure``.
    """

    def __init__(self, programs: HostPrograms, folder: Path | None) -> None:
        self._programs = programs
        self._folder = folder
        self.router = programs.network.at(ROUTER, 50051)
        self.nodes = programs.network.at(ROUTER, 50052)

    def tls(self, name: str) -> list[str]:
        if self._folder is None:
            return []
        own = self._folder / name
        return [
            *("--tls-ca", str(self._folder / "ca.crt")),
            *("--tls-cert", f"{own}.crt", "--tls-key", f"{own}.key"),
        ]

    def run(self, name: str, *arguments: str) -> str:
        """Run a command on the operator's host; returns all that it prints."""
        return self._programs.run(OPERATOR, *arguments, *self.tls(name))

    def admin(self, *arguments: str) -> str:
        return self.run("operator", "admin", *arguments, "--router", self.nodes)

    def generate(self) -> str:
        limits = ["--max-tokens", "8", "--temperature", "0"]
        return self.run("client", "generate", "--router", self.router, *limits, PROMPT)


@pytest.fixture(scope="module", params=["insecure", "tls"])
def fleet(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Fleet]:
    tokens = TOKENS if request.param == "insecure" else {}
    hosts = [ROUTER, OPERATOR, *NODES]
    with Network(hosts, ["ipv4"]) as network, HostPrograms(network, tokens) as programs:
        folder = None
        if request.param == "tls":
            folder = tmp_path_factory.mktemp("certs")
            dev = [sys.executable, "-m", "baton", "certs", "dev", "--out", str(folder)]
            for host in hosts:
                dev += ["--host", network.address(host)]
            subprocess.run(dev, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
        made = Fleet(programs, folder)
        model = ["--model", str(DEMO_MODEL)]
        listen = ["--listen", made.router, "--node-listen", made.nodes, "--http-listen", ""]
        open_to_all = ["--insecure"] if folder is None else ["--tls-require-client-certs"]
        programs.start(
            ROUTER, "router", *model, *listen, *open_to_all, "--no-local-prefill",
            *made.tls("router"),
        )  # fmt: skip
        for name in NODES:
            kv = ["--kv-connector", "tls", "--kv-listen", network.at(name, 0)]
            role = "prefill" if name.startswith("p") else "decode"
            programs.start(
                name, role, *model, "--router", made.nodes, "--name", name,
                "--listen", network.at(name, 50060), "--num-blocks", "128", "--num-threads", "1",
                *(["--insecure"] if folder is None else kv), *made.tls(name),
            )  # fmt: skip
        wait_until_paired(made)
        yield made


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
