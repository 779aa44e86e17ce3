"""Multi-head latent attention as config.json describes it; no torch.

Refuses to know: tensors, how attention over latents is computed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from models.fields import Fields

_V3 = "DeepseekV3ForCausalLM"
_ARCHITECTURES = ("DeepseekV2ForCausalLM", _V3)
_SCALING = ("rope_scaling", "rope_parameters")  # the older name wins, as in rope_config.py


@dataclass(frozen=True, slots=True)
class MLAConfig:
    """The sizes of latent attention (DeepSeek-AI, arXiv:2405.04434, section 2.1).

    Attributes:
        q_lora_rank: rank of the queries' low-rank projection; None: queries are projected at once.
        kv_lora_rank: size of a token's latent, which makes all heads' keys and values.
        qk_nope_head_dim: size of the part of a query or key head that carries no position.
        qk_rope_head_dim: size of the part that carries the position; all heads share keys' part.
        v_head_dim: size of a value head.
        rope_interleave: neighbours turn together, not halves.
        scale: factor on the dot products.
    """

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rope_interleave: bool
    scale: float

    @property
    def width(self) -> int:
        """Numbers that a layer keeps of a token."""
        return self.kv_lora_rank + self.qk_rope_head_dim


def parse_mla(fields: Fields, architecture: str) -> MLAConfig | None:
    """Read latent attention from the fields of config.json; None: the architecture has none.

    Raises:
        ModelLoadError: a field that is missing, out of range, or not supported.
    """
    if architecture not in _ARCHITECTURES:
        return None
    num_heads = fields.integer("num_attention_heads")
    num_kv_heads = fields.integer("num_key_value_heads", num_heads)
    if num_kv_heads != num_heads:
        problem = f"{num_kv_heads} is not supported, a latent makes all {num_heads} heads"
        raise fields.wrong("num_key_value_heads", problem)
    rope_dim = fields.integer("qk_rope_head_dim")
    if rope_dim % 2:
        raise fields.wrong("qk_rope_head_dim", f"{rope_dim} is odd, rotary embedding needs pairs")
    if architecture == _V3 and fields.get("head_dim") not in (None, rope_dim):
        # transformers gives the rotary embedding head_dim dims, whatever the heads have.
        raise fields.wrong("head_dim", f"only qk_rope_head_dim, {rope_dim}, is supported")
    nope_dim = fields.integer("qk_nope_head_dim")
    return MLAConfig(
        q_lora_rank=fields.optional_integer("q_lora_rank"),
        kv_lora_rank=fields.integer("kv_lora_rank"),
        qk_nope_head_dim=nope_dim,
        qk_rope_head_dim=rope_dim,
        v_head_dim=fields.integer("v_head_dim"),
        rope_interleave=_rope_interleave(fields, architecture),
        scale=(nope_dim + rope_dim) ** -0.5 * _scale_of_rope(fields),
    )


def _rope_interleave(fields: Fields, architecture: str) -> bool:
    """DeepSeek V2 has no such field: its neighbours turn together."""
    if architecture == "DeepseekV2ForCausalLM":
        return True
    return fields.boolean("rope_interleave", True)


def _scale_of_rope(fields: Fields) -> float:
    """What YaRN does to the dot products beside cosines and sines: ``mscale_all_dim``, squared."""
    section = next((name for name in _SCALING if fields.get(name)), None)
    scaling = fields.child(section) if section else Fields({}, "")
    rope_type = scaling.get("rope_type") or scaling.get("type") or "default"
    if rope_type == "default" or not scaling.get("mscale_all_dim"):
        return 1.0
    factor = scaling.number("factor")
    scale = 0.1 * scaling.number("mscale_all_dim") * math.log(factor) + 1.0 if factor > 1 else 1.0
    return scale * scale
