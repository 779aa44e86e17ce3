"""DecodeNodeOptions: all options of a decode node. DecodeOptions: those of decode nodes only."""

from __future__ import annotations

from dataclasses import dataclass

from baton.api.errors import ConfigError
from baton.engine_config import BY_DECODES, EngineConfig
from baton.options import check_limits, group, option
from node_runtime.options import NodeOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeOptions:
    """Limits of what a decode node accepts; a wrong value raises ConfigError."""

    max_receiving_requests: int = option(
        64, least=1, help="Most requests whose KV arrives at the same time."
    )
    max_receiving_tokens: int = option(
        0,
        least=0,
        help="Most tokens whose KV arrives at the same time; a single request may have more. "
        "Other requests wait for their grant. 0: half of the KV cache.",
    )
    local_prefill_threshold: int = option(
        32,
        least=0,
        help="Compute a request here, without receiving KV, if the prefix cache lacks at most "
        "this many of its tokens and it can begin at once. 0: never.",
    )
    max_step_stretch: float = option(
        3.0,
        least=0.0,
        help="Longest step that decodes and also computes a prompt, while a prefill node is "
        "connected: a multiple of the measured time of steps that only decode. Lower keeps the "
        "gaps between a stream's tokens even, higher finishes prompts sooner; 0: only "
        "--prefill-tokens-beside-decodes bounds steps.",
    )

    def __post_init__(self) -> None:
        check_limits(self)
        if 0 < self.max_step_stretch <= 1:
            raise ConfigError(
                f"max_step_stretch: must be 0 or above 1, got {self.max_step_stretch:g}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeNodeOptions(NodeOptions):
    """Options of a decode node; a wrong value raises ConfigError with the field's name."""

    engine: EngineConfig = group(
        lambda: EngineConfig(
            preemption="hand-back", cuda_graph_max_chunk=0, pipeline_layers=BY_DECODES
        )
    )
    decode: DecodeOptions = group(DecodeOptions)
