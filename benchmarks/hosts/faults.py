"""Faults between hosts and in hosts, by name, for the drills of `partitions.py`.

    p0>d0                     the network drops what p0 sends to d0
    p0=d0                     the network drops what p0 and d0 send to each other
    p0 link                   the link of p0 is down
    decodes=router            no decode node and the router reach each other
    p0 stopped                the process is stopped (SIGSTOP), its sockets stay open
    p0 clock ahead, behind    the wall clock jumps by an hour, and back at the end
    p0 disk                   the disk of logs and dumps is full
    p0 descriptors            the process can open no more files or sockets
    p0 descriptors and cut    as above, while p0 and d0 must connect again
    router moves              the router's name gets another address; at the end, its old address
    d0 moves                  d0 dies and comes back on another host; at the end, on its own host
    stranger at d0            d0 dies, and another node starts on its host, address and port
    loopback                  a joining node tells its peers its loopback address
    wrong port                a node tries to join at a port where no router listens
    dump                      a node joins, its engine soon stands still, and the disk has no room
                              for its dump; the node must end

Each fault has a beginning and an end. Refuses to know: load, what requests see.
"""

from __future__ import annotations

import itertools
import os
import resource
import signal
import struct
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import grpc

from baton.v1 import admin_pb2
from benchmarks.runner.answers import Case
from benchmarks.runner.programs import admin_of
from tests.hosts.network import Family, Network
from tests.hosts.programs import ROUTER_PORT, HostPrograms

CLIENT, ROUTER, SPARE, STRANGER = "client", "router", "spare", "d2"
NODES = ("p0", "p1", "d0", "d1")
DECODES = ("d0", "d1")
MEMBERS = (CLIENT, ROUTER, "p0", "d0")
PAIRS = tuple(f"{a}>{b}" for a, b in itertools.permutations(MEMBERS, 2))
BOTH_WAYS = tuple(f"{a}={b}" for a, b in itertools.combinations(MEMBERS, 2))
# Pairs without traffic, because clients and nodes never talk to each other
IDLE_PAIRS = tuple(pair for pair in PAIRS + BOTH_WAYS if CLIENT in pair and ROUTER not in pair)
LINKS = (f"{ROUTER} link", "p0 link", "d0 link")
NO_FAULT = "none"
FLEET = "fleet"  # the router's name
WRONG_PORT = 50999
HOUR_S = 3600
CHUNK_TOKENS = 64
READY_TIMEOUT_S = 120.0
# Caches are much smaller than all prompts together, so that most KV is sent. Digests are switched
# on, because nodes on loopback use none by default and would not be paired with the others.
NODE_WORDS = (
    *("--dtype", "float32", "--num-blocks", "160", "--max-num-requests", "16", "--kv-digests"),
    *("--long-prefill-token-threshold", str(CHUNK_TOKENS)),
)
_CLOCK_SOURCE = Path(__file__).parents[2] / "tests" / "hosts" / "clock_shift.c"


