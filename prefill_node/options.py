"""PrefillOptions: the options of a prefill node. PushMode: when it sends a prompt's KV blocks."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from baton.engine_config import EngineConfig
from baton.options import group, option
from node_runtime.options import NodeOptions


class PushMode(StrEnum):
    """When KV blocks are sent, from the latest mode to the earliest. All send the same bytes."""

    AFTER_PREFILL = "after-prefill"  # all blocks after token 1; a baseline for comparison
    CHUNKS = "chunks"  # a chunk's full blocks are sent while the next chunk computes
    LAYERS = "layers"  # like CHUNKS, but the last chunk's blocks are sent in groups of layers


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillOptions(NodeOptions):
    """Options of a prefill node; a wrong value raises ConfigError with the field's name."""

    # Preempted prompts are recomputed here, because no other node has their blocks. All drafts are
    # made here, because the decode node, which verifies them, decides how many it uses.
    engine: EngineConfig = group(
        lambda: EngineConfig(cuda_graph_max_batch=0), without=("preemption", "adaptive_speculation")
    )
    push: PushMode = option(PushMode.LAYERS, help="When to send KV blocks.")
    encode_nodes: bool = option(
        False,
        help="Receive the encodings of images from encode nodes (`baton encode`). This node "
        "encodes the images whose encodings do not come.",
    )
    encodings_listen: str = option(
        "",
        help="With --encode-nodes and --kv-connector tls: host:port to which encode nodes send "
        "encodings; by default a free port of the host in --kv-listen.",
    )
    encode_timeout_s: float = option(
        3.0,
        above=0,
        help="With --encode-nodes: how long a prompt waits for an encoding before this node "
        "encodes the image, seconds beyond twice the time that the router expects.",
    )
