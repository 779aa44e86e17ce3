"""ModelFields: the config.json fields that families share, checked and typed; no torch.

A family's file decides what the values mean for a network. Refuses to know: families, tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from baton.api.errors import ModelLoadError
from models.fields import MAX_PARTS, Fields
from models.recipe import AttentionSpec, FeedForwardSpec, LayerSpec, MlpSpec, Recipe
from models.rope_config import RopeConfig, parse_ropes

FULL, SLIDING = "full_attention", "sliding_attention"
# Value in ``layer_types`` -> whether the layer's mixer has a recurrent state.
STATE_KINDS = {FULL: False, "attention": False, "linear_attention": True, "mamba": True}
Windows = Sequence[int | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFields:
    """The config.json fields that families share; lengths are in tokens.

    Attributes:
        fields: all fields of the file, with the family's defaults.
        max_model_len: longest sequence (prompt and output) with correct results.
        activation: activation of gated units: "silu", "gelu_tanh" or "gelu".
        rope: rotary embedding of all layers, or of layers without a sliding window.
        sliding_rope: rotary embedding of layers with a sliding window; None: ``rope``.
        sliding_window_pattern: length of a run of layers whose last layer has no window, if
            ``layer_types`` is None.
    """

    fields: Fields
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    max_model_len: int
    attention_bias: bool
    mlp_bias: bool
    activation: str
    rope: RopeConfig
    sliding_rope: RopeConfig | None
    sliding_window: int | None
    use_sliding_window: bool
    max_window_layers: int
    sliding_window_pattern: int
    layer_types: tuple[str, ...] | None

    @classmethod
    def read(
        cls,
        fields: Fields,
        max_model_len: int | None,
        *,
        activation: str,
        layer_kinds: Iterable[str],
        sliding_window_pattern: int | None,
        rope_options: tuple[bool, bool, float],
    ) -> ModelFields:
        """Read and check the fields; raises ModelLoadError.

        Args:
            fields: fields of config.json.
            max_model_len: longest sequence to serve, in tokens; None: the file's limit.
            activation: activation of gated units.
            layer_kinds: names that ``layer_types`` may contain.
            sliding_window_pattern: as in `Family`.
            rope_options: ``ropes_by_layer_type``, ``partial_rotary`` and ``turning`` of `Family`.
        """
        num_heads = fields.integer("num_attention_heads")
        num_layers = fields.integer("num_hidden_layers", maximum=MAX_PARTS)
        head_dim = _head_dim(fields, num_heads)
        length = _max_position_embeddings(fields, max_model_len)
        rope, sliding_rope = parse_ropes(fields, head_dim, length, max_model_len, *rope_options)
        pattern = sliding_window_pattern or fields.integer("sliding_window_pattern", 1)
        return cls(
            fields=fields,
            vocab_size=fields.integer("vocab_size"),
            hidden_size=fields.integer("hidden_size"),
            intermediate_size=fields.integer("intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=_num_kv_heads(fields, num_heads),
            head_dim=head_dim,
            rms_norm_eps=fields.number("rms_norm_eps"),
            max_position_embeddings=length,
            max_model_len=min(max_model_len or length, rope.max_len or length),
            attention_bias=fields.boolean("attention_bias", False),
            mlp_bias=fields.boolean("mlp_bias", False),
            activation=activation,
            rope=rope,
            sliding_rope=sliding_rope,
            sliding_window=_sliding_window(fields),
            use_sliding_window=fields.boolean("use_sliding_window", False),
            max_window_layers=fields.integer("max_window_layers", 28, minimum=0),
            sliding_window_pattern=pattern,
            layer_types=_layer_types(fields, num_layers, layer_kinds),
        )

    # ------------------------------------------------------------------ specs of common parts

    def attention(self, **options: Any) -> AttentionSpec:
        """Make an `AttentionSpec` from these options and the file's sizes of heads."""
        return AttentionSpec(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            **options,
        )

    def mlp(self, **options: Any) -> MlpSpec:
        """Make an `MlpSpec` from these options and the file's size and activation."""
        return MlpSpec(inner_size=self.intermediate_size, activation=self.activation, **options)

    def recipe(
        self, mixers: Iterable[AttentionSpec], feed_forward: FeedForwardSpec, **options: Any
    ) -> Recipe:
        """Make a recipe whose layers differ only in their attention.

        Args:
            mixers: attention of each layer.
            feed_forward: feed-forward part of every layer.
            options: options of `Recipe`; by default, ``ropes`` is the file's rotary embedding.
        """
        layers = tuple(LayerSpec(mixer, feed_forward) for mixer in mixers)
        options.setdefault("ropes", (self.rope,))
        return Recipe(layers=layers, **options)

    def attention_layers(
        self, windows: Windows | None = None, **options: Any
    ) -> list[AttentionSpec]:
        """Make the attention of each layer; the layers differ only in their windows.

        Args:
            windows: sliding window of each layer; None: no layer has a window.
            options: options of `AttentionSpec`.
        """
        by_window = {
            window: self.attention(window=window, **options) for window in set(windows or (None,))
        }
        return [by_window[window] for window in windows or (None,) * self.num_layers]

    # ------------------------------------------------------------------ which layers have a window

    def windows_by_type(self, types: Sequence[str]) -> list[int | None]:
        """Return the sliding window of each layer, given the layers' types.

        Raises:
            ModelLoadError: a layer has a window, but the file does not give its size.
        """
        if self.sliding_window is None and SLIDING in types:
            raise ModelLoadError("config.json: sliding_window: missing, but some layers have one")
        return [self.sliding_window if name == SLIDING else None for name in types]

    def windows_by_pattern(self) -> list[int | None]:
        """Return each layer's window, for models in which most layers have a sliding window.

        ``layer_types`` decides if the file has it; otherwise, the last of every
        ``sliding_window_pattern`` layers has no window.

        Raises:
            ModelLoadError: a layer has a window, but the file does not give its size.
        """
        layers, pattern = range(self.num_layers), self.sliding_window_pattern
        return self.windows_by_type(
            self.layer_types or [SLIDING if (index + 1) % pattern else FULL for index in layers]
        )

    def windows_if_switched_on(self) -> list[int | None]:
        """Return each layer's window, for models with the switch ``use_sliding_window``.

        With the switch on, ``layer_types`` decides which layers have a window; without
        ``layer_types``, all layers from ``max_window_layers`` on have one.

        Raises:
            ModelLoadError: ``layer_types`` has a window, but the switch is off, or the file does
                not give the window's size.
        """
        window = self.sliding_window if self.use_sliding_window else None
        if self.layer_types is None:
            first = self.max_window_layers
            return [window if index >= first else None for index in range(self.num_layers)]
        if window is None and SLIDING in self.layer_types:
            problem = "layer_types: sliding_attention without a sliding window"
            raise ModelLoadError(f"config.json: {problem}")
        return [window if name == SLIDING else None for name in self.layer_types]

    # ------------------------------------------------------------------ which layers have a state

    def recurrent_layers(self, *, interval: int) -> tuple[bool, ...]:
        """Return for each layer whether its mixer has a recurrent state, by ``layer_types``.

        Args:
            interval: if the file has no ``layer_types``, every ``interval``-th layer has attention;
                0: no layer has.

        Raises:
            ModelLoadError: no layer has attention.
        """
        if self.layer_types is not None:
            recurrent = tuple(STATE_KINDS[name] for name in self.layer_types)
        else:
            interval = interval and self.fields.integer("full_attention_interval", interval)
            layers = range(self.num_layers)
            recurrent = tuple(not interval or (index + 1) % interval != 0 for index in layers)
        if all(recurrent):
            problem = f"some of {self.num_layers} layers have to attend"
            raise self.fields.wrong("layer_types", problem)
        return recurrent