class Site:
    """The programs on their hosts, and the client's requests with their expected outputs.

    Args:
        folder: contains the files that shift the programs' clocks.
        connector: nixl or tls.
    """

    def __init__(
        self, network: Network, programs: HostPrograms, cases: list[Case], folder: Path,
        connector: str,
    ) -> None:  # fmt: skip
        self.network, self.programs, self.cases = network, programs, cases
        self.connector, self._folder = connector, folder
        self.router = programs.router

    def start(self) -> None:
        """Start all programs, and wait until all pairs are connected."""
        self.network.name_addresses(FLEET, [self.network.address(ROUTER)])
        listen = "[::]" if ":" in self.network.address(ROUTER) else "0.0.0.0"
        self.programs.start_router(
            "--no-local-prefill", "--listen", f"{listen}:{ROUTER_PORT}",
            variables=self._variables(ROUTER),
        )  # fmt: skip
        for name in NODES:
            self.start_node(name)
        self.network.enter(CLIENT)  # before gRPC starts threads here
        self.wait_for(lambda: all_are_paired(self.router))

    def start_node(
        self, name: str, *more: str, host: str = "", port: int = ROUTER_PORT, devices: str = "eth0"
    ) -> None:
        """Start a node.

        Args:
            more: additional words of its command.
            host: the node's host; empty: the host with the node's name.
            port: the router's port in the node's command.
            devices: network devices for KV.
        """
        host = host or name
        words = ["--kv-connector", self.connector, *more]
        words += ["--kv-listen", self.network.at(host, 0)] if self.connector == "tls" else []
        self.programs.start_node(
            name, *NODE_WORDS, *words, host=host, router=f"{FLEET}:{port}",
            variables={**self._variables(name), "UCX_NET_DEVICES": devices},
        )  # fmt: skip

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition holds; raise TimeoutError with the ends of all logs."""
        if seconds_until(condition, READY_TIMEOUT_S) is None:
            logs = [self.programs.log(name)[-2000:] for name in self.programs.processes]
            raise TimeoutError("\n".join(logs))

    def wait_for_line(self, name: str, text: str, begin: int) -> None:
        """Wait until a program's log has a text after its first ``begin`` characters."""
        self.wait_for(lambda: text in self.programs.log(name)[begin:])

    def shift_clock(self, name: str, seconds: int) -> None:
        """Shift the wall clock of a program by some seconds from the machine's clock."""
        with self._clock(name).open("r+b") as file:  # keep the inode, because the file is mapped
            file.write(struct.pack("q", seconds))

    def _variables(self, name: str) -> dict[str, str]:
        self._clock(name).write_bytes(struct.pack("q", 0))
        return {"BATON_CLOCK_SHIFT": str(self._clock(name))}

    def _clock(self, name: str) -> Path:
        return self._folder / f"{name}.clock"


@contextmanager
def running_site(
    cases: list[Case], connector: str = "nixl", family: Family = "ipv4"
) -> Iterator[Site]:
    """Start all programs on their hosts; yield when all pairs are connected."""
    names = [CLIENT, ROUTER, *NODES, SPARE]
    with tempfile.TemporaryDirectory(prefix="baton-clocks-") as folder:
        library = Path(folder) / "clock_shift.so"
        command = ("cc", "-O2", "-shared", "-fPIC", "-o", str(library), str(_CLOCK_SOURCE), "-ldl")
        subprocess.run(command, check=True)
        variables = {"LD_PRELOAD": str(library)}
        with Network(names, [family]) as network, HostPrograms(network, variables) as programs:
            site = Site(network, programs, cases, Path(folder), connector)
            site.start()
            yield site


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault with its begin and its end.

    Attributes:
        is_clients: whether the fault cuts off the client, which may then lose requests.
        restarts: whether the end of the fault starts a program, which takes longer than mending a
            link.
    """

    begin: Callable[[Site], object]
    end: Callable[[Site], object]
    is_clients: bool = False
    restarts: bool = False


def find_fault(name: str) -> Fault:
    """Return the fault with this name; raise ValueError if there is none."""
    if name in _OTHERS:
        return _OTHERS[name]
    for sign, is_both in ((">", False), ("=", True)):
        if sign in name:
            return _cut(*name.split(sign), is_both=is_both)
    who, _, kind = name.partition(" ")
    if kind not in _KINDS or who not in (ROUTER, *NODES):
        raise ValueError(f"cuts: no fault has the name {name!r}")
    return _KINDS[kind](who)


def all_are_paired(router: str, names: tuple[str, ...] = NODES) -> bool:
    """Return whether every node is known and connected to all nodes of the other role."""
    try:
        with admin_of(router) as admin:
            nodes = admin.ListNodes(admin_pb2.ListNodesRequest(), timeout=2).nodes
    except grpc.RpcError:
        return False
    alive = {node.node_name for node in nodes if not node.lost}
    connected = {
        (node.node_name, peer.node_name) for node in nodes for peer in node.peers if peer.connected
    }
    pairs = {(a, b) for a, b in itertools.permutations(names, 2) if a[0] != b[0]}
    return alive >= set(names) and connected >= pairs


def seconds_until(condition: Callable[[], bool], limit_s: float) -> float | None:
    """Return the seconds until a condition holds, or None after ``limit_s``."""
    begin = time.monotonic()
    while not condition():
        if time.monotonic() > begin + limit_s:
            return None
        time.sleep(0.05)
    return time.monotonic() - begin


# ------------------------------------------------------------------ the network


def _cut(a: str, b: str, *, is_both: bool) -> Fault:
    senders = DECODES if a == "decodes" else (a,)
    pairs = [(one, b) for one in senders]
    pairs += [(b, one) for one in senders] if is_both else []

    def change(site: Site, verb: str) -> None:
        for pair in pairs:
            getattr(site.network, verb)(*pair)

    return Fault(partial(change, verb="cut"), partial(change, verb="mend"), CLIENT in (a, b))


def _link(name: str) -> Fault:
    def begin(site: Site) -> None:
        site.network.set_link(name, up=False)

    def end(site: Site) -> None:
        site.network.set_link(name, up=True)

    return Fault(begin, end, is_clients=name == ROUTER)


def _move_router(site: Site) -> None:
    """Move the router's name to a new address; nodes no longer reach the old address."""
    address = site.network.add_address(ROUTER, "3")
    for name in NODES:
        site.network.cut(name, ROUTER)
        site.network.cut(ROUTER, name)
    site.network.name_addresses(FLEET, [address])


