"""Hints of prompts in one process: which prefixes to keep in the cache, and for which session."""

from __future__ import annotations

import hashlib

from baton.api.errors import InvalidRequestError
from baton.kv.pins import PinTerms, PrefixPin, check_ttl

_NAME_BYTES = 16


def terms_of(pin_s: float, session: str) -> PinTerms | None:
    """Return how to keep a prompt and its answer; None: there is no hint.

    Args:
        pin_s: seconds for which both stay in the cache; 0: as long as there is room.
        session: the caller's name for the conversation; empty: none.

    Raises InvalidRequestError if the time is not possible.
    """
    if not pin_s and not session:
        return None
    if pin_s:
        check_ttl(pin_s, "pin_s")
    prefixes = (PrefixPin(pin_s),) if pin_s else ()
    return PinTerms(session=name_of(session) if session else b"", prefixes=prefixes)


def name_of(session: str) -> bytes:
    """Return the name under which the engine remembers a session.

    Raises InvalidRequestError if the caller names no session.
    """
    if not session:
        raise InvalidRequestError("session", "is needed")
    return hashlib.sha256(session.encode(errors="surrogatepass")).digest()[:_NAME_BYTES]
