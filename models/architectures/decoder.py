"""The decoder-only transformer that Llama's descendants share; architecture files state variants.

Refuses to know: architecture names, files, weights' origin.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional

import baton_kernels as ops
from baton.kv_layers import LayerKV, PagedKV
from models.base import ForwardContext, Rotations
from models.config import ModelConfig
from models.cpu.decode_tapes import DecodeTapes
from models.layers.attention import Attention, AttentionOptions
from models.layers.mlp import GatedMLP
from models.layers.norm import NoNorm, NormWeight, RMSNorm
from models.layers.rotary import RotaryEmbedding
from models.rope_config import RopeConfig

# Makes a part of one layer, of the model's shape and the layer's index.
LayerPart = Callable[[ModelConfig, int], nn.Module]


@dataclass(frozen=True, slots=True)
class LayerNorms:
    """Where a layer has norms, each by its name in checkpoints; None: there is none.

    What is added to the residual stream goes through those behind a part.
    """

    before_mixer: str | None = "input_layernorm"
    after_mixer: str | None = None
    before_feed_forward: str | None = "post_attention_layernorm"
    after_feed_forward: str | None = None


@dataclass(frozen=True, slots=True)
class DecoderOptions:
    """The differences between the architectures.

    Attributes:
        attention: of the layers that `mixer` does not make.
        mlp_bias: of the feed-forward parts that `feed_forward` does not make.
        sliding_windows: of each layer that `mixer` does not make; None: no layer has one.
        kv_layers: what each layer keeps, where mixers do not all attend by keys and values of the
            config's heads; None: they do.
        mixer: makes what mixes the tokens of a layer, called as ``Attention`` is; None: attention.
        feed_forward: makes what follows, `[num_tokens, hidden_size]` to the same; None: a gated
            MLP.
        ropes: of the rotations that a step's layers choose from; None: the config's one.
        layer_ropes: which of them is each layer's; None: all take the first.
        norms: where a layer's norms stand.
        norm_weight: of all norms outside of attention.
        embedding_scale: what embeddings are multiplied with, rounded to their dtype.
        residual_scale: what each part's result is multiplied with, before it is added.
        logits_divisor: of the head's results.
        logits_soft_cap: see ``ops.soft_cap``, of the head's results; None: there is none.
        stored_joined: checkpoints have gate and up projections joined.
        stored_names: parts of parameters' names -> what checkpoints have in their place.
    """

    attention: AttentionOptions = field(default_factory=AttentionOptions)
    mlp_bias: bool = False
    sliding_windows: tuple[int | None, ...] | None = None
    kv_layers: tuple[LayerKV, ...] | None = None
    mixer: LayerPart | None = None
    feed_forward: LayerPart | None = None
    ropes: tuple[RopeConfig, ...] | None = None
    layer_ropes: tuple[int, ...] | None = None
    norms: LayerNorms = field(default_factory=LayerNorms)
    norm_weight: NormWeight = NormWeight.OWN
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logits_divisor: float = 1.0
    logits_soft_cap: float | None = None
    stored_joined: bool = False
    stored_names: Mapping[str, str] = field(default_factory=dict)

    def make_mixer(self, config: ModelConfig, layer_index: int) -> nn.Module:
        """Make the part of a layer in which tokens see others."""
        if self.mixer is not None:
            return self.mixer(config, layer_index)
        windows = self.sliding_windows
        window = windows[layer_index] if windows else None
        rotation = self.layer_ropes[layer_index] if self.layer_ropes else 0
        return Attention(config, self.attention, layer_index, window, rotation)

    def make_feed_forward(self, config: ModelConfig, layer_index: int) -> nn.Module:
        """Make the part of a layer that takes each token alone."""
        if self.feed_forward is not None:
            return self.feed_forward(config, layer_index)
        return GatedMLP(
            config.hidden_size,
            config.intermediate_size,
            bias=self.mlp_bias,
            activation=config.activation,
            stored_joined=self.stored_joined,
        )

    def make_norm(self, config: ModelConfig) -> RMSNorm:
        """Make a norm of the residual stream, or of what is added to it."""
        return RMSNorm(config.hidden_size, config.rms_norm_eps, self.norm_weight)


class DecoderLayer(nn.Module):
    """Attention and feed-forward on one residual stream, with norms before or behind each."""

    def __init__(self, config: ModelConfig, options: DecoderOptions, layer_index: int) -> None:
        super().__init__()
        self._residual_scale = options.residual_scale
        self.self_attn = options.make_mixer(config, layer_index)
        self.mlp = options.make_feed_forward(config, layer_index)

        def norm(name: str | None) -> RMSNorm | NoNorm:
            if name is None:
                return NoNorm()
            made = options.make_norm(config)
            self.add_module(name, made)
            return made

        # A tuple: the modules are registered by the names above, and by no other.
        norms = options.norms
        self._mixer_norms = norm(norms.before_mixer), norm(norms.after_mixer)
        self._feed_forward_norms = norm(norms.before_feed_forward), norm(norms.after_feed_forward)

    def forward(
        self, delta: Tensor, residual: Tensor | None, rotations: Rotations, step: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        """Compute one layer; the addition of its result is left to the next norm, which fuses it.

        Args:
            delta: ``[num_tokens, hidden_size]``, what the layer before adds to the stream.
            residual: ``[num_tokens, hidden_size]``, the stream; None in the first layer.
            rotations: of the step.
            step: the forward context.

        Returns:
            ``(delta, residual)`` for the next layer.
        """
        before, after = self._mixer_norms
        if residual is None:
            normed, residual = before(delta), delta
        else:
            normed, residual = before.add(delta, residual, self._residual_scale)
        attended = after(self.self_attn(normed, rotations, step))  # [num_tokens, hidden_size]
        before, after = self._feed_forward_norms
        normed, residual = before.add(attended, residual, self._residual_scale)
        return after(self.mlp(normed)), residual


class Decoder(nn.Module):
    """Embedding, layers and last norm: everything that checkpoints keep under ``model.``."""

    def __init__(self, config: ModelConfig, options: DecoderOptions) -> None:
        super().__init__()
        self.embed_tokens: nn.Module = nn.Embedding(config.vocab_size, config.hidden_size)
        self.rotary_embs = nn.ModuleList(
            RotaryEmbedding(rope, config.head_dim, config.max_model_len)
            for rope in options.ropes or (config.rope,)
        )
        self.layers = nn.ModuleList(
            DecoderLayer(config, options, index) for index in range(config.num_layers)
        )
        self.norm = options.make_norm(config)
        self._embedding_scale = options.embedding_scale
        self._residual_scale = options.residual_scale
        self.tapes: DecodeTapes | None = None  # of a model that is packed for a CPU

    def forward(self, input_ids: Tensor, context: ForwardContext) -> Tensor:
        """See ``CausalLM.forward``."""
        delta: Tensor = self.embed_tokens(input_ids)  # [num_tokens, hidden_size]
        if self._embedding_scale != 1.0:
            delta = delta * _rounded(self._embedding_scale, delta.dtype)
        inputs = [delta]
        for rotary_emb in self.rotary_embs:  # each [num_tokens, rotary_dim]
            inputs += rotary_emb(context.positions, context.max_seq_len, delta.dtype)
        if self.tapes is None:
            return self._layers(inputs, context)
        return self.tapes.run(self._layers, inputs, context)

    def _layers(self, inputs: Sequence[Tensor], context: ForwardContext) -> Tensor:
        """Compute all layers: ``[num_tokens, hidden_size]``, after the last norm."""
        delta, *angles = inputs
        rotations = tuple(zip(angles[::2], angles[1::2], strict=True))
        residual: Tensor | None = None
        for index, layer in enumerate(self.layers):
            delta, residual = layer(delta, residual, rotations, context)
            if context.after_layer is not None:
                context.after_layer(index)
        assert residual is not None, "a decoder has at least one layer"
        return self.norm.add(delta, residual, self._residual_scale)[0]


@functools.cache
def _rounded(number: float, dtype: torch.dtype) -> float:
    """Round to a tensor's dtype, as Hugging Face rounds what it multiplies embeddings with."""
    return float(torch.tensor(number, dtype=dtype, device="cpu"))


