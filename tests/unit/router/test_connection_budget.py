"""Unit tests of how the router divides its descriptors."""

from __future__ import annotations

import resource

import pytest

from baton.api.errors import ConfigError
from baton.processes.process import num_descriptors_allowed, raise_descriptor_limit
from router.connection_budget import ConnectionOptions, share_descriptors
from router.gate.overload import THRESHOLDS


@pytest.mark.parametrize("num_descriptors", [256, 1024, 20_000, 2**20])
@pytest.mark.parametrize("own_address_for_nodes", [False, True])
def test_all_limits_together_leave_the_process_some(
    num_descriptors: int, own_address_for_nodes: bool
) -> None:
    budget = share_descriptors(
        num_descriptors, ConnectionOptions(), own_address_for_nodes=own_address_for_nodes
    )
    num_nodes = budget.nodes.max_connections if own_address_for_nodes else 0
    limits = [budget.http.max_connections, budget.public.max_connections, num_nodes]
    num_used = limits[0] + 3 * (limits[1] + limits[2])  # a gRPC connection takes three descriptors
    assert num_used + 64 < THRESHOLDS["descriptors"].shed * num_descriptors
    assert max(limits) <= 10_000
    assert min(limits[:2]) >= 24
    assert budget.http.max_connections_per_address <= budget.http.max_connections
    assert num_nodes >= 8 or not own_address_for_nodes


def test_what_the_options_say_counts_as_far_as_there_are_descriptors() -> None:
    options = ConnectionOptions(max_connections=100, max_connections_per_address=100)
    budget = share_descriptors(1024, options, own_address_for_nodes=False)
    assert budget.http.max_connections == budget.public.max_connections == 100
    assert budget.http.max_connections_per_address == 100
    too_many = ConnectionOptions(max_connections=189)
    with pytest.raises(ConfigError, match=r"^max_connections: must be 188 or less with RLIMIT"):
        share_descriptors(1024, too_many, own_address_for_nodes=False)
    with pytest.raises(ConfigError, match=r"^RLIMIT_NOFILE: must allow 256 descriptors, got 100"):
        share_descriptors(100, ConnectionOptions(), own_address_for_nodes=False)


@pytest.mark.parametrize(
    ("option", "value"), [("max_connections", -1), ("idle_timeout_s", 0), ("stall_timeout_s", -1)]
)
def test_an_option_without_sense_is_one_line(option: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"^{option}: must be"):
        ConnectionOptions(**{option: value})  # type: ignore[arg-type]


def test_the_limit_of_descriptors_is_raised_to_what_is_allowed() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, hard), hard))
        raise_descriptor_limit()
        assert num_descriptors_allowed() == min(hard, 2**20)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
