"""CacheSalts: which prompts' KV a principal may find again, as bytes that name blocks apart.

    principal -> its sharing group, or else its tenant -> HMAC-SHA256(secret, (kind, name)) -> salt

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

from baton.errors import ConfigError
from baton.identity import Principal

logger = logging.getLogger(__name__)

MIN_SECRET_BYTES = 16
_DOMAIN = b"baton/cache-salt/1"


class CacheSalts:
    """The salts of one router.

    Args:
        secret: the same in all routers of a fleet, which then find what any of them had computed.
            None: one of its own until it ends; what it had computed is not found again after that.
    """

    def __init__(self, secret: bytes | None = None) -> None:
        self._secret = secrets.token_bytes(32) if secret is None else secret

    def of(self, principal: Principal) -> bytes:
        """The salt of a principal's prompts; empty where there are no tenants."""
        if principal.cache_group:
            return self._derive(b"group", principal.cache_group)
        return self.of_tenant(principal) if principal.tenant else b""

    def of_tenant(self, principal: Principal) -> bytes:
        """A salt of its tenant alone, whatever group that is in."""
        return self._derive(b"tenant", principal.tenant)

    def _derive(self, kind: bytes, name: str) -> bytes:
        # Length-prefixed, so that no two pairs of fields are the same bytes.
        fields = (_DOMAIN, kind, name.encode(errors="surrogatepass"))
        framed = b"".join(len(field).to_bytes(4, "little") + field for field in fields)
        return hmac.digest(self._secret, framed, hashlib.sha256)


def read_secret(path: str) -> bytes:
    """The secret in a file, without white space around it; raises ConfigError."""
    try:
        secret = Path(path).read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"cache_salt_secret_file: cannot read {path} ({error})") from error
    if len(secret) < MIN_SECRET_BYTES:
        raise ConfigError(
            f"cache_salt_secret_file: {path} must have {MIN_SECRET_BYTES} bytes or more, "
            f"got {len(secret)}"
        )
    return secret


def make_salts(secret_file: str, *, has_keys: bool) -> CacheSalts:
    """The salts of a router, given the file of its secret; empty: it draws one.

    Args:
        has_keys: whether there can be tenants.

    Raises ConfigError.
    """
    if secret_file:
        return CacheSalts(read_secret(secret_file))
    if has_keys:
        logger.info(
            "cache_salt_secret_file: not given; what tenants have cached on the nodes is found "
            "through this router only, until it ends"
        )
    return CacheSalts()
