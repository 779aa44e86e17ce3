"""PrefillOptions: the options of a prefill node, and when it sends the KV blocks of a prompt."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from baton.engine_config import EngineConfig
from baton.limits import NUM_LAYER_GROUPS
from baton.options import group, option
from node_runtime.options import NodeOptions


class PushMode(StrEnum):
    """From the latest to the earliest; each sends the same bytes."""

    AFTER_PREFILL = "after-prefill"  # all blocks when token 1 is known; to measure the others by
    CHUNKS = "chunks"  # the blocks that a chunk filled while the next one computes
    LAYERS = "layers"  # and the last chunk's, some layers while the next ones compute


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillOptions(NodeOptions):
    """Options of a prefill node; raises ConfigError naming the field."""

    # A prompt that lost its blocks is computed again here: nobody else has any. What is guessed
    # behind it, the decode node computes, and says how much of it.
    engine: EngineConfig = group(
        lambda: EngineConfig(cuda_graph_max_batch=0), without=("preemption", "adaptive_speculation")
    )
    push: PushMode = option(PushMode.LAYERS, help="When KV blocks are sent.")
    layer_groups: int = option(
        NUM_LAYER_GROUPS, least=1, help="Parts of a chunk that is sent layer-wise."
    )
