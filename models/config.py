"""What config.json and generation_config.json say about a model, checked and typed; no torch.

Fields keep what the files say; what a field means for a network (which layers have a window,
which projections a bias) is decided in that architecture's file.
Refuses to know: tensors, weights, what a forward pass is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from baton.api.errors import ModelLoadError
from baton.checkpoint.model_folder import MODELOPT_FILE
from models.dialects import Dialect, dialect_of
from models.fields import MAX_PARTS, Fields
from models.lfm2_config import ShortConvConfig, common_fields, parse_short_conv
from models.loading.text_parts import TEXT_PARTS, text_fields, text_part
from models.mla_config import MLAConfig, parse_mla
from models.moe_config import EXPERT_SIZE, MoeConfig, parse_moe
from models.nemotron_config import NemotronConfig, parse_nemotron
from models.nemotron_config import common_fields as nemotron_fields
from models.quantization import QuantizationConfig, parse_quantization
from models.recurrent_config import (
    DeltaNetConfig,
    Mamba2Config,
    parse_bamba,
    parse_delta_net,
    parse_granite,
)
from models.registry import MODELS
from models.rope_config import RopeConfig, parse_ropes

_DTYPES = ("float32", "bfloat16", "float16")
_TURNING = {"BambaForCausalLM": 0.5}  # the part of a head that turns, where it is not all
_LAYER_TYPES = ("full_attention", "sliding_attention")
# Models that see images, too, keep what is said of the text in an object of its own.
_WITH_IMAGES = ("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration")
_DELTA_NETS = (
    "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM",
    *_WITH_IMAGES,
)
_GRANITE_HYBRID = "GraniteMoeHybridForCausalLM"
_NEMOTRON = "NemotronHForCausalLM"
_LFM2 = "Lfm2ForCausalLM"
_LFM2_LAYER_TYPES = ("full_attention", "conv")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a model and the token ids it ends with; lengths are in tokens.

    Attributes:
        is_text_part: the checkpoint is one of a model that sees images, too.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    max_model_len: int  # the longest sequence, prompt and output, that comes out right
    tie_word_embeddings: bool
    attention_bias: bool
    attention_out_bias: bool  # Seed-OSS; others have both or none
    qkv_bias: bool
    mlp_bias: bool
    activation: str  # of gated units: "silu", "gelu_tanh" or "gelu"
    rope: RopeConfig
    sliding_rope: RopeConfig | None  # of layers with a window; None: they turn as others do
    no_rope_layers: tuple[int, ...] | None  # of each layer: 0 if it does not turn
    no_rope_layer_interval: int
    query_pre_attn_scalar: float | None
    attention_multiplier: float | None
    attn_logit_softcapping: float | None
    final_logit_softcapping: float | None
    embedding_multiplier: float
    residual_multiplier: float
    logits_scaling: float
    sliding_window: int | None
    use_sliding_window: bool
    max_window_layers: int
    sliding_window_pattern: int  # one layer of so many has no window, where no types are given
    layer_types: tuple[str, ...] | None
    attention_sinks: bool  # each head has one
    short_conv: ShortConvConfig | None  # of LFM2's layers that do not attend
    dtype: str  # the checkpoint's: "float32", "bfloat16" or "float16"
    eos_token_ids: frozenset[int]
    quantization: QuantizationConfig | None  # of the weights; None: they are stored plainly
    use_qk_norm: bool = False  # GLM-4-MoE; others have such norms or none
    num_mtp_layers: int = 0  # behind the model's own in a checkpoint, for predicting several tokens
    moe: MoeConfig | None = None  # None: no layer has experts
    mamba2: Mamba2Config | None = None  # of layers that do not attend; None: all do
    delta_net: DeltaNetConfig | None = None  # of layers that do not attend; None: all do
    mla: MLAConfig | None = None  # None: layers keep keys and values
    nemotron: NemotronConfig | None = None  # of Nemotron-H, whose layers are of one or two parts
    is_text_part: bool = False

    def attends(self, layer: int) -> bool:
        """Say whether a layer attends; others carry a state."""
        if self.short_conv is not None and self.layer_types is not None:
            return self.layer_types[layer] != "conv"
        recurrent = self.mamba2 or self.delta_net
        return recurrent is None or not recurrent.recurrent_layers[layer]

    @classmethod
    def from_folder(cls, folder: str | Path, *, max_model_len: int | None = None) -> ModelConfig:
        """Read ``config.json`` and, where there is one, ``generation_config.json``.

        Args:
            folder: a model folder in Hugging Face layout.
            max_model_len: the longest sequence to serve, at most ``max_position_embeddings``.
                None serves ``max_position_embeddings``, but with RoPE type ``longrope`` the
                original length, up to which results equal Hugging Face's (see ``RopeConfig``).

        Raises:
            ModelLoadError: one line that names the file and the field.
        """
        path = Path(folder)
        if not path.is_dir():
            raise ModelLoadError(f"{path}: no such model folder")
        generation, quantization = path / "generation_config.json", path / MODELOPT_FILE
        return _parse(
            Fields.from_file(path / "config.json"),
            Fields.from_file(generation) if generation.exists() else Fields({}, str(generation)),
            max_model_len,
            Fields.from_file(quantization) if quantization.exists() else None,
        )

    @classmethod
    def from_dict(
        cls, values: Mapping[str, object], *, max_model_len: int | None = None
    ) -> ModelConfig:
        """Read the content of a config.json, as :meth:`from_folder` does."""
        return _parse(Fields(values, "config.json"), Fields({}, ""), max_model_len)


def _parse(
    fields: Fields,
    generation: Fields,
    max_model_len: int | None,
    quantization: Fields | None = None,
) -> ModelConfig:
    """Read a whole model's file; of a model that sees images, its text network's part."""
    name = _architecture(fields)
    if name not in TEXT_PARTS:
        return _parse_network(name, fields, generation, max_model_len, quantization)
    name, fields = text_part(fields, name)
    found = _parse_network(name, fields, generation, max_model_len, quantization)
    return replace(found, is_text_part=True)


def _parse_network(
    architecture: str,
    fields: Fields,
    generation: Fields,
    max_model_len: int | None,
    quantization: Fields | None,
) -> ModelConfig:
    nemotron = parse_nemotron(fields) if architecture == _NEMOTRON else None
    short_conv = parse_short_conv(fields) if architecture == _LFM2 else None
    fields = _IN_OWN_WORDS.get(architecture, _as_written)(fields)
    dialect, fields = _dialect(fields, architecture)
    num_heads = fields.integer("num_attention_heads")
    num_layers = fields.integer("num_hidden_layers", maximum=MAX_PARTS)
    mla = parse_mla(fields, architecture)
    head_dim = _head_dim(fields, num_heads) if mla is None else mla.qk_rope_head_dim
    max_position_embeddings = _max_position_embeddings(fields, max_model_len)
    lengths = (max_position_embeddings, max_model_len, *_rope_options(architecture))
    rope, sliding_rope = parse_ropes(fields, head_dim, *lengths)
    limits = (max_model_len or max_position_embeddings, rope.max_len or max_position_embeddings)
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_num_kv_heads(fields, num_heads),
        head_dim=head_dim,
        rms_norm_eps=fields.number("rms_norm_eps"),
        max_position_embeddings=max_position_embeddings,
        max_model_len=min(limits),
        tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
        attention_bias=fields.boolean("attention_bias", False),
        attention_out_bias=fields.boolean("attention_out_bias", False),
        qkv_bias=fields.boolean("qkv_bias", True),
        mlp_bias=fields.boolean("mlp_bias", False),
        activation=dialect.activation(fields),
        rope=rope,
        sliding_rope=sliding_rope,
        no_rope_layers=_no_rope_layers(fields, num_layers),
        no_rope_layer_interval=fields.integer("no_rope_layer_interval", 4),
        query_pre_attn_scalar=fields.optional_number("query_pre_attn_scalar"),
        attention_multiplier=fields.optional_number("attention_multiplier"),
        attn_logit_softcapping=fields.optional_number("attn_logit_softcapping"),
        final_logit_softcapping=fields.optional_number("final_logit_softcapping"),
        embedding_multiplier=fields.number("embedding_multiplier", 1.0),
        residual_multiplier=fields.number("residual_multiplier", 1.0),
        logits_scaling=fields.number("logits_scaling", 1.0),
        sliding_window=_sliding_window(fields),
        use_sliding_window=fields.boolean("use_sliding_window", False),
        max_window_layers=fields.integer("max_window_layers", 28, minimum=0),
        sliding_window_pattern=dialect.window_pattern(fields),
        layer_types=_layer_types(fields, num_layers, architecture),
        attention_sinks=dialect.attention_sinks,
        short_conv=short_conv,
        dtype=_dtype(fields),
        eos_token_ids=_eos_token_ids(fields, generation),
        quantization=parse_quantization(fields, quantization),
        use_qk_norm=fields.boolean("use_qk_norm", False),
        num_mtp_layers=_num_mtp_layers(fields),
        moe=nemotron.moe if nemotron else parse_moe(fields, architecture),
        mamba2=nemotron.mamba2 if nemotron else _mamba2(fields, architecture, num_layers),
        delta_net=_delta_net(fields, architecture, num_layers),
        mla=mla,
        nemotron=nemotron,
    )


def _rope_options(architecture: str) -> tuple[bool, bool, float]:
    dialect = dialect_of(architecture)
    turning = _TURNING.get(architecture, 1.0)
    return dialect.ropes_by_layer_type, dialect.partial_rotary, turning


def _of_granite(fields: Fields) -> Fields:
    """Return the fields by the names that other families have for them."""
    turning = fields.text("position_embedding_type", "nope")
    if turning not in ("nope", "rope"):
        problem = f"{turning!r} is not supported; supported: nope, rope"
        raise fields.wrong("position_embedding_type", problem)
    values: dict[str, object] = {
        EXPERT_SIZE: fields.integer("intermediate_size"),
        "intermediate_size": fields.integer("shared_intermediate_size", 1024),
        "no_rope_layers": [int(turning == "rope")]
        * fields.integer("num_hidden_layers", maximum=MAX_PARTS),
    }
    return fields.with_values(values)


def _as_written(fields: Fields) -> Fields:
    return fields


# How the fields of a file come by the names that other families have for them.
_IN_OWN_WORDS: Mapping[str, Callable[[Fields], Fields]] = {
    _LFM2: common_fields,
    _NEMOTRON: nemotron_fields,
    _GRANITE_HYBRID: _of_granite,
    **dict.fromkeys(_WITH_IMAGES, text_fields),
}


def _delta_net(fields: Fields, architecture: str, num_layers: int) -> DeltaNetConfig | None:
    return parse_delta_net(fields, num_layers) if architecture in _DELTA_NETS else None


def _mamba2(fields: Fields, architecture: str, num_layers: int) -> Mamba2Config | None:
    parse = {"BambaForCausalLM": parse_bamba, _GRANITE_HYBRID: parse_granite}.get(architecture)
    return parse and parse(fields, fields.integer("hidden_size"), num_layers)


def _architecture(fields: Fields) -> str:
    names = fields.texts("architectures")
    supported = MODELS.names()
    if len(names) != 1 or names[0] not in supported:
        found = ", ".join(names) or "none"
        raise fields.wrong(
            "architectures", f"{found} is not supported; supported: {', '.join(supported)}"
        )
    return names[0]


def _dialect(fields: Fields, architecture: str) -> tuple[Dialect, Fields]:
    """Return how a file is read, and its fields with the defaults of that."""
    dialect = dialect_of(architecture)
    dialect.refuse_unread(fields)
    return dialect, fields.replaced(dialect.fill)


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
    """Return the window or None; 0 means none if use_sliding_window is false."""
    switched_off = fields.get("use_sliding_window") is False
    window = fields.optional_integer("sliding_window", minimum=0 if switched_off else 1)
    return window or None


def _layer_types(fields: Fields, num_layers: int, architecture: str) -> tuple[str, ...] | None:
    if not fields.has("layer_types") or architecture in (*_DELTA_NETS, _GRANITE_HYBRID):
        return None  # the latter's are with the rest of their states
    layer_types = fields.texts("layer_types")
    for name in layer_types:
        if name not in (_LFM2_LAYER_TYPES if architecture == _LFM2 else _LAYER_TYPES):
            raise fields.wrong("layer_types", f"{name!r} is not supported")
    if len(layer_types) != num_layers:
        raise fields.wrong("layer_types", f"{len(layer_types)} entries for {num_layers} layers")
    return layer_types


def _no_rope_layers(fields: Fields, num_layers: int) -> tuple[int, ...] | None:
    if not fields.has("no_rope_layers"):
        return None
    values = fields.get("no_rope_layers")
    if not isinstance(values, list) or not all(value in (0, 1) for value in values):
        raise fields.wrong("no_rope_layers", "expected a list of 0 and 1")
    if len(values) < num_layers:
        raise fields.wrong("no_rope_layers", f"{len(values)} entries for {num_layers} layers")
    return tuple(values[:num_layers])


def _eos_token_ids(*sources: Fields) -> frozenset[int]:
    return frozenset().union(*(fields.token_ids("eos_token_id") for fields in sources))


def _num_mtp_layers(fields: Fields) -> int:
    name = "num_nextn_predict_layers"  # transformers writes the other name, too
    return fields.integer(
        name if fields.has(name) else "num_mtp_layers", 0, minimum=0, maximum=MAX_PARTS
    )


def _dtype(fields: Fields) -> str:
    name = "dtype" if fields.has("dtype") else "torch_dtype"
    dtype = fields.text(name, "float32").removeprefix("torch.")
    if dtype not in _DTYPES:
        raise fields.wrong(name, f"{dtype!r} is not supported; supported: {', '.join(_DTYPES)}")
    return dtype
