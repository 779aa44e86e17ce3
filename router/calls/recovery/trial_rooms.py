"""TrialRooms: keeps nodes free ("rooms"), so that each suspect request is tried alone.

    a suspect asks for a room    the least busy node is kept: new requests go elsewhere
    the node is still busy       its requests move elsewhere, as after a preemption
    the suspect is done          the next suspect gets the room; without one, the room opens
    the room was kept for long   the room opens to all requests

If no other node exists, ordinary requests wait a moment, at most `MAX_KEPT_S`. `TrialRooms` knows
neither the suspicion nor how a trial ends.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import dataclass

from baton.link.words import PAIR_ROLES
from router.fleet.fleet import Fleet
from router.fleet.load.node_load import NodeLoad
from router.fleet.node import Node
from router.fleet.node_pool import NodePool

logger = logging.getLogger(__name__)

# Seconds in which a newly kept node may finish its requests before the router moves them elsewhere.
QUIESCE_S = 1.0
# Longest time in seconds that one node is kept, over all suspects.
MAX_KEPT_S = 5.0
# Seconds for which a node serves ordinary requests before it may be kept again. Without this rest,
# a series of suspects could keep the only node for ever.
REST_S = 2.0
# Seconds in which the next suspect may take over a free room.
HAND_OVER_S = 0.1


@dataclass(slots=True, eq=False)
class _Room:
    node: Node
    owner: object | None  # the suspect that has the room; None: between two suspects
    kept_since: float
    is_told: bool = False  # whether it was logged that requests are moved


class TrialRooms:
    """Keeps nodes of one base model free for suspects.

    Args:
        pool: the joined nodes; provides the clock.
    """

    def __init__(self, pool: NodePool) -> None:
        self._pool = pool
        self._rooms: dict[str, _Room] = {}  # kept nodes, by engine id
        self._rests_until: dict[str, float] = {}  # rest times, by engine id

    def __bool__(self) -> bool:
        """Return whether any node is kept."""
        return bool(self._rooms)

    def acquire(self, owner: object, nodes: Iterable[NodeLoad]) -> str:
        """Return the engine id of an idle node that is now kept for the owner; "" if none is.

        Ask again until a node is kept, or call `release`.

        Args:
            owner: a suspect; one suspect has at most one room.
            nodes: candidates for the room.
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
            if not mine.is_told:
                mine.is_told = True
                logger.info("%s: requests are moved for a trial", mine.node.name)
            mine.node.preempt_legs("is kept for a trial")
        return "" if mine.node.num_open else mine.node.engine_id

    def release(self, owner: object) -> None:
        """Hand the owner's room to the next suspect, or open the room if none comes."""
        for room in self._rooms.values():
            if room.owner is owner:
                room.owner = None
                asyncio.get_running_loop().call_later(HAND_OVER_S, self._open_if_free, room)

    def without(self, fleet: Fleet, owner: object | None = None) -> Fleet:
        """Return the fleet without nodes that are kept for other owners; may be empty."""

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
        now = self._pool.clock()
        nodes = [one for one in nodes if self._rests_until.get(one.engine_id, now) <= now]
        if not nodes:
            return None
        node = min(nodes, key=lambda one: one.num_open)
        if not self._may_keep(node, num_others=len(nodes) - 1):
            return None
        room = _Room(node, None, self._pool.clock())
        self._rooms[node.engine_id] = room
        asyncio.get_running_loop().call_later(MAX_KEPT_S, self._open_and_rest, room)
        return room

    def _may_keep(self, node: Node, num_others: int) -> bool:
        """Return whether one more node may be kept.

        The other nodes must do all other requests' work.

        Args:
            num_others: number of other candidates that are not kept.
        """
        role = node.registration.role
        nodes = [one for one in self._pool.nodes if one.registration.role in PAIR_ROLES]
        kept = [one for one in nodes if one.engine_id in self._rooms]
        is_second = any(one.registration.role is role for one in kept)
        if is_second and (node.num_open or not num_others):
            return False
        if all(one.registration.role is role for one in kept):
            return True
        # Two trials at a time need two free nodes of the other role.
        other_role = [one for one in nodes if one.registration.role is not role]
        return num_others > 0 and len(other_role) > len([one for one in kept if one in other_role])

    def _open_if_free(self, room: _Room) -> None:
        if room.owner is None:
            self._open(room)

    def _open_and_rest(self, room: _Room) -> None:
        """Open a room that was kept too long, and let its node rest for a while."""
        if self._rooms.get(room.node.engine_id) is room:
            now = self._pool.clock()
            self._rests_until = {name: at for name, at in self._rests_until.items() if at > now}
            self._rests_until[room.node.engine_id] = now + REST_S
            self._open(room)

    def _open(self, room: _Room) -> None:
        """Open a room to ordinary requests again."""
        if self._rooms.get(room.node.engine_id) is room:
            del self._rooms[room.node.engine_id]
            self._pool.note_eligibility_change()
