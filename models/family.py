"""Family and TextPart: descriptions of how config.json is read for one architecture.

Defaults equal those of transformers' configuration classes (tests/numerics/test_config_fields.py).
A field that changes results is refused by name if the architecture does not use it.
Refuses to know: which families there are, torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from models.fields import Fields
from models.model_fields import FULL, SLIDING, ModelFields
from models.recipe import Recipe
from models.rope_config import AxesRule
from models.vision.specs import VisionSpec

# Name of an activation in config.json -> Baton's name.
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu": "gelu",
}
GELU = ("gelu_tanh", "gelu")
# Optional fields -> values that have no effect. Files of architectures that do not read the field
# may have only these values.
_OPTIONAL: Mapping[str, tuple[object, ...]] = {
    "query_pre_attn_scalar": (None,),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "use_bidirectional_attention": (None, False, 0),
    "embedding_multiplier": (None, 1),
    "residual_multiplier": (None, 1),
    "attention_multiplier": (None,),
    "logits_scaling": (None, 1),
    "no_rope_layers": (None,),
    "use_qk_norm": (None, False),
    "attention_chunk_size": (None,),  # for Llama 4, whose layers attend only within chunks
    "per_layer_config": (None, {}),
    "rope_local_base_freq": (None,),
}
# Fields that few architectures use, but whose types are checked in every file.
_FLAGS, _INTERVAL = ("attention_out_bias", "qkv_bias"), "no_rope_layer_interval"
# transformers reads this field for every architecture's mask, and takes null for false.
_IS_CAUSAL = "is_causal"


def as_written(fields: Fields) -> Fields:
    """Return a file's fields unchanged; their names are those that all families share."""
    return fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Description of all models with one name in config.json's ``architectures``.

    Attributes:
        recipe: makes the recipe from the fields; raises ModelLoadError for unsupported features.
        translate: changes a file's fields to the names that all families share.
        defaults: values of fields that the file lacks; a null in the file stays null.
        defaults_for_null: values of fields that the file lacks or sets to null.
        reads: optional fields that the recipe uses; others are refused if they have an effect.
        activations: activations of gated units that the model may have, besides silu.
        activation_field: name of the field that names the activation.
        layer_kinds: names that ``layer_types`` may give a layer.
        sliding_window_pattern: length of a run of layers whose last layer has full attention, for
            files without layer types; None: the file has this number.
        ropes_by_layer_type: whether layers with a sliding window may have a separate RoPE.
        partial_rotary: whether files may limit rotation to the first dims of a head.
        turning: default fraction of a head's dims that RoPE rotates.
        vision, axes: as in `TextPart`, if the models read images, and this object also describes
            their text part.
    """

    recipe: Callable[[ModelFields], Recipe]
    translate: Callable[[Fields], Fields] = as_written
    defaults: Mapping[str, object] = field(default_factory=dict)
    defaults_for_null: Mapping[str, object] = field(default_factory=dict)
    reads: frozenset[str] = frozenset()
    activations: tuple[str, ...] = ()
    activation_field: str = "hidden_act"
    layer_kinds: tuple[str, ...] = (FULL, SLIDING)
    sliding_window_pattern: int | None = None
    ropes_by_layer_type: bool = False
    partial_rotary: bool = False
    turning: float = 1.0
    vision: Callable[[Fields], VisionSpec] | None = None
    axes: AxesRule | None = None

    def read(self, fields: Fields, max_model_len: int | None) -> ModelFields:
        """Read and check the fields that all families share.

        Raises:
            ModelLoadError: a field is missing, out of range, or has an unsupported effect.
        """
        fields = self.translate(fields)
        self._refuse_unread(fields)
        fields = fields.replaced(self._fill)
        return ModelFields.read(
            fields,
            max_model_len,
            activation=self._activation(fields),
            layer_kinds=self.layer_kinds,
            sliding_window_pattern=self.sliding_window_pattern,
            rope_options=(self.ropes_by_layer_type, self.partial_rotary, self.turning),
        )

    def _fill(self, values: Mapping[str, object]) -> dict[str, object]:
        """Add the architecture's defaults for missing fields to a file's fields."""
        found = {name: value for name, value in values.items() if value is not None}
        return {**self.defaults, **values, **self.defaults_for_null, **found}

    def _activation(self, fields: Fields) -> str:
        """Read the activation; raises ModelLoadError if the architecture does not support it."""
        name = fields.text(self.activation_field, "silu")
        found = _ACTIVATIONS.get(name)
        known = ("silu", *self.activations)
        if found is None or found not in known:
            supported = ", ".join(key for key, value in _ACTIVATIONS.items() if value in known)
            problem = f"{name!r} is not supported; supported: {supported}"
            raise fields.wrong(self.activation_field, problem)
        return found

    def _refuse_unread(self, fields: Fields) -> None:
        """Raise ModelLoadError if a field would change results, but the architecture ignores it."""
        for name, neutral in _OPTIONAL.items():
            if name not in self.reads and not _is_one_of(fields.get(name), neutral):
                raise fields.wrong(name, "is not supported with this architecture")
        for name in _FLAGS:
            fields.boolean(name, False)
        fields.integer(_INTERVAL, 1)
        if _IS_CAUSAL in fields.names() and not fields.get(_IS_CAUSAL):
            raise fields.wrong(_IS_CAUSAL, "only true is supported")


def _is_one_of(value: object, neutral: tuple[object, ...]) -> bool:
    """Return whether ``value`` is in ``neutral``; as in JSON, true does not equal 1."""
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral)


@dataclass(frozen=True, slots=True)
class TextPart:
    """Description of a model that reads images and contains a text model of another name.

    Attributes:
        architecture: name of the text model's architecture; None: ``by_type`` decides.
        by_type: text model's architecture by the ``model_type`` of the text part of config.json.
        defaults: values of text fields that the file lacks.
        is_tied: whether the output head uses the embedding's weight if the file does not say.
        vision: reads the vision encoder's spec from the fields of the whole model; None: only
            text is supported.
        axes: how RoPE pairs are divided among three axes (M-RoPE); None: RoPE has one axis.
    """

    architecture: str | None = None
    by_type: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, object] = field(default_factory=dict)
    is_tied: bool = False
    vision: Callable[[Fields], VisionSpec] | None = None
    axes: AxesRule | None = None
