"""Copies KV blocks between nodes. A new transport needs one file, and one line in this registry.

Importing this package does not import any transport, or torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.registry import Registry

if TYPE_CHECKING:
    from kvconnector.transports.base import MakeTransport

KV_CONNECTORS: Registry[MakeTransport] = Registry(
    "KV connector",
    {
        "nixl": "kvconnector.transports.nixl.transport:NixlTransport",
        "tls": "kvconnector.transports.sockets.transport:TlsTransport",
        "in_memory": "kvconnector.transports.in_memory:InMemoryTransport",
    },
    plugin_group="baton.transports",
)
