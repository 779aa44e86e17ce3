"""Convert messages about many peers to protobuf and back; the protobuf messages have columns.

A fleet exchanges two updates for each pair of nodes. Built-in functions read and write columns,
which is much faster than one protobuf message for each update.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

from baton.api.errors import InvalidRequestError
from baton.link import words as link
from baton.v1 import node_pb2

_INFOS = ("peer_info", "fetch_peer_info", "share_peer_info")


def peer_reports_to_proto(event: link.PeerReports) -> node_pb2.PeerReports:
    groups: dict[tuple[bool, str, str, bool], list[link.PeerReport]] = {}
    for one in event.reports:
        # One text that no message can hold must not stop the reports on all other peers
        problem = one.problem.encode(errors="backslashreplace").decode()
        key = (one.connected, one.transport, problem, one.is_encode_node)
        groups.setdefault(key, []).append(one)
    message = node_pb2.PeerReports(unknown=event.unknown)
    for (connected, transport, problem, is_encode_node), reports in groups.items():
        message.groups.add(
            connected=connected,
            transport=transport,
            problem=problem,
            is_encode_node=is_encode_node,
            engine_ids=[one.engine_id for one in reports],
            bandwidths_bytes_per_s=[one.bandwidth_bytes_per_s for one in reports],
        )
    return message


def peer_reports_from_proto(message: node_pb2.PeerReports) -> link.PeerReports:
    """Convert reports; raises InvalidRequestError if the columns of a group differ in length."""
    reports: list[link.PeerReport] = []
    for group in message.groups:
        rates = group.bandwidths_bytes_per_s[:]
        if len(rates) != len(group.engine_ids):
            raise InvalidRequestError("peer_reports", "must have columns of one length")
        said = (group.connected, _share(group.transport), group.problem)
        is_encode_node, report = group.is_encode_node, link.PeerReport
        engine_ids = map(_share, group.engine_ids)
        reports += [
            report(engine_id, *said, rate, is_encode_node)
            for engine_id, rate in zip(engine_ids, rates, strict=True)
        ]
    return link.PeerReports(tuple(reports), tuple(message.unknown))


@functools.lru_cache(maxsize=2**15)
def _share(text: str) -> str:
    """Return one object for equal texts: all nodes of a role report the same peers.

    `sys.intern` would keep the texts of nodes that have left, in Python 3.12.
    """
    return text


def peer_updates_to_proto(command: link.PeerUpdates) -> node_pb2.PeerUpdates:
    joined = [one for one in command.updates if not one.removed]
    columns = {name: [getattr(one, name) for one in joined] for name in _INFOS}
    return node_pb2.PeerUpdates(
        removed=[one.engine_id for one in command.updates if one.removed],
        engine_ids=[one.engine_id for one in joined],
        known=command.known,
        **{f"{name}s": column for name, column in columns.items() if any(column)},
    )


def peer_updates_from_proto(message: node_pb2.PeerUpdates) -> link.PeerUpdates:
    """Convert updates; raises InvalidRequestError if columns differ in length."""
    engine_ids = message.engine_ids[:]
    columns: Sequence[Iterator[bytes]] = [
        _complete_column(getattr(message, f"{name}s")[:], len(engine_ids)) for name in _INFOS
    ]
    updates = [link.PeerUpdate(engine_id, removed=True) for engine_id in message.removed]
    updates += [
        link.PeerUpdate(
            engine_id, info, removed=False, fetch_peer_info=fetch, share_peer_info=share
        )
        for engine_id, info, fetch, share in zip(engine_ids, *columns, strict=True)
    ]
    return link.PeerUpdates(tuple(updates), tuple(message.known))


def _complete_column(column: Sequence[bytes], length: int) -> Iterator[bytes]:
    """Return a column with ``length`` entries; a column that was left out gets empty entries."""
    if column and len(column) != length:
        raise InvalidRequestError("peer_updates", "must have columns of one length")
    return iter(column or [b""] * length)
