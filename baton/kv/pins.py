"""Pins: values with which a client asks nodes to keep prefixes of its prompt in their caches."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.api.errors import InvalidRequestError

MAX_PREFIXES = 4  # maximum number of pinned prefixes of one request
MAX_TTL_S = 7 * 86_400.0  # longest time that a client may give; nodes cut it further


@dataclass(frozen=True, slots=True)
class PrefixPin:
    """A prefix of a request that nodes are to keep in their prefix caches.

    Attributes:
        ttl_s: seconds, from the request's end, after which the prefix need not be kept.
        num_tokens: length of the prefix, in the prompt; 0: the whole prompt and the answer.
    """

    ttl_s: float
    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class PinTerms:
    """The pinned prefixes of one request, with the owner for whom nodes keep them.

    Attributes:
        owner: name of the tenant, made by the router; each owner has a share of a node's pins.
        session: name of the session, made by the router; empty: none.
        prefixes: the pinned prefixes.
    """

    owner: bytes = field(default=b"", repr=False)
    session: bytes = field(default=b"", repr=False)
    prefixes: tuple[PrefixPin, ...] = ()


def check_num_pins(num_pins: int) -> None:
    """Raise InvalidRequestError if a client's pins are too many."""
    if num_pins > MAX_PREFIXES:
        raise InvalidRequestError("pins", f"must have at most {MAX_PREFIXES}, got {num_pins}")


def check_pins(prefixes: tuple[PrefixPin, ...]) -> None:
    """Raise InvalidRequestError if a client's pins are too many, or a pin's time is invalid."""
    check_num_pins(len(prefixes))
    for index, prefix in enumerate(prefixes):
        check_ttl(prefix.ttl_s, f"pins[{index}].ttl_s")


def check_ttl(ttl_s: float, field: str = "ttl_s") -> None:
    """Raise InvalidRequestError if a prefix cannot be kept for this time.

    Args:
        field: the client's field with the time, for the error.
    """
    if not 0 < ttl_s <= MAX_TTL_S:
        raise InvalidRequestError(field, f"must be above 0 and at most {MAX_TTL_S:g}")
