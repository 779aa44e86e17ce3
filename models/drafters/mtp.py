"""MTP: a drafting layer that was trained with the target model (DeepSeek-AI, arXiv 2412.19437).

The layer is like the target model's layers, and is stored in the target model's checkpoint or in a
separate folder. Checkpoints have one of two layouts: DeepSeek's (``model.layers.N``, after the last
layer: ``enorm``, ``hnorm``, ``eh_proj``, ``shared_head``) and Qwen's (``mtp``:
``pre_fc_norm_embedding``, ``pre_fc_norm_hidden``, ``fc``, ``norm``). If there are several MTP
layers, only the first is used, for all drafts.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace

from baton.api.errors import ModelLoadError
from models.config import ModelConfig
from models.drafters.loading import DrafterSource
from models.drafters.state_decoder import StateDrafter, StateLayout
from models.loading.fused_experts import split_fused_experts
from models.loading.loader import on_meta_device, open_weights
from models.loading.stored_weights import StoredTensor
from models.recipe import AttentionSpec, Recipe

_QWEN = {
    "model.embedding_norm.": "mtp.pre_fc_norm_embedding.",
    "model.state_norm.": "mtp.pre_fc_norm_hidden.",
    "model.": "mtp.",
}


def load_mtp(source: DrafterSource) -> StateDrafter:
    """Load the drafter for ``--speculative-method mtp``."""
    target = source.model.config
    prefix = f"model.layers.{target.num_layers}."
    with ExitStack() as files:
        if source.folder is None:
            stored = open_weights(source.model_folder, target, files)
        else:
            stored = source.open(files)
        if "mtp.fc.weight" in stored:
            layout = _qwen_layout(stored, source)
        elif prefix + "eh_proj.weight" in stored:
            layout = _deepseek_layout(stored, source, prefix)
        else:
            raise ModelLoadError(
                f"{source.where}: no MTP layer: neither mtp.fc nor {prefix}eh_proj is there"
            )
        config = replace(target, recipe=_recipe(target), num_mtp_layers=0)
        with on_meta_device():
            drafter = StateDrafter(config, layout)
        if (experts := target.experts) is not None:
            stored = split_fused_experts(
                stored,
                experts.num_experts,
                drafter.checkpoint_name,
                by_turns=experts.stored_by_turns,
            )
        source.fill(drafter, stored)
    drafter.share(source.model, None)
    return drafter


def _recipe(target: ModelConfig) -> Recipe:
    """Return a recipe with one layer like the target's last layer, but without a sliding window."""
    own, last = target.recipe, target.layers[-1]
    mixer = last.mixer
    if isinstance(mixer, AttentionSpec):
        mixer = replace(mixer, window=None, rotation=0)
    layers = (replace(last, mixer=mixer),)
    return replace(own, layers=layers, ropes=own.ropes[:1], stored_prefix="model.")


def _qwen_layout(stored: dict[str, StoredTensor], source: DrafterSource) -> StateLayout:
    return StateLayout(
        names=_QWEN,
        embedding_norm=True,
        state_norm=True,
        final_norm=True,
        goes_on_normed=True,
        state_size=source.model.config.hidden_size,
    )


def _deepseek_layout(
    stored: dict[str, StoredTensor], source: DrafterSource, prefix: str
) -> StateLayout:
    target = source.model.config
    has_head = prefix + "shared_head.head.weight" in stored
    return StateLayout(
        names={
            "lm_head.": f"{prefix}shared_head.head.",
            "model.layers.0.": prefix,
            "model.norm.": f"{prefix}shared_head.norm.",
            "model.fc.": f"{prefix}eh_proj.",
            "model.embedding_norm.": f"{prefix}enorm.",
            "model.state_norm.": f"{prefix}hnorm.",
            "model.embed_tokens.": f"{prefix}embed_tokens.",
        },
        has_embedding=prefix + "embed_tokens.weight" in stored,
        has_head=has_head,
        head_size=target.vocab_size,
        embedding_norm=True,
        state_norm=True,
        final_norm=True,
        state_size=target.hidden_size,
    )
