"""Peer infos of nodes that have no memory, for tests of what is said about them."""

from __future__ import annotations

from kvconnector.peer_info import PeerInfo


def peer_info(engine_id: str, *, public_key: bytes = b"") -> PeerInfo:
    """Of a node with sixteen blocks, on a host of its own."""
    return PeerInfo(
        engine_id=engine_id,
        connector="scripted",
        host=engine_id,
        pid=0,
        agent_metadata=b"",
        base_address=0,
        block_bytes=64,
        block_size=4,
        num_blocks=16,
        device_id=0,
        layout="any",
        public_key=public_key,
    )
