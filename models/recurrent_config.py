"""What the recurrent token mixers of a model are, as config.json describes them.

Defaults follow ``transformers``, whose results are the reference. Refuses to know: tensors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from models.fields import Fields

# What layers are called in config.json, and whether they carry a state.
_KINDS = {"full_attention": False, "attention": False, "linear_attention": True, "mamba": True}


@dataclass(frozen=True, slots=True)
class Mamba2Config:
    """Mamba 2's mixers (Dao and Gu, arXiv:2405.21060).

    Attributes:
        num_heads: number of heads of the state.
        head_dim: size of a head's inputs and results.
        num_groups: of heads that follow each other and share what writes and reads their states.
        state_dim: rows of a head's state, each of ``head_dim``.
        kernel_size: tokens that the convolution reads.
        conv_bias: whether the convolution has one.
        proj_bias: whether the projections have one.
        recurrent_layers: whether each layer has such a mixer; else it attends.
    """

    num_heads: int
    head_dim: int
    num_groups: int
    state_dim: int
    kernel_size: int
    conv_bias: bool
    proj_bias: bool
    recurrent_layers: tuple[bool, ...]

    @property
    def inner_size(self) -> int:
        """Size of all heads."""
        return self.num_heads * self.head_dim

    @property
    def num_channels(self) -> int:
        """Channels of the convolution."""
        return self.inner_size + 2 * self.num_groups * self.state_dim


@dataclass(frozen=True, slots=True)
class DeltaNetConfig:
    """Gated delta nets (Yang et al., arXiv:2412.06464).

    Attributes:
        num_key_heads: each of which serves value heads that follow each other.
        num_value_heads: heads of the state.
        key_dim: rows of a head's state, each of ``value_dim``.
        value_dim: size of a head's values and results.
        kernel_size: tokens that the convolution reads.
        recurrent_layers: whether each layer has such a mixer; else it attends.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    kernel_size: int
    recurrent_layers: tuple[bool, ...]

    @property
    def num_channels(self) -> int:
        """Channels of the convolution."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim


def parse_bamba(fields: Fields, hidden_size: int, num_layers: int) -> Mamba2Config:
    """Read the mixers of Bamba, of which some layers attend instead.

    Raises:
        ModelLoadError: as `parse_mamba2`; or no layer attends; or a listed layer does not exist.
    """
    attending = fields.token_ids("attn_layer_indices")
    if not attending or max(attending) >= num_layers:
        problem = f"some of {num_layers} layers have to attend, found {list(attending)}"
        raise fields.wrong("attn_layer_indices", problem)
    return parse_mamba2(
        fields, hidden_size, tuple(layer not in attending for layer in range(num_layers))
    )


def parse_mamba2(
    fields: Fields, hidden_size: int, recurrent_layers: tuple[bool, ...]
) -> Mamba2Config:
    """Read the fields ``mamba_...`` of Bamba and its relatives.

    Raises:
        ModelLoadError: sizes that do not fit, or a limit that is not computed here.
    """
    refuse_time_step_limit(fields)
    num_heads = fields.integer("mamba_n_heads", 128)
    inner_size = fields.integer("mamba_expand", 2) * hidden_size
    if inner_size % num_heads:
        problem = f"{num_heads} does not divide mamba_expand * hidden_size = {inner_size}"
        raise fields.wrong("mamba_n_heads", problem)
    head_dim = inner_size // num_heads
    if fields.get("mamba_d_head") not in (None, "auto", head_dim):
        problem = f"{fields.get('mamba_d_head')!r}, but other fields mean {head_dim}"
        raise fields.wrong("mamba_d_head", problem)
    num_groups = fields.integer("mamba_n_groups", 1)
    if num_heads % num_groups:
        raise fields.wrong("mamba_n_groups", f"{num_groups} does not divide {num_heads} heads")
    return Mamba2Config(
        num_heads=num_heads,
        head_dim=head_dim,
        num_groups=num_groups,
        state_dim=fields.integer("mamba_d_state", 256),
        kernel_size=fields.integer("mamba_d_conv", 4, minimum=2),
        conv_bias=fields.boolean("mamba_conv_bias", True),
        proj_bias=fields.boolean("mamba_proj_bias", False),
        recurrent_layers=recurrent_layers,
    )


def parse_granite(fields: Fields, hidden_size: int, num_layers: int) -> Mamba2Config:
    """Read the mixers of Granite 4.

    Raises:
        ModelLoadError: as `parse_mamba2` and `recurrent_layers`.
    """
    return parse_mamba2(fields, hidden_size, recurrent_layers(fields, num_layers, interval=0))


def refuse_time_step_limit(fields: Fields) -> None:
    """Refuse a limit: transformers applies it to prompts and not to the tokens behind them."""
    if not fields.has("time_step_limit"):
        return
    found = fields.get("time_step_limit")
    if found not in ([0.0, math.inf], [0.0, {"__float__": "Infinity"}]):
        raise fields.wrong("time_step_limit", f"{found} is not supported")


def parse_delta_net(fields: Fields, num_layers: int) -> DeltaNetConfig:
    """Read the fields ``linear_...`` of Qwen3-Next, and which layers these are of.

    Raises:
        ModelLoadError: sizes that do not fit, or no layer attends.
    """
    if fields.get("attn_output_gate") not in (None, True):
        raise fields.wrong("attn_output_gate", "only true is supported with this architecture")
    num_key_heads = fields.integer("linear_num_key_heads", 16)
    num_value_heads = fields.integer("linear_num_value_heads", 32)
    if num_value_heads % num_key_heads:
        problem = f"{num_key_heads} does not divide {num_value_heads} value heads"
        raise fields.wrong("linear_num_key_heads", problem)
    return DeltaNetConfig(
        num_key_heads=num_key_heads,
        num_value_heads=num_value_heads,
        key_dim=fields.integer("linear_key_head_dim", 128),
        value_dim=fields.integer("linear_value_head_dim", 128),
        kernel_size=fields.integer("linear_conv_kernel_dim", 4, minimum=2),
        recurrent_layers=recurrent_layers(fields, num_layers),
    )


def recurrent_layers(fields: Fields, num_layers: int, *, interval: int = 4) -> tuple[bool, ...]:
    """Read which layers carry a state, of ``layer_types``.

    Args:
        fields: fields of config.json.
        num_layers: number of the model's layers.
        interval: where no types are given, one layer of so many attends; 0: none does.

    Raises:
        ModelLoadError: an unknown kind of layer, a wrong number of layers, or no layer attends.
    """
    if not fields.has("layer_types"):
        interval = interval and fields.integer("full_attention_interval", interval)
        recurrent = tuple(not interval or (i + 1) % interval != 0 for i in range(num_layers))
    else:
        names = fields.texts("layer_types")
        for name in names:
            if name not in _KINDS:
                raise fields.wrong("layer_types", f"{name!r} is not supported")
        if len(names) != num_layers:
            raise fields.wrong("layer_types", f"{len(names)} entries for {num_layers} layers")
        recurrent = tuple(_KINDS[name] for name in names)
    if all(recurrent):
        raise fields.wrong("layer_types", f"some of {num_layers} layers have to attend")
    return recurrent
