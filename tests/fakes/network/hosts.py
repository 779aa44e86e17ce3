"""Hosts of a test's own on one machine: network namespaces on a bridge (Linux, root, iproute2)."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

NETWORK = "10.77.83"


def can_make_hosts() -> bool:
    """Say whether this machine lets us make network namespaces."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        return False
    name = f"bt{os.getpid()}-try"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False)
    if made.returncode:
        return False
    _ip("netns", "del", name)
    return True


class Hosts:
    """Namespaces by name, each with one interface ``eth0`` and an address of its own.

    Attributes:
        addresses: address of each host, by name.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._prefix = f"bt{os.getpid()}"
        self.addresses = {name: f"{NETWORK}.{i}" for i, name in enumerate(names, 1)}
        self._bridge = f"{self._prefix}-net"

    def command(self, host: str, *arguments: str) -> list[str]:
        """Return a command line that runs on a host."""
        return ["ip", "netns", "exec", f"{self._prefix}-{host}", *arguments]

    def open(self) -> None:
        """Make the hosts and plug all into one bridge, which lies in a namespace of its own."""
        _ip("netns", "add", self._bridge)
        _ip("-n", self._bridge, "link", "add", "br0", "type", "bridge")
        _ip("-n", self._bridge, "link", "set", "br0", "up")
        for number, (name, address) in enumerate(self.addresses.items()):
            host = f"{self._prefix}-{name}"
            _ip("netns", "add", host)
            _ip("-n", host, "link", "set", "lo", "up")
            ends = ["eth0", "netns", host, "type", "veth", "peer", "name", f"port{number}"]
            _ip("link", "add", *ends, "netns", self._bridge)
            _ip("-n", self._bridge, "link", "set", f"port{number}", "master", "br0", "up")
            _ip("-n", host, "address", "add", f"{address}/24", "dev", "eth0")
            _ip("-n", host, "link", "set", "eth0", "up")

    def close(self) -> None:
        """Remove the namespaces; a process that still runs keeps its own until it ends."""
        for name in (*(f"{self._prefix}-{name}" for name in self.addresses), self._bridge):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


@contextmanager
def hosts(*names: str) -> Iterator[Hosts]:
    """Make hosts for the length of a test."""
    made = Hosts(names)
    try:
        made.open()
        yield made
    finally:
        made.close()


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
