"""The decoder-only transformer: builds its modules from a recipe, and computes steps.

Refuses to know: families, files, where weights come from.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from baton.api.errors import ConfigError
from baton.kv.layers import AnyKV, as_replicated, shared_layers
from models.base import AdapterSpan, ForwardContext, Rotations
from models.config import ModelConfig
from models.cpu.decode_tapes import DecodeTapes
from models.layers.attention import Attention
from models.layers.computing import Computing
from models.layers.embedding import LayerEnd, PerLayerEmbedding, look_up, rounded
from models.layers.gated_delta_net import GatedDeltaNet
from models.layers.latent_attention import LatentAttention
from models.layers.linear import LabelHead, keep_elements, keep_outputs
from models.layers.mamba2 import Mamba2
from models.layers.mlp import GatedMLP, SquaredReluMLP
from models.layers.moe import MlpAndExperts, SparseMoe
from models.layers.norm import NoNorm, RMSNorm
from models.layers.rotary import RotaryEmbedding
from models.layers.short_conv import GatedShortConv
from models.loading.text_parts import VISION
from models.parallel.group import ALONE, SINGLE_RANK, Collective, Ranks
from models.parallel.shards import Rank, Span, stage_layers
from models.recipe import (
    RELU2,
    AttentionSpec,
    DeltaNetSpec,
    ExpertsSpec,
    FeedForwardSpec,
    LatentSpec,
    Mamba2Spec,
    MlpAndExpertsSpec,
    ShortConvSpec,
)
from models.vision.layers import VisionEncoder


def make_mixer(config: ModelConfig, layer_index: int) -> nn.Module:
    """Make a layer's token mixer: attention, or a mixer with a recurrent state."""
    spec, hidden_size, eps = (
        config.layers[layer_index].mixer,
        config.hidden_size,
        config.rms_norm_eps,
    )
    match spec:
        case AttentionSpec():
            return Attention(spec, hidden_size, eps, layer_index)
        case LatentSpec():
            return LatentAttention(spec, hidden_size, layer_index)
        case Mamba2Spec():
            return Mamba2(spec, hidden_size, eps, layer_index)
        case DeltaNetSpec():
            return GatedDeltaNet(spec, hidden_size, eps, layer_index)
        case ShortConvSpec():
            return GatedShortConv(spec, layer_index)


def make_feed_forward(spec: FeedForwardSpec | None, config: ModelConfig) -> nn.Module | None:
    """Make the feed-forward part of a layer; None if the layer has no such part."""
    hidden_size = config.hidden_size
    if spec is None:
        return None
    if isinstance(spec, MlpAndExpertsSpec):
        return MlpAndExperts(spec, hidden_size, functools.partial(make_norm, config))
    if isinstance(spec, ExpertsSpec):
        return SparseMoe(spec, hidden_size)
    if spec.activation == RELU2:
        return SquaredReluMLP(hidden_size, spec.inner_size, bias=spec.bias)
    return GatedMLP(
        hidden_size,
        spec.inner_size,
        bias=spec.bias,
        activation=spec.activation,
        stored_joined=spec.stored_joined,
    )


def make_norm(config: ModelConfig, size: int | None = None) -> RMSNorm:
    """Make a norm of vectors of ``size``; by default, of the residual stream."""
    return RMSNorm(size or config.hidden_size, config.rms_norm_eps, config.recipe.norm_weight)


