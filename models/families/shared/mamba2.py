"""Reads Mamba 2's mixers from config.json fields ``mamba_...``, with defaults of transformers."""

from __future__ import annotations

import math

from models.fields import Fields
from models.recipe import Mamba2Spec


def read_mamba2(fields: Fields, hidden_size: int) -> Mamba2Spec:
    """Read Mamba 2's mixer from the fields ``mamba_...``.

    Raises:
        ModelLoadError: sizes do not fit together, or there is a limit on time steps.
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
    return Mamba2Spec(
        num_heads=num_heads,
        head_dim=head_dim,
        num_groups=num_groups,
        state_dim=fields.integer("mamba_d_state", 256),
        kernel_size=fields.integer("mamba_d_conv", 4, minimum=2),
        conv_bias=fields.boolean("mamba_conv_bias", True),
        proj_bias=fields.boolean("mamba_proj_bias", False),
    )


def refuse_time_step_limit(fields: Fields) -> None:
    """Raise ModelLoadError for a time step limit.

    transformers applies the limit to prompts, but not to generated tokens.
    """
    if not fields.has("time_step_limit"):
        return
    found = fields.get("time_step_limit")
    if found not in ([0.0, math.inf], [0.0, {"__float__": "Infinity"}]):
        raise fields.wrong("time_step_limit", f"{found} is not supported")
