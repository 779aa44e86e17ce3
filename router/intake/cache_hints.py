"""Cache hints: the sessions and pins that clients name for prompts that they will send again.

A hint changes where a request runs and which blocks nodes keep, never a token. Names of sessions
and owners are digests that include the tenant's name, so that clients cannot name sessions of other
tenants. All routers of a fleet make equal digests.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence

from baton.access.identity import Principal
from baton.api.errors import InvalidRequestError
from baton.kv.pins import MAX_TTL_S, PinTerms, PrefixPin
from baton.link.words import NodeRole, SessionHint
from router.fleet.node import Node
from router.fleet.node_pool import NodePool

# OpenAI keeps prompts in memory for 5 to 10 minutes after their last use.
IN_MEMORY_S = 600.0
_DURATION = re.compile(r"([1-9][0-9]{0,5})([smh])", re.ASCII)
_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0}
_NAME_BYTES = 16


def retention_s(text: str) -> float | None:
    """Return the seconds that a value of OpenAI's fields means; None: the text is no time.

    Args:
        text: ``in_memory``, or a number with the unit s, m or h, such as ``24h``.
    """
    if text in ("in_memory", "in-memory"):
        return IN_MEMORY_S
    found = _DURATION.fullmatch(text)
    if found is None:
        return None
    return min(int(found[1]) * _UNITS_S[found[2]], MAX_TTL_S)


def session_of_key(principal: Principal, key: str) -> str:
    """Return the session id that OpenAI's ``prompt_cache_key`` stands for; empty for no key.

    The key is hashed, because a session id has limits that the key does not have.
    """
    return _digest(b"key", principal, key).hex() if key else ""


def make_pins(
    principal: Principal, session_id: str, prefixes: Sequence[PrefixPin]
) -> PinTerms | None:
    """Return the pins and the session of a request; None if it has neither.

    Args:
        session_id: the client's name of the session for which nodes remember the prefix; empty:
            none.
    """
    if not prefixes and not session_id:
        return None
    session = session_name(principal, session_id) if session_id else b""
    return PinTerms(owner_name(principal), session, tuple(prefixes))


def session_hint(
    principal: Principal, session_id: str, prompt_cache_key: str, keep_s: float = 0.0
) -> SessionHint:
    """Return the command that keeps a session's prefix for ``keep_s``, or, if 0, ends its pins.

    Raises InvalidRequestError unless exactly one name of the session is given.
    """
    if bool(session_id) == bool(prompt_cache_key):
        raise InvalidRequestError("session_id", "or prompt_cache_key is needed, and not both")
    session_id = session_id or session_of_key(principal, prompt_cache_key)
    return SessionHint(owner_name(principal), session_name(principal, session_id), keep_s)


def send_hint(pool: NodePool, hint: SessionHint) -> int:
    """Send a hint to the serving nodes that may know its session; return how many these are.

    If no serving node is known to have got a request of the session, all get the hint: another
    router, or this router before a restart, may have sent the session's requests. Draining nodes
    get no hint, because a node that sleeps after its drain would store all commands.
    """
    known = (pool.node(engine_id) for engine_id in pool.session_places.nodes_of(hint.session))
    serving = _serving(node for node in known if node is not None) or _serving(pool.members)
    for node in serving:
        node.send(hint)
    return len(serving)


def _serving(nodes: Iterable[Node]) -> list[Node]:
    """Return the prefill and decode nodes that do not drain."""
    return [
        node
        for node in nodes
        if not node.is_draining and node.registration.role is not NodeRole.ENCODE
    ]


def owner_name(principal: Principal) -> bytes:
    """Return the name under which nodes count a tenant's pins; empty if there are no tenants."""
    return _digest(b"owner", principal, "") if principal.tenant else b""


def session_name(principal: Principal, session_id: str) -> bytes:
    """Return the name of a tenant's session for nodes."""
    return _digest(b"session", principal, session_id)


def _digest(kind: bytes, principal: Principal, name: str) -> bytes:
    fields = (kind, *(text.encode(errors="surrogatepass") for text in (principal.tenant, name)))
    framed = b"".join(len(field).to_bytes(4, "little") + field for field in fields)
    return hashlib.sha256(framed).digest()[:_NAME_BYTES]