class DecoderLayer(nn.Module):
    """A mixer and possibly a feed-forward part on one residual stream, and their norms."""

    def __init__(self, config: ModelConfig, layer_index: int) -> None:
        super().__init__()
        self._residual_scale = config.recipe.residual_scale
        self.self_attn = make_mixer(config, layer_index)
        self.mlp = make_feed_forward(config.layers[layer_index].feed_forward, config)
        self.end = _make_end(config)

        def norm(name: str | None) -> RMSNorm | NoNorm:
            if name is None:
                return NoNorm()
            made = make_norm(config)
            self.add_module(name, made)
            return made

        # The layer is in a tuple, because torch would register modules in an attribute a second
        # time.
        norms = config.recipe.norms
        self._mixer_norms = norm(norms.before_mixer), norm(norms.after_mixer)
        if self.mlp is not None:
            last_norms = (norms.before_feed_forward, norms.after_feed_forward)
            self._feed_forward_norms = norm(last_norms[0]), norm(last_norms[1])
        # The ranks over which the mixer's results are summed, and the ranks over which the
        # feed-forward part's results are summed.
        self._mixer_group: Collective = SINGLE_RANK
        self._feed_forward_group: Collective = SINGLE_RANK

    def shard(self, group: Collective, expert_parallel: str) -> None:
        """Keep one rank's share of mixer and feed-forward part; keep an indivisible part whole."""
        rank = Rank(group.rank, group.size, expert_parallel)
        if _can_share(self.self_attn):
            cast("Shareable", self.self_attn).shard(rank)
            self._mixer_group = group
        if self.mlp is not None and _can_share(self.mlp):
            cast("Shareable", self.mlp).shard(rank)
            if isinstance(self.mlp, MlpAndExperts):
                self.mlp.group = group
            else:
                self._feed_forward_group = group

    def forward(
        self,
        delta: Tensor,
        residual: Tensor | None,
        rotations: Rotations,
        step: ForwardContext,
        vectors: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute one layer. The next layer's norm adds the result to the stream, in one operation.

        Args:
            delta: ``[num_tokens, hidden_size]``, the previous layer's result, still to be added to
                the residual stream.
            residual: ``[num_tokens, hidden_size]``, the stream without ``delta``; None: ``delta``
                is the stream.
            rotations: cosines and sines of the step.
            step: the forward context.
            vectors: ``[num_tokens, size]``, the tokens' per-layer embeddings for this layer.

        Returns:
            ``(delta, residual)`` for the next layer.
        """
        before, after = self._mixer_norms
        if residual is None:
            normed, residual = before(delta), delta
        else:
            normed, residual = before.add(delta, residual, self._residual_scale)
        attended = self._mixer_group.all_reduce(self.self_attn(normed, rotations, step))
        attended = after(attended)  # [num_tokens, hidden_size]
        if self.mlp is None:
            return self._close(attended, residual, vectors)
        before, after = self._feed_forward_norms
        normed, residual = before.add(attended, residual, self._residual_scale)
        stream = (residual,) if isinstance(self.mlp, MlpAndExperts) else ()
        fed = self._feed_forward_group.all_reduce(self.mlp(normed, *stream))
        return self._close(after(fed), residual, vectors)

    def _close(
        self, delta: Tensor, residual: Tensor, vectors: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        if self.end is None:
            return delta, residual
        return self.end(delta, residual, self._residual_scale, vectors), None


def _make_end(config: ModelConfig) -> LayerEnd | None:
    recipe = config.recipe
    if recipe.per_layer_embedding is None and not recipe.layer_scalars:
        return None
    return LayerEnd(
        recipe.per_layer_embedding,
        config.hidden_size,
        make_norm(config),
        has_scalar=recipe.layer_scalars,
    )


class Shareable(Protocol):
    """A part of a layer that ranks may divide. The sum of their results is the part's result.

    Attributes:
        can_share: whether ranks can divide this part; if not, each rank computes all of it.
    """

    can_share: bool

    def shard(self, rank: Rank) -> None:
        """Keep one rank's share; call before weights are loaded.

        Raises:
            ConfigError: the share would be empty.
        """
        ...


def _can_share(part: nn.Module) -> bool:
    return bool(getattr(part, "can_share", False))


class Elsewhere(nn.Module):
    """A placeholder for a module that this pipeline stage (or this drafter) does not have."""


class Decoder(Computing):
    """Embedding, layers and last norm: the modules that checkpoints name ``model.``.

    Attributes:
        dtype: dtype of activations; set when weights are loaded.
    """

    dtype = torch.float32

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        recipe = config.recipe
        self.embed_tokens: nn.Module = nn.Embedding(config.vocab_size, config.hidden_size)
        self.rotary_embs = nn.ModuleList(
            RotaryEmbedding(rope, config.rotated_head_dim(index), config.max_model_len)
            for index, rope in enumerate(recipe.ropes)
        )
        self.layers = nn.ModuleList(
            DecoderLayer(config, index) for index in range(config.num_layers)
        )
        self.norm = make_norm(config)
        self.per_layer = _make_per_layer_embedding(config)
        self._kv_sources = shared_layers([layer.mixer.kv for layer in config.layers])
        for layer, source in self._kv_sources.items():
            _attention(self.layers[layer]).read_kv_of(_attention(self.layers[source]))
        self._embedding_scale = recipe.embedding_scale
        self._residual_scale = recipe.residual_scale
        self.tapes: DecodeTapes | None = None  # set if weights are packed for a CPU
        self._ranks = ALONE
        self._vocab = (0, config.vocab_size)
        self._hidden_size = config.hidden_size
        # Size of a token's vector for each layer; 0: the model has no per-layer embeddings.
        self._vector_size = 0
        if recipe.per_layer_embedding is not None:
            self._vector_size = recipe.per_layer_embedding.size
        self._own_layers = range(config.num_layers)
        # For drafters that read hidden states between layers: the layers whose inputs are kept, and
        # the latest step's inputs of these layers, `[num_tokens, len(state_layers) * hidden_size]`.
        self.state_layers: tuple[int, ...] = ()
        self.states: Tensor | None = None

    def shard(self, ranks: Ranks, vocab: Span, *, needs_embedding: bool) -> None:
        """Keep one rank's share of layers and vocabulary; call before weights are loaded."""
        self._ranks = ranks
        self._vocab = vocab
        self._own_layers = range(
            *stage_layers(len(self.layers), ranks.stage, ranks.num_stages, ranks.stage_layers)
        )
        for reader in self._own_layers:
            if (source := self._kv_sources.get(reader, reader)) not in self._own_layers:
                raise ConfigError(
                    f"pipeline_layers: layer {reader} reads the keys and values of layer {source}, "
                    f"so one stage must have both"
                )
        if needs_embedding:
            keep_elements(self.embed_tokens, "weight", vocab)
        else:
            self.embed_tokens = Elsewhere()
        if not ranks.is_first_stage:
            self.per_layer = None
        elif self.per_layer is not None:
            self.per_layer.shard(ranks.group)
        for index, layer in enumerate(self.layers):
            if index not in self._own_layers:
                self.layers[index] = Elsewhere()
            elif ranks.group.size > 1:
                cast("DecoderLayer", layer).shard(ranks.group, ranks.expert_parallel)

    def forward(self, input_ids: Tensor, context: ForwardContext) -> Tensor:
        """Compute one step, and write keys and values into the cache; see ``CausalLM.forward``."""
        if self._ranks.is_first_stage:
            delta = self.embed(input_ids)  # [num_tokens, hidden_size]
            for places, embeddings in context.images:
                delta.index_copy_(0, places, embeddings[:, : self._hidden_size].to(delta.dtype))
            inputs = [delta]
            if self.per_layer is not None:
                places_of_images = [places for places, _ in context.images]
                inputs.append(self.per_layer(input_ids, delta, places_of_images))
        else:
            inputs = self._take_over(input_ids)
            delta = inputs[0]
        for rotary_emb in self.rotary_embs:  # each [num_tokens, rotary_dim]
            inputs += rotary_emb(context.positions, context.max_seq_len, delta.dtype)
        if self.tapes is None or context.images:
            results = self._layers(inputs, context)
        else:
            results = self.tapes.run(self._layers, inputs, context)
        hidden, *states = results
        self.states = torch.cat(states, dim=-1) if states else None
        if not self._ranks.is_last_stage:
            sent = hidden
            if self._vector_size:
                later = inputs[1][:, len(self._own_layers) * self._vector_size :]
                sent = torch.cat((hidden, later), dim=1)
            self._ranks.pass_on(sent)
        return hidden

    def _take_over(self, input_ids: Tensor) -> list[Tensor]:
        """Receive the stream, and the vectors of this and later stages' layers."""
        num_layers = len(self.layers) - self._own_layers.start
        sizes = [self._hidden_size, num_layers * self._vector_size]
        shape = (len(input_ids), sum(sizes))
        empty = torch.empty(shape, dtype=self.dtype, device=input_ids.device)
        received = self._ranks.take_over(empty)
        if not self._vector_size:
            return [received]
        return [part.contiguous() for part in torch.split(received, sizes, dim=1)]

    @property
    def num_stages(self) -> int:
        """Return the number of pipeline stages that share the layers."""
        return self._ranks.num_stages

    def kept_states(self) -> Tensor:
        """Return the latest step's hidden states before each layer in ``state_layers``."""
        assert self.states is not None, "none are kept"
        return self.states

    def embed(self, input_ids: Tensor) -> Tensor:
        """Return the tokens' embeddings; ranks that divide the vocabulary sum their results."""
        embedded = look_up(self.embed_tokens, input_ids, self._vocab, self._ranks.group)
        if self._embedding_scale != 1.0:
            embedded = embedded * rounded(self._embedding_scale, embedded.dtype)
        return embedded

    def _layers(self, inputs: Sequence[Tensor], context: ForwardContext) -> tuple[Tensor, ...]:
        """Run this stage's layers; the last stage also applies the final norm.

        Returns hidden states, ``[num_tokens, hidden_size]``. The last stage also returns,
        in the same shape, the hidden states before each layer in ``state_layers``.
        """
        delta, *angles = inputs
        vectors = angles.pop(0) if self._vector_size else None
        rotations = tuple(zip(angles[::2], angles[1::2], strict=True))
        residual: Tensor | None = None
        states: list[Tensor] = []
        for index in self._own_layers:
            if index in self.state_layers:
                states.append(self._stream(delta, residual))
            own = None
            if vectors is not None:
                first = (index - self._own_layers.start) * self._vector_size
                own = vectors[:, first : first + self._vector_size]
            delta, residual = self.layers[index](delta, residual, rotations, context, own)
            for places, embeddings in context.images:
                first = (index + 1) * self._hidden_size
                # DeepStack: add the image's vectors for this layer to the residual stream
                if first < embeddings.shape[1]:
                    more = embeddings[:, first : first + self._hidden_size]
                    delta.index_add_(0, places, more.to(delta.dtype))
            if context.after_layer is not None:
                context.after_layer(index)
        if not self._ranks.is_last_stage:
            return (self._stream(delta, residual),)
        if residual is None:
            return self.norm(delta), *states
        return self.norm.add(delta, residual, self._residual_scale)[0], *states

    def _stream(self, delta: Tensor, residual: Tensor | None) -> Tensor:
        """Return the residual stream between two layers."""
        if residual is None:
            return delta
        return self.ops.scaled_add(delta, residual, self._residual_scale)


def _make_per_layer_embedding(config: ModelConfig) -> PerLayerEmbedding | None:
    spec = config.recipe.per_layer_embedding
    if spec is None:
        return None
    sizes = (config.vocab_size, config.hidden_size, config.num_layers)
    return PerLayerEmbedding(spec, *sizes, make_norm(config, spec.size))


def _attention(layer: nn.Module) -> Attention:
    found = cast("DecoderLayer", layer).self_attn
    assert isinstance(found, Attention), "only such layers share keys and values"
    return found


class AdaptedForward(Protocol):
    """Computes steps in which some tokens use adapters; `AdapterSlots` implements this."""

    def forward(self, input_ids: Tensor, context: ForwardContext) -> Tensor:
        """Compute one step, and write keys and values into the cache; see ``CausalLM.forward``."""
        ...

    def logits(self, hidden: Tensor, spans: tuple[AdapterSpan, ...]) -> Tensor:
        """Return the output head's results for ``[n, hidden_size]``.

        Args:
            spans: the rows that use adapters.

        """
        ...


class DecoderForCausalLM(Computing):
    """A ``CausalLM``: decoder and output head. Weights are not initialized until they are loaded.

    Args:
        config: the model's shape and recipe.

    Attributes:
        mapped_bytes: bytes of the weights that are mapped from a file in the user's cache.
        adapted: computes steps with adapters; None: adapters are disabled.
        vision: makes embeddings of images; None: this model computes no images.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.mapped_bytes = 0
        self.adapted: AdaptedForward | None = None
        self.vision: VisionEncoder | None = None
        recipe, first = config.recipe, config.num_layers
        mtp_layers = tuple(f"model.layers.{first + i}." for i in range(config.num_mtp_layers))
        self._ignored = recipe.ignored + mtp_layers
        self._logits_divisor = recipe.logits_divisor
        self._logits_soft_cap = recipe.logits_soft_cap
        self.model = Decoder(config)
        self.kv_layers: tuple[AnyKV, ...] = tuple(
            spec.mixer.kv
            if _can_share(cast("DecoderLayer", layer).self_attn)
            else as_replicated(spec.mixer.kv)
            for spec, layer in zip(config.layers, self.model.layers, strict=True)
        )
        self.lm_head: nn.Module | None = None  # None: tied to the embedding
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.score: nn.Module | None = None
        if config.num_labels:
            self.score = LabelHead(config.num_labels, config.hidden_size)
        self._group: Collective = SINGLE_RANK

    def shard(self, ranks: Ranks) -> None:
        """Keep one rank's share of the model; call before weights are loaded.

        All ranks of the last stage compute equal logits. Every rank of every stage has the whole
        vision encoder, because layers of later stages may add vectors of images, and because the
        last stage reports the images that could not be encoded.

        Raises:
            ConfigError: a stage has more ranks than heads, there are more stages than layers, or
                ranks cannot divide the experts as wanted.
        """
        if ranks.expert_parallel == "on" and self.config.experts is None:
            raise ConfigError("expert_parallel: the model has no experts to divide; use auto")
        self._group = group = ranks.group
        vocab = Rank(group.rank, group.size).span(self.config.vocab_size)
        is_tied = self.lm_head is None
        needs_embedding = ranks.is_first_stage or (ranks.is_last_stage and is_tied)
        self.model.shard(ranks, vocab, needs_embedding=needs_embedding)
        if not ranks.is_last_stage:
            self.lm_head = Elsewhere()
        elif self.lm_head is not None:
            assert isinstance(self.lm_head, nn.Linear)
            keep_outputs(self.lm_head, vocab)
        if not ranks.is_last_stage and self.score is not None:
            self.score = Elsewhere()

    @property
    def kv_scales(self) -> tuple[tuple[float, float], ...]:
        """Return each layer's scales ``(key, value)`` for a float8 KV cache."""
        mixers = [getattr(layer, "self_attn", None) for layer in self.model.layers]
        return tuple(
            (mixer.k_scale, mixer.v_scale) if isinstance(mixer, Attention) else (1.0, 1.0)
            for mixer in mixers
        )

    def checkpoint_name(self, name: str) -> str:
        """Return the name that checkpoints give to a parameter called ``name`` in Baton's model."""
        return name if name.startswith(VISION) else self.config.recipe.stored_name(name)

    def ignores_weight(self, name: str) -> bool:
        """Return whether a checkpoint may have a weight of this name that this model ignores.

        Examples are layers for multi-token prediction, which a drafter reads instead, and unused
        vision parts.
        """
        of_vision = () if self.vision is None else self.vision.ignored
        return name.startswith((*self._ignored, "mtp.", *(VISION + one for one in of_vision)))

    def forward(self, input_ids: Tensor, context: ForwardContext) -> Tensor:
        """Compute one step, and write keys and values into the cache; see ``CausalLM.forward``."""
        if context.adapters:
            assert self.adapted is not None, "no adapter is loaded"
            return self.adapted.forward(input_ids, context)
        hidden: Tensor = self.model(input_ids, context)  # [num_tokens, hidden_size]
        return hidden

    def compute_logits(self, hidden: Tensor, adapters: tuple[AdapterSpan, ...] = ()) -> Tensor:
        """Return the logits of hidden states, ``[n, vocab_size]``; see ``CausalLM``."""
        if adapters:
            assert self.adapted is not None, "no adapter is loaded"
            logits = self.adapted.logits(hidden, adapters)
        elif self.lm_head is None:
            embedding = self.model.embed_tokens
            assert isinstance(embedding, nn.Embedding), "packed ones come with a head"
            logits = functional.linear(hidden, embedding.weight)  # [n, vocab_size]
        else:
            logits = self.lm_head(hidden)
        if self._group.size > 1:
            logits = self._gather(logits)
        if self._logits_divisor != 1.0:
            logits = logits / self._logits_divisor
        return (
            logits
            if self._logits_soft_cap is None
            else self.ops.soft_cap(logits, self._logits_soft_cap)
        )

    def compute_labels(self, hidden: Tensor) -> Tensor:
        """Return the classification head's logits, ``[n, num_labels]``."""
        assert self.score is not None, "there is no classification head"
        logits: Tensor = self.score(hidden)
        return logits

    def _gather(self, logits: Tensor) -> Tensor:
        """Join the logits of all ranks, whose shares may differ in size: `[n, vocab_size]`."""
        ranks = [Rank(rank, self._group.size) for rank in range(self._group.size)]
        sizes = [end - first for first, end in (r.span(self.config.vocab_size) for r in ranks)]
        most = max(sizes)
        padded = functional.pad(logits, (0, most - logits.shape[1])).contiguous()
        parts = self._group.all_gather(padded)
        return torch.cat([part[:, :size] for part, size in zip(parts, sizes, strict=True)], dim=1)
