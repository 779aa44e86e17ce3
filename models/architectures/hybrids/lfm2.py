"""LFM2: short convolutions in most layers, attention in some. Refuses to know: how they compute."""

from __future__ import annotations

from torch import Tensor, nn

from baton.kv.layers import LayerKV, PagedKV, StateArray, StateKV
from models.architectures.decoder import DecoderForCausalLM, DecoderOptions
from models.base import ForwardContext, Rotations
from models.config import ModelConfig
from models.layers.attention import Attention, AttentionOptions
from models.layers.short_conv import ShortConv

_CONV = "conv"
# Of a layer: how a part is called here -> in checkpoints.
_NAMES = {
    ".input_layernorm.": ".operator_norm.",
    ".post_attention_layernorm.": ".ffn_norm.",
    ".mlp.gate_proj.": ".feed_forward.w1.",
    ".mlp.up_proj.": ".feed_forward.w3.",
    ".mlp.down_proj.": ".feed_forward.w2.",
    ".self_attn.o_proj.": ".self_attn.out_proj.",
    ".self_attn.q_norm.": ".self_attn.q_layernorm.",
    ".self_attn.k_norm.": ".self_attn.k_layernorm.",
    "model.norm.": "model.embedding_norm.",
}


class GatedShortConv(nn.Module):
    """``out(C * conv(B * x))`` with ``B, C, x`` projections of the input.

    Args:
        config: the model's shape.
        layer_index: which layer of the cache is this one's.
    """

    def __init__(self, config: ModelConfig, layer_index: int) -> None:
        super().__init__()
        assert config.short_conv is not None
        size, bias = config.hidden_size, config.short_conv.bias
        self._layer_index = layer_index
        self.in_proj = nn.Linear(size, 3 * size, bias=bias)
        self.conv = ShortConv(size, config.short_conv.kernel_size, bias=bias, has_silu=False)
        self.out_proj = nn.Linear(size, size, bias=bias)

    def forward(self, hidden: Tensor, rotations: Rotations, context: ForwardContext) -> Tensor:
        """Mix ``[num_tokens, hidden_size]``, normalized, into the same; rotations are not used."""
        metadata, (states,) = context.state_layer(self._layer_index)
        in_gate, out_gate, x = self.in_proj(hidden).chunk(3, dim=-1)  # [num_tokens, hidden_size]
        mixed = self.conv(x, states, metadata, in_gate=in_gate, out_gate=out_gate)
        out: Tensor = self.out_proj(mixed)
        return out


class Lfm2ForCausalLM(DecoderForCausalLM):
    """LFM2: Amini et al., arXiv:2511.23404."""

    def __init__(self, config: ModelConfig) -> None:
        assert config.short_conv is not None
        assert config.layer_types is not None
        attention = AttentionOptions(qk_norm=True)
        state = StateKV((StateArray((config.hidden_size, config.short_conv.kernel_size - 1)),))
        paged = PagedKV(config.num_kv_heads, config.head_dim)
        self._is_conv = is_conv = [name == _CONV for name in config.layer_types]
        kv_layers: tuple[LayerKV, ...] = tuple(state if conv else paged for conv in is_conv)

        def make_mixer(config: ModelConfig, layer_index: int) -> nn.Module:
            if is_conv[layer_index]:
                return GatedShortConv(config, layer_index)
            return Attention(config, attention, layer_index, None)

        super().__init__(config, DecoderOptions(attention, kv_layers=kv_layers, mixer=make_mixer))

    def checkpoint_name(self, name: str) -> str:
        """See ``DecoderForCausalLM.checkpoint_name``."""
        words = name.split(".")
        if words[1] == "layers" and self._is_conv[int(words[2])]:
            name = name.replace(".self_attn.", ".conv.")
        for ours, theirs in _NAMES.items():
            name = name.replace(ours, theirs)
        return name
