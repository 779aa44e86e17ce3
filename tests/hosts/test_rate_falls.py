"""Test of a link whose rate falls to a small part: its healthy peer does not count as dead."""

from __future__ import annotations

import pytest

from benchmarks.hosts.full_link import connected
from tests.hosts.network import Network, why_no_hosts

pytestmark = [
    pytest.mark.large,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "hosts can be made"),
]

DRAIN_S = 1.2  # seconds for which the KV that may be in flight fills the slow link
NUM_BLOCKS = 32  # per transfer: 4 MiB


@pytest.mark.parametrize("connector", ["nixl", "tls"])
def test_no_transfer_fails_when_the_rate_of_a_link_has_fallen(connector: str) -> None:
    with (
        Network(["p0", "d0"], ["ipv4"]) as network,
        connected(network, connector, ["d0"]) as (sender, ids),
    ):
        order = {"num_blocks": NUM_BLOCKS, "seconds": 2.0, "engine_ids": list(ids.values())}
        found = sender.carry_out(**order)[ids["d0"]]
        network.limit("d0", 8 * found["most_in_flight"] / DRAIN_S)
        found = sender.carry_out(**order)[ids["d0"]]  # a failed transfer ends the sender
        assert found["num_bytes"] >= 2 * NUM_BLOCKS * 2**17
