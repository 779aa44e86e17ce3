"""Access: identifies callers and decides which calls they may make.

The servers of gRPC calls, HTTP paths and metrics pages ask `Access` first. This file knows neither
gRPC nor HTTP.

Wrong keys are rate-limited per client address. After too many wrong keys from an address, keys from
this address that have not worked before are refused without a comparison. Keys that have worked
before still work, so nobody can lock out other callers behind the same proxy.
"""

from __future__ import annotations

import hmac
import ipaddress
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from baton.access.allowance import Allowance
from baton.access.api_keys import ApiKey, digest_of, is_expired, read_keys
from baton.access.audit_log import AuditEvent, AuditKind, AuditLog, clip
from baton.access.call_roles import INFER, Roles
from baton.access.identity import ANYBODY, Credentials, Principal, Role
from baton.api.errors import (
    BatonError,
    ConfigError,
    OverloadedError,
    PermissionDeniedError,
    UnauthenticatedError,
)

logger = logging.getLogger(__name__)

# Principals of the two tokens. Names in key files begin with a letter or digit, so no key in a file
# has one of these names.
ADMIN_TOKEN = Principal(
    name="--admin-token",
    tenant="--admin-token",
    roles=frozenset({Role.INFER, Role.LOOK, Role.OPERATE}),
)
NODE_TOKEN = Principal(name="--node-token", tenant="--node-token", roles=frozenset({Role.JOIN}))

_NO_KEY = (
    "authorization: must be 'Bearer' and an API key; commands and clients of Baton take the key "
    "from BATON_API_KEY, operators' commands from BATON_ADMIN_TOKEN"
)
_UNKNOWN_KEY = (
    "authorization: the API key is not known here; the operator of the router makes keys "
    "(baton keys new)"
)
_BURST, _PER_SECOND = 10, 1.0  # wrong keys per address: allowed at once, and per second
_AUDIT_BURST, _AUDIT_PER_SECOND = 20, 1.0  # limits audit lines for refusals per address
_ALL_BURST, _ALL_PER_SECOND = 500, 20.0  # limits audit lines for all addresses
_SAME_LOOK_S = 60.0  # seconds in which equal reads make one audit line


