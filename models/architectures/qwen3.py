"""Qwen3, dense: a norm on each query and key head. Refuses to know: how a decoder computes."""

from __future__ import annotations

from models.architectures.decoder import DecoderForCausalLM, DecoderOptions
from models.config import ModelConfig
from models.layers.attention import AttentionOptions
from models.layers.windows import windows_of_some_layers


class Qwen3ForCausalLM(DecoderForCausalLM):
    """Qwen3: Yang et al., arXiv:2505.09388."""

    def __init__(self, config: ModelConfig) -> None:
        bias = config.attention_bias
        attention = AttentionOptions(qkv_bias=bias, output_bias=bias, qk_norm=True)
        windows = windows_of_some_layers(config)
        super().__init__(config, DecoderOptions(attention, sliding_windows=windows))
