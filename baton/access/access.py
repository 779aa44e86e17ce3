"""Access: the one place that decides who a call's principal is, and whether it may do that.

Every surface asks here before it looks at anything else: gRPC calls, HTTP paths, metrics pages.
Knows neither gRPC nor HTTP.

Wrong keys are slowed by where they come from. While an address has used up its allowance, keys from
there that have never worked are not even compared; those that have worked go on working, so that
nobody locks out others who come from the same address, such as behind one proxy.
"""

from __future__ import annotations

import hmac
import ipaddress
import logging
from collections.abc import Iterable, Mapping
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

# (Names of keys begin with a letter or digit: nobody in a file can be one of these.)
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
_BURST, _PER_SECOND = 10, 1.0  # wrong keys of one address
_AUDIT_BURST, _AUDIT_PER_SECOND = 20, 1.0  # lines about refusals, by address
_ALL_BURST, _ALL_PER_SECOND = 500, 20.0  # lines about refusals and looks together
_SAME_LOOK_S = 60.0  # who looks at the same again within a minute (`baton admin top`) is told once


class Access:
    """Decides who may call one program.

    Args:
        keys_file: API keys; none if not given.
        admin_token: a key with the roles of `ADMIN_TOKEN`; empty: there is none.
        node_token: a key with the roles of `NODE_TOKEN`; empty: there is none.
        model: the name of the served model, for keys that may use some models only.
        audit: records joins, looks, changes and failures.
        by_certificate: whether certificates are asked of callers: then nothing is open either.

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
        self._model = model
        self._tokens = [
            ApiKey(digest=digest_of(token), principal=principal)
            for token, principal in ((admin_token, ADMIN_TOKEN), (node_token, NODE_TOKEN))
            if token
        ]
        self._keys: tuple[ApiKey, ...] = () if keys_file is None else read_keys(keys_file)
        self._by_certificate = by_certificate
        self.is_open = not (self._tokens or keys_file or by_certificate)
        self._proven: set[bytes] = set()  # digests of keys that have worked
        self._failures = Allowance(_BURST, _PER_SECOND)
        self._refusal_lines = Allowance(_AUDIT_BURST, _AUDIT_PER_SECOND)
        self._all_lines = Allowance(_ALL_BURST, _ALL_PER_SECOND)
        self._looks = Allowance(1, 1 / _SAME_LOOK_S)
        self._new_looks = Allowance(_AUDIT_BURST, _AUDIT_PER_SECOND)
        self._own_changes = Allowance(_AUDIT_BURST, _AUDIT_PER_SECOND)

    def warn_of_gaps(self, roles: Iterable[Role]) -> None:
        """Log what nobody may do: a program that denies by default says so at its start.

        What certificates will come, it cannot know.
        """
        if self.is_open or self._by_certificate:
            return
        known = {role for key in (*self._tokens, *self._keys) for role in key.principal.roles}
        for role in roles:
            if role not in known:
                logger.warning("no API key has the role %s (baton keys new --role %s)", role, role)

    def read_again(self) -> None:
        """Reload the keys and reopen the audit log's file, which may have moved (SIGHUP)."""
        self.reload()
        self.audit.reopen()

    def reload(self) -> None:
        """Read the file again; when it is wrong, say so and keep the keys as they are."""
        if self._keys_file is None:
            return
        try:
            self._keys = read_keys(self._keys_file)
        except ConfigError as error:
            logger.error("%s; the keys stay as they were", error)
        else:
            self._proven &= {key.digest for key in (*self._tokens, *self._keys)}
            logger.info("api_keys_file: read %s again", self._keys_file)

    # ------------------------------------------------------------------ who it is

    def principal_of(self, credentials: Credentials, anybody: Principal = ANYBODY) -> Principal:
        """Find out who calls.

        Who shows a key is who the key says, else who its certificate says; where there are no
        keys, the certificate says it whatever comes as a key. The time that it takes
        tells nothing of any key.

        Args:
            anybody: who it is where there are no credentials to be shown.

        Raises:
            UnauthenticatedError: nobody who is known.
            OverloadedError: too many wrong keys came from there lately.
        """
        if credentials.certificate_problem:
            raise UnauthenticatedError(credentials.certificate_problem)
        if self.is_open:
            return anybody
        has_keys = bool(self._tokens or self._keys_file)
        if credentials.certificate is not None and not (credentials.authorization and has_keys):
            return credentials.certificate  # (Some clients cannot but send a key, such as "none".)
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
            raise UnauthenticatedError("authorization: the API key is not known here")
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

    # ------------------------------------------------------------------ what it may do

    def admit(
        self, credentials: Credentials, roles: Roles, call: str, anybody: Principal = ANYBODY
    ) -> Principal:
        """Find out who calls and whether it may; log refusals in the audit log.

        Args:
            roles: any one of them is enough.
            call: what it wants, as the audit log names it.

        Raises:
            PermissionDeniedError: it may not.
            BatonError: as `principal_of`.
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
        # (Of a call for clients and operators: operators use no model.)
        uses_model = roles == INFER
        if uses_model and principal.models and self._model not in principal.models:
            raise PermissionDeniedError(
                f"model: {principal.name} may not use {self._model!r}, which is served here"
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
        """Log what somebody did, or tried; the same read access is logged once a minute."""
        is_client = principal.may(Role.INFER)  # (What a router asks of its node has no role there.)
        told = {name: clip(value) for name, value in (arguments or {}).items()}
        if kind is AuditKind.LOOKED:
            same = f"{principal.name} {address} {call} {told} {problem}"
            if not self._looks.take(same):
                return
            # Clients look at their own only; asking for ever new ids must not hide others' lines.
            if is_client and not principal.is_operator and not self._new_looks.take(principal.name):
                self.audit.note_suppressed()
                return
            if not self._all_lines.take(""):
                self.audit.note_suppressed()
                return
        elif kind is AuditKind.CHANGED and is_client and not principal.may(Role.OPERATE):
            # A client that ended a request of its own, or says so: it may do that all day.
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
    """Return the address, or of IPv6 its /64 network: what shares one caller's allowance.

    All of IPv4 is in one such network where a listener takes both (``::ffff:10.0.0.7``): there each
    address is one.
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
