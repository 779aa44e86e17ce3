"""Architecture: says how GGUF files of one architecture map to config.json and tensor names.

Knows neither torch nor any particular architecture.
"""

from __future__ import annotations

import enum
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from baton.api.errors import ModelLoadError
from baton.checkpoint.gguf.file import GgufFile

# Placeholders for the layer number and the expert number in names of tensors.
LAYER, EXPERT = "{layer}", "{expert}"
_MAX_LAYERS = 2**14
# Significant digits of a written 32-bit float: the first number suffices for most floats, the
# second for all floats.
_SHORTEST_DIGITS, _EXACT_DIGITS = 6, 10
# A layer's tensor in a GGUF file -> its name within a layer in Hugging Face layout. EXPERT in a
# name means that the tensor of the GGUF file stacks all experts.
Names = Mapping[str, str]
COMMON_NAMES: Names = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{expert}.gate_proj",
    "ffn_up_exps": "mlp.experts.{expert}.up_proj",
    "ffn_down_exps": "mlp.experts.{expert}.down_proj",
}
# Tensors that join the rows of several tensors. They are split into these tensors unless the
# architecture has a name for the joined tensor.
FUSED_PARTS: Mapping[str, tuple[str, ...]] = {
    "attn_qkv": ("attn_q", "attn_k", "attn_v"),
    "ffn_gate_up_exps": ("ffn_gate_exps", "ffn_up_exps"),
}
COMMON_OUTER: Mapping[str, str] = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}


class Change(enum.Enum):
    """Ways to undo what a converter to GGUF did to tensors (see `models/loading/gguf_changes.py`).

    The first five ways reorder rows and do not change any value.
    """

    QUERY_HALVES = "split each query head's rows into halves; the file has them in pairs"
    KEY_HALVES = "split each key head's rows into halves; the file has them in pairs"
    VALUE_HEADS = "put the value heads of one key head together; the file deals them out"
    VALUE_CHANNELS = "reorder as VALUE_HEADS does, but leave the rows of queries and keys"
    BY_KEY_HEAD = "give each key head its queries, keys, values and gates"

    LESS_ONE = "subtract the 1 that the file adds to a norm's weight"
    LOG_OF_DECAY = "take the logarithm of the negated value"
    VALUE_COLUMNS = "reorder columns as VALUE_HEADS reorders rows"
    CHANNELS = "add the dimension of a convolution's only input"
    FLAT = "drop all dimensions but one"
    ONE_ROW = "add the dimension of a matrix's only row"
    LATENTS = "transpose the keys' matrices and join them with the values', head by head"


@dataclass(frozen=True, slots=True)
class Keys:
    """Checked access to a file's metadata; the names to look up lack the architecture's prefix."""

    file: GgufFile
    architecture: str

    @classmethod
    def of(cls, file: GgufFile) -> Keys:
        """Make the keys of a file, with the architecture that the file names."""
        return cls(file, str(file.metadata.get("general.architecture")))

    def get(self, name: str, default: Any = None) -> Any:
        """Return a key's value from the file, unchecked, or ``default`` if it is missing."""
        return self.file.metadata.get(f"{self.architecture}.{name}", default)

    def integer(self, name: str, default: int | None = None, *, minimum: int = 1) -> int:
        """Return a key's integer, or the largest integer of a list with an integer per layer.

        Raises:
            ModelLoadError: the value is missing, of another type, or too small.
        """
        value = self.get(name, default)
        if isinstance(value, list) and value and all(_is_integer(one) for one in value):
            value = max(value)
        if not _is_integer(value) or value < minimum:
            raise self.wrong(name, f"must be a number above {minimum - 1}, got {value!r:.100}")
        return int(value)

    def layer_integers(self, name: str, *, minimum: int = 1) -> list[int]:
        """Return a key's integer for each layer; the file may have one integer for all layers.

        Raises:
            ModelLoadError: an integer is missing, of another type, or too small.
        """
        value, count = self.get(name), self.num_layers()
        if not isinstance(value, list):
            return [self.integer(name, minimum=minimum)] * count
        if len(value) < count:
            raise self.wrong(name, f"{len(value)} entries for {count} layers")
        if not all(_is_integer(one) and one >= minimum for one in value):
            raise self.wrong(name, f"must be numbers above {minimum - 1}, got {value!r:.100}")
        return value[:count]

    def number(self, name: str, default: float | None = None) -> float:
        """Return a key's positive number; raises ModelLoadError for another value."""
        value = self.get(name, default)
        if not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self.wrong(name, f"must be a number above 0, got {value!r:.100}")
        return float(value)

    def decimal(self, name: str, default: float | None = None) -> float:
        """Return a key's 32-bit float as the shortest decimal number that rounds to this float."""
        value = self.number(name, default)
        exact = struct.pack("<d", value)
        for digits in range(_SHORTEST_DIGITS, _EXACT_DIGITS):
            short = float(f"{value:.{digits}g}")
            if struct.pack("<d", struct.unpack("<f", struct.pack("<f", short))[0]) == exact:
                return short
        return value

    def boolean(self, name: str, default: bool) -> bool:
        """Return a key's boolean; raises ModelLoadError for another value."""
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise self.wrong(name, f"must be true or false, got {value!r:.100}")
        return value

    def num_layers(self) -> int:
        """Return the number of layers, without the layers for multi-token prediction."""
        count = self.integer("block_count")
        if count > _MAX_LAYERS:
            raise self.wrong("block_count", f"must be at most {_MAX_LAYERS}, got {count}")
        more = self.integer("nextn_predict_layers", 0, minimum=0)
        if more >= count:
            raise self.wrong("nextn_predict_layers", f"{more}, but block_count is {count}")
        return count - more

    def has(self, part: str, layer: int = 0) -> bool:
        """Return whether a layer of the file has the tensor ``part``, for example `attn_q.bias`."""
        return f"blk.{layer}.{part}" in self.file.tensors

    def layers_with(self, *parts: str) -> list[int]:
        """Return the layers that have at least one of the tensors ``parts``."""
        layers = range(self.num_layers())
        return [layer for layer in layers if any(self.has(part, layer) for part in parts)]

    def rows(self, part: str) -> int:
        """Return the number of output rows of a tensor in the first layer that has this tensor.

        For a tensor that stacks experts, returns the rows of one expert. Raises ModelLoadError if
        no layer has the tensor.
        """
        for layer in self.layers_with(part):
            shape = self.file.tensors[f"blk.{layer}.{part}"].shape
            if len(shape) > 1:
                return shape[-2]
        raise ModelLoadError(f"{self.file.path}: weights are missing: blk.0.{part}")

    def wrong(self, name: str, problem: str) -> ModelLoadError:
        """Return an error that names the file and a key."""
        return ModelLoadError(f"{self.file.path}: {self.architecture}.{name}: {problem}")


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def whole_heads(keys: Keys) -> Mapping[str, Any]:
    """Return the config.json field of the head size, for models whose RoPE rotates whole heads."""
    size = _head_dim(keys)
    for name in ("attention.value_length", "rope.dimension_count"):
        if (found := keys.integer(name, size)) != size:
            raise keys.wrong(name, f"must be the keys' length {size}, got {found}")
    return {"head_dim": size}


