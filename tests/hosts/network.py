"""Hosts on one machine: each has its own network, process ids, IPC, host name and /etc/hosts.

Each host has one interface, ``eth0``, and a link to a router, which belongs to no host. The router
can silently drop what one host sends to another, also in only one direction. Links have rates in
both directions. Some hosts may be far: they have their own router, and one trunk joins the two
routers. Needs Linux, root and iproute2. A host ends with the process that made it, even if that
process is killed, and leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

ROOT = Path(__file__).parents[2]
Family = Literal["ipv4", "ipv6"]
BOTH: tuple[Family, ...] = ("ipv4", "ipv6")
_NAMESPACES = ("--net", "--uts", "--ipc", "--pid", "--mount")
_ROUTERS = ("near", "far")  # names of the two routers; each joins the hosts of its site
_TRUNK = "trunk"  # device at each router's end of the trunk
_TRUNK_NUMBER = 255
_FLAGS: Mapping[Family, str] = {"ipv4": "-4", "ipv6": "-6"}
_CLONE_NEWNET = 0x40000000
# A limited device's bucket must hold what arrives between two ticks of the kernel's clock.
_BUCKET_S, _MIN_BUCKET_BYTES = 0.002, 2**17
_QUEUE = "50ms"  # longest time for which a limited device queues a packet


@functools.cache
def why_no_hosts() -> str:
    """Return why hosts cannot be made on this machine; empty: they can."""
    missing = [name for name in ("ip", "tc", "unshare", "nsenter") if shutil.which(name) is None]
    if missing:
        return f"hosts need {', '.join(missing)} (packages iproute2 and util-linux)"
    if os.geteuid() != 0:
        return "hosts need root, to make network namespaces"
    try:
        with Network(["a"]) as network:
            network.limit("a", 10**9)
    except (OSError, subprocess.SubprocessError) as error:
        output = getattr(error, "stderr", None) or b""
        return f"hosts cannot be made here: {error} {output.decode(errors='replace')}".strip()
    return ""


@dataclass(frozen=True, slots=True)
class Event:
    """A change of the network.

    Attributes:
        at_s: seconds since the network was made.
    """

    at_s: float
    text: str


@dataclass(slots=True)
class Host:
    """One host.

    Attributes:
        pid: process id of the host's process 1, as this process sees it.
        addresses: the host's address in each family.
        is_far: whether the host's packets to near hosts cross the trunk.
    """

    name: str
    number: int
    pid: int
    addresses: dict[Family, str]
    holder: subprocess.Popen[bytes]
    names_file: Path
    is_far: bool = False
    extra_names: dict[str, list[str]] = field(default_factory=dict)

    @property
    def disk(self) -> Path:
        """Return the folder of the host's small disk, as this process sees it."""
        return Path(f"/proc/{self.pid}/root/mnt")

    def command(self, *words: object) -> list[str]:
        """Return a command line that runs a program on this host."""
        return ["nsenter", "--target", str(self.pid), "--all", "--wd", *map(str, words)]

    def run(self, *words: object) -> None:
        """Run a short command in this host's network; raise CalledProcessError if it fails."""
        command = ["nsenter", "--target", str(self.pid), "--net", *map(str, words)]
        subprocess.run(command, check=True, capture_output=True)


