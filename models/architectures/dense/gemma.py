"""Gemma 2 and 3, text: norms on both sides of each part, soft caps, windows in most layers.

Refuses to know: how a decoder computes.
"""

from __future__ import annotations

from models.architectures.decoder import DecoderForCausalLM, DecoderOptions, LayerNorms
from models.config import ModelConfig
from models.layers.attention import AttentionOptions
from models.layers.norm import NormWeight
from models.layers.windows import windows_by_pattern

_NORMS = LayerNorms(
    before_mixer="input_layernorm",
    after_mixer="post_attention_layernorm",
    before_feed_forward="pre_feedforward_layernorm",
    after_feed_forward="post_feedforward_layernorm",
)


class Gemma2ForCausalLM(DecoderForCausalLM):
    """Gemma 2: arXiv:2408.00118."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, _options(config, qk_norm=False))


class Gemma3ForCausalLM(DecoderForCausalLM):
    """Gemma 3: arXiv:2503.19786; layers with a window turn by a base of their own."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, _options(config, qk_norm=True))


def _options(config: ModelConfig, *, qk_norm: bool) -> DecoderOptions:
    bias, scalar = config.attention_bias, config.query_pre_attn_scalar
    windows = windows_by_pattern(config)
    local = config.sliding_rope
    return DecoderOptions(
        attention=AttentionOptions(
            qkv_bias=bias,
            output_bias=bias,
            qk_norm=qk_norm,
            norm_weight=NormWeight.OFFSET,
            scale=None if scalar is None else scalar**-0.5,
            soft_cap=config.attn_logit_softcapping,
        ),
        sliding_windows=windows,
        ropes=(config.rope,) if local is None else (config.rope, local),
        layer_ropes=tuple(int(local is not None and window is not None) for window in windows),
        norms=_NORMS,
        norm_weight=NormWeight.OFFSET,
        embedding_scale=config.hidden_size**0.5,
        logits_soft_cap=config.final_logit_softcapping,
    )
