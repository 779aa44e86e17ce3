"""Addresses that tests, drills and the demo give to the servers they start."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from baton.processes.free_address import free_address

pytestmark = pytest.mark.medium

PROGRAM = """
from baton.processes.free_address import free_address
print(*(free_address() for _ in range(30)))
input()
"""


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


def test_processes_that_ask_at_once_are_told_different_addresses() -> None:
    ask = [sys.executable, "-c", PROGRAM]
    pipe = subprocess.PIPE
    asking = [subprocess.Popen(ask, text=True, stdin=pipe, stdout=pipe) for _ in range(3)]
    told: list[str] = [free_address() for _ in range(30)]
    for process in asking:
        assert process.stdout is not None
        told += process.stdout.readline().split()
    for process in asking:
        process.communicate("\n")
    assert len(told) == len(set(told)) == 120


def test_a_server_can_listen_there_and_no_connection_takes_it_before() -> None:
    file = Path("/proc/sys/net/ipv4/ip_local_port_range")
    first_of_connections = int(file.read_text(encoding="ascii").split()[0])
    address = free_address()
    with socket.create_server(_split(address)):
        pass
    assert _split(address)[1] < first_of_connections


def test_where_somebody_listens_nobody_is_sent() -> None:
    host, port = _split(free_address())
    with socket.create_server((host, port + 1)):
        assert _split(free_address())[1] > port + 1
