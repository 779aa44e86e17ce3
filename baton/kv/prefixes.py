"""Names of the transfers that bring cached prefixes from one node to another.

A fetched prefix is a transfer of its own, beside the hand-off of the same request. The two ends of
these transfers have their own engine ids, so that their messages never mix with hand-offs.
"""

from __future__ import annotations

# Ending of the engine id under which a node sends or receives prefixes, beside its own engine id.
FETCH_ENDING = "/fetch"


def fetch_end(engine_id: str) -> str:
    """Return the engine id of a node's end for prefixes."""
    return engine_id + FETCH_ENDING


def is_fetch_end(engine_id: str) -> bool:
    """Return whether an engine id names a node's end for prefixes."""
    return engine_id.endswith(FETCH_ENDING)


def node_of(fetch_end_id: str) -> str:
    """Return the engine id of the node that an end for prefixes belongs to."""
    return fetch_end_id.removesuffix(FETCH_ENDING)


def transfer_name(request_id: str) -> str:
    """Return the id of the transfer of a request's cached prefix."""
    return f"{request_id}#prefix"
