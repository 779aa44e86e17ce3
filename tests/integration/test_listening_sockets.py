"""Every socket that any program listens on, found from outside, and what protects it.

The table below is a section of docs/security.md (``BATON_WRITE_DOCS=1`` writes it anew). A socket
that is not in the table fails the test, and so does a socket that other machines can reach.
"""

from __future__ import annotations

import ipaddress
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from baton.processes.free_address import free_address
from tests.fakes.checkpoints.demo_model import DEMO_MODEL
from tests.fakes.network.sockets import Listening, listening
from tests.fakes.processes.deployments import READY_TIMEOUT_S

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "security.md"
KV_PORTS = range(31000, 31100)  # none that a connection gets by chance
ENVIRONMENT = {**os.environ, "UCX_TCP_PORT_RANGE": f"{KV_PORTS.start}-{KV_PORTS.stop - 1}"}
MODEL = ["--model", str(DEMO_MODEL)]

pytestmark = pytest.mark.thorough  # three systems of three programs


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


_GATE = "before a call's body is read, the caller's key or certificate must have the role"
_CONNECTIONS = "TLS; limits and timeouts of connections"
SOCKETS = {
    "public": Socket("router", "gRPC of clients", "`--listen`", f"{_GATE} `infer`; {_CONNECTIONS}"),
    "http": Socket("router", "HTTP API", "`--http-listen`", f"{_GATE} `infer`; {_CONNECTIONS}"),
    "nodes": Socket(
        "router",
        "links of nodes, `baton admin`",
        "`--node-listen` (default: `--listen`)",
        f"{_GATE} `join`, `look` or `operate`; mutual TLS",
    ),
    "node": Socket(
        "prefill, decode",
        "health and reflection of a node",
        "`--listen` of the node",
        "health is open; every other call needs a role; TLS",
    ),
    "private": Socket(
        "router, prefill, decode",
        "gRPC behind its guard",
        "a Unix socket in a private temporary folder, for each port without client certificates",
        "only the user that runs the program can open the folder",
    ),
    "metrics": Socket(
        "prefill, decode",
        "Prometheus page",
        "`--metrics-listen` (none by default)",
        "with credentials, the role `look` (`/health` and `/ready` are open); TLS; limits and "
        "timeouts of connections",
    ),
    "kv": Socket(
        "prefill, decode",
        "KV by `--kv-connector nixl` (UCX over TCP)",
        "`UCX_NET_DEVICES`, `UCX_TCP_PORT_RANGE`",
        "**UCX neither authenticates nor encrypts**; messages are sealed with a key per pair. On "
        "an untrusted network use `--kv-connector tls` or a NetworkPolicy",
    ),
    "kv_tls": Socket(
        "prefill, decode",
        "KV by `--kv-connector tls`",
        "`--kv-listen`",
        "mutual TLS 1.3 with the certificates that the router announced; writes only into granted "
        "blocks; limits of connections and time for strangers",
    ),
}
NO_SOCKETS = (
    "`baton sim-node`, `generate`, `chat`, `admin`, `loadtest`, `keys`, `certs`, `LLM` of one rank"
)


@pytest.fixture(scope="module")
def found() -> dict[str, set[Listening]]:
    """Find the sockets that programs listen on, by row name; ``sim``: the simulated nodes."""
    addresses = {name: free_address() for name in ("public", "http", "nodes", "node", "metrics")}
    router = ["router", *MODEL, "--listen", addresses["public"]]
    router += ["--http-listen", addresses["http"], "--node-listen", addresses["nodes"]]
    node = [*MODEL, "--router", addresses["nodes"], "--num-threads", "1", "--num-blocks", "64"]
    prefill = ["prefill", *node, "--listen", addresses["node"], "--name", "p0"]
    prefill += ["--metrics-listen", addresses["metrics"]]
    others = {name: free_address() for name in ("node", "kv_p", "kv_d")}
    decode = ["decode", *node, "--listen", others["node"], "--name", "d0"]
    names = {Listening("tcp", *_split(address)): name for name, address in addresses.items()}
    names[Listening("tcp", *_split(others["node"]))] = "node"
    names |= {Listening("tcp", *_split(others[end])): "kv_tls" for end in ("kv_p", "kv_d")}
    tls = ["--kv-connector", "tls", "--kv-listen"]
    by_name: dict[str, set[Listening]] = {"unknown": set(), "sim": set()}
    modes: set[int] = set()

    def look(program: str, process: subprocess.Popen[bytes]) -> None:
        for item in listening(process.pid):
            plain = Listening(item.kind, item.host.removeprefix("::ffff:"), item.port)
            name = names.get(plain, "unknown")
            if name == "unknown" and program == "node" and item.port in KV_PORTS:
                name = "kv"
            if item.kind == "unix" and item.host.endswith("/grpc"):
                name = "private"
                modes.add(Path(item.host).parent.stat().st_mode & 0o777)
            by_name.setdefault(name if program != "sim" else "sim", set()).add(item)

    kv_options: tuple[tuple[list[str], list[str]], ...] = (
        ([], []),
        ([*tls, others["kv_p"]], [*tls, others["kv_d"]]),
    )
    for of_prefill, of_decode in kv_options:
        with running(router, prefill + of_prefill, decode + of_decode) as processes:
            _generate(addresses["public"])
            for program, process in zip(("router", "node", "node"), processes, strict=True):
                look(program, process)
    with running(router, ["sim-node", *MODEL, "--router", addresses["nodes"]]) as processes:
        _generate(addresses["public"])
        look("sim", processes[1])
    assert modes == {0o700}
    return by_name


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
    found: dict[str, set[Listening]],
) -> None:
    assert found["unknown"] == set()
    assert found["sim"] == set()
    assert set(found) - {"unknown", "sim"} == set(SOCKETS)
    assert len(found["kv"]) == len(found["kv_tls"]) == len(found["node"]) == 2


def test_nothing_is_reached_from_other_machines_unless_told(
    found: dict[str, set[Listening]],
) -> None:
    for item in set().union(*found.values()) - found["private"]:
        assert item.kind == "tcp"
        address = ipaddress.ip_address(item.host.removeprefix("::ffff:"))
        assert address.is_loopback, item


def test_the_page_has_this_table() -> None:
    rows = "\n".join(
        f"| {s.program} | {s.what} | {s.option} | {s.protection} |" for s in SOCKETS.values()
    )
    head = "| program | what | address | what protects it |\n|---|---|---|---|\n"
    table = f"{head}{rows}\n\n"
    none = (
        f"The following programs open no listening socket: {NO_SOCKETS}.\n\n"
        "An encode node opens the same sockets as a prefill node.\n"
    )
    page = PAGE.read_text(encoding="utf-8")
    if os.environ.get("BATON_WRITE_DOCS"):
        begin, end = page.index(head), page.index("The ranks of one model (")
        page = f"{page[:begin]}{table}{none}\n{page[end:]}"
        PAGE.write_text(page, encoding="utf-8")
    assert table + none in page