class Network:
    """Hosts by name, as a context manager that ends them.

    Args:
        names: names of the hosts; every host can resolve them.
        families: IP versions of the hosts' addresses.
        far: names of the hosts at the other end of the trunk; empty: there is no trunk.

    Attributes:
        events: the changes of the network so far, in order.
    """

    def __init__(
        self, names: Sequence[str], families: Sequence[Family] = BOTH, far: Sequence[str] = ()
    ) -> None:
        self.families = tuple(families)
        self._far = frozenset(far)
        self._routers: list[Host] = []  # the near site's router, then the far site's
        self.events: list[Event] = []
        self.hosts: dict[str, Host] = {}
        self._names = list(names)
        self._begin = time.monotonic()
        self._folder = tempfile.TemporaryDirectory(prefix="baton-hosts-")

    def __enter__(self) -> Self:
        try:
            for number in range(2 if self._far else 1):
                self._start_router(_TRUNK_NUMBER - number)
            for number, name in enumerate(self._names, 1):
                self.hosts[name] = self._start(name, number)
            for host in self.hosts.values():
                self._plug_in(host)
            if self._far:
                self._join_routers()
            self.write_names()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all processes of all hosts, and remove the network."""
        holders = [host.holder for host in (*self.hosts.values(), *self._routers)]
        for holder in holders:
            holder.kill()  # its child, process 1 of the host, gets SIGKILL from the kernel
        for holder in holders:
            holder.wait()
            for pipe in (holder.stdin, holder.stdout, holder.stderr):
                if pipe is not None:
                    pipe.close()
        self._folder.cleanup()

    # ------------------------------------------------------------------ addresses

    def address(self, name: str) -> str:
        """Return a host's address in the network's first family."""
        return self.hosts[name].addresses[self.families[0]]

    def at(self, name: str, port: int) -> str:
        """Return "host:port" with a host's address; IPv6 addresses are in brackets."""
        address = self.address(name)
        return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"

    def command(self, host: str, *words: object) -> list[str]:
        """Return a command line that runs a program on a host."""
        return self.hosts[host].command(*words)

    def name_addresses(self, name: str, addresses: Sequence[str], on: Sequence[str] = ()) -> None:
        """Let a name resolve to these addresses, in order, on some hosts; by default on all."""
        self._note(f"the name {name} stands for {', '.join(addresses)}")
        for host in on or self.hosts:
            self.hosts[host].extra_names[name] = list(addresses)
        self.write_names()

    def write_names(self) -> None:
        """Write each host's /etc/hosts."""
        for host in self.hosts.values():
            found = {one.name: list(one.addresses.values()) for one in self.hosts.values()}
            found |= host.extra_names
            local = "127.0.0.1 localhost\n::1 localhost\n"
            lines = [f"{one} {name}\n" for name, addresses in found.items() for one in addresses]
            # Keep the file's inode, because the host has mounted it.
            host.names_file.write_text(local + "".join(lines))

    def add_address(self, name: str, last: str) -> str:
        """Give a host a second address, which ends in ``last``; return the address."""
        return self._change_address("add", name, last)

    def remove_address(self, name: str, last: str) -> str:
        """Remove a host's second address; return the address."""
        return self._change_address("delete", name, last)

    def _change_address(self, verb: str, name: str, last: str) -> str:
        family = self.families[0]
        address = self.address(name)[:-1] + last
        length = 24 if family == "ipv4" else 64
        self.hosts[name].run("ip", _FLAGS[family], "address", verb, f"{address}/{length}", "dev",
                             "eth0")  # fmt: skip
        self._note(f"{verb} the address {address} of {name}")
        return address

    # ------------------------------------------------------------------ faults

    def limit(self, name: str, bits_per_s: float | None) -> None:
        """Limit the rate of a host's link in each direction; None: unlimited."""
        self._note(f"link of {name}: {bits_per_s / 1e6:g} Mbit/s" if bits_per_s else
                   f"link of {name}: unlimited")  # fmt: skip
        host = self.hosts[name]
        _limit_device(host, "eth0", bits_per_s)
        _limit_device(self._router_of(host), f"port{host.number}", bits_per_s)

    def set_congestion_control(self, name: str) -> None:
        """Let the hosts' new TCP connections use a congestion control, such as cubic.

        Raises CalledProcessError if this machine does not allow the name
        (`net.ipv4.tcp_allowed_congestion_control`).
        """
        for host in self.hosts.values():
            host.run("sysctl", "-qw", f"net.ipv4.tcp_congestion_control={name}")

    def limit_trunk(self, bits_per_s: float | None) -> None:
        """Limit the rate between near and far hosts in each direction; None: unlimited."""
        self._note(f"trunk: {bits_per_s / 1e6:g} Mbit/s" if bits_per_s else "trunk: unlimited")
        for router in self._routers:
            _limit_device(router, _TRUNK, bits_per_s)

    def cut(self, sender: str, receiver: str) -> None:
        """Drop what one host sends to another, silently; the other direction is not changed."""
        self._change_rules("add", sender, receiver)
        self._note(f"cut {sender} -> {receiver}")

    def mend(self, sender: str, receiver: str) -> None:
        """End a cut of one direction."""
        self._change_rules("delete", sender, receiver)
        self._note(f"mended {sender} -> {receiver}")

    @contextlib.contextmanager
    def cutting(self, sender: str, receiver: str) -> Iterator[None]:
        """Cut one direction for the length of a block."""
        self.cut(sender, receiver)
        try:
            yield
        finally:
            self.mend(sender, receiver)

    def set_link(self, name: str, *, up: bool) -> None:
        """Take a host's link down or up."""
        host = self.hosts[name]
        router = self._router_of(host)
        router.run("ip", "link", "set", f"port{host.number}", "up" if up else "down")
        self._note(f"link of {name} {'up' if up else 'down'}")

    def received_bytes(self, name: str) -> int:
        """Return the bytes that have come in over a host's link."""
        return self._counter(name, "rx_bytes")

    def sent_bytes(self, name: str) -> int:
        """Return the bytes that have gone out over a host's link."""
        return self._counter(name, "tx_bytes")

    def enter(self, name: str) -> None:
        """Move this thread, and threads that it starts later, to a host's network."""
        libc = ctypes.CDLL(None, use_errno=True)
        with Path(f"/proc/{self.hosts[name].pid}/ns/net").open("rb") as namespace:
            if libc.setns(namespace.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")

    # ------------------------------------------------------------------ inside

    def _start(self, name: str, number: int) -> Host:
        names_file = Path(self._folder.name) / f"{name}.hosts"
        names_file.touch()
        holder = subprocess.Popen(
            ["unshare", *_NAMESPACES, "--fork", "--kill-child", "--mount-proc",
             sys.executable, "-S", Path(__file__).parent / "host_init.py", name, names_file],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT,
        )  # fmt: skip
        assert holder.stdout is not None
        assert holder.stderr is not None
        if holder.stdout.readline() != b"ready\n":
            holder.kill()
            raise OSError(holder.stderr.read().decode(errors="replace").strip())
        children = Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text()
        addresses: dict[Family, str] = {
            "ipv4": f"10.77.{number}.2",
            "ipv6": f"fd77:0:0:{number}::2",
        }
        held = {family: addresses[family] for family in self.families}
        return Host(name, number, int(children), held, holder, names_file, name in self._far)

    def _start_router(self, number: int) -> None:
        router = self._start(_ROUTERS[len(self._routers)], number)
        self._routers.append(router)
        router.run("sysctl", "-qw", "net.ipv4.ip_forward=1")
        router.run(
            "sysctl", "-qw", "net.ipv6.conf.all.forwarding=1",
            "net.ipv6.conf.all.keep_addr_on_down=1",
        )  # fmt: skip

    def _router_of(self, host: Host) -> Host:
        return self._routers[host.is_far]

    def _join_routers(self) -> None:
        """Make the trunk: a link between the two routers, and routes to the other site's hosts."""
        near, far = self._routers
        near.run("ip", "link", "add", _TRUNK, "type", "veth", "peer", "name", _TRUNK,
                 "netns", far.pid)  # fmt: skip
        for router in self._routers:
            router.run("ip", "link", "set", _TRUNK, "up")
        for family in self.families:
            flag, length = _FLAGS[family], 24 if family == "ipv4" else 64
            for router, end in zip(self._routers, _trunk_ends(family), strict=True):
                add = [*("ip", flag, "address", "add", f"{end}/{length}", "dev", _TRUNK)]
                router.run(*add, *(() if family == "ipv4" else ("nodad",)))
            near_end, far_end = _trunk_ends(family)
            far.run("ip", flag, "route", "add", "default", "via", near_end)
            for host in self.hosts.values():
                if host.is_far:
                    near.run("ip", flag, "route", "add", f"{host.addresses[family]}", "via",
                             far_end)  # fmt: skip

    def _plug_in(self, host: Host) -> None:
        """Make a host's link to its router, with addresses and routes."""
        port, router = f"port{host.number}", self._router_of(host)
        router.run("ip", "link", "add", port, "type", "veth", "peer", "name", "eth0",
                   "netns", host.pid)  # fmt: skip
        host.run("ip", "link", "set", "eth0", "up")
        router.run("ip", "link", "set", port, "up")
        for family, address in host.addresses.items():
            flag, gate = _FLAGS[family], address[:-1] + "1"
            length, nodad = ("24", ()) if family == "ipv4" else ("64", ("nodad",))
            add = ["ip", flag, "address", "add"]
            router.run(*add, f"{gate}/{length}", "dev", port, *nodad)
            host.run(*add, f"{address}/{length}", "dev", "eth0", *nodad)
            host.run("ip", flag, "route", "add", "default", "via", gate)

    def _change_rules(self, verb: str, sender: str, receiver: str) -> None:
        for family in self.families:
            source, target = (self.hosts[name].addresses[family] for name in (sender, receiver))
            router = self._router_of(self.hosts[sender])
            router.run("ip", _FLAGS[family], "rule", verb, "from", source, "to", target,
                       "priority", "10", "type", "blackhole")  # fmt: skip

    def _counter(self, name: str, which: str) -> int:
        host = self.hosts[name]
        command = host.command("cat", f"/sys/class/net/eth0/statistics/{which}")
        return int(subprocess.run(command, check=True, capture_output=True).stdout)

    def _note(self, text: str) -> None:
        self.events.append(Event(time.monotonic() - self._begin, text))


def _trunk_ends(family: Family) -> tuple[str, str]:
    """Return the addresses of the near and the far router on the trunk."""
    if family == "ipv4":
        return f"10.77.{_TRUNK_NUMBER}.1", f"10.77.{_TRUNK_NUMBER}.2"
    return f"fd77:0:0:{_TRUNK_NUMBER}::1", f"fd77:0:0:{_TRUNK_NUMBER}::2"


def _limit_device(host: Host, device: str, bits_per_s: float | None) -> None:
    """Limit the rate at which a device sends; None: unlimited."""
    with contextlib.suppress(subprocess.CalledProcessError):  # the device had no limit
        host.run("tc", "qdisc", "delete", "dev", device, "root")
    if bits_per_s:
        bucket = max(_MIN_BUCKET_BYTES, int(bits_per_s / 8 * _BUCKET_S))
        host.run("tc", "qdisc", "add", "dev", device, "root", "tbf", "rate",
                 f"{int(bits_per_s)}bit", "burst", f"{bucket}b", "latency", _QUEUE)  # fmt: skip
