"""Tests that no peer can speak for another, over the network or with a forged peer info."""

from __future__ import annotations

import pytest

from baton.api.sampling_params import SamplingParams
from baton.link.words import PeerUpdate
from kvconnector.base import HandoffRecord
from kvconnector.protocol.messages import Commit, Quiet, encode
from kvconnector.protocol.seals import HEADER_BYTES, Channel
from tests.fakes.handoff.handoff_cluster import Cluster
from tests.property.test_handoff import assert_clean, make_cluster, prompt_of


def quarantine(cluster: Cluster) -> int:
    """A request is cancelled while its writes are in flight; returns the blocks held for them."""
    cluster.place("a", 1, prompt_of(1, 10), SamplingParams(max_tokens=3))
    for _ in range(50):
        if cluster.network.writes:
            break
        for engine_id in "pd":
            cluster.round(engine_id)
            cluster.step(engine_id)
        while cluster.network.messages:
            cluster.network.deliver(0)
    cluster.cancel(("a", 1), on_p=False)
    cluster.step("d")
    cluster.round("d")
    cluster.network.messages.clear()  # its Cancel is lost
    return cluster.d.beat().num_quarantined_blocks


def test_a_forged_quiet_frees_no_quarantined_block() -> None:
    cluster = make_cluster(20)
    num_blocks = quarantine(cluster)
    assert num_blocks > 0
    forged = [
        encode(Quiet(engine_id="p", request_id="a", epoch=1, reason="")),
        encode(
            Commit(
                engine_id="p",
                request_id="a",
                epoch=1,
                record=HandoffRecord(token_id=1, num_tokens=10),
                num_bytes=0,
                num_blocks=0,
                transport="",
                exposed_transfer_s=0.0,
            )
        ),
    ]
    inbox = cluster.network.ends["d"].inbox
    for sender in ("p", "x"):  # whoever it calls itself
        for message in forged:
            inbox.append((sender, message))
            inbox.append((sender, bytes(24) + message))
    cluster.round("d")
    cluster.step("d")
    assert cluster.d.beat().num_quarantined_blocks == num_blocks
    cluster.settle()  # it says Quiet itself when it is
    assert cluster.d.beat().num_quarantined_blocks == 0
    cluster.cancel(("a", 1))
    cluster.settle()
    assert_clean(cluster)


def test_without_seals_a_forged_quiet_would_free_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: what the test above says could be otherwise."""
    cluster = make_cluster(20)
    assert quarantine(cluster) > 0
    quiet = encode(Quiet(engine_id="p", request_id="a", epoch=1, reason=""))
    cluster.network.ends["d"].inbox.append(("p", bytes(HEADER_BYTES) + quiet))
    with monkeypatch.context() as patch:
        patch.setattr(Channel, "open", lambda self, payload: payload[HEADER_BYTES:])
        cluster.round("d")
        cluster.step("d")
    assert cluster.d.beat().num_quarantined_blocks == 0
    assert cluster.network.writes
    cluster.cancel(("a", 1))
    cluster.settle()


def test_a_peer_info_in_anothers_name_is_refused_by_both_roles() -> None:
    cluster = make_cluster(20)
    cluster.reports.clear()
    cluster.d.submit(PeerUpdate("x", cluster.sender.describe()))
    cluster.p.submit(PeerUpdate("y", cluster.d.receiver.describe()))
    for engine_id in "dp":
        cluster.step(engine_id)
    assert [(report.engine_id, report.connected, report.problem) for report in cluster.reports] == [
        ("x", False, "the peer info of x has the id p"),
        ("y", False, "the peer info of y has the id d"),
    ]


def test_another_process_in_a_known_peers_name_changes_nothing() -> None:
    cluster, other = make_cluster(20), make_cluster(20)
    cluster.reports.clear()
    cluster.d.submit(PeerUpdate("p", other.sender.describe()))
    cluster.p.submit(PeerUpdate("d", other.d.receiver.describe()))
    cluster.settle()
    assert cluster.reports == []
    cluster.place("a", 1, prompt_of(1, 10), SamplingParams(max_tokens=3))
    cluster.settle()
    assert cluster.attempts["a", 1].is_complete
    assert_clean(cluster)
