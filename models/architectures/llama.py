"""Llama 1 to 3.3 and everything saved under that name. Refuses to know: how a decoder computes."""

from __future__ import annotations

from models.architectures.decoder import DecoderForCausalLM, DecoderOptions
from models.config import ModelConfig
from models.layers.attention import AttentionOptions


class LlamaForCausalLM(DecoderForCausalLM):
    """Llama: Touvron et al., arXiv:2302.13971; Grattafiori et al., arXiv:2407.21783."""

    def __init__(self, config: ModelConfig) -> None:
        bias = config.attention_bias
        attention = AttentionOptions(qkv_bias=bias, output_bias=bias)
        super().__init__(config, DecoderOptions(attention, mlp_bias=config.mlp_bias))
