"""Recurrent mixers against transformers' modules: whole texts there, cut into steps here.

Refuses to know: engines, checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BambaConfig, NemotronHConfig, Qwen3NextConfig
from transformers.models.bamba.modeling_bamba import BambaMixer
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMamba2Mixer
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from baton.api.errors import ModelLoadError
from baton_kernels import StateMetadata
from models.config import ModelConfig
from models.families.shared.mamba2 import read_mamba2
from models.fields import Fields
from models.layers.gated_delta_net import GatedDeltaNet
from models.layers.linear import RegroupedLinear
from models.layers.mamba2 import Mamba2
from models.recipe import DeltaNetSpec, Mamba2Spec, MixerSpec
from tests.numerics.state_steps import random_cuts, steps_of

HIDDEN_SIZE, EPS = 32, 1e-5
MAMBA = {
    "mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 24, "mamba_expand": 2,
    "mamba_d_conv": 4, "mamba_chunk_size": 8,
}  # fmt: skip
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 12,
    "linear_value_head_dim": 8, "linear_conv_kernel_dim": 3,
}  # fmt: skip
NEMOTRON: dict[str, Any] = {
    "mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 24,
    "conv_kernel": 4, "chunk_size": 8, "layers_block_type": ["attention"] + 5 * ["mamba"],
}  # fmt: skip
SHAPE: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": HIDDEN_SIZE, "intermediate_size": 64,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4,
    "max_position_embeddings": 64, "rms_norm_eps": EPS, "num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8,
}  # fmt: skip
LENGTHS = (1, 3, 40, 23)


def mixers(architecture: str, values: dict[str, Any]) -> list[MixerSpec]:
    config = ModelConfig.from_dict({**SHAPE, "architectures": [architecture], **values})
    return [layer.mixer for layer in config.layers]


class Step:
    """One step of a model with one layer."""

    def __init__(self, metadata: StateMetadata, states: tuple[Tensor, ...]) -> None:
        self._metadata, self._states = metadata, states

    def state_layer(self, layer_index: int) -> tuple[StateMetadata, tuple[Tensor, ...]]:
        assert layer_index == 5
        return self._metadata, self._states


def randomize(module: nn.Module) -> None:
    for parameter in module.parameters():
        nn.init.uniform_(parameter, -0.5, 0.5)


def copy_weights(theirs: nn.Module, ours: nn.Module) -> None:
    """Fill every parameter of ours; all of theirs are taken."""
    stored = dict(theirs.named_parameters())
    for path, module in ours.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if isinstance(module, RegroupedLinear):
                for part, rows in module.part_rows():
                    parameter.data[rows] = stored.pop(f"{part}.{name}")[module.row_order(part)]
            else:
                parameter.data[:] = stored.pop(f"{path}.{name}".removeprefix("."))
    assert not stored


@torch.inference_mode()
def check(theirs: Any, ours: nn.Module, state_shapes: Sequence[tuple[int, ...]]) -> None:
    """All texts at once, each cut at random; and a last step of single tokens."""
    copy_weights(theirs, ours)
    texts = [torch.randn(length, HIDDEN_SIZE) for length in LENGTHS]
    expected = [theirs(text[None])[0] for text in texts]
    cuts = [random_cuts(length, length) for length in LENGTHS]
    steps, num_slots = steps_of(cuts)
    states = tuple(torch.full((num_slots, *shape), torch.nan) for shape in state_shapes)
    found: list[list[Tensor]] = [[] for _ in texts]
    for metadata, chunks in steps:
        hidden = torch.cat([texts[text][begin:end] for text, begin, end in chunks])
        out = ours(hidden, (), Step(metadata, states))
        parts = torch.split(out, [end - begin for _, begin, end in chunks])
        for (text, _, _), part in zip(chunks, parts, strict=True):
            found[text].append(part)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.cat(one), other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bias", [False, True])
def test_mamba2(bias: bool) -> None:
    torch.manual_seed(0)
    values = MAMBA | {"mamba_conv_bias": bias, "mamba_proj_bias": bias}
    theirs = BambaMixer(
        BambaConfig(hidden_size=HIDDEN_SIZE, rms_norm_eps=EPS, num_hidden_layers=6, **values), 5
    )
    config = read_mamba2(Fields(values, "config.json"), HIDDEN_SIZE)
    randomize(theirs)
    check_mamba2(theirs, config)


def check_mamba2(theirs: Any, config: Mamba2Spec) -> None:
    ours = Mamba2(config, HIDDEN_SIZE, EPS, 5)
    recurrent = (config.num_heads, config.state_dim, config.head_dim)
    check(theirs, ours, (ours.conv1d.state_shape, recurrent))


def nemotron_mixer(time_step_min: float) -> Any:
    """Return transformers' mixer of layer 5, whose time steps are all below 0.001."""
    torch.manual_seed(0)
    config = NemotronHConfig(
        hidden_size=HIDDEN_SIZE, layer_norm_epsilon=EPS, time_step_min=time_step_min, **NEMOTRON
    )
    mixer = NemotronHMamba2Mixer(config, 5)
    randomize(mixer)
    mixer.dt_bias.data -= 12
    return mixer


def test_no_time_step_of_nemotron_h_is_raised() -> None:
    """Baton computes as NVIDIA's own code: time_step_min is for initial weights alone.

    transformers raises the time steps of a prompt's tokens to time_step_min, and leaves those of
    later tokens alone. Once transformers stops that, the second check fails, and docs/models.md
    can drop its note.
    """
    config = mixers("NemotronHForCausalLM", NEMOTRON | {"time_step_min": 0.001})[-1]
    assert isinstance(config, Mamba2Spec)
    check_mamba2(nemotron_mixer(0.0), config)
    with pytest.raises(AssertionError, match="not close"):
        check_mamba2(nemotron_mixer(0.001), config)


def test_gated_delta_net() -> None:
    torch.manual_seed(0)
    theirs = Qwen3NextGatedDeltaNet(
        Qwen3NextConfig(hidden_size=HIDDEN_SIZE, rms_norm_eps=EPS, num_hidden_layers=8, **DELTA), 5
    )
    *nets, attention = mixers("Qwen3NextForCausalLM", DELTA)
    config = nets[0]
    assert config == DeltaNetSpec(
        num_key_heads=2, num_value_heads=6, key_dim=12, value_dim=8, kernel_size=3
    )
    assert isinstance(config, DeltaNetSpec)
    assert [isinstance(one, DeltaNetSpec) for one in (*nets, attention)] == [True] * 3 + [False]
    ours = GatedDeltaNet(config, HIDDEN_SIZE, EPS, 5)
    recurrent = (config.num_value_heads, config.key_dim, config.value_dim)
    randomize(theirs)
    check(theirs, ours, (ours.conv1d.state_shape, recurrent))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("mamba_n_heads", 7), ("mamba_n_groups", 3), ("mamba_d_head", 9),
        ("time_step_limit", [0.1, float("inf")]), ("time_step_limit", [0.0, 2.0]),
    ],
)  # fmt: skip
def test_mixers_that_are_not_computed_are_refused(name: str, value: object) -> None:
    fields = Fields(MAMBA | {name: value}, "config.json")
    with pytest.raises(ModelLoadError, match=rf"^config.json: {name}: "):
        read_mamba2(fields, HIDDEN_SIZE)


def test_value_heads_belong_to_key_heads() -> None:
    with pytest.raises(ModelLoadError, match=r"^config.json: linear_num_key_heads: "):
        mixers("Qwen3NextForCausalLM", DELTA | {"linear_num_key_heads": 4})
