"""Every socket that any program listens on, found from outside, and what protects it.

The table below is the page docs/listening_sockets.md (``BATON_WRITE_DOCS=1`` writes it anew). A
socket that is not in it fails the test, and so does one that others than this machine can reach.
"""

from __future__ import annotations

import ipaddress
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.fakes.sockets import Listening, listening
from tests.integration.conftest import DEMO_MODEL, READY_TIMEOUT_S, free_address

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "listening_sockets.md"
KV_PORTS = range(41000, 41100)
ENVIRONMENT = {**os.environ, "UCX_TCP_PORT_RANGE": f"{KV_PORTS.start}-{KV_PORTS.stop - 1}"}
MODEL = ["--model", str(DEMO_MODEL)]


@dataclass(frozen=True, slots=True)
class Socket:
    """A row of the table.

    Attributes:
        option: where its address is said.
        protection: what a stranger who reaches it meets.
    """

    program: str
    what: str
    option: str
    protection: str


_GATE = "a role for every call (API key or client certificate), decided before its body is read"
_CONNECTIONS = "TLS; timeouts and caps of connections"
SOCKETS = {
    "public": Socket("router", "gRPC of clients", "`--listen`", f"{_GATE}: infer; {_CONNECTIONS}"),
    "http": Socket("router", "HTTP API", "`--http-listen`", f"{_GATE}: infer; {_CONNECTIONS}"),
    "nodes": Socket(
        "router",
        "links of nodes, `baton admin`",
        "`--node-listen` (else on `--listen`)",
        f"{_GATE}: join, look, operate; mutual TLS",
    ),
    "node": Socket(
        "prefill, decode",
        "health and reflection of a node",
        "`--listen` of the node",
        "health is open; nothing else answers anybody without a role; TLS",
    ),
    "metrics": Socket(
        "prefill, decode",
        "Prometheus page",
        "`--metrics-listen` (none by default)",
        "look, when credentials are set; TLS; timeouts and caps of connections",
    ),
    "kv": Socket(
        "prefill, decode",
        "KV by `--kv-connector nixl` (UCX over TCP)",
        "`UCX_NET_DEVICES`, `UCX_TCP_PORT_RANGE`",
        "**UCX neither authenticates nor encrypts**: messages and blocks are checked with keys of "
        "each pair; on a network that is not trusted use the TLS connector, or a NetworkPolicy",
    ),
}
NO_SOCKETS = "`baton sim-node`, `generate`, `chat`, `admin`, `loadtest`, `keys`, `certs`, `LLM`"


@pytest.fixture(scope="module")
def found() -> Iterator[dict[str, list[Listening]]]:
    """What is listened on, by the name of its row; ``sim``: by the simulated nodes."""
    addresses = {name: free_address() for name in ("public", "http", "nodes", "node", "metrics")}
    decode_listen = free_address()
    router = ["router", *MODEL, "--listen", addresses["public"]]
    router += ["--http-listen", addresses["http"], "--node-listen", addresses["nodes"]]
    node = [*MODEL, "--router", addresses["nodes"], "--num-threads", "1", "--num-blocks", "64"]
    prefill = ["prefill", *node, "--listen", addresses["node"], "--name", "p0"]
    decode = ["decode", *node, "--listen", decode_listen, "--name", "d0"]
    names = {Listening("tcp", *_split(address)): name for name, address in addresses.items()}
    names[Listening("tcp", *_split(decode_listen))] = "node"
    with running(
        router,
        [*prefill, "--metrics-listen", addresses["metrics"]],
        decode,
        ["sim-node", *MODEL, "--router", addresses["nodes"]],
    ) as processes:
        _generate(addresses["public"])
        by_name: dict[str, list[Listening]] = {"unknown": [], "sim": []}
        for process, program in zip(processes, ("router", "prefill", "decode", "sim"), strict=True):
            for item in listening(process.pid):
                plain = Listening(item.kind, item.host.removeprefix("::ffff:"), item.port)
                name = names.get(plain, "unknown")
                if program == "sim":
                    name = "sim"
                elif name == "unknown" and program != "router" and item.port in KV_PORTS:
                    name = "kv"
                by_name.setdefault(name, []).append(item)
        yield by_name


@contextmanager
def running(*commands: list[str]) -> Iterator[list[subprocess.Popen[bytes]]]:
    baton = [sys.executable, "-m", "baton"]
    processes = [
        subprocess.Popen([*baton, *command], cwd=ROOT, env=ENVIRONMENT) for command in commands
    ]
    try:
        yield processes
    finally:
        for process in reversed(processes):
            process.terminate()
        for process in processes:
            process.wait(timeout=30)


def _generate(address: str) -> None:
    """One request through both nodes: whatever is opened late is open then."""
    command = [sys.executable, "-m", "baton", "generate", "--router", address, "hello"]
    give_up_at = time.monotonic() + READY_TIMEOUT_S
    while subprocess.run(command, cwd=ROOT, capture_output=True, check=False).returncode:
        assert time.monotonic() < give_up_at
        time.sleep(0.5)


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


def test_every_socket_is_in_the_table_and_every_row_is_there(
    found: dict[str, list[Listening]],
) -> None:
    assert found.pop("unknown") == []
    assert found.pop("sim") == []
    assert set(found) == set(SOCKETS)
    assert len(found["kv"]) == len(found["node"]) == 2


def test_nothing_is_reached_from_other_machines_unless_told(
    found: dict[str, list[Listening]],
) -> None:
    for item in (item for items in found.values() for item in items):
        assert item.kind == "tcp"
        address = ipaddress.ip_address(item.host.removeprefix("::ffff:"))
        assert address.is_loopback, item


def test_the_page_is_this_table() -> None:
    rows = "\n".join(
        f"| {s.program} | {s.what} | {s.option} | {s.protection} |" for s in SOCKETS.values()
    )
    page = textwrap.dedent(
        """\
        # Listening sockets

        Every socket that a program listens on. `tests/integration/test_listening_sockets.py` starts
        the programs, finds their sockets from outside, and fails on one that is not here. All are
        on loopback unless told otherwise; beyond it, a listen without authentication and TLS is
        refused ([security](security.md)).

        | program | what | address | what protects it |
        |---|---|---|---|
        {rows}

        Not listening on anything: {none}.
        """
    ).format(rows=rows, none=NO_SOCKETS)
    if os.environ.get("BATON_WRITE_DOCS"):
        PAGE.write_text(page, encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == page