def _move_router_back(site: Site) -> None:
    for name in NODES:
        site.network.mend(name, ROUTER)
        site.network.mend(ROUTER, name)
    site.network.name_addresses(FLEET, [site.network.address(ROUTER)])
    site.network.remove_address(ROUTER, "3")


# ------------------------------------------------------------------ programs


def _stopped(name: str) -> Fault:
    def send(site: Site, number: signal.Signals) -> None:
        site.programs.signal(name, number)

    return Fault(partial(send, number=signal.SIGSTOP), partial(send, number=signal.SIGCONT))


def _clock(name: str, seconds: int) -> Fault:
    def set_shift(site: Site, shift: int) -> None:
        site.shift_clock(name, shift)

    return Fault(partial(set_shift, shift=seconds), partial(set_shift, shift=0))


def _fill_disk(site: Site, name: str) -> None:
    disk = site.network.hosts[name].disk
    room = os.statvfs(disk)
    with (disk / "filler").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, room.f_bavail * room.f_frsize)


def _empty_disk(site: Site, name: str) -> None:
    (site.network.hosts[name].disk / "filler").unlink()


def _full_disk(name: str) -> Fault:
    return Fault(partial(_fill_disk, name=name), partial(_empty_disk, name=name))


def _take_descriptors(site: Site, name: str) -> None:
    """Lower a program's limit of open files to the number that it has open."""
    for pid in site.programs.pids(name):
        _, most = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        with suppress(OSError):
            used = max(int(path.name) for path in Path(f"/proc/{pid}/fd").iterdir()) + 1
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (used, most))


def _give_descriptors(site: Site, name: str) -> None:
    for pid in site.programs.pids(name):
        _, most = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (most, most))


def _no_descriptors(name: str) -> Fault:
    return Fault(partial(_take_descriptors, name=name), partial(_give_descriptors, name=name))


def _no_descriptors_to_connect(name: str) -> Fault:
    """Let a node open no more descriptors while its connection to a peer is cut."""
    cut = _cut(name, "d0" if name.startswith("p") else "p0", is_both=True)

    def begin(site: Site) -> None:
        _take_descriptors(site, name)
        cut.begin(site)

    def end(site: Site) -> None:
        cut.end(site)
        _give_descriptors(site, name)

    return Fault(begin, end)


