"""Granite 4 with states: Mamba 2 in most layers, Granite's attention in others, experts or none.

Refuses to know: how states, attention and experts compute.
"""

from __future__ import annotations

from torch import nn

from models.architectures.decoder import DecoderOptions
from models.architectures.hybrids.bamba import MambaForCausalLM, mamba_layers
from models.config import ModelConfig
from models.layers import moe
from models.layers.attention import Attention, AttentionOptions
from models.layers.mamba2 import Mamba2
from models.rope_config import NO_ROPE

_NAMES = {
    ".mlp.gate.": ".block_sparse_moe.router.layer.",
    ".mlp.shared_expert.gate_up_proj.": ".shared_mlp.input_linear.",
    ".mlp.shared_expert.down_proj.": ".shared_mlp.output_linear.",
    ".mlp.gate_up_proj.": ".shared_mlp.input_linear.",
    ".mlp.down_proj.": ".shared_mlp.output_linear.",
}


class GraniteMoeHybridForCausalLM(MambaForCausalLM):
    """Granite 4.0: IBM, huggingface.co/blog/ibm-granite (2025)."""

    def __init__(self, config: ModelConfig) -> None:
        bias = config.attention_bias
        attention = AttentionOptions(
            qkv_bias=bias, output_bias=bias, scale=config.attention_multiplier
        )

        def make_mixer(config: ModelConfig, layer_index: int) -> nn.Module:
            if config.attends(layer_index):
                return Attention(config, attention, layer_index, None)
            assert config.mamba2 is not None
            return Mamba2(config.mamba2, config.hidden_size, config.rms_norm_eps, layer_index)

        turns = config.no_rope_layers is None or any(config.no_rope_layers)
        options = DecoderOptions(
            mixer=make_mixer,
            feed_forward=None if config.moe is None else moe.feed_forward,
            kv_layers=mamba_layers(config),
            ropes=(config.rope if turns else NO_ROPE,),
            embedding_scale=config.embedding_multiplier,
            residual_scale=config.residual_multiplier,
            logits_divisor=config.logits_scaling,
            stored_joined=True,
            stored_names=_NAMES,
        )
        super().__init__(config, options)
