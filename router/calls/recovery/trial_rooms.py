"""TrialRooms: keeps nodes free ("rooms"), so that each suspect request is tried alone.

    a suspect asks for a room    the least busy node is kept: new requests go to other nodes
    the node is still busy       its requests move to other nodes, as after a preemption
    the suspect is done          the next suspect gets the room; without one, the room opens
    the room was kept for long   the room opens to all requests

If no other node exists, ordinary requests wait until the room opens, at most `MAX_KEPT_S`.
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

# A newly kept node may finish its requests for this many seconds; then the router moves them to
# other nodes.
QUIESCE_S = 1.0
# A node is kept for at most this many seconds, for all suspects in turn.
MAX_KEPT_S = 5.0
# After it was kept, a node serves ordinary requests for at least this many seconds. Without this
# rest, a series of suspects could keep the only node for ever.
REST_S = 2.0
# A room without a suspect stays closed for this many seconds, so that the next suspect may take it
# over.
HAND_OVER_S = 0.1


@dataclass(slots=True, eq=False)
class _Room:
    node: Node
    # The suspect for which the node is kept; None: it waits for the next suspect
    owner: object | None
    kept_since: float
    is_told: bool = False  # whether the log says that the node's requests are moved


class TrialRooms:
    """Keeps nodes of one base model free for trials of suspects.

    Args:
        pool: the joined nodes; provides the clock.
    """

    def __init__(self, pool: NodePool) -> None:
        self._pool = pool
        self._rooms: dict[str, _Room] = {}  # kept nodes, by engine id
        # For each engine id: the time until which the node may not be kept for a suspect again
        self._rests_until: dict[str, float] = {}

    def __bool__(self) -> bool:
        """Return whether any node is kept for a suspect."""
        return bool(self._rooms)

    def acquire(self, owner: object, nodes: Iterable[NodeLoad]) -> str:
        """Keep a node for a suspect; return the node's engine id once it is idle, else "".

        Ask again until the node is idle, or call `release`.

        Args:
            owner: the suspect; a suspect has at most one room.
            nodes: the nodes that may be kept.
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
        """Hand the suspect's room to the next suspect, or open the room if none comes."""
        for room in self._rooms.values():
            if room.owner is owner:
                room.owner = None
                asyncio.get_running_loop().call_later(HAND_OVER_S, self._open_if_free, room)

    def without(self, fleet: Fleet, owner: object | None = None) -> Fleet:
        """Return the fleet without the nodes that are kept for other suspects; may be empty.

        Args:
            owner: the suspect that may use its own room; None: no suspect.
        """

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
        """Return whether enough nodes are left for ordinary requests if this node is kept, too.

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
        # A trial needs a node of the other role as partner, and two trials need two.
        other_role = [one for one in nodes if one.registration.role is not role]
        return num_others > 0 and len(other_role) > len([one for one in kept if one in other_role])

    def _open_if_free(self, room: _Room) -> None:
        if room.owner is None:
            self._open(room)

    def _open_and_rest(self, room: _Room) -> None:
        """Open a room that was kept too long; its node may not be kept again for `REST_S`."""
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
