"""Unit tests of parsers of the command line: bytes and addresses; and of shares of cores."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.access.exposure import split_address
from baton.api.errors import ConfigError
from baton.deployment.local_deployment import divide_cores, encode_args_of, num_ranks_of
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


@given(
    st.sets(st.integers(0, 300), min_size=1, max_size=40),
    st.lists(st.integers(1, 6), min_size=1, max_size=20),
)
def test_cores_are_divided_by_ranks_and_not_shared_while_there_are_enough(
    cores: set[int], num_ranks: list[int]
) -> None:
    ordered, in_all = sorted(cores), sum(num_ranks)
    shares = list(divide_cores(ordered, num_ranks))
    assert len(shares) == len(num_ranks)
    assert {core for share in shares for core in share} <= cores
    for share, own in zip(shares, num_ranks, strict=True):
        assert share == sorted(set(share))
        assert len(share) >= min(own, len(cores))  # a core for each rank, if the machine has them
    if in_all <= len(cores):
        assert [core for share in shares for core in share] == ordered  # disjoint, all used
        each = len(cores) // in_all
        for share, own in zip(shares, num_ranks, strict=True):
            assert own * each <= len(share) <= own * (each + 1)
    else:  # too many ranks: of those of one node, no core has more than another
        assert all(len(s) == min(n, len(cores)) for s, n in zip(shares, num_ranks, strict=True))
        if max(num_ranks) == 1:
            uses = [sum(core in share for share in shares) for core in ordered]
            assert max(uses) - min(uses) <= 1


@pytest.mark.parametrize(
    ("arguments", "num_ranks"),
    [
        ([], 1),
        (["--tensor-parallel-size", "2"], 2),
        (["--tensor-parallel-size=4", "--pipeline-parallel-size", "2"], 8),
        (["--tensor-parallel-size", "4", "--tensor-parallel-size", "2"], 2),
        (["--tensor-parallel-size", "many"], 1),
    ],
)
def test_ranks_of_a_node_are_known_before_it_starts(arguments: list[str], num_ranks: int) -> None:
    assert num_ranks_of(arguments) == num_ranks


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], []),
        (["--kv-cache-memory", "64M", "--kv-connector", "tls"], ["--kv-connector=tls"]),
        (
            [
                "--kv-connector=tls",
                "--dtype",
                "float32",
                "--push",
                "chunks",
                "--kv-connector",
                "shm",
            ],
            ["--kv-connector=shm", "--dtype=float32"],
        ),
        (
            ["--kv-digests", "--no-kv-digests", "--weights", "int8", "--revision", "b"],
            ["--revision=b", "--no-kv-digests"],
        ),
        (["--dtype"], []),  # each prefill node says what is missing
    ],
)
def test_encode_nodes_get_the_options_that_must_equal_those_of_prefill_nodes(
    arguments: list[str], expected: list[str]
) -> None:
    assert encode_args_of(arguments) == expected
