"""CacheSalts: which prompts' KV a principal may find again, as bytes that name blocks apart.

    principal -> its sharing group, or else its tenant -> HMAC-SHA256(secret, (kind, name)) -> salt
    salt, a client's own word -> HMAC-SHA256(secret, ("client", salt, word)) -> a narrower salt

Nodes put the salt at the root of a prompt's block hashes (`baton/block_hash.py`), and the router
where it computes the same: with another salt the same prompt has other names everywhere. Nobody
who has no secret can compute one. Salts go to nodes, and neither to clients nor into logs.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import secrets
from pathlib import Path

from baton.access.identity import Principal
from baton.api.errors import ConfigError

logger = logging.getLogger(__name__)

MIN_SECRET_BYTES = 16
_MAX_SECRET_BYTES = 2**16
_DOMAIN = b"baton/cache-salt/1"


class CacheSalts:
    """The salts of one router.

    Args:
        secret: the same in all routers of a fleet, which then find what any of them had computed.
            None: one of its own until it ends; what it had computed is not found again after that.
    """

    def __init__(self, secret: bytes | None = None) -> None:
        self._secret = secrets.token_bytes(32) if secret is None else secret

    def of(self, principal: Principal, word: str = "") -> bytes:
        """The salt of a principal's prompts; empty where there are no tenants.

        Args:
            word: prompts with another one of these are apart, too. It can only narrow who shares
                a prompt: what it makes is made of the principal's own salt.
        """
        if principal.cache_group:
            salt = self._derive(b"group", principal.cache_group)
        else:
            salt = self._derive(b"tenant", principal.tenant) if principal.tenant else b""
        return self._narrowed(salt, word)

    def of_tenant(self, principal: Principal, word: str = "") -> bytes:
        """A salt of its tenant alone, whatever group that is in."""
        return self._narrowed(self._derive(b"tenant", principal.tenant), word)

    def _narrowed(self, salt: bytes, word: str) -> bytes:
        return self._derive(b"client", word, salt) if word else salt

    def _derive(self, kind: bytes, name: str, within: bytes = b"") -> bytes:
        # Length-prefixed, so that no two lists of fields are the same bytes.
        fields = [_DOMAIN, kind, name.encode(errors="surrogatepass")]
        if within:
            fields.append(within)
        framed = b"".join(len(field).to_bytes(4, "little") + field for field in fields)
        return hmac.digest(self._secret, framed, hashlib.sha256)


def make_salts(secret_file: str, *, has_tenants: bool) -> CacheSalts:
    """The salts of a router; raises ConfigError for a file that holds no secret."""
    if secret_file:
        return CacheSalts(read_secret(secret_file))
    if has_tenants:
        logger.info(
            "cache_salt_secret_file: not given; what tenants have cached on the nodes is found "
            "through this router only, until it ends"
        )
    return CacheSalts()


def read_secret(path: str) -> bytes:
    """The secret in a file, without white space around it; raises ConfigError."""
    try:
        with Path(path).open("rb") as file:
            secret = file.read(_MAX_SECRET_BYTES + 1).strip()
    except OSError as error:
        raise ConfigError(f"cache_salt_secret_file: cannot read {path} ({error})") from error
    if len(secret) > _MAX_SECRET_BYTES:
        raise ConfigError(f"cache_salt_secret_file: {path} has more than {_MAX_SECRET_BYTES} bytes")
    if len(secret) < MIN_SECRET_BYTES:
        raise ConfigError(
            f"cache_salt_secret_file: {path} must have {MIN_SECRET_BYTES} bytes or more, "
            f"got {len(secret)}"
        )
    return secret