# ------------------------------------------------------------------ nodes that come and go


def _replace(site: Site, old: str, new: str, host: str) -> None:
    """Kill node ``old``, start node ``new``; wait until all nodes but ``old`` are paired."""
    mark = len(site.programs.log(ROUTER))
    site.programs.kill(old)
    site.start_node(new, host=host)
    site.wait_for_line(ROUTER, f"node {new} joined", mark)
    names = tuple(sorted({*NODES, new} - ({old} if old != new else set())))
    site.wait_for(lambda: all_are_paired(site.router, names))


def _moves(name: str) -> Fault:
    there = partial(_replace, old=name, new=name, host=SPARE)
    back = partial(_replace, old=name, new=name, host=name)
    return Fault(there, back, restarts=True)


def _stranger(name: str) -> Fault:
    there = partial(_replace, old=name, new=STRANGER, host=name)
    back = partial(_replace, old=STRANGER, new=name, host=name)
    return Fault(there, back, restarts=True)


def _join_on_loopback(site: Site) -> None:
    mark = len(site.programs.log(ROUTER))
    site.start_node(STRANGER, host=SPARE, devices="lo")
    site.wait_for_line(ROUTER, f"cannot reach {STRANGER}", mark)


def _join_at_wrong_port(site: Site) -> None:
    site.start_node(STRANGER, host=SPARE, port=WRONG_PORT)
    site.wait_for_line(STRANGER, str(WRONG_PORT), 0)


def _fail_on_full_disk(site: Site) -> None:
    """Start a node whose engine soon stands still; wait until the node has ended by itself."""
    mark = len(site.programs.log(ROUTER))
    words = ("--inject-faults", "hang_engine=60", "--engine-timeout-s", "2")
    site.start_node(STRANGER, *words, host=SPARE)
    site.wait_for_line(ROUTER, f"node {STRANGER} joined", mark)
    _fill_disk(site, SPARE)
    site.wait_for(lambda: STRANGER in site.programs.ended())


def _kill_stranger(site: Site) -> None:
    site.programs.kill(STRANGER)


def _tidy_up(site: Site) -> None:
    _empty_disk(site, SPARE)
    _kill_stranger(site)


_KINDS: Mapping[str, Callable[[str], Fault]] = {
    "link": _link,
    "stopped": _stopped,
    "clock ahead": partial(_clock, seconds=HOUR_S),
    "clock behind": partial(_clock, seconds=-HOUR_S),
    "disk": _full_disk,
    "descriptors": _no_descriptors,
    "descriptors and cut": _no_descriptors_to_connect,
    "moves": _moves,
}
_OTHERS: Mapping[str, Fault] = {
    NO_FAULT: Fault(lambda _: None, lambda _: None),
    "router moves": Fault(_move_router, _move_router_back),
    "stranger at d0": _stranger("d0"),
    "loopback": Fault(_join_on_loopback, _kill_stranger),
    "wrong port": Fault(_join_at_wrong_port, _kill_stranger),
    "dump": Fault(_fail_on_full_disk, _tidy_up),
}
STATES = (
    *(f"{name} stopped" for name in (ROUTER, "p0", "d0")),
    *(f"{name} clock {way}" for name in (ROUTER, "p0", "d0") for way in ("ahead", "behind")),
    *(f"{name} disk" for name in (ROUTER, "p0", "d0")),
    *(f"{name} descriptors" for name in (ROUTER, "p0", "d0")),
    *(
        "p0 descriptors and cut",
        "d0 descriptors and cut",
        "d0=router",
        "decodes=router",
        "router moves",
    ),
)
NEWCOMERS = ("p0 moves", "d0 moves", "stranger at d0", "loopback", "wrong port", "dump")
