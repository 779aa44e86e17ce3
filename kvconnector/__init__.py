"""KV blocks from here to there. To add a transport: one file and one line here."""

from __future__ import annotations

from collections.abc import Callable

import torch

from baton.registry import Registry
from kvconnector.base import KVTransport

KV_CONNECTORS: Registry[Callable[[str, torch.Tensor], KVTransport]] = Registry(
    "KV connector",
    {
        "nixl": "kvconnector.nixl.transport:NixlTransport",
        "in_memory": "kvconnector.in_memory:InMemoryTransport",
    },
)
