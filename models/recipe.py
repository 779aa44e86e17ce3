"""Recipe: the parts of a model as plain values. A layer has a mixer and a feed-forward part.

A family's file makes the recipe from config.json, and `Decoder` builds modules from the recipe.
Each spec also tells which matrices a part has, and what a mixer keeps per token or request, so that
memory and work can be estimated.
Refuses to know: families, files, tensors (this module does not import torch).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

from baton.kv.layers import LatentKV, PagedKV, SharedKV, StateArray, StateKV
from models.rope_config import RopeConfig

# Shape of a weight matrix: (outputs, inputs).
Matrix = tuple[int, int]
# Squared ReLU, the activation of experts and MLPs without gates.
RELU2 = "relu2"


class NormWeight(Enum):
    """How a norm's weight is applied."""

    OWN = auto()  # in the model's dtype, applied after rounding the normalized value (Llama)
    WIDE = auto()  # in float32, applied before the result is rounded (OLMo 2)
    OFFSET = auto()  # like WIDE, but 1 is added to the weight (Gemma)


class Part:
    """A mixer or a feed-forward part; ``hidden_size`` is the size of the residual stream."""

    __slots__ = ()

    def matrices(self, hidden_size: int) -> list[Matrix]:
        """List the part's matrices that all tokens use and that may be quantized."""
        raise NotImplementedError

    def exact_matrices(self, hidden_size: int) -> list[Matrix]:
        """List the part's matrices that are never quantized."""
        return []

    def expert_matrices(self, hidden_size: int) -> list[Matrix]:
        """List the part's matrices that only some tokens use: those of routed experts."""
        return []


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec(Part):
    """Grouped-query attention.

    Attributes:
        num_heads, num_kv_heads, head_dim: shape of queries, and of keys and values.
        window: number of tokens that a token attends to, itself included; None: all.
        rotation: index of the layer's rotary embedding in the recipe's ``ropes``.
        qkv_bias: whether queries, keys and values have a bias.
        output_bias: whether the output projection has a bias.
        qk_norm: whether queries and keys have an RMSNorm, before the rotation.
        qk_norm_of_all_heads: whether one RMSNorm spans all query heads of a token, and one all key
            heads.
        norm_weight: how the norms' weights are applied.
        scale: factor of dot products; None: ``head_dim ** -0.5``.
        soft_cap: attention scores become ``soft_cap * tanh(score / soft_cap)``; None: no cap.
        sinks: whether each head has a learned sink.
        output_gate: whether the attention's results are multiplied by the sigmoid of a further
            projection of the input.
        stored_joined: whether checkpoints have one tensor for query, key and value projections.
        pair_dims: number of a head's dims in which checkpoints store the two dims of a RoPE pair
            next to each other (GPT-J style); None: the pairs' first dims come before the second
            dims. Not supported with ``stored_joined``.
        whole_images: whether the tokens of one image attend to each other in both directions.
        value_norm: whether values have an RMSNorm without a weight.
        values_from_keys: whether values are the keys before norm and rotation, so that checkpoints
            have no projection of values.
        kv_distance: the layer reads the keys and values of the layer this many layers before it,
            and has no projections of keys and values; None: it has keys and values of its own.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None = None
    rotation: int = 0
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    qk_norm_of_all_heads: bool = False
    norm_weight: NormWeight = NormWeight.OWN
    scale: float | None = None
    soft_cap: float | None = None
    sinks: bool = False
    output_gate: bool = False
    stored_joined: bool = False
    pair_dims: int | None = None
    whole_images: bool = False
    value_norm: bool = False
    values_from_keys: bool = False
    kv_distance: int | None = None

    @property
    def kv(self) -> PagedKV | SharedKV:
        """Return what the layer caches: keys and values of all tokens, or of those in a window."""
        if self.kv_distance is not None:
            return SharedKV(self.kv_distance)
        return PagedKV(self.num_kv_heads, self.head_dim, self.window)

    @property
    def attended_flops(self) -> int:
        """Return the FLOPs per pair of a token and a token that it attends to."""
        return 4 * self.num_heads * self.head_dim

    def matrices(self, hidden_size: int) -> list[Matrix]:
        """List the matrices that all tokens use and that may be quantized."""
        query, key = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        own = 2 * key if self.kv_distance is None else 0
        joined = query + own + (query if self.output_gate else 0)
        return [(joined, hidden_size), (hidden_size, query)]


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSpec(Part):
    """Multi-head latent attention (DeepSeek-AI, arXiv:2405.04434, section 2.1).

    Attributes:
        num_heads: number of heads; the keys and values of all heads come from one latent.
        q_lora_rank: rank of the queries' low-rank projection; None: a single projection.
        kv_lora_rank: size of a token's latent, without the rotated part.
        qk_nope_head_dim: size of the part of query and key heads that is not rotated.
        qk_rope_head_dim: size of the rotated part, which all key heads share.
        v_head_dim: size of a value head.
        rope_interleave: whether RoPE rotates adjacent pairs instead of halves.
        scale: factor of the dot products.
        bias: whether the low-rank and output projections have biases.
    """

    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rope_interleave: bool
    scale: float
    bias: bool = False

    @property
    def width(self) -> int:
        """Return the number of elements that the layer caches per token."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def kv(self) -> LatentKV:
        """Return what the layer caches: a latent of every token."""
        return LatentKV(self.width)

    @property
    def attended_flops(self) -> int:
        """Return the FLOPs per pair of a token and a token that it attends to.

        Scores and sums are computed in latents.
        """
        return 2 * self.num_heads * (self.width + self.kv_lora_rank)

    def matrices(self, hidden_size: int) -> list[Matrix]:
        """List the matrices that all tokens use and that may be quantized."""
        query = self.num_heads * (self.qk_nope_head_dim + self.qk_rope_head_dim)
        rank, output = self.q_lora_rank, self.num_heads * self.v_head_dim
        queries = [(query, hidden_size)] if rank is None else [(rank, hidden_size), (query, rank)]
        return [*queries, (self.width, hidden_size), (hidden_size, output)]

    def exact_matrices(self, hidden_size: int) -> list[Matrix]:
        """List the matrices that are never quantized: the one from latents to keys and values."""
        size = self.num_heads * (self.qk_nope_head_dim + self.v_head_dim)
        return [(size, self.kv_lora_rank)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Spec(Part):
    """Mamba 2's mixer (Dao and Gu, arXiv:2405.21060).

    Attributes:
        num_heads: number of heads of the state.
        head_dim: size of a head's inputs and results.
        num_groups: number of groups of adjacent heads that share the vectors ``b`` and ``c``.
        state_dim: number of rows of a head's state; each row has ``head_dim`` numbers.
        kernel_size: number of tokens that the convolution reads, including the token itself.
        conv_bias: whether the convolution has a bias.
        proj_bias: whether the projections have a bias.
    """

    num_heads: int
    head_dim: int
    num_groups: int
    state_dim: int
    kernel_size: int
    conv_bias: bool
    proj_bias: bool

    @property
    def inner_size(self) -> int:
        """Return the size of all heads' inputs together."""
        return self.num_heads * self.head_dim

    @property
    def num_channels(self) -> int:
        """Return the number of channels that the convolution reads."""
        return self.inner_size + 2 * self.num_groups * self.state_dim

    @property
    def kv(self) -> StateKV:
        """Return what the layer keeps per request: the convolution's inputs, the heads' states."""
        conv = StateArray((self.num_channels, self.kernel_size - 1))
        heads = StateArray((self.num_heads, self.state_dim, self.head_dim), "float32")
        return StateKV((conv, heads))

    def matrices(self, hidden_size: int) -> list[Matrix]:
        """List the matrices that all tokens use and that may be quantized."""
        size = self.inner_size + self.num_channels + self.num_heads
        return [(size, hidden_size), (hidden_size, self.inner_size)]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNetSpec(Part):
    """A gated delta net (Yang et al., arXiv:2412.06464).

    Attributes:
        num_key_heads: number of key heads; adjacent value heads share a key head.
        num_value_heads: number of value heads, each of which has a state.
        key_dim: size of a key, and number of rows of a head's state.
        value_dim: size of a head's values and results, and of a row of its state.
        kernel_size: number of tokens that the convolution reads, including the token itself.
        stored_by_key_head: whether checkpoints group the rows of projections by key head.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    kernel_size: int
    stored_by_key_head: bool = True

    @property
    def num_channels(self) -> int:
        """Return the number of channels that the convolution reads."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim

    @property
    def kv(self) -> StateKV:
        """Return what the layer keeps per request: the convolution's inputs, the heads' states."""
        conv = StateArray((self.num_channels, self.kernel_size - 1))
        heads = StateArray((self.num_value_heads, self.key_dim, self.value_dim), "float32")
        return StateKV((conv, heads))

    def matrices(self, hidden_size: int) -> list[Matrix]:
        """List the matrices that all tokens use and that may be quantized."""
        values = self.num_value_heads * self.value_dim
        size = self.num_channels + values + 2 * self.num_value_heads
        return [(size, hidden_size), (hidden_size, values)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvSpec(Part):
    """A gated short convolution (Amini et al., arXiv:2511.23404).

    Attributes:
        num_channels: size of input, output and residual stream.
        kernel_size: number of tokens that the convolution reads, including the token itself.
        bias: whether convolution and projections have biases.
    """

    num_channels: int
    kernel_size: int
    bias: bool

    @property
    def kv(self) -> StateKV:
        """Return what the layer keeps per request: the latest inputs of the convolution."""
        return StateKV((StateArray((self.num_channels, self.kernel_size - 1)),))

    def matrices(self, hidden_size: int) -> list[Matrix]:
        """List the matrices that all tokens use and that may be quantized."""
        return [(3 * hidden_size, hidden_size), (hidden_size, hidden_size)]


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpSpec(Part):
    """A feed-forward part that all tokens go through.

    Attributes:
        inner_size: intermediate size, after gating.
        bias: whether the projections have biases.
        activation: ``silu``, ``gelu_tanh`` or ``gelu`` of gates; ``relu2``: no gates, squared ReLU.
        stored_joined: whether checkpoints have one tensor for gate and up projection.
    """

    inner_size: int
    bias: bool = False
    activation: str = "silu"
    stored_joined: bool = False

    def matrices(self, hidden_size: int) -> list[Matrix]:
        """List the matrices that all tokens use and that may be quantized."""
        return mlp_matrices(hidden_size, self.inner_size, self.activation)


@dataclass(frozen=True, slots=True)
class ExpertsSpec(Part):
    """A mixture of experts in place of an MLP.

    Attributes:
        num_experts: number of experts.
        inner_size: intermediate size of each expert, after gating.
        top_k: number of experts per token.
        scoring: how the router's logits become scores: a value of ``baton_kernels.Scoring``.
        normalize: whether the weights of a token's experts are divided by their sum.
        scale: factor of the weights of a token's experts.
        num_groups: number of groups of experts; if more than one, groups are chosen before experts.
        top_groups: number of groups from which a token's experts are chosen.
        group_best: a group's score is the sum of this many best scores of its experts.
        has_bias: whether checkpoints have a bias per expert. The bias is added to the scores when
            experts are chosen, but not when their results are weighted.
        shared_size: intermediate size of the shared experts, after gating; 0: no shared experts.
        shared_bias: whether the shared experts have biases, if they are without gates.
        has_shared_gate: whether the sigmoid of a logit per token scales the shared experts' result.
        activation: the experts' activation, as for an MLP, or gpt-oss's clamped gate.
        has_biases: whether router and experts have biases.
        latent_size: size of the experts' input and output; None: the residual stream's size.
        stored_by_turns: whether rows of gates and ups alternate in checkpoints' fused experts.
        stored_as_linears: whether checkpoints store fused and shared experts as two linear layers
            each.
        stored_both_ways: whether the axis of inputs precedes the axis of outputs in the fused
            experts of some checkpoints, and follows it in others.
        has_scales: whether checkpoints have a number per expert that multiplies the expert's
            weights last.
    """

    num_experts: int
    inner_size: int
    top_k: int
    scoring: str = "softmax"
    normalize: bool = False
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    group_best: int = 1
    has_bias: bool = False
    shared_size: int = 0
    shared_bias: bool = False
    has_shared_gate: bool = False
    activation: str = "silu"
    has_biases: bool = False
    latent_size: int | None = None
    stored_by_turns: bool = False
    stored_as_linears: bool = False
    stored_both_ways: bool = False
    has_scales: bool = False

    def matrices(self, hidden_size: int) -> list[Matrix]:
        """List the matrices that all tokens use: projections of latents, and shared experts."""
        latent = self.latent_size
        around = [] if latent is None else [(latent, hidden_size), (hidden_size, latent)]
        return [*around, *mlp_matrices(hidden_size, self.shared_size, self.activation)]

    def exact_matrices(self, hidden_size: int) -> list[Matrix]:
        """List the matrices that are never quantized: the router, and the shared experts' gate."""
        return [(self.num_experts + self.has_shared_gate, hidden_size)]

    def expert_matrices(self, hidden_size: int) -> list[Matrix]:
        """List the matrices of all routed experts."""
        width = hidden_size if self.latent_size is None else self.latent_size
        return mlp_matrices(width, self.inner_size, self.activation) * self.num_experts


@dataclass(frozen=True, slots=True)
class MlpAndExpertsSpec(Part):
    """An MLP and a mixture of experts side by side; their normalized results are summed (Gemma 4).

    Experts and router read the residual stream, each after a norm of its own.

    Attributes:
        mlp: the MLP.
        experts: the experts, without shared experts.
    """

    mlp: MlpSpec
    experts: ExpertsSpec

    def matrices(self, hidden_size: int) -> list[Matrix]:
        """List the matrices that all tokens use and that may be quantized."""
        return [*self.mlp.matrices(hidden_size), *self.experts.matrices(hidden_size)]

    def exact_matrices(self, hidden_size: int) -> list[Matrix]:
        """List the matrices that are never quantized: the router."""
        return self.experts.exact_matrices(hidden_size)

    def expert_matrices(self, hidden_size: int) -> list[Matrix]:
        """List the matrices of all routed experts."""
        return self.experts.expert_matrices(hidden_size)


@dataclass(frozen=True, slots=True)
class PerLayerEmbeddingSpec(Part):
    """Per-layer embeddings (Gemma 4): each token has a small vector for each layer.

    A token's vectors are looked up by the token's id, and added to a projection of the token's
    embedding. At its end, a layer multiplies an activation of the residual stream by the layer's
    vector, and adds a projection of the product to the stream.

    Attributes:
        size: size of a token's vector for one layer.
        activation: activation of the gates, as for an MLP.
        image_token_id: token whose vectors all tokens of images get.
    """

    size: int
    activation: str
    image_token_id: int

    def matrices(self, hidden_size: int) -> list[Matrix]:
        """List the matrices of one layer: two projections of the stream, and one to the stream."""
        return [(self.size, hidden_size), (self.size, hidden_size), (hidden_size, self.size)]


def mlp_matrices(hidden_size: int, inner_size: int, activation: str) -> list[Matrix]:
    """List the matrices of an MLP's two layers; gate and up projection count as one layer.

    The list is empty if ``inner_size`` is 0.
    """
    if not inner_size:
        return []
    num_first = 1 if activation == RELU2 else 2
    return [(num_first * inner_size, hidden_size), (hidden_size, inner_size)]


MixerSpec = AttentionSpec | LatentSpec | Mamba2Spec | DeltaNetSpec | ShortConvSpec
FeedForwardSpec = MlpSpec | ExpertsSpec | MlpAndExpertsSpec


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """A decoder layer: a token mixer, and a feed-forward part after it.

    Attributes:
        mixer: the part in which a token reads other tokens, by attention or a recurrent state.
        feed_forward: the part that processes each token alone; None: no such part.
        stored_names: parts of this layer's parameter names -> what checkpoints have instead.
    """

    mixer: MixerSpec
    feed_forward: FeedForwardSpec | None
    stored_names: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def parts(self) -> tuple[Part, ...]:
        """Return the layer's mixer, and its feed-forward part if it has one."""
        return (self.mixer,) if self.feed_forward is None else (self.mixer, self.feed_forward)

    @property
    def experts(self) -> ExpertsSpec | None:
        """Return the spec of the layer's experts; None: the layer has no experts."""
        part = self.feed_forward
        part = part.experts if isinstance(part, MlpAndExpertsSpec) else part
        return part if isinstance(part, ExpertsSpec) else None


@dataclass(frozen=True, slots=True)
class LayerNorms:
    """The names that checkpoints give to a layer's norms, by place; None: no norm there.

    A norm after a part is applied to the part's result, before the addition to the residual stream.
    """

    before_mixer: str | None = "input_layernorm"
    after_mixer: str | None = None
    before_feed_forward: str | None = "post_attention_layernorm"
    after_feed_forward: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The parts of a decoder, from which its modules are built.

    Attributes:
        layers: the layers, in order.
        ropes: the model's rotary embeddings; each layer uses one.
        norms: names of a layer's norms, by place.
        norm_weight: how the weights of all norms outside of mixers are applied.
        embedding_scale: factor of the embeddings; it is rounded to their dtype.
        residual_scale: factor of each part's result when it is added to the residual stream.
        layer_scalars: whether each layer multiplies the residual stream by a number of the
            checkpoint at the layer's end.
        per_layer_embedding: vectors of tokens for each layer; None: there are none.
        logits_divisor: number by which the output head's results are divided.
        logits_soft_cap: logits become ``cap * tanh(logit / cap)``; None: no cap.
        stored_names: parts of parameter names -> what checkpoints have instead.
        stored_prefix: prefix that checkpoints have instead of ``model.``.
        ignored: prefixes of the names of checkpoints' tensors that the model does not use.
    """

    layers: tuple[LayerSpec, ...]
    ropes: tuple[RopeConfig, ...]
    norms: LayerNorms = field(default_factory=LayerNorms)
    norm_weight: NormWeight = NormWeight.OWN
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    layer_scalars: bool = False
    per_layer_embedding: PerLayerEmbeddingSpec | None = None
    logits_divisor: float = 1.0
    logits_soft_cap: float | None = None
    stored_names: Mapping[str, str] = field(default_factory=dict, hash=False)
    stored_prefix: str = "model."
    ignored: tuple[str, ...] = ()

    def stored_name(self, name: str) -> str:
        """Return the name that checkpoints give to a parameter called ``name`` in Baton's model.

        Prefixes that checkpoints have, `stored_prefix` and those of `ignored` tensors, are kept.
        """
        words = name.split(".", 3)
        if len(words) > 3 and words[1] == "layers" and int(words[2]) < len(self.layers):
            for ours, theirs in self.layers[int(words[2])].stored_names.items():
                name = name.replace(ours, theirs)
        for ours, theirs in self.stored_names.items():
            name = name.replace(ours, theirs)
        if name.startswith("model.") and not name.startswith((self.stored_prefix, *self.ignored)):
            name = self.stored_prefix + name.removeprefix("model.")
        return name
