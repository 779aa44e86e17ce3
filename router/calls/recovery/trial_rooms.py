"""TrialRooms: nodes that are kept for one suspect at a time, so that a trial is a trial alone.

    a suspect asks for a room    the least busy node: new requests go elsewhere
    the node is still busy       its requests are moved elsewhere, like those that it preempts
    the suspect is done          the next one has the room; without a next one all may come in
    it was kept for long         all may come in

Where there is no other node, ordinary requests wait: a pause, and never longer than `MAX_KEPT_S`.
Knows neither what a suspect is suspected of nor how a trial ends.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import dataclass

from router.fleet.fleet import Fleet
from router.fleet.load.node_load import NodeLoad
from router.fleet.node import Node
from router.fleet.node_pool import NodePool

logger = logging.getLogger(__name__)

# Requests on a node that is to be a room have so long to end by themselves.
QUIESCE_S = 1.0
# A room is kept for suspects, one after the other, for so long at most.
MAX_KEPT_S = 5.0
# The next suspect has so long to take a room over.
HAND_OVER_S = 0.1


@dataclass(slots=True, eq=False)
class _Room:
    node: Node
    owner: object | None  # None: between two suspects
    kept_since: float


class TrialRooms:
    """Keep nodes of one router for suspects.

    Args:
        pool: where the nodes are; its clock counts.
    """

    def __init__(self, pool: NodePool) -> None:
        self._pool = pool
        self._rooms: dict[str, _Room] = {}  # by engine id

    def __bool__(self) -> bool:
        """Whether any node is kept."""
        return bool(self._rooms)

    def acquire(self, owner: object, nodes: Iterable[NodeLoad]) -> str:
        """Return the engine id of a node on which nothing is open, now the owner's; "" if not yet.

        To be asked again until there is one, or until `release`.

        Args:
            owner: a suspect; it has one room at most.
            nodes: that would do.
        """
        suitable = {node.engine_id for node in nodes}
        mine = next((one for one in self._rooms.values() if one.owner is owner), None)
        if mine is not None and mine.node.engine_id not in suitable:
            self._open(mine)
            mine = None
        if mine is None:
            mine = self._choose(suitable)
            if mine is None:
                return ""
            mine.owner = owner
        if mine.node.num_open and self._pool.clock() >= mine.kept_since + QUIESCE_S:
            logger.info("%s: requests are moved for a trial", mine.node.name)
            mine.node.preempt_legs("is kept for a trial")
        return "" if mine.node.num_open else mine.node.engine_id

    def release(self, owner: object) -> None:
        """Hand the owner's room to the next suspect, or open it to all when none comes."""
        for room in self._rooms.values():
            if room.owner is owner:
                room.owner = None
                asyncio.get_running_loop().call_later(HAND_OVER_S, self._open_if_free, room)

    def without(self, fleet: Fleet, owner: object | None = None) -> Fleet:
        """Return what is left of a fleet for a request that owns no other room; may be empty."""

        def is_free(node: NodeLoad) -> bool:
            room = self._rooms.get(node.engine_id)
            return room is None or (owner is not None and room.owner is owner)

        return fleet.only(is_free, is_free)

    def _choose(self, suitable: set[str]) -> _Room | None:
        for room in self._rooms.values():
            if room.owner is None and room.node.engine_id in suitable:
                return room
        nodes = [
            node
            for node in self._pool.nodes
            if node.engine_id in suitable and node.engine_id not in self._rooms
        ]
        if not nodes:
            return None
        node = min(nodes, key=lambda one: one.num_open)
        if not self._may_keep(node, num_others=len(nodes) - 1):
            return None
        room = _Room(node, None, self._pool.clock())
        self._rooms[node.engine_id] = room
        asyncio.get_running_loop().call_later(MAX_KEPT_S, self._open, room)
        return room

    def _may_keep(self, node: Node, num_others: int) -> bool:
        """Say whether one more node may be kept: somebody has to do the others' work.

        Args:
            num_others: nodes that would do and are not kept.
        """
        role, nodes = node.registration.role, self._pool.nodes
        kept = [one for one in nodes if one.engine_id in self._rooms]
        is_second = any(one.registration.role is role for one in kept)
        if is_second and (node.num_open or not num_others):
            return False
        if all(one.registration.role is role for one in kept):
            return True
        # Each of two trials needs a node of the other role that is not kept.
        other_role = [one for one in nodes if one.registration.role is not role]
        return num_others > 0 and len(other_role) > len([one for one in kept if one in other_role])

    def _open_if_free(self, room: _Room) -> None:
        if room.owner is None:
            self._open(room)

    def _open(self, room: _Room) -> None:
        """Let ordinary requests in again."""
        if self._rooms.get(room.node.engine_id) is room:
            del self._rooms[room.node.engine_id]
            self._pool.note_eligibility_change()
