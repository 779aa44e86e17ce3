"""Loads a worker's drafter at the start, and connects it to the KV memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from baton.api.errors import ConfigError
from baton.engine_config import DRAFTERS as METHODS
from baton.engine_config import EngineConfig
from baton.kv.layers import AnyKV
from engine.worker.device_choice import BackendNames, choose_ops, choose_packer
from engine.worker.drafting.base import DraftChooser, Drafting
from engine.worker.drafting.heads import HeadsDrafting
from engine.worker.drafting.layers import LayersDrafting
from engine.worker.drafting.passes import Passes
from engine.worker.kv_cache import KVMemory
from engine.worker.make_runner import make_backends
from models.base import CausalLM
from models.decoder import DecoderForCausalLM
from models.drafters import DRAFTERS
from models.drafters.base import HeadsDrafter, LayersDrafter
from models.drafters.loading import DrafterSource
from models.drafters.state_decoder import StateDrafter

AnyDrafter = HeadsDrafter | LayersDrafter


def load_drafter(
    config: EngineConfig,
    model_folder: Path,
    model: CausalLM,
    dtype: torch.dtype,
    device: torch.device,
) -> AnyDrafter | None:
    """Load the drafter that the options name; None: they name no drafter with weights.

    Raises:
        ModelLoadError: the drafter's folder is missing, incomplete or unsupported.
        ConfigError: the drafter does not fit the model.
    """
    if config.speculative_method not in METHODS:
        return None
    assert isinstance(model, DecoderForCausalLM)
    folder = Path(config.speculative_model) if config.speculative_model else None
    source = DrafterSource(
        folder=folder,
        model_folder=model_folder,
        model=model,
        dtype=dtype,
        device=device,
        # Drafts need not be batch-invariant: without rejection sampling, they change no output
        # token.
        packer=choose_packer(replace(config, batch_invariant=False), device, dtype),
        ops=choose_ops(config, device),
        max_model_len=config.max_model_len,
    )
    return DRAFTERS.load(config.speculative_method)(source)


def fit_num_drafts(config: EngineConfig, drafter: AnyDrafter | None) -> EngineConfig:
    """Limit the number of drafts in the options to the number of the drafter's heads.

    Raises ConfigError if the user asked for more drafts than the drafter has heads.
    """
    num_heads = getattr(drafter, "num_heads", None)
    if num_heads is None:
        return config
    if config.num_speculative_tokens > num_heads:
        raise ConfigError(
            f"num_speculative_tokens: at most {num_heads}, the number of heads, got "
            f"{config.num_speculative_tokens}"
        )
    return replace(config, num_speculative_tokens=min(config.max_num_drafts, num_heads))


def layers_of(drafter: AnyDrafter | None) -> tuple[AnyKV, ...]:
    """Return the description of KV that each layer of the drafter keeps."""
    return () if drafter is None else tuple(getattr(drafter, "kv_layers", ()))


def make_drafting(
    drafter: AnyDrafter | None,
    model: CausalLM,
    memory: KVMemory,
    backend_names: BackendNames,
    max_model_len: int,
    *,
    rejects: bool = False,
) -> Drafting | None:
    """Connect a drafter to its model and the KV memory, whose last layers are the drafter's.

    Args:
        rejects: whether drafts are accepted by rejection sampling.
    """
    if drafter is None:
        return None
    chooser = DraftChooser(rejects=rejects)
    if not layers_of(drafter):
        return HeadsDrafting(drafter, chooser)  # type: ignore[arg-type]
    spec, num_layers = memory.spec, len(model.kv_layers)
    passes = Passes(
        make_backends(backend_names),
        spec.layer_groups[num_layers:],
        spec.layer_caches(memory.tensor)[num_layers:],
        spec.block_size,
        memory.tensor.device,
    )
    longest = min(max_model_len, getattr(drafter, "max_model_len", max_model_len))
    read_states = None
    if getattr(drafter, "state_layers", ()):
        assert isinstance(model, DecoderForCausalLM)
        read_states = model.model.kept_states
    is_quick = isinstance(drafter, StateDrafter) and drafter.model.tapes is not None
    return LayersDrafting(
        drafter,  # type: ignore[arg-type]
        passes,
        num_layers,
        longest,
        chooser,
        read_states,
        drafter if is_quick and not rejects else None,  # type: ignore[arg-type]
    )
