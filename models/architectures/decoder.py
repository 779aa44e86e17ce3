"""The decoder-only transformer that Llama's descendants share; architecture files state variants.

Refuses to know: architecture names, files, weights' origin.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

from torch import Tensor, nn
from torch.nn import functional

from models.base import ForwardContext
from models.config import ModelConfig
from models.cpu.decode_tapes import DecodeTapes
from models.layers.attention import Attention, AttentionOptions
from models.layers.mlp import GatedMLP
from models.layers.norm import RMSNorm
from models.layers.rotary import RotaryEmbedding


@dataclass(frozen=True, slots=True)
class DecoderOptions:
    """The differences between the architectures."""

    attention: AttentionOptions = field(default_factory=AttentionOptions)
    mlp_bias: bool = False
    sliding_windows: tuple[int | None, ...] | None = None  # per layer; None: no layer has one


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each behind a norm (pre-norm), on one residual stream."""

    def __init__(self, config: ModelConfig, options: DecoderOptions, layer_index: int) -> None:
        super().__init__()
        windows = options.sliding_windows
        window = windows[layer_index] if windows else None
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, options.attention, layer_index, window)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, bias=options.mlp_bias)

    def forward(
        self, delta: Tensor, residual: Tensor | None, cos: Tensor, sin: Tensor, step: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        """Compute one layer; the addition of its result is left to the next norm, which fuses it.

        Args:
            delta: ``[num_tokens, hidden_size]``, what the layer before adds to the stream.
            residual: ``[num_tokens, hidden_size]``, the stream; None in the first layer.
            cos: ``[num_tokens, rotary_dim]``.
            sin: ``[num_tokens, rotary_dim]``.
            step: the forward context.

        Returns:
            ``(delta, residual)`` for the next layer.
        """
        if residual is None:
            normed, residual = self.input_layernorm(delta), delta
        else:
            normed, residual = self.input_layernorm.add(delta, residual)
        attended = self.self_attn(normed, cos, sin, step)  # [num_tokens, hidden_size]
        normed, residual = self.post_attention_layernorm.add(attended, residual)
        return self.mlp(normed), residual


class Decoder(nn.Module):
    """Embedding, layers and last norm: everything that checkpoints keep under ``model.``."""

    def __init__(self, config: ModelConfig, options: DecoderOptions) -> None:
        super().__init__()
        self.embed_tokens: nn.Module = nn.Embedding(config.vocab_size, config.hidden_size)
        self.rotary_emb = RotaryEmbedding(config.rope, config.head_dim, config.max_model_len)
        self.layers = nn.ModuleList(
            DecoderLayer(config, options, index) for index in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.tapes: DecodeTapes | None = None  # of a model that is packed for a CPU

    def forward(self, input_ids: Tensor, context: ForwardContext) -> Tensor:
        """See ``CausalLM.forward``."""
        delta: Tensor = self.embed_tokens(input_ids)  # [num_tokens, hidden_size]
        # each [num_tokens, rotary_dim]
        cos, sin = self.rotary_emb(context.positions, context.max_seq_len, delta.dtype)
        if self.tapes is None:
            return self._layers(delta, cos, sin, context)
        return self.tapes.run(self._layers, (delta, cos, sin), context)

    def _layers(self, delta: Tensor, cos: Tensor, sin: Tensor, context: ForwardContext) -> Tensor:
        """Compute all layers: ``[num_tokens, hidden_size]``, after the last norm."""
        residual: Tensor | None = None
        for index, layer in enumerate(self.layers):
            delta, residual = layer(delta, residual, cos, sin, context)
            if context.after_layer is not None:
                context.after_layer(index)
        assert residual is not None, "a decoder has at least one layer"
        return self.norm.add(delta, residual)[0]


class DecoderForCausalLM(nn.Module):
    """A ``CausalLM``: the decoder and the output head. Weights are uninitialized until loaded.

    Args:
        config: the model's shape.
        options: the architecture's variant.
    """

    def __init__(self, config: ModelConfig, options: DecoderOptions) -> None:
        super().__init__()
        self.config = config
        self.sliding_windows = options.sliding_windows or (None,) * config.num_layers
        self.model = Decoder(config, options)
        self.lm_head: nn.Module | None = None  # None: the embedding is the head (tied)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    @property
    def kv_scales(self) -> tuple[tuple[float, float], ...]:
        """See ``CausalLM.kv_scales``."""
        layers = [cast(DecoderLayer, layer).self_attn for layer in self.model.layers]
        return tuple((layer.k_scale, layer.v_scale) for layer in layers)

    def forward(self, input_ids: Tensor, context: ForwardContext) -> Tensor:
        """See ``CausalLM.forward``."""
        hidden: Tensor = self.model(input_ids, context)  # [num_tokens, hidden_size]
        return hidden

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """See ``CausalLM.compute_logits``."""
        if self.lm_head is None:
            embedding = cast(nn.Embedding, self.model.embed_tokens)
            return functional.linear(hidden, embedding.weight)  # [n, vocab_size]
        logits: Tensor = self.lm_head(hidden)
        return logits
