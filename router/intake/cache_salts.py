"""CacheSalts: derive the salts that decide which prompts share cached blocks.

    principal -> its sharing group, or else its tenant -> HMAC-SHA256(secret, (kind, name)) -> salt
    salt and the client's word -> HMAC-SHA256(secret, ("client", salt, word)) -> a narrower salt

The hash of a prompt's first block includes the salt (`baton/kv/block_hash.py`), so the same prompt
has other block hashes with another salt. Nobody can compute a salt without the secret. Salts go to
nodes, never to clients or logs.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import secrets
from pathlib import Path

from baton.access.identity import Principal
from baton.api.errors import ConfigError, reason_of

logger = logging.getLogger(__name__)

MIN_SECRET_BYTES = 16
_MAX_SECRET_BYTES = 2**16
_DOMAIN = b"baton/cache-salt/1"


class CacheSalts:
    """Derives the cache salts of one router's prompts.

    Args:
        secret: shared by all routers of a fleet, so that they find each other's cached prompts.
            None: a random secret; prompts cached before a restart are not found after it.
    """

    def __init__(self, secret: bytes | None = None) -> None:
        self._secret = secrets.token_bytes(32) if secret is None else secret

    def of(self, principal: Principal, word: str = "") -> bytes:
        """Return the salt of a principal's prompts; empty if the router has no tenants.

        Args:
            word: the request's ``cache_salt``; prompts with different words share no blocks. A word
                can only narrow sharing, because the result also depends on the principal's salt.
        """
        if principal.cache_group:
            salt = self._derive(b"group", principal.cache_group)
        else:
            salt = self._derive(b"tenant", principal.tenant) if principal.tenant else b""
        return self._narrowed(salt, word)

    def of_tenant(self, principal: Principal, word: str = "") -> bytes:
        """Return the salt of a principal's tenant, even if the tenant is in a sharing group."""
        return self._narrowed(self._derive(b"tenant", principal.tenant), word)

    def _narrowed(self, salt: bytes, word: str) -> bytes:
        return self._derive(b"client", word, salt) if word else salt

    def _derive(self, kind: bytes, name: str, within: bytes = b"") -> bytes:
        # Each field is preceded by its length, so that different lists of fields have different
        # bytes.
        fields = [_DOMAIN, kind, name.encode(errors="surrogatepass")]
        if within:
            fields.append(within)
        framed = b"".join(len(field).to_bytes(4, "little") + field for field in fields)
        return hmac.digest(self._secret, framed, hashlib.sha256)


def make_salts(secret_file: str, *, has_tenants: bool) -> CacheSalts:
    """Make a router's cache salts; raises ConfigError if the file has no valid secret."""
    if secret_file:
        return CacheSalts(read_secret(secret_file))
    if has_tenants:
        logger.info(
            "cache_salt_secret_file: not given; what tenants have cached on the nodes is found "
            "through this router only, until it ends"
        )
    return CacheSalts()


def read_secret(path: str) -> bytes:
    """Return the secret in a file, stripped of white space; raises ConfigError."""
    try:
        with Path(path).open("rb") as file:
            secret = file.read(_MAX_SECRET_BYTES + 1).strip()
    except OSError as error:
        raise ConfigError(
            f"cache_salt_secret_file: cannot read {path} ({reason_of(error)})"
        ) from error
    if len(secret) > _MAX_SECRET_BYTES:
        raise ConfigError(f"cache_salt_secret_file: {path} has more than {_MAX_SECRET_BYTES} bytes")
    if len(secret) < MIN_SECRET_BYTES:
        raise ConfigError(
            f"cache_salt_secret_file: {path} must have {MIN_SECRET_BYTES} bytes or more, "
            f"got {len(secret)}"
        )
    return secret
