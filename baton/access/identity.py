"""Principal: who calls, and what that allows. Plain values; knows no key, no certificate, no RPC.

Whoever authenticates a call (an API key, a client certificate, loopback) makes a `Principal` of
it; whoever serves the call asks only the principal.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

NODE_KINDS = ("prefill", "decode", "sim")  # what a certificate calls a node


class Role(StrEnum):
    """What a caller may do; a principal has any number of them.

    INFER: send prompts, and ask about the model and one's own requests.
    LOOK: see what operators see.
    OPERATE: change what operators change.
    JOIN: register as a node.
    """

    INFER = "infer"
    LOOK = "look"
    OPERATE = "operate"
    JOIN = "join"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one principal may take of a router; 0 is no limit.

    Attributes:
        max_open_requests: that wait or are in progress.
        requests_per_minute: requests that may begin per minute.
        tokens_per_minute: limit of prompt tokens computed plus output tokens sampled.
        weight: divisor of what a request costs its tenant when tenants compete: with 2 the tenant
            gets two shares.
        most_urgent_priority: smaller priorities are refused; None: any. Who has no leave to be
            more urgent than 0 cannot get before other tenants by asking for it. Where callers have
            no tenant there are no others, and any will do.
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
        name: name of the key or certificate; empty where anybody may call.
        tenant: whose requests and cached prompts are its own: all principals of one tenant see
            each other's. Empty where anybody may call.
        roles: what it may do.
        models: names of the served models that it may use; empty: all.
        limits: what it may take.
        cache_group: tenants of one group find each other's cached prompts; empty: a tenant finds
            its own only.
    """

    name: str = ""
    tenant: str = ""
    roles: frozenset[Role] = frozenset()
    models: frozenset[str] = frozenset()
    limits: Limits = field(default_factory=Limits)
    cache_group: str = ""

    def may(self, role: Role) -> bool:
        """Say whether this principal has a role."""
        return role in self.roles

    @property
    def is_operator(self) -> bool:
        """Whether it may see what others sent; who may change things may look, too."""
        return not self.roles.isdisjoint((Role.LOOK, Role.OPERATE))


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """The credentials that a call brings.

    Attributes:
        authorization: the header or the metadata of that name; empty: none came.
        certificate: whom the caller's certificate names; None: it showed none.
        certificate_problem: why the certificate is no longer valid; empty: it is valid.
        address: the calling machine's address, without a port.
    """

    authorization: str = field(default="", repr=False)
    certificate: Principal | None = None
    certificate_problem: str = ""
    address: str = ""


ANYBODY = Principal(roles=frozenset({Role.INFER, Role.LOOK, Role.JOIN}))
"""Who calls a program that has no credentials, through an address that others can reach."""

ANYBODY_HERE = Principal(roles=frozenset(Role))
"""The same, through an address that only this machine can reach."""
