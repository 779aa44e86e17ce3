"""KV blocks from here to there. To add a transport: one file and one line here."""

from __future__ import annotations

from baton.registry import Registry
from kvconnector.transports.base import MakeTransport

KV_CONNECTORS: Registry[MakeTransport] = Registry(
    "KV connector",
    {
        "nixl": "kvconnector.transports.nixl.transport:NixlTransport",
        "tls": "kvconnector.transports.sockets.transport:TlsTransport",
        "in_memory": "kvconnector.transports.in_memory:InMemoryTransport",
    },
)