class Access:
    """Decides who may make which calls to one program.

    Args:
        keys_file: file with API keys; None: no such file.
        admin_token: API key with the roles of `ADMIN_TOKEN`; empty: none.
        node_token: API key with the roles of `NODE_TOKEN`; empty: none.
        model: name of the served model, for keys limited to some models; used until `note_names`.
        audit: log of joins, reads, changes and refusals.
        by_certificate: whether callers must show a client certificate.

    Raises:
        ConfigError: the file cannot be read or is wrong.
    """

    def __init__(
        self,
        *,
        keys_file: Path | None = None,
        admin_token: str = "",
        node_token: str = "",
        model: str = "",
        audit: AuditLog | None = None,
        by_certificate: bool = False,
    ) -> None:
        self.audit = audit or AuditLog()
        self._keys_file = keys_file
        self._names: Callable[[], Sequence[str]] = lambda: (model,)
        self._tokens = [
            ApiKey(digest=digest_of(token), principal=principal)
            for token, principal in ((admin_token, ADMIN_TOKEN), (node_token, NODE_TOKEN))
            if token
        ]
        self._keys: tuple[ApiKey, ...] = () if keys_file is None else read_keys(keys_file)
        self._by_certificate = by_certificate
        self.is_open = not (self._tokens or keys_file or by_certificate)
        self._proven: set[bytes] = set()  # digests of keys that have worked before
        self._failures = Allowance(_BURST, _PER_SECOND)
        self._refusal_lines = Allowance(_AUDIT_BURST, _AUDIT_PER_SECOND)
        self._all_lines = Allowance(_ALL_BURST, _ALL_PER_SECOND)
        self._looks = Allowance(1, 1 / _SAME_LOOK_S)
        self._new_looks = Allowance(_AUDIT_BURST, _AUDIT_PER_SECOND)
        self._own_changes = Allowance(_AUDIT_BURST, _AUDIT_PER_SECOND)

    def note_names(self, names: Callable[[], Sequence[str]]) -> None:
        """Set the function that returns the served models' names, the default name first."""
        self._names = names

    def warn_of_gaps(self, roles: Iterable[Role]) -> None:
        """Log a warning at the program's start for each role that no key has.

        Logs nothing if client certificates are required, because their roles are known only at
        calls.
        """
        if self.is_open or self._by_certificate:
            return
        known = {role for key in (*self._tokens, *self._keys) for role in key.principal.roles}
        for role in roles:
            if role not in known:
                logger.warning("no API key has the role %s (baton keys new --role %s)", role, role)

    def read_again(self) -> None:
        """Reload the keys at SIGHUP; reopen the audit log's file, which may have been renamed."""
        self.reload()
        self.audit.reopen()

    def reload(self) -> None:
        """Reload the keys from the file; if it is invalid, log an error and keep the old keys."""
        if self._keys_file is None:
            return
        try:
            self._keys = read_keys(self._keys_file)
        except ConfigError as error:
            logger.error("%s; the keys stay as they were", error)
        else:
            self._proven &= {key.digest for key in (*self._tokens, *self._keys)}
            logger.info("api_keys_file: read %s again", self._keys_file)

    # ------------------------------------------------------------------ authentication

    def principal_of(self, credentials: Credentials, anybody: Principal = ANYBODY) -> Principal:
        """Return the caller's principal.

        An API key has precedence over a client certificate. If the program has no keys, any key is
        ignored and the certificate decides. Comparing takes equal time for all keys.

        Args:
            anybody: principal of callers if the program needs no credentials.

        Raises:
            UnauthenticatedError: the credentials are missing, unknown or expired.
            OverloadedError: this address has sent too many wrong keys recently.
        """
        if credentials.certificate_problem:
            raise UnauthenticatedError(credentials.certificate_problem)
        if self.is_open:
            return anybody
        has_keys = bool(self._tokens or self._keys_file)
        if credentials.certificate is not None and not (credentials.authorization and has_keys):
            # If the program has no keys, a client's key is ignored, because some clients send a
            # dummy.
            return credentials.certificate
        scheme, _, given = credentials.authorization.partition(" ")
        if scheme.lower() != "bearer" or not given.strip():
            raise UnauthenticatedError(_NO_KEY)
        key = self._find(digest_of(given.strip()))
        network = _network(credentials.address)
        wait_s = self._failures.wait_s(network)
        if wait_s and (key is None or key.digest not in self._proven):
            error = OverloadedError(
                f"authorization: too many wrong API keys came from {credentials.address or 'there'}"
            )
            error.retry_delay_s = wait_s
            raise error
        if key is None:
            self._failures.take(network)
            raise UnauthenticatedError(_UNKNOWN_KEY)
        if is_expired(key):
            raise UnauthenticatedError(f"authorization: the key of {key.principal.name} is expired")
        self._proven.add(key.digest)
        return key.principal

    def _find(self, digest: bytes) -> ApiKey | None:
        found = None
        for key in (*self._tokens, *self._keys):
            if hmac.compare_digest(key.digest, digest):
                found = key
        return found

    # ------------------------------------------------------------------ authorization

    def admit(
        self, credentials: Credentials, roles: Roles, call: str, anybody: Principal = ANYBODY
    ) -> Principal:
        """Return the caller's principal if it may make a call; write refusals to the audit log.

        Args:
            roles: roles that allow the call; one of them is enough.
            call: the call's name for the audit log.

        Raises:
            PermissionDeniedError: the caller may not make the call.
            BatonError: the caller is unknown; see `principal_of`.
        """
        principal: Principal | None = None
        try:
            principal = self.principal_of(credentials, anybody)
            self._check(principal, roles)
        except BatonError as error:
            kind = AuditKind.FAILED if principal is None else AuditKind.REFUSED
            self._note_refusal(kind, principal, credentials.address, call, str(error))
            raise
        return principal

    def _check(self, principal: Principal, roles: Roles) -> None:
        if principal.roles.isdisjoint(roles):
            if not roles:
                raise PermissionDeniedError("authorization: nobody may do this")
            wanted = " or ".join(sorted(roles))
            if self.is_open:
                raise PermissionDeniedError(
                    "authorization: to change anything through an address that other machines can "
                    "reach, the router must have --admin-token or --api-keys-file"
                )
            raise PermissionDeniedError(
                f"authorization: {principal.name} must have the role {wanted} for this"
            )
        # A key may be limited to some models. Operators' calls use no model. The model's name in a
        # request is checked later, after the request has been read.
        uses_model = roles == INFER
        if uses_model and principal.models and principal.models.isdisjoint(self._names()):
            raise PermissionDeniedError(
                f"model: {principal.name} may not use {self._names()[0]!r}, which is served here"
            )

    # ------------------------------------------------------------------ the audit log

    def note(
        self,
        kind: AuditKind,
        principal: Principal,
        address: str,
        call: str,
        arguments: Mapping[str, Any] | None = None,
        problem: str = "",
    ) -> None:
        """Write an action or an attempt to the audit log; equal reads are written once a minute."""
        is_client = principal.may(Role.INFER)  # routers' own principals lack the role INFER
        told = {name: clip(value) for name, value in (arguments or {}).items()}
        if kind is AuditKind.LOOKED:
            same = f"{principal.name} {address} {call} {told} {problem}"
            if not self._looks.take(same):
                return
            # Clients only read their own requests, but may ask for ever new ids. Their lines must
            # not use up the limit for all lines.
            if is_client and not principal.is_operator and not self._new_looks.take(principal.name):
                self.audit.note_suppressed()
                return
            if not self._all_lines.take(""):
                self.audit.note_suppressed()
                return
        elif kind is AuditKind.CHANGED and is_client and not principal.may(Role.OPERATE):
            # A client may abort any number of its own requests, so these lines are limited too.
            if not (self._own_changes.take(principal.name) and self._all_lines.take("")):
                self.audit.note_suppressed()
                return
        elif kind is AuditKind.REFUSED and not self._refusal_lines.take(_network(address)):
            self.audit.note_suppressed()
            return
        self.audit.write(
            AuditEvent(
                kind=kind,
                who=principal.name,
                tenant=principal.tenant,
                address=address,
                call=call,
                arguments=told,
                problem=clip(problem),
            )
        )

    def _note_refusal(
        self, kind: AuditKind, principal: Principal | None, address: str, call: str, problem: str
    ) -> None:
        if not (self._refusal_lines.take(_network(address)) and self._all_lines.take("")):
            self.audit.note_suppressed()
            return
        fields = {"address": address, "call": clip(call), "problem": clip(problem)}
        self.audit.write(AuditEvent.of(kind, principal, **fields))


def _network(address: str) -> str:
    """Return the name under which wrong keys from an address are counted.

    The name is the address, or the /64 network of an IPv6 address.

    All IPv4 addresses in IPv6 form (``::ffff:10.0.0.7``) lie in one /64 network, so such an address
    counts as its IPv4 address.
    """
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address
    if parsed.version == 4:
        return address
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.ip_network((int(parsed) >> 64 << 64, 64)))
