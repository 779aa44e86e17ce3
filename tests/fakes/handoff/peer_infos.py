"""Peer infos of nodes without memory, for tests of peer infos alone."""

from __future__ import annotations

from kvconnector.peer_info import PeerInfo, RankMemory
from tests.fakes.handoff.kv_memories import manifest


def peer_info(engine_id: str, *, public_key: bytes = b"") -> PeerInfo:
    """Make the info of a node with sixteen blocks, on a host of its own."""
    return PeerInfo(
        engine_id=engine_id,
        connector="scripted",
        host=engine_id,
        pid=0,
        manifest=manifest(1, 4, 4),
        num_blocks=16,
        ranks=(RankMemory(),),
        public_key=public_key,
    )