class DecoderForCausalLM(nn.Module):
    """A ``CausalLM``: the decoder and the output head. Weights are uninitialized until loaded.

    Args:
        config: the model's shape.
        options: the architecture's variant.
    """

    def __init__(self, config: ModelConfig, options: DecoderOptions) -> None:
        super().__init__()
        self.config = config
        self.kv_layers = options.kv_layers or tuple(
            PagedKV(config.num_kv_heads, config.head_dim, window)
            for window in options.sliding_windows or (None,) * config.num_layers
        )
        first, num_mtp_layers = config.num_layers, config.num_mtp_layers
        self._mtp_layers = tuple(f"model.layers.{first + i}." for i in range(num_mtp_layers))
        self._stored_names = options.stored_names
        self._logits_divisor = options.logits_divisor
        self._logits_soft_cap = options.logits_soft_cap
        self.model = Decoder(config, options)
        self.lm_head: nn.Module | None = None  # None: the embedding is the head (tied)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    @property
    def kv_scales(self) -> tuple[tuple[float, float], ...]:
        """See ``CausalLM.kv_scales``."""
        mixers = [layer.self_attn for layer in self.model.layers]
        return tuple(
            (mixer.k_scale, mixer.v_scale) if isinstance(mixer, Attention) else (1.0, 1.0)
            for mixer in mixers
        )

    def checkpoint_name(self, name: str) -> str:
        """Return how checkpoints call the parameter that is ``name`` here; others override it."""
        for ours, theirs in self._stored_names.items():
            name = name.replace(ours, theirs)
        return name

    def ignores_weight(self, name: str) -> bool:
        """Say whether a checkpoint may have this weight, which nothing here reads.

        These are layers that predict several tokens: nothing here drafts with them.
        """
        return name.startswith(self._mtp_layers)

    def forward(self, input_ids: Tensor, context: ForwardContext) -> Tensor:
        """See ``CausalLM.forward``."""
        hidden: Tensor = self.model(input_ids, context)  # [num_tokens, hidden_size]
        return hidden

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """See ``CausalLM.compute_logits``."""
        if self.lm_head is None:
            embedding = self.model.embed_tokens
            assert isinstance(embedding, nn.Embedding), "packed ones come with a head"
            logits = functional.linear(hidden, embedding.weight)  # [n, vocab_size]
        else:
            logits = self.lm_head(hidden)
        if self._logits_divisor != 1.0:
            logits = logits / self._logits_divisor
        return (
            logits if self._logits_soft_cap is None else ops.soft_cap(logits, self._logits_soft_cap)
        )
