"""Unit tests of what is typed on a command line: bytes, addresses; and of the shares of cores."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.access.exposure import split_address
from baton.api.errors import ConfigError
from baton.local_deployment import divide_cores
from baton.options import parse_bytes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        ("1000000", 1_000_000),
        ("4K", 4096),
        ("512M", 512 * 2**20),
        ("512m", 512 * 2**20),
        ("512MB", 512 * 2**20),
        ("2GiB", 2 * 2**30),
        (" 2 G ", 2 * 2**30),
        ("7B", 7),
    ],
)
def test_bytes_are_read_with_every_unit(text: str, expected: int) -> None:
    assert parse_bytes("kv_cache_memory", text) == expected


@pytest.mark.parametrize("text", ["", "G", "-1G", "1.5G", "1T", "1 G B", "0x10", "1G2", "1e9"])
def test_bytes_that_are_not_a_number_and_a_unit_are_refused_by_the_options_name(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^kv_cache_memory: must be a number of bytes"):
        parse_bytes("kv_cache_memory", text)


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1:50051", ("127.0.0.1", 50051)),
        ("localhost:0", ("localhost", 0)),
        ("[::1]:65535", ("[::1]", 65535)),
    ],
)
def test_an_address_is_split_at_its_last_colon(address: str, expected: tuple[str, int]) -> None:
    assert split_address("listen", address) == expected


@pytest.mark.parametrize(
    "address",
    [
        "",
        "host",
        ":1",
        "host:",
        "host:x",
        "host:-1",
        "host:65536",
        "host:1 ",
        "host:\N{SUPERSCRIPT TWO}",
    ],
)
def test_a_malformed_address_is_refused_by_the_options_name(address: str) -> None:
    with pytest.raises(ConfigError, match=r"^listen: must be host:port, got "):
        split_address("listen", address)


@given(st.sets(st.integers(0, 300), min_size=1, max_size=40), st.integers(1, 50))
def test_cores_are_divided_evenly_and_not_shared_while_there_are_enough(
    cores: set[int], num_processes: int
) -> None:
    ordered = sorted(cores)
    shares = list(divide_cores(ordered, num_processes))
    assert len(shares) == num_processes
    sizes = [len(share) for share in shares]
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1
    assert {core for share in shares for core in share} <= cores
    if num_processes <= len(cores):
        assert [core for share in shares for core in share] == ordered  # disjoint, all used
    else:  # too many processes: no core has two more than another
        uses = [sum(core in share for share in shares) for core in ordered]
        assert max(uses) - min(uses) <= 1
