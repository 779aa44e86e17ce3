"""Names of the transfers that bring cached prefixes from one node to another.

A fetched prefix is a transfer of its own, beside the hand-off of the same request. The two ends of
these transfers have their own engine ids, so that their messages never mix with hand-offs. A node
of either role has an end of each kind.
"""

from __future__ import annotations

# Endings of the engine ids under which a node receives and sends prefixes, beside its engine id.
FETCH_ENDING, SHARE_ENDING = "/fetch", "/share"


def fetch_end(engine_id: str) -> str:
    """Return the engine id of the end at which a node receives prefixes."""
    return engine_id + FETCH_ENDING


def share_end(engine_id: str) -> str:
    """Return the engine id of the end from which a node sends prefixes."""
    return engine_id + SHARE_ENDING


def is_fetch_end(engine_id: str) -> bool:
    """Return whether an engine id names an end that receives prefixes."""
    return engine_id.endswith(FETCH_ENDING)


def is_prefix_end(engine_id: str) -> bool:
    """Return whether an engine id names an end that receives or sends prefixes."""
    return engine_id.endswith((FETCH_ENDING, SHARE_ENDING))


def node_of(end_id: str) -> str:
    """Return the engine id of the node that an end belongs to."""
    return end_id.removesuffix(FETCH_ENDING).removesuffix(SHARE_ENDING)


def transfer_name(request_id: str) -> str:
    """Return the id of the transfer of a request's cached prefix."""
    return f"{request_id}#prefix"
