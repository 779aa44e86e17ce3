"""Phi-3, Granite, SmolLM3, GLM-4, OLMo 2 and 3: each is a Llama but for one thing.

Refuses to know: how a decoder computes.
"""

from __future__ import annotations

from models.architectures.decoder import DecoderForCausalLM, DecoderOptions, LayerNorms
from models.config import ModelConfig
from models.layers.attention import AttentionOptions
from models.layers.norm import NormWeight
from models.layers.windows import windows_by_pattern, windows_of_some_layers
from models.rope_config import NO_ROPE


class Phi3ForCausalLM(DecoderForCausalLM):
    """Phi-3: Abdin et al., arXiv:2404.14219."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(
            config,
            DecoderOptions(
                attention=AttentionOptions(stored_joined=True),
                sliding_windows=(config.sliding_window,) * config.num_layers,
                stored_joined=True,
            ),
        )


class GraniteForCausalLM(DecoderForCausalLM):
    """Granite: arXiv:2408.13359, whose multipliers are muP's (Yang et al., arXiv:2203.03466)."""

    def __init__(self, config: ModelConfig) -> None:
        bias = config.attention_bias
        options = DecoderOptions(
            attention=AttentionOptions(
                qkv_bias=bias, output_bias=bias, scale=config.attention_multiplier
            ),
            mlp_bias=config.mlp_bias,
            embedding_scale=config.embedding_multiplier,
            residual_scale=config.residual_multiplier,
            logits_divisor=config.logits_scaling,
        )
        super().__init__(config, options)


class SmolLM3ForCausalLM(DecoderForCausalLM):
    """SmolLM3, with layers as in Yang et al., arXiv:2501.18795."""

    def __init__(self, config: ModelConfig) -> None:
        bias, interval = config.attention_bias, config.no_rope_layer_interval
        turning = config.no_rope_layers or tuple(
            int((index + 1) % interval != 0) for index in range(config.num_layers)
        )
        windows = windows_of_some_layers(config)
        if config.layer_types is None and config.use_sliding_window:
            windows = tuple(None if turns else config.sliding_window for turns in turning)
        options = DecoderOptions(
            attention=AttentionOptions(qkv_bias=bias, output_bias=bias),
            mlp_bias=config.mlp_bias,
            sliding_windows=windows,
            ropes=(config.rope, NO_ROPE),
            layer_ropes=tuple(1 - turns for turns in turning),
        )
        super().__init__(config, options)


class GlmForCausalLM(DecoderForCausalLM):
    """GLM-4 of 2024: Team GLM, arXiv:2406.12793; half of a head turns."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, _glm(config, LayerNorms()))


class Glm4ForCausalLM(DecoderForCausalLM):
    """GLM-4 and Z1 of 2025: norms behind each part, too."""

    def __init__(self, config: ModelConfig) -> None:
        norms = LayerNorms(
            after_mixer="post_self_attn_layernorm", after_feed_forward="post_mlp_layernorm"
        )
        super().__init__(config, _glm(config, norms))


def _glm(config: ModelConfig, norms: LayerNorms) -> DecoderOptions:
    return DecoderOptions(
        attention=AttentionOptions(qkv_bias=config.attention_bias, stored_in_pairs=True),
        norms=norms,
        stored_joined=True,
    )


_OLMO_NORMS = LayerNorms(
    before_mixer=None,
    after_mixer="post_attention_layernorm",
    before_feed_forward=None,
    after_feed_forward="post_feedforward_layernorm",
)


class Olmo2ForCausalLM(DecoderForCausalLM):
    """OLMo 2: arXiv:2501.00656."""

    def __init__(self, config: ModelConfig) -> None:
        options = DecoderOptions(
            attention=_olmo_attention(config), norms=_OLMO_NORMS, norm_weight=NormWeight.WIDE
        )
        super().__init__(config, options)


class Olmo3ForCausalLM(DecoderForCausalLM):
    """OLMo 3: three layers with a window, which turn unscaled, to one without."""

    def __init__(self, config: ModelConfig) -> None:
        windows = windows_by_pattern(config)
        assert config.sliding_rope is not None, "its dialect reads one"
        options = DecoderOptions(
            attention=_olmo_attention(config),
            sliding_windows=windows,
            ropes=(config.rope, config.sliding_rope),
            layer_ropes=tuple(int(window is not None) for window in windows),
            norms=_OLMO_NORMS,
            norm_weight=NormWeight.WIDE,
        )
        super().__init__(config, options)


def _olmo_attention(config: ModelConfig) -> AttentionOptions:
    return AttentionOptions(
        qkv_bias=config.attention_bias,
        output_bias=config.attention_bias,
        qk_norm_of_all_heads=True,
        norm_weight=NormWeight.WIDE,
    )
