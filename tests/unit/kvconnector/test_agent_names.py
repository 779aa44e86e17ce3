"""Tests that metadata in another peer's name does not reach NIXL."""

from __future__ import annotations

import time

import msgspec
import pytest
import torch

from baton.api.errors import TransferError
from baton.testing.transports import BLOCK_SHAPE
from kvconnector.peer_info import RankMemory
from kvconnector.transports.nixl.transport import NixlTransport
from tests.fakes.handoff.kv_link import numbers
from tests.fakes.handoff.kv_memories import memory_of

pytestmark = pytest.mark.nixl


def test_metadata_in_anothers_name_replaces_nobody() -> None:
    number = next(numbers)
    names = [f"{role}{number}-names" for role in "dpx"]
    d, p, x = (NixlTransport(name, memory_of(torch.zeros(4, *BLOCK_SHAPE))) for name in names)
    d.connect(p.peer_info)
    forged = msgspec.structs.replace(x.peer_info, ranks=p.peer_info.ranks)
    cut = msgspec.structs.replace(
        x.peer_info, ranks=(RankMemory(agent_metadata=x.peer_info.ranks[0].agent_metadata[:20]),)
    )
    for info in (forged, cut, msgspec.structs.replace(x.peer_info, ranks=(RankMemory(),))):
        with pytest.raises(TransferError, match="is damaged, or belongs to another agent"):
            d.connect(info)
    d.notify(p.peer_info.engine_id, b"still there")
    for _ in range(1000):
        d.take_notifications()
        taken = p.take_notifications()
        if taken:
            break
    assert taken == [(d.peer_info.engine_id, b"still there")]
    for transport in (d, p, x):
        transport.close()


def test_a_peer_that_says_it_has_very_many_blocks_is_not_written_to() -> None:
    number = next(numbers)
    names = [f"{role}{number}-many" for role in "pd"]
    p, d = (NixlTransport(name, memory_of(torch.zeros(4, *BLOCK_SHAPE))) for name in names)
    p.connect(msgspec.structs.replace(d.peer_info, num_blocks=2**31 - 1))
    began_at = time.process_time()
    with pytest.raises(TransferError, match="too many to be written to"):
        p.write(d.peer_info.engine_id, [0], [0])
    assert time.process_time() - began_at < 5.0  # else minutes, and 50 GB
    for transport in (p, d):
        transport.close()


def test_tables_that_were_cut_for_a_peer_go_with_it() -> None:
    number = next(numbers)
    names = [f"{role}{number}-cut" for role in "pd"]
    p, d = (NixlTransport(name, memory_of(torch.zeros(4, *BLOCK_SHAPE))) for name in names)
    p.connect(d.peer_info)
    write = p.write(d.peer_info.engine_id, [0], [0])
    while not write.is_done():
        d.take_notifications()
    assert len(p._tables) == 1
    p.disconnect(d.peer_info.engine_id)
    assert not p._tables
    for transport in (p, d):
        transport.close()
