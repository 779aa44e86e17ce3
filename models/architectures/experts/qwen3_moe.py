"""Qwen3 with experts: the attention of Qwen3. Refuses to know: how experts compute."""

from __future__ import annotations

from models.architectures.decoder import DecoderForCausalLM, DecoderOptions
from models.config import ModelConfig
from models.layers.attention import AttentionOptions
from models.layers.moe import feed_forward


class Qwen3MoeForCausalLM(DecoderForCausalLM):
    """Qwen3 with experts: Yang et al., arXiv:2505.09388."""

    def __init__(self, config: ModelConfig) -> None:
        bias = config.attention_bias
        attention = AttentionOptions(qkv_bias=bias, output_bias=bias, qk_norm=True)
        window = config.sliding_window if config.use_sliding_window else None
        windows = (window,) * config.num_layers  # as transformers has it; no layer types
        options = DecoderOptions(attention, sliding_windows=windows, feed_forward=feed_forward)
        super().__init__(config, options)
