"""Seed-OSS: a Llama whose attention may have biases before it, behind it, or both.

Refuses to know: how a decoder computes.
"""

from __future__ import annotations

from models.architectures.decoder import DecoderForCausalLM, DecoderOptions
from models.config import ModelConfig
from models.layers.attention import AttentionOptions


class SeedOssForCausalLM(DecoderForCausalLM):
    """Seed-OSS by ByteDance, whose modeling file is all that there is of a paper."""

    def __init__(self, config: ModelConfig) -> None:
        attention = AttentionOptions(
            qkv_bias=config.attention_bias, output_bias=config.attention_out_bias
        )
        super().__init__(config, DecoderOptions(attention, mlp_bias=config.mlp_bias))
