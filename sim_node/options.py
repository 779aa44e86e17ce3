"""SimOptions: the sizes of a simulated node, and the model it claims to serve."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from baton.api.errors import ConfigError
from baton.block_hash import DEFAULT_HASH_ALGORITHM, HASH_ALGORITHMS
from sim_node.timing import PRESETS, TimingModel


@dataclass(frozen=True, slots=True, kw_only=True)
class SimOptions:
    """The same for all nodes of a process; checked when made.

    Attributes:
        num_blocks: KV blocks of a node.
        max_model_len: most tokens of a request; 0: the model's own limit.
        max_num_requests: most requests in a decode batch.
        max_num_batched_tokens: most prompt tokens in a prefill step.
        local_prefill_threshold: a request of which a decode node has all but so many tokens in its
            prefix cache is not received but computed there. 0: never.
    """

    timing: TimingModel = field(default_factory=lambda: PRESETS["h100-8b"])
    block_size: int = 16
    num_blocks: int = 26_000
    max_model_len: int = 0
    max_num_requests: int = 256
    max_num_batched_tokens: int = 8192
    local_prefill_threshold: int = 32
    prefix_hash: str = DEFAULT_HASH_ALGORITHM

    def __post_init__(self) -> None:
        for name, least in (
            ("block_size", 1),
            ("num_blocks", 1),
            ("max_model_len", 0),
            ("max_num_requests", 1),
            ("max_num_batched_tokens", 1),
            ("local_prefill_threshold", 0),
        ):
            value = getattr(self, name)
            if value < least:
                raise ConfigError(f"{name}: must be {least} or more, got {value}")
        if self.prefix_hash not in HASH_ALGORITHMS:
            known = ", ".join(HASH_ALGORITHMS)
            raise ConfigError(f"prefix_hash: must be one of {known}, got {self.prefix_hash!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimModel:
    """What a router must be told of the model.

    Attributes:
        identity: what decides its tokens, as nodes tell it.
        max_model_len: most tokens of a request.
    """

    identity: Mapping[str, str]
    vocab_size: int
    max_model_len: int
