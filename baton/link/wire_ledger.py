"""Convert the ledger of a node's KV blocks to protobuf, for `baton admin audit`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from baton.telemetry.ledger import BlockHolding, Ledger, to_ranges
from baton.v1 import admin_pb2
from baton.wire.fields import to_message


def ledger_to_protos(ledger: Ledger, part_bytes: int) -> Iterator[admin_pb2.ListBlocksResponse]:
    """Split the ledger into messages of about ``part_bytes``; merged, they are the whole ledger."""
    part = to_message(
        admin_pb2.ListBlocksResponse,
        ledger,
        orphans=_ranges_to_proto(ledger.orphans),
        overdrawn=_ranges_to_proto(ledger.overdrawn),
    )
    num_bytes = part.ByteSize()
    for holding in ledger.holdings:
        message = _holding_to_proto(holding)
        num_bytes += message.ByteSize()
        part.holdings.append(message)
        if num_bytes >= part_bytes:
            yield part
            part, num_bytes = admin_pb2.ListBlocksResponse(), 0
    yield part


def ledger_to_answers(ledger: Ledger, part_bytes: int) -> Iterator[admin_pb2.NodeAdminResponse]:
    """Split a node's ledger, and that of its encodings, into answers of about ``part_bytes``."""
    for part in ledger_to_protos(ledger, part_bytes):
        yield admin_pb2.NodeAdminResponse(list_blocks=part)
    if ledger.encodings is not None:
        for part in ledger_to_protos(ledger.encodings, part_bytes):
            yield admin_pb2.NodeAdminResponse(encodings=part)


def _holding_to_proto(holding: BlockHolding) -> admin_pb2.BlockHolding:
    return to_message(
        admin_pb2.BlockHolding,
        holding,
        owner=holding.owner.value,
        num_blocks=len(holding.block_ids),
        ranges=_ranges_to_proto(holding.block_ids),
    )


def _ranges_to_proto(block_ids: Iterable[int]) -> list[admin_pb2.BlockRange]:
    return [
        admin_pb2.BlockRange(first_block_id=first, num_blocks=number)
        for first, number in to_ranges(block_ids)
    ]
