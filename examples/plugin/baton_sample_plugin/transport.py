"""A KV transport within one process, under another name. A real one copies between machines."""

from __future__ import annotations

from kvconnector.transports.in_memory import InMemoryTransport


class SampleTransport(InMemoryTransport):
    """Copies as `InMemoryTransport` does."""
