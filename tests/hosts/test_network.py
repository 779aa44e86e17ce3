"""Tests that hosts on one machine are separate, and that cuts, rates and names have effect."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.fakes.time.waiting import wait_until
from tests.hosts.network import BOTH, Family, Network, why_no_hosts

pytestmark = [
    pytest.mark.large,
    pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "hosts can be made"),
]


@pytest.fixture
def network() -> Iterator[Network]:
    with Network(["a", "b", "c"]) as made:
        yield made


def output_of(network: Network, host: str, *words: str) -> str:
    """Run a command on a host; return its standard output."""
    return subprocess.run(
        network.command(host, *words), check=True, capture_output=True, timeout=30
    ).stdout.decode()


def received(network: Network, sender: str, receiver: str, family: Family, seconds: float) -> int:
    """Send a thousand datagrams per second to a host; return how many reach it in some seconds."""
    exchange = [sys.executable, "-S", "-m", "tests.hosts.exchange"]
    address = network.hosts[receiver].addresses[family]
    sending = subprocess.Popen(network.command(sender, *exchange, "send", address))
    try:
        return int(output_of(network, receiver, *exchange, "receive", str(seconds)))
    finally:
        subprocess.run(network.command(sender, "sh", "-c", "kill -9 -1"), check=False)
        sending.wait()


def test_hosts_share_neither_devices_nor_processes_nor_memory(network: Network) -> None:
    assert output_of(network, "a", "hostname") == "a\n"
    assert output_of(network, "a", "ls", "/sys/class/net").split() == ["eth0", "lo"]
    sleeping = subprocess.Popen(network.command("a", "sleep", "60"))
    wait_until(lambda: "sleep" in output_of(network, "a", "ps", "-e"), "the process")
    assert "sleep" not in output_of(network, "b", "ps", "-e")
    sleeping.kill()
    sleeping.wait()
    output_of(network, "a", "touch", "/dev/shm/of-a")
    assert output_of(network, "b", "ls", "/dev/shm") == ""


def test_hosts_end_with_all_their_processes() -> None:
    with Network(["a"]) as network:
        sleeping = subprocess.Popen(network.command("a", "sleep", "60"))
        wait_until(lambda: "sleep" in output_of(network, "a", "ps", "-e"), "the process")
        holder = network.hosts["a"].holder
    sleeping.wait(timeout=10)
    assert holder.poll() is not None


@pytest.mark.parametrize("family", BOTH)
def test_a_cut_drops_one_direction_of_one_pair(network: Network, family: Family) -> None:
    with network.cutting("a", "b"):
        assert received(network, "a", "b", family, 0.3) == 0
        assert received(network, "b", "a", family, 0.3) > 0
        assert received(network, "a", "c", family, 0.3) > 0
    assert received(network, "a", "b", family, 0.3) > 0
    assert [event.text for event in network.events] == ["cut a -> b", "mended a -> b"]


def test_a_link_keeps_its_rate_and_goes_down_and_up(network: Network) -> None:
    network.limit("b", 1e6)
    # 125 datagrams by the rate, and those that fill the bucket
    assert 50 < received(network, "a", "b", "ipv4", 1.0) < 350
    network.limit("b", None)
    network.set_link("b", up=False)
    assert received(network, "a", "b", "ipv6", 0.3) == 0
    network.set_link("b", up=True)
    assert received(network, "a", "b", "ipv6", 0.3) > 0


def test_names_stand_for_several_addresses_that_change(network: Network) -> None:
    network.name_addresses("fleet", ["10.77.1.2", "10.77.2.2"])
    lookup = "import socket; print(*{a[4][0] for a in socket.getaddrinfo('fleet', 1)})"
    command = (sys.executable, "-S", "-c", lookup)
    assert set(output_of(network, "c", *command).split()) == {"10.77.1.2", "10.77.2.2"}
    network.name_addresses("fleet", ["10.77.3.2"], on=["c"])
    assert output_of(network, "c", *command).split() == ["10.77.3.2"]
