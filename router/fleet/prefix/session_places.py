"""SessionPlaces: which nodes may know a session, so that a hint need not go to every node.

A node knows a session if it got a request of the session. This router remembers to which nodes it
sent the session's requests. Later requests may have come through other routers to other nodes,
which then have this router's last prompt of the session in their caches: the prefix index names
these nodes. Nodes that only got earlier requests through other routers, or before this router's
start, are not found.

Refuses to know: tenants, names of sessions, hints.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.kv.block_hash import ShortHash
from router.fleet.prefix.prefix_index import PrefixIndex
from router.fleet.prefix.prompt_hashes import PromptHashes

MAX_SESSIONS = 2**15
# Maximum number of nodes that are remembered per session. A session with more nodes counts as
# unknown.
MAX_NODES = 32


@dataclass(slots=True)
class _Session:
    """The places of one session.

    Attributes:
        engine_ids: the nodes that got requests of the session.
        ends: for each kind of block hashes, the hash of the last prompt's last full block.
    """

    engine_ids: set[str] = field(default_factory=set)
    ends: tuple[ShortHash, ...] = ()


class SessionPlaces:
    """Remembers the places of the sessions that were used last.

    Args:
        index: finds the nodes that have a prompt in their prefix caches.
        max_sessions: maximum number of sessions; the least recently used sessions are forgotten.
    """

    def __init__(self, index: PrefixIndex, max_sessions: int = MAX_SESSIONS) -> None:
        self._index = index
        self._max_sessions = max_sessions
        self._sessions: OrderedDict[bytes, _Session] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def note_placement(
        self, session: bytes, engine_ids: Sequence[str], prompt: PromptHashes
    ) -> None:
        """Remember that a request of a session is sent to these nodes."""
        known = self._sessions.setdefault(session, _Session())
        self._sessions.move_to_end(session)
        if len(known.engine_ids) <= MAX_NODES:
            known.engine_ids.update(engine_ids)
        known.ends = self._index.ends_of(prompt)
        if len(self._sessions) > self._max_sessions:
            self._sessions.popitem(last=False)

    def nodes_of(self, session: bytes) -> set[str]:
        """Return the engine ids of the nodes that may know a session; empty: it may be any node."""
        known = self._sessions.get(session)
        if known is None or len(known.engine_ids) > MAX_NODES:
            return set()
        return known.engine_ids.union(*(self._index.match((end,)) for end in known.ends))
