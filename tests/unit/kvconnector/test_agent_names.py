"""NIXL's metadata: what says that it is of somebody else does not reach NIXL."""

from __future__ import annotations

import msgspec
import pytest
import torch

from baton.api.errors import TransferError
from kvconnector.peer_info import RankMemory
from kvconnector.transports.nixl.transport import NixlTransport
from tests.fakes.kv_link import BLOCK_SHAPE, numbers
from tests.fakes.kv_memories import memory_of

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
        with pytest.raises(TransferError, match="is of somebody else, or damaged"):
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
