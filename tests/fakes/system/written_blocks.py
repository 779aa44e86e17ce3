"""Checks the blocks of a whole system that other nodes write, or may write."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from baton.kv.prefixes import node_of
from kvconnector.ends import Sender
from prefill_node.node import PrefillNode
from tests.fakes.handoff.handoff_cluster import sender_of
from tests.fakes.handoff.scripted_network import ScriptedNetwork
from tests.fakes.system.node_process import NodeProcess


def check_writes(by_id: Mapping[str, NodeProcess], network: ScriptedNetwork) -> None:
    """Check that blocks a peer may write are held, name no content, and are offered once."""
    writable: dict[tuple[str, int], tuple[str, str, int]] = {}
    for process, sender in _senders(by_id):
        for transfer in sender.machine.transfers.values():
            is_over = transfer.commit_is_sent and transfer.is_complete  # it waits for Verified
            if transfer.granted is None or transfer.failure is not None or is_over:
                continue
            key = (process.engine_id, transfer.request_id, transfer.epoch)
            for block_id in transfer.granted.block_ids:
                place = (node_of(transfer.engine_id), block_id)
                assert writable.setdefault(place, key) == key, "offered twice"
    for write in network.writes:
        source, target = (by_id[node_of(end.engine_id)] for end in (write.source, write.target))
        for block_id in write.remote_block_ids:
            writable.setdefault((target.engine_id, block_id), ("", "", 0))
        held = source.node.engine.block_pool.ref_counts()
        assert source.dead or held.keys() >= set(write.local_block_ids)
        blocks = target.node.engine.block_pool._blocks
        named = [b for b in write.remote_block_ids if blocks[b].block_hash is not None]
        assert target.dead or not named, "a peer may write what the prefix cache gives out"
    counts = {
        engine_id: process.node.engine.block_pool.ref_counts()
        for engine_id, process in by_id.items()
        if not process.dead
    }
    for engine_id, block_id in writable:
        if engine_id not in counts:
            continue
        # (Cached blocks have been written, and nothing writes them again; see `check_cache`.)
        block = by_id[engine_id].node.engine.block_pool._blocks[block_id]
        is_kept = block.block_hash is not None
        assert is_kept or block_id in counts[engine_id], "a peer may write a free block"


def _senders(by_id: Mapping[str, NodeProcess]) -> Iterator[tuple[NodeProcess, Sender]]:
    """Yield all ends of living processes that send KV."""
    for process in by_id.values():
        if process.dead:
            continue
        if isinstance(process.node, PrefillNode):
            yield process, sender_of(process.node)
        if process.prefix_ends:
            yield process, process.prefix_ends[1]
