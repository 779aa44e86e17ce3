"""Principal: who calls, and what the caller may do, as plain values.

Authentication by API key, client certificate or loopback address makes a `Principal`. Code that
serves a call uses only the principal, not keys or certificates.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

NODE_KINDS = ("prefill", "decode", "encode", "sim")  # the kinds of nodes in certificates


class Role(StrEnum):
    """Permission of a caller; a principal can have any number of roles.

    INFER: send prompts, and ask about the model and the caller's own requests.
    LOOK: read everything that operators can see.
    OPERATE: make the changes that operators can make.
    JOIN: register as a node.
    """

    INFER = "infer"
    LOOK = "look"
    OPERATE = "operate"
    JOIN = "join"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one principal's use of a router; 0: no limit.

    Attributes:
        max_open_requests: maximum number of requests that wait or are in progress.
        requests_per_minute: limit of new requests per minute.
        tokens_per_minute: limit of computed prompt tokens plus sampled output tokens.
        weight: share of the tenant when tenants compete; a request's cost is divided by this.
        most_urgent_priority: smallest priority number that a request may have; None: any number.
            With 0, a client cannot overtake other tenants by asking for more urgency. Has no effect
            if callers have no tenant.
    """

    max_open_requests: int = 0
    requests_per_minute: float = 0.0
    tokens_per_minute: float = 0.0
    weight: float = 1.0
    most_urgent_priority: int | None = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """The identity of a caller.

    Attributes:
        name: name of the key or certificate; empty if anybody may call.
        tenant: owner of the requests and cached prompts of all principals with this tenant; empty
            if anybody may call.
        roles: decide which calls the caller may make.
        models: served names that the principal may use; empty: all.
        limits: limits of the principal's use.
        cache_group: group of tenants that share cached prompts; empty: the tenant shares none.
    """

    name: str = ""
    tenant: str = ""
    roles: frozenset[Role] = frozenset()
    models: frozenset[str] = frozenset()
    limits: Limits = field(default_factory=Limits)
    cache_group: str = ""

    def may(self, role: Role) -> bool:
        """Return whether this principal has a role."""
        return role in self.roles

    @property
    def is_operator(self) -> bool:
        """Return whether this principal may read other callers' requests."""
        return not self.roles.isdisjoint((Role.LOOK, Role.OPERATE))


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """The credentials that came with a call.

    Attributes:
        authorization: value of the ``authorization`` header or metadata; empty: there is none.
        certificate: principal in the client certificate; None: no accepted certificate.
        certificate_problem: why the certificate is not accepted; empty: it is valid, or there is
            none.
        address: IP address of the caller.
    """

    authorization: str = field(default="", repr=False)
    certificate: Principal | None = None
    certificate_problem: str = ""
    address: str = ""


ANYBODY = Principal(roles=frozenset({Role.INFER, Role.LOOK, Role.JOIN}))
"""Caller through an address that other machines can reach, if the program needs no credentials."""

ANYBODY_HERE = Principal(roles=frozenset(Role))
"""Caller through a loopback address, if the program needs no credentials."""
