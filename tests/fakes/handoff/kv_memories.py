"""KV memory without an engine, as `baton.testing` has it."""

from __future__ import annotations

from baton.testing.transports import PlainMemory, manifest, memory_of

__all__ = ["PlainMemory", "manifest", "memory_of"]
