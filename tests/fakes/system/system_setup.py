"""The parameters of nodes, router and network of a whole system. Refuses to know: their actions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from baton.kv.block_hash import BlockHash
from decode_node.options import DecodeOptions
from prefill_node.options import PushMode


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The options of a system's nodes.

    Attributes:
        num_blocks: blocks of each node and KV cache group; few, so that memory is short.
        num_groups: number of the model's KV cache groups.
        expected_kv: the KV of a prompt, by an engine that shares nothing with these.
        router_is_busy: whether the router is so busy that it wakes readers as seldom as it may.
        sometimes_alone: whether decode nodes compute some prompts themselves.
        rounds_per_step: rounds of KV I/O threads per step in `flow`; more deliver KV sooner.
        chunk_s: how long a prefill node computes a chunk of a prompt that has more of them.
        index_is_small: the router has no room for all that nodes tell of their prefix caches.
        num_drafts: most drafts of a request in a step; every third one is wrong.
        contents: known contents of blocks, by hash.
        fetches: whether nodes get cached prefixes from each other wherever they can.
        engine_options: options of every node's engine; they override those of `System`.
    """

    folder: Path
    expected_kv: Callable[[list[int]], torch.Tensor]
    num_blocks: int
    num_groups: int
    async_scheduling: bool
    push_mode: PushMode
    kv_digests: bool
    options: DecodeOptions
    preemption: str
    policy: str
    router_is_busy: bool
    sometimes_alone: bool
    rounds_per_step: int
    chunk_s: float
    index_is_small: bool
    num_drafts: int
    contents: Mapping[BlockHash, torch.Tensor]
    fetches: bool = False
    engine_options: Mapping[str, Any] = field(default_factory=dict)
