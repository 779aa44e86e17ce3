"""ModelConfig: the checked contents of config.json and generation_config.json; no torch.

A family's file (`models/families`) decides what the fields mean for a network.
Refuses to know: families, tensors, weights, forward passes.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from baton.api.errors import ModelLoadError
from baton.checkpoint.model_folder import MODELOPT_FILE
from baton.checkpoint.pooling.architectures import Head, read_labels, split_architecture
from baton.kv.layers import LayerKV, SharedKV
from models.family import Family, TextPart
from models.fields import MAX_PARTS, Fields
from models.loading.text_parts import rope_fields, text_part
from models.quantization import QuantizationConfig, parse_quantization
from models.recipe import AttentionSpec, ExpertsSpec, LatentSpec, LayerSpec, Recipe
from models.registry import MODELS
from models.rope_config import RopeConfig
from models.vision.specs import VisionSpec

_DTYPES = ("float32", "bfloat16", "float16")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape and parts of a model, and the token ids that end an output.

    Lengths are in tokens.

    Attributes:
        max_model_len: longest sequence (prompt and output) with correct results.
        dtype: dtype of the checkpoint's weights: "float32", "bfloat16" or "float16".
        compute_dtype: dtype to compute in if the device supports this dtype; differs from ``dtype``
            only for quantized GGUF files.
        quantization: format of the stored weights; None: not quantized.
        num_mtp_layers: number of multi-token prediction layers, stored after the model's layers.
        is_text_part: whether the checkpoint also has a vision encoder.
        vision: shape of the vision encoder; None: prompts may not contain images.
        head: what the checkpoint's head computes. Only a model with a head for tokens generates
            text.
        num_labels: number of labels of the classification head; 0: no such head.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    max_model_len: int
    tie_word_embeddings: bool
    dtype: str
    compute_dtype: str
    eos_token_ids: frozenset[int]
    quantization: QuantizationConfig | None
    num_mtp_layers: int
    recipe: Recipe
    is_text_part: bool = False
    vision: VisionSpec | None = None
    head: Head = Head.TOKENS
    num_labels: int = 0

    @property
    def generates(self) -> bool:
        """Return whether the model generates text: the checkpoint has a head for tokens."""
        return self.head is Head.TOKENS

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        """Return the specs of all layers."""
        return self.recipe.layers

    @property
    def num_layers(self) -> int:
        """Return the number of layers."""
        return len(self.recipe.layers)

    @property
    def attention(self) -> AttentionSpec | LatentSpec:
        """Return the spec of the first layer with attention; every model has one."""
        kinds = (AttentionSpec, LatentSpec)
        return next(layer.mixer for layer in self.layers if isinstance(layer.mixer, kinds))

    @property
    def num_heads(self) -> int:
        """Return the number of attention heads."""
        return self.attention.num_heads

    @property
    def num_kv_heads(self) -> int:
        """Return the number of KV heads; for latent attention, the number of attention heads."""
        found = self.attention
        return found.num_kv_heads if isinstance(found, AttentionSpec) else found.num_heads

    @property
    def head_dim(self) -> int:
        """Return the size of a head; for latent attention, the size of a head's rotated part."""
        found = self.attention
        return found.head_dim if isinstance(found, AttentionSpec) else found.qk_rope_head_dim

    @property
    def kept_kv(self) -> tuple[LayerKV, ...]:
        """Return what each layer keeps that does not read another layer's keys and values."""
        every = (layer.mixer.kv for layer in self.layers)
        return tuple(kv for kv in every if not isinstance(kv, SharedKV))

    def rotated_head_dim(self, rotation: int) -> int:
        """Return the size of the heads that the rotary embedding of this index rotates."""
        mixers = (layer.mixer for layer in self.layers)
        sizes = (
            mixer.head_dim
            for mixer in mixers
            if isinstance(mixer, AttentionSpec) and mixer.rotation == rotation
        )
        return next(sizes, self.head_dim)

    @property
    def experts(self) -> ExpertsSpec | None:
        """Return the spec of the first layer with experts; None: no layer has experts."""
        parts = (layer.experts for layer in self.layers)
        return next((part for part in parts if part is not None), None)

    @property
    def has_sinks(self) -> bool:
        """Return whether any layer has attention sinks."""
        mixers = (layer.mixer for layer in self.layers)
        return any(isinstance(mixer, AttentionSpec) and mixer.sinks for mixer in mixers)

    @property
    def whole_image_layers(self) -> frozenset[int]:
        """Return the indices of layers where one image's tokens attend in both directions."""
        mixers = enumerate(layer.mixer for layer in self.layers)
        return frozenset(
            index
            for index, mixer in mixers
            if isinstance(mixer, AttentionSpec) and mixer.whole_images
        )

    @property
    def rope(self) -> RopeConfig:
        """Return the rotary embedding of all layers, or of the layers without a sliding window."""
        return self.recipe.ropes[0]

    @classmethod
    def from_folder(
        cls, folder: str | Path, *, max_model_len: int | None = None, images: bool = False
    ) -> ModelConfig:
        """Read ``config.json`` and, where there is one, ``generation_config.json``.

        Args:
            folder: a model folder in Hugging Face layout.
            max_model_len: the longest sequence to serve, at most ``max_position_embeddings``, which
                is the default. For RoPE type ``longrope`` the default is
                ``original_max_position_embeddings``: up to this length, results equal Hugging
                Face's (see ``RopeConfig``).
            images: whether to read the vision encoder, too.

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
            images=images,
        )

    @classmethod
    def from_dict(
        cls,
        values: Mapping[str, object],
        *,
        max_model_len: int | None = None,
        images: bool = False,
    ) -> ModelConfig:
        """Read a configuration from the parsed content of a config.json."""
        fields = Fields(values, "config.json")
        return _parse(fields, Fields({}, ""), max_model_len, images=images)


def _parse(
    fields: Fields,
    generation: Fields,
    max_model_len: int | None,
    quantization: Fields | None = None,
    *,
    images: bool = False,
) -> ModelConfig:
    """Read the configuration of the model, or of its text part if it also reads images.

    Args:
        images: whether to read the vision encoder, too.
    """
    name, head = _architecture(fields)
    family = MODELS.load(name)
    if isinstance(family, TextPart):
        name, text = text_part(fields, family)
        found = replace(_parse(text, generation, max_model_len, quantization), is_text_part=True)
        return _with_vision(found, fields, family) if images else found
    whole, model = fields, family.read(fields, max_model_len)
    fields = model.fields
    found = ModelConfig(
        architecture=name,
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        rms_norm_eps=model.rms_norm_eps,
        max_position_embeddings=model.max_position_embeddings,
        max_model_len=model.max_model_len,
        # If the checkpoint has no head for tokens, "tied" keeps the model from creating one.
        tie_word_embeddings=head is not Head.TOKENS or fields.boolean("tie_word_embeddings", False),
        dtype=_dtype(fields),
        compute_dtype=_dtype(fields, "compute_dtype"),
        eos_token_ids=_eos_token_ids(fields, generation),
        quantization=parse_quantization(fields, quantization),
        num_mtp_layers=_num_mtp_layers(fields),
        recipe=family.recipe(model),
        head=head,
        num_labels=len(read_labels(fields.get)) if head is Head.LABELS else 0,
    )
    return _with_vision(found, whole, family) if images else found


def _with_vision(config: ModelConfig, fields: Fields, part: Family | TextPart) -> ModelConfig:
    """Add the vision encoder, and RoPE with three axes if needed, to a text part's configuration.

    Args:
        config: configuration of the text part.
        fields: fields of the whole model.
        part: the family's description of the model.

    If the vision encoder is not supported, a warning is logged, and the configuration stays as it
    is.
    """
    if part.vision is None:
        return config
    try:
        vision = part.vision(fields)
    except ModelLoadError as error:
        logger.warning("prompts may have no images: %s", error)
        return config
    recipe = config.recipe
    if part.axes is not None:
        rope, pairs = rope_fields(fields), config.rope.rotary_dim(config.head_dim) // 2
        axes = part.axes.axes(rope, pairs)
        recipe = replace(recipe, ropes=tuple(replace(one, axes=axes) for one in recipe.ropes))
    return replace(config, recipe=recipe, vision=vision)


def _architecture(fields: Fields) -> tuple[str, Head]:
    """Return the name of the text-generating architecture, and the checkpoint's kind of head.

    For example, a classifier's name is replaced by the name of the model it was made from.
    """
    names = fields.texts("architectures")
    supported = MODELS.names()
    name, head = split_architecture(names[0]) if len(names) == 1 else ("", Head.TOKENS)
    if name not in supported:
        found = ", ".join(names) or "none"
        raise fields.wrong(
            "architectures", f"{found} is not supported; supported: {', '.join(supported)}"
        )
    return name, head


def _eos_token_ids(*sources: Fields) -> frozenset[int]:
    return frozenset().union(*(fields.token_ids("eos_token_id") for fields in sources))


def _num_mtp_layers(fields: Fields) -> int:
    name = "num_nextn_predict_layers"  # transformers also writes this name
    return fields.integer(
        name if fields.has(name) else "num_mtp_layers", 0, minimum=0, maximum=MAX_PARTS
    )


def _dtype(fields: Fields, first: str = "dtype") -> str:
    """Read a dtype from the first existing field: ``first``, ``dtype`` or ``torch_dtype``."""
    names = (first, "dtype", "torch_dtype")
    name = next((name for name in names if fields.has(name)), "dtype")
    dtype = fields.text(name, "float32").removeprefix("torch.")
    if dtype not in _DTYPES:
        raise fields.wrong(name, f"{dtype!r} is not supported; supported: {', '.join(_DTYPES)}")
    return dtype
