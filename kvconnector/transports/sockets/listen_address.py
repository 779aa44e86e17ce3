"""Parses the address on which a node listens for KV. Imports no torch."""

from __future__ import annotations

from baton.access.exposure import split_address
from baton.api.errors import ConfigError


def parse_listen_address(listen: str) -> tuple[str, int]:
    """Split ``host:port`` into the host and the port for a socket; raise ConfigError."""
    host, port = split_address("kv_listen", listen)
    if host in ("0.0.0.0", "[::]"):
        raise ConfigError(
            f"kv_listen: peers dial this address, so it must be one of this machine's, not {host}"
        )
    return host.removeprefix("[").removesuffix("]"), port
