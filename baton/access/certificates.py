"""Certificates: read the caller, and the nodes that may join, from a verified certificate.

    spiffe://TRUST-DOMAIN/ROLES/NAME                   a caller that is its own tenant
    spiffe://TRUST-DOMAIN/tenant/TENANT/ROLES/NAME     a caller of a tenant that may have several
    spiffe://TRUST-DOMAIN/node/prefill/NAME            a prefill node (or decode: a decode node)
    spiffe://TRUST-DOMAIN/nodes/prefill/NAME           all prefill nodes NAME-... of a workload
    spiffe://TRUST-DOMAIN/node/sim/NAME                simulated nodes NAME-p0, NAME-d0 and so on

ROLES is ``infer``, ``look`` or ``operate``, or several roles joined by ``-``. The trust domain is
not checked, because the CA decides who gets certificates. Other URIs are ignored.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from cryptography import x509

from baton.access.identity import Principal, Role
from baton.api.errors import UnauthenticatedError

_WORD = r"[A-Za-z0-9._-]{1,128}"
_CALLER = re.compile(
    rf"spiffe://{_WORD}/(?:tenant/(?P<tenant>{_WORD})/)?"
    rf"(?P<roles>(?:infer|look|operate)(?:-(?:infer|look|operate))*)/(?P<name>{_WORD})",
    re.ASCII,
)
_NODE = re.compile(
    rf"spiffe://{_WORD}/(?:node/(?P<kind>prefill|decode|encode|sim)"
    r"|nodes/(?P<many>prefill|decode|encode))/"
    rf"(?P<name>{_WORD})"
)


@dataclass(frozen=True, slots=True)
class NodeName:
    """Names that a certificate covers: one node, or all nodes of a simulation or workload.

    Attributes:
        is_many: whether the certificate covers all names that begin with this name and a hyphen.
    """

    kind: str
    name: str
    is_many: bool = False

    def covers(self, role: str, name: str) -> bool:
        """Return whether the certificate covers a node with this role and name."""
        if self.kind == "sim":
            return re.fullmatch(rf"{re.escape(self.name)}-{role[0]}\d+", name, re.ASCII) is not None
        if self.is_many:
            return self.kind == role and name.startswith(f"{self.name}-")
        return (self.kind, self.name) == (role, name)


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificateIdentity:
    """The identity that a certificate gives to its holder.

    Attributes:
        principal: the caller, who has no roles if no URI of the certificate names roles.
        nodes: nodes that may join with the certificate.
        subject: name to show in messages.
        not_after: when the certificate expires.
    """

    principal: Principal
    nodes: tuple[NodeName, ...]
    subject: str
    not_after: datetime

    def node_refusal(self, role: str, name: str) -> str:
        """Return why a node with this role and name may not join; empty if it may."""
        if any(node.covers(role, name) for node in self.nodes):
            return ""
        if not self.nodes:
            return f"certificate: is for {self.subject}, which is no node"
        return f"certificate: is for {self.subject}, not for node/{role}/{name}"


def identity_of(subject: str, uris: Sequence[str], not_after: datetime) -> CertificateIdentity:
    """Read the identity from a certificate's URIs; raises UnauthenticatedError if they conflict."""
    nodes = [
        NodeName(m["kind"] or m["many"], m["name"], is_many=bool(m["many"]))
        for m in map(_NODE.fullmatch, uris)
        if m
    ]
    callers = [match for match in map(_CALLER.fullmatch, uris) if match]
    owners = {(match["name"], match["tenant"] or match["name"]) for match in callers}
    if len(owners) > 1:
        raise UnauthenticatedError(f"certificate: names more than one caller ({', '.join(uris)})")
    roles = {Role(word) for match in callers for word in match["roles"].split("-")}
    name, tenant = owners.pop() if owners else (nodes[0].name if nodes else subject, "")
    if nodes:
        roles.add(Role.JOIN)
    return CertificateIdentity(
        principal=Principal(name=name, tenant=tenant, roles=frozenset(roles)),
        nodes=tuple(nodes),
        subject=", ".join(uris) or subject,
        not_after=not_after,
    )


def certificate_identity(source: Any) -> CertificateIdentity | None:
    """Return the identity in a connection's client certificate; None: there is no certificate.

    The TLS library verified the certificate when the connection began. Expiry is checked here at
    each call, because a connection can outlive its certificate.

    Args:
        source: a gRPC servicer context, or the transport of an aiohttp request.

    Raises:
        UnauthenticatedError: the certificate has expired, or cannot be read.
    """
    data = _certificate_of(source)
    if not data:
        return None
    identity = _read(data)
    if identity.not_after < datetime.now(UTC):
        raise UnauthenticatedError(
            f"certificate: {identity.subject}: has expired; connect again with a new one"
        )
    return identity


def certificate_principal(source: Any) -> Principal | None:
    """Return the principal in a connection's client certificate; None: there is no certificate."""
    identity = certificate_identity(source)
    return None if identity is None else identity.principal


def _certificate_of(source: Any) -> bytes:
    """Return the client's certificate as PEM or DER; empty if the client showed none."""
    if hasattr(source, "auth_context"):
        context: Mapping[str, Sequence[bytes]] = source.auth_context()
        return next(iter(context.get("x509_pem_cert") or ()), b"")
    connection = source.get_extra_info("ssl_object")
    return b"" if connection is None else connection.getpeercert(binary_form=True) or b""


# cached, because callers use few certificates and parsing takes 50 us
@functools.lru_cache(maxsize=4096)
def _read(data: bytes) -> CertificateIdentity:
    load = x509.load_pem_x509_certificate if data[:1] == b"-" else x509.load_der_x509_certificate
    try:
        certificate = load(data)
        not_after = certificate.not_valid_after_utc
        subject = certificate.subject.rfc4514_string() or "nobody"
        uris = _uris(certificate)
    except ValueError as error:
        raise UnauthenticatedError("certificate: cannot be read") from error
    return identity_of(subject, uris, not_after)


def _uris(certificate: x509.Certificate) -> list[str]:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return names.get_values_for_type(x509.UniformResourceIdentifier)
