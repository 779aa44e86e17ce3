"""TimingModel: durations of a simulated node's steps and transfers, with presets by name.

    prefill step  = prefill_step_s + tokens / prefill_tokens_per_s + pairs * prefill_s_per_pair
    decode step   = decode_step_s + requests * decode_s_per_request
                    + kv tokens * decode_s_per_kv_token
                    + time for prompt tokens in the same step

A pair is a (query token, key token) that attention computes. Refuses to know: nodes, clocks.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from baton.api.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class TimingModel:
    """How fast a node's hardware computes its model; raises ConfigError if a value is wrong.

    Attributes:
        prefill_tokens_per_s: prompt tokens computed per second, if attention took no time.
        prefill_step_s: fixed time of each prefill step, in seconds.
        prefill_s_per_pair: seconds for attention of one query token to one key token.
        decode_step_s: fixed time of each decode step, in seconds, for reading the weights.
        decode_s_per_request: additional seconds per request in the batch.
        decode_s_per_kv_token: additional seconds per context token in the batch, for reading its
            KV.
        kv_bytes_per_token: bytes of KV per token, over all layers.
        link_bytes_per_s: bytes per second that a prefill node can send.
        link_latency_s: seconds from when the last byte of a transfer is sent until the commit is
            handled.
    """

    prefill_tokens_per_s: float
    prefill_step_s: float
    prefill_s_per_pair: float
    decode_step_s: float
    decode_s_per_request: float
    decode_s_per_kv_token: float
    kv_bytes_per_token: int
    link_bytes_per_s: float
    link_latency_s: float

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not 0 <= value < float("inf"):
                raise ConfigError(f"{field.name}: must be 0 or more, got {value!r}")
        for name in ("prefill_tokens_per_s", "link_bytes_per_s", "decode_step_s"):
            if not getattr(self, name):
                raise ConfigError(f"{name}: must be above 0, got 0")

    def prefill_s(self, num_tokens: int, num_pairs: int) -> float:
        """Return the seconds of a prefill step with this many tokens and (query, key) pairs."""
        return self.prefill_step_s + self.compute_s(num_tokens, num_pairs)

    def compute_s(self, num_tokens: int, num_pairs: int) -> float:
        """Return the seconds that prompt tokens add to a step."""
        return num_tokens / self.prefill_tokens_per_s + num_pairs * self.prefill_s_per_pair

    def decode_s(self, num_requests: int, num_kv_tokens: int) -> float:
        """Return the seconds of a decode step with this many requests and context tokens."""
        batch_s = num_requests * self.decode_s_per_request
        return self.decode_step_s + batch_s + num_kv_tokens * self.decode_s_per_kv_token

    def scaled(self, factor: float) -> TimingModel:
        """Return timing with all durations times ``factor``; raises ConfigError unless above 0."""
        if not 0 < factor < float("inf"):
            raise ConfigError(f"time_scale: must be above 0, got {factor!r}")
        return TimingModel(
            prefill_tokens_per_s=self.prefill_tokens_per_s / factor,
            prefill_step_s=self.prefill_step_s * factor,
            prefill_s_per_pair=self.prefill_s_per_pair * factor,
            decode_step_s=self.decode_step_s * factor,
            decode_s_per_request=self.decode_s_per_request * factor,
            decode_s_per_kv_token=self.decode_s_per_kv_token * factor,
            kv_bytes_per_token=self.kv_bytes_per_token,
            link_bytes_per_s=self.link_bytes_per_s / factor,
            link_latency_s=self.link_latency_s * factor,
        )


# One H100 SXM per node, Llama-3.1-8B in bf16 (128 KiB of KV per token).
# Prefill: vLLM 0.30 on one H100 with Qwen3-8B sustains 3,018 output tokens/s at 1,024 in / 128 out
#   under a latency limit (silybench, capacity.csv). So it computes eight times as many prompt
#   tokens, 24,000 per second, beside its decodes.
# Attention: FlashAttention-3 reaches 640 TFLOP/s (arXiv 2407.08608, figure 5), and a pair takes
#   4 * 32 layers * 4,096 FLOPs. The figure counts only pairs that a causal mask allows, as
#   `num_pairs` does.
# Decode: vLLM on one H100, Llama-3.1-8B, batches of 8, 64 and 256: 7.3, 11.5 and 26.1 ms between
#   tokens (median; ML.ENERGY leaderboard, lm-arena-chat). That is 6.7 ms + 0.076 ms per request, of
#   which reading some 600 tokens of KV at 70 % of 3.35 TB/s takes 0.034 ms.
# Link: Mooncake measured 41 GB/s for one port of 400 Gb/s (164 GB/s for four), and 0.54 ms for the
#   KV of 128 tokens.
_H100_8B = TimingModel(
    prefill_tokens_per_s=24_000,
    prefill_step_s=0.004,
    prefill_s_per_pair=8.2e-10,
    decode_step_s=0.0067,
    decode_s_per_request=4.2e-5,
    decode_s_per_kv_token=5.6e-8,
    kv_bytes_per_token=131_072,
    link_bytes_per_s=41e9,
    link_latency_s=0.0005,
)
# Two H100 per node, a 70B model in fp8 (80 layers, 8 KV heads: 160 KiB of KV per token in fp8).
# Computed from the numbers above, not measured: there are 70 / 8 times as many FLOPs on two GPUs at
# twice the rate of bf16, a step reads 70 GB of weights at 70 % of 2 * 3.35 TB/s, and KV leaves
# through two ports.
_H100_70B = TimingModel(
    prefill_tokens_per_s=11_000,
    prefill_step_s=0.006,
    prefill_s_per_pair=2.0e-9,
    decode_step_s=0.015,
    decode_s_per_request=9e-5,
    decode_s_per_kv_token=3.5e-8,
    kv_bytes_per_token=163_840,
    link_bytes_per_s=82e9,
    link_latency_s=0.0005,
)

PRESETS: dict[str, TimingModel] = {"h100-8b": _H100_8B, "h100-70b": _H100_70B}


def preset(name: str) -> TimingModel:
    """Return the timing model of this name; raises ConfigError with the known names."""
    if name not in PRESETS:
        raise ConfigError(f"preset: must be one of {', '.join(PRESETS)}, got {name!r}")
    return PRESETS[name]
