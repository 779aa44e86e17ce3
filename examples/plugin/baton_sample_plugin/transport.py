"""A KV transport: Baton's transport within one process under another name."""

from __future__ import annotations

from kvconnector.transports.in_memory import InMemoryTransport


class SampleTransport(InMemoryTransport):
    """Copies blocks as `InMemoryTransport` does."""