def _num_kv_heads(fields: Fields, num_heads: int) -> int:
    num_kv_heads = fields.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise fields.wrong("num_key_value_heads", f"{num_kv_heads} does not divide {num_heads}")
    return num_kv_heads


def _max_position_embeddings(fields: Fields, max_model_len: int | None) -> int:
    most = fields.integer("max_position_embeddings")
    if max_model_len is not None and not 1 <= max_model_len <= most:
        problem = f"max_model_len {max_model_len}, but max_position_embeddings is {most}"
        raise fields.wrong("max_position_embeddings", problem)
    return most


def _head_dim(fields: Fields, num_heads: int) -> int:
    head_dim = fields.optional_integer("head_dim")
    if head_dim is None:
        hidden_size = fields.integer("hidden_size")
        if hidden_size % num_heads:
            raise fields.wrong("hidden_size", f"{hidden_size} is no multiple of {num_heads} heads")
        head_dim = hidden_size // num_heads
    if head_dim % 2:
        raise fields.wrong("head_dim", f"{head_dim} is odd, rotary embedding needs pairs")
    return head_dim


def _sliding_window(fields: Fields) -> int | None:
    """Return the sliding window, or None; allow a window of 0 if use_sliding_window is false."""
    switched_off = fields.get("use_sliding_window") is False
    window = fields.optional_integer("sliding_window", minimum=0 if switched_off else 1)
    return window or None


def _layer_types(fields: Fields, num_layers: int, kinds: Iterable[str]) -> tuple[str, ...] | None:
    if not fields.has("layer_types"):
        return None
    layer_types = fields.texts("layer_types")
    for name in layer_types:
        if name not in kinds:
            raise fields.wrong("layer_types", f"{name!r} is not supported")
    if len(layer_types) != num_layers:
        raise fields.wrong("layer_types", f"{len(layer_types)} entries for {num_layers} layers")
    return layer_types
