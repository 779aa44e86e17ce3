"""gpt-oss: experts with clamped gates, a sink in each head, a window in every second layer.

Refuses to know: how experts compute, how a sink is attended to.
"""

from __future__ import annotations

from models.architectures.decoder import DecoderForCausalLM, DecoderOptions
from models.config import ModelConfig
from models.layers.attention import AttentionOptions
from models.layers.moe import feed_forward
from models.layers.norm import NormWeight
from models.layers.windows import windows_by_pattern


class GptOssForCausalLM(DecoderForCausalLM):
    """gpt-oss: OpenAI, arXiv:2508.10925."""

    def __init__(self, config: ModelConfig) -> None:
        bias = config.attention_bias
        options = DecoderOptions(
            attention=AttentionOptions(
                qkv_bias=bias, output_bias=bias, sinks=config.attention_sinks
            ),
            feed_forward=feed_forward,
            sliding_windows=windows_by_pattern(config),
            norm_weight=NormWeight.WIDE,
            stored_names={".mlp.gate.": ".mlp.router."},
        )
        super().__init__(config, options)