def partly_turning_heads(keys: Keys) -> Mapping[str, Any]:
    """Return the fields of the head size and of the share of each head that RoPE rotates."""
    size = keys.integer("attention.key_length", default_head_dim(keys))
    if (found := keys.integer("attention.value_length", size)) != size:
        raise keys.wrong("attention.value_length", f"must be the keys' length {size}, got {found}")
    turning = keys.integer("rope.dimension_count", size)
    if turning > size:
        raise keys.wrong("rope.dimension_count", f"must be at most {size}, got {turning}")
    return {"head_dim": size, "partial_rotary_factor": turning / size}


def default_head_dim(keys: Keys) -> int:
    """Return the hidden size divided by the number of heads, at least 1."""
    return keys.integer("embedding_length") // keys.integer("attention.head_count") or 1


def _head_dim(keys: Keys) -> int:
    default = keys.get("rope.dimension_count") or default_head_dim(keys)
    return keys.integer("attention.key_length", default)


def no_fields(keys: Keys) -> Mapping[str, Any]:
    """Return no fields: the architecture has no config.json fields of its own."""
    return {}


@dataclass(frozen=True, slots=True)
class Architecture:
    """Description of one architecture of GGUF files.

    Attributes:
        model: name of the architecture in `models/registry.py`.
        fields: makes the fields of config.json that only this architecture has.
        heads: makes the fields of config.json about head size and rotation.
        prefix: prefix of a layer's tensors in Hugging Face layout.
        outer: names of tensors outside layers, where they differ from `COMMON_OUTER`.
        names: names of a layer's tensors, where they differ from `COMMON_NAMES`. A key that ends in
            `.weight` or `.bias` stands for this tensor alone, and its value includes the ending.
        joins: tensors that Hugging Face layout joins: the joined tensor's name within a layer, and
            the file's tensors whose rows it joins.
        changes: the converter's changes to undo, in order, by tensor of the file or by name in
            ``joins``.
        may_have_experts: whether models of this architecture may have experts.
        variant: returns another description for files that need another one, or None; if the
            attribute is None, this description serves all files.
    """

    model: str
    fields: Callable[[Keys], Mapping[str, Any]] = no_fields
    heads: Callable[[Keys], Mapping[str, Any]] = whole_heads
    prefix: str = "model.layers.{layer}."
    outer: Mapping[str, str] = field(default_factory=dict)
    names: Names = field(default_factory=dict)
    joins: Sequence[tuple[str, tuple[str, ...]]] = ()
    changes: Mapping[str, tuple[Change, ...]] = field(default_factory=dict)
    may_have_experts: bool = False
    variant: Callable[[Keys], Architecture | None] | None = None

    def outer_name(self, part: str) -> str | None:
        """Return the name in Hugging Face layout of a tensor outside layers, or None if unknown."""
        return {**COMMON_OUTER, **self.outer}.get(part)

    def inner_name(self, part: str, kind: str) -> str | None:
        """Return the name in Hugging Face layout of a layer's tensor, or None if unknown.

        Args:
            part: name of the tensor in the file without layer and kind, for example `attn_q`.
            kind: `.weight`, `.bias` or "".
        """
        names = {**COMMON_NAMES, **self.names}
        if kind and part + kind in names:
            return self.prefix + names[part + kind]
        return self.prefix + names[part] + kind if part in names else None

    def changes_of(self, part: str, kind: str) -> tuple[Change, ...]:
        """Return the changes of GGUF converters to a tensor, which loading must undo."""
        return self.changes.get(part + kind) or self.changes.get(part, ())
