"""One architecture of GGUF files as a row: its fields of config.json, and what its tensors become.

Refuses to know: torch, which architectures there are.
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

# Places in a name of a checkpoint that a tensor's own numbers fill.
LAYER, EXPERT = "{layer}", "{expert}"
_MAX_LAYERS = 2**14
# Digits that are enough for every number of 32 bits, and fewer, which are enough for most.
_SHORTEST_DIGITS, _EXACT_DIGITS = 6, 10
# A layer's part in a GGUF file -> its name in a layer of a checkpoint. A name with EXPERT: the
# tensor stacks all experts.
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
# Tensors that hold the rows of several parts; cut apart where an architecture has no name for them.
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
    """Undo one change that the converter made to a tensor (`models/loading/gguf_changes.py`).

    The first five reorder rows and change no value.
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
    """A file's metadata, whose keys begin with its architecture's name."""

    file: GgufFile
    architecture: str

    @classmethod
    def of(cls, file: GgufFile) -> Keys:
        """Take the architecture from the file."""
        return cls(file, str(file.metadata.get("general.architecture")))

    def get(self, name: str, default: Any = None) -> Any:
        """Return a value as it is in the file."""
        return self.file.metadata.get(f"{self.architecture}.{name}", default)

    def integer(self, name: str, default: int | None = None, *, minimum: int = 1) -> int:
        """Return a number; of a list with one for each layer, the largest.

        Raises:
            ModelLoadError: the number is missing, of another type, or too small.
        """
        value = self.get(name, default)
        if isinstance(value, list) and value and all(_is_integer(one) for one in value):
            value = max(value)
        if not _is_integer(value) or value < minimum:
            raise self.wrong(name, f"must be a number above {minimum - 1}, got {value!r:.100}")
        return int(value)

    def number(self, name: str, default: float | None = None) -> float:
        """Return a number above 0; raises ModelLoadError for anything else."""
        value = self.get(name, default)
        if not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self.wrong(name, f"must be a number above 0, got {value!r:.100}")
        return float(value)

    def decimal(self, name: str, default: float | None = None) -> float:
        """Return a number of 32 bits as the shortest one that rounds to it."""
        value = self.number(name, default)
        exact = struct.pack("<d", value)
        for digits in range(_SHORTEST_DIGITS, _EXACT_DIGITS):
            short = float(f"{value:.{digits}g}")
            if struct.pack("<d", struct.unpack("<f", struct.pack("<f", short))[0]) == exact:
                return short
        return value

    def boolean(self, name: str, default: bool) -> bool:
        """Return a truth value; raises ModelLoadError for anything else."""
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise self.wrong(name, f"must be true or false, got {value!r:.100}")
        return value

    def num_layers(self) -> int:
        """Count the layers, without those that predict several tokens."""
        count = self.integer("block_count")
        if count > _MAX_LAYERS:
            raise self.wrong("block_count", f"must be at most {_MAX_LAYERS}, got {count}")
        more = self.integer("nextn_predict_layers", 0, minimum=0)
        if more >= count:
            raise self.wrong("nextn_predict_layers", f"{more}, but block_count is {count}")
        return count - more

    def has(self, part: str, layer: int = 0) -> bool:
        """Say whether a layer has a tensor, as `attn_q.bias`."""
        return f"blk.{layer}.{part}" in self.file.tensors

    def layers_with(self, *parts: str) -> list[int]:
        """List the layers that have one of these tensors."""
        layers = range(self.num_layers())
        return [layer for layer in layers if any(self.has(part, layer) for part in parts)]

    def rows(self, part: str) -> int:
        """Count the outputs of the first tensor of that name; raises ModelLoadError: there is none.

        In a stack of experts these are one expert's.
        """
        for layer in self.layers_with(part):
            shape = self.file.tensors[f"blk.{layer}.{part}"].shape
            if len(shape) > 1:
                return shape[-2]
        raise ModelLoadError(f"{self.file.path}: weights are missing: blk.0.{part}")

    def wrong(self, name: str, problem: str) -> ModelLoadError:
        """Make the error about one key."""
        return ModelLoadError(f"{self.file.path}: {self.architecture}.{name}: {problem}")


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def whole_heads(keys: Keys) -> Mapping[str, Any]:
    """Read the size of heads, all of which turns."""
    size = _head_dim(keys)
    for name in ("attention.value_length", "rope.dimension_count"):
        if (found := keys.integer(name, size)) != size:
            raise keys.wrong(name, f"must be the keys' length {size}, got {found}")
    return {"head_dim": size}


def partly_turning_heads(keys: Keys) -> Mapping[str, Any]:
    """Read the size of heads, and the part of it that turns."""
    size = keys.integer("attention.key_length", default_head_dim(keys))
    if (found := keys.integer("attention.value_length", size)) != size:
        raise keys.wrong("attention.value_length", f"must be the keys' length {size}, got {found}")
    turning = keys.integer("rope.dimension_count", size)
    if turning > size:
        raise keys.wrong("rope.dimension_count", f"must be at most {size}, got {turning}")
    return {"head_dim": size, "partial_rotary_factor": turning / size}


def default_head_dim(keys: Keys) -> int:
    """Divide the stream among the heads, at least 1 each."""
    return keys.integer("embedding_length") // keys.integer("attention.head_count") or 1


def _head_dim(keys: Keys) -> int:
    default = keys.get("rope.dimension_count") or default_head_dim(keys)
    return keys.integer("attention.key_length", default)


def no_fields(keys: Keys) -> Mapping[str, Any]:
    """Return no fields beyond those of all architectures."""
    return {}


@dataclass(frozen=True, slots=True)
class Architecture:
    """One architecture of GGUF files.

    Attributes:
        model: name in `models/registry.py`.
        fields: reads the fields of config.json that not all architectures have.
        heads: reads the fields about the size of heads and how much of them turns.
        prefix: start of a layer's names in a checkpoint.
        outer: names of tensors outside layers that differ from `COMMON_OUTER`.
        names: names of a layer's tensors that differ from `COMMON_NAMES`. A key with `.weight` or
            `.bias` stands for that tensor alone, and its name is then complete.
        joins: names in a layer, each with the file's tensors whose rows it joins.
        changes: changes by tensor of the file, or by name of ``joins``, in the order of applying.
        variant: returns another row where a file needs one; None: this row serves all files.
    """

    model: str
    fields: Callable[[Keys], Mapping[str, Any]] = no_fields
    heads: Callable[[Keys], Mapping[str, Any]] = whole_heads
    prefix: str = "model.layers.{layer}."
    outer: Mapping[str, str] = field(default_factory=dict)
    names: Names = field(default_factory=dict)
    joins: Sequence[tuple[str, tuple[str, ...]]] = ()
    changes: Mapping[str, tuple[Change, ...]] = field(default_factory=dict)
    variant: Callable[[Keys], Architecture | None] | None = None

    def outer_name(self, part: str) -> str | None:
        """Return how a checkpoint calls a tensor of no layer; None: it is not known."""
        return {**COMMON_OUTER, **self.outer}.get(part)

    def inner_name(self, part: str, kind: str) -> str | None:
        """Return how a checkpoint calls a layer's tensor; None: it is not known.

        Args:
            part: `attn_q`.
            kind: `.weight`, `.bias` or nothing.
        """
        names = {**COMMON_NAMES, **self.names}
        if kind and part + kind in names:
            return self.prefix + names[part + kind]
        return self.prefix + names[part] + kind if part in names else None

    def changes_of(self, part: str, kind: str) -> tuple[Change, ...]:
        """Return what is done to a tensor."""
        return self.changes.get(part + kind) or self.changes.get(part, ())
