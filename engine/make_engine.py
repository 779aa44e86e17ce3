"""Makes an engine from its parts: executor, scheduler, prefix cache and optional features."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType

from baton.api.images import ImageLayout
from baton.checkpoint.model_folder import weights_digest
from baton.checkpoint.model_identity import folder_identity
from baton.engine_config import EngineConfig
from baton.kv.block_hash import BlockHasher, cache_namespace
from baton.media.layouts import layout_of
from baton.text.grammar_trials import EarlyGrammars
from engine.core.images.image_steps import ImageLimits
from engine.core.kv_cache_manager import KVCacheManager
from engine.core.pins.prefix_pins import PrefixPins
from engine.core.scheduler import Scheduler
from engine.core.side_blocks import SideBlocks
from engine.engine import Engine
from engine.executors import EXECUTORS
from engine.executors.base import Executor
from engine.features import Features
from engine.images.image_inputs import ImageInputs
from engine.images.pixel_maker import PixelMaker
from engine.kv_files.make_tier import make_tier
from engine.sampling.grammar_compiler import GrammarCompiler
from engine.sampling.mask_threads import MaskThreads
from engine.speculation.speculation import drafter_identity, find_drafter, make_speculation
from models.config import ModelConfig

logger = logging.getLogger(__name__)

_NOBODYS: Mapping[str, str] = MappingProxyType({})


def make_engine(
    model_folder: Path,
    config: EngineConfig,
    identity: Mapping[str, str] = _NOBODYS,
    executor: Executor | None = None,
    grammars: EarlyGrammars | None = None,
) -> Engine:
    """Load the model, allocate the KV cache, and make the engine.

    Args:
        identity: identity of the model folder (`folder_identity`), which makes hashes of cached KV
            equal on all nodes that serve the model; None: hashes are valid only in this process.
        executor: computes the steps; None: make the executor that the options name.
        grammars: the parts that compile grammars, made before any thread started; None: make them
            here.

    Raises:
        ModelLoadError: the folder is missing, incomplete or unsupported.
        ConfigError: an option does not fit the model or the machine.
    """
    config = find_drafter(config)
    layout = _image_layout(model_folder, config)
    config = replace(config, images=layout is not None)
    if executor is None:
        executor = EXECUTORS.load(config.executor_name)(model_folder, config)
    config, memory, model = executor.config, executor.kv_memory, executor.model_config
    # Later processes read the files, so the weights need an identity
    if config.kv_files and not identity:
        identity = {"weights": weights_digest(model_folder), **folder_identity(model_folder)}
    compatibility = {
        **identity,
        "dtype": executor.dtype,
        "linear_weights": executor.linear_weights,
        "kv_cache_dtype": memory.dtype,
        "block_size": str(config.block_size),
        "kv_layout": memory.manifest.layout,
    }
    if config.num_lookahead_drafts:  # the blocks also hold the drafter's KV
        compatibility["drafter"] = drafter_identity(config, model_folder)
    kv_cache_manager = KVCacheManager(
        memory.num_blocks,
        config.block_size,
        sliding_windows=memory.spec.sliding_windows,
        hasher=_hasher(config, compatibility) if config.prefix_cache else None,
    )
    speculation = make_speculation(config, model.vocab_size)
    scheduler = Scheduler(
        kv_cache_manager,
        max_num_requests=config.max_num_requests,
        max_num_batched_tokens=config.max_num_batched_tokens,
        long_prefill_token_threshold=config.long_prefill_token_threshold,
        prefill_tokens_beside_decodes=config.prefill_tokens_beside_decodes,
        preemption=config.preemption,
        by_priority=config.scheduling_policy == "priority",
        drafting=speculation,
        masks=MaskThreads(),
        images=ImageLimits(
            cache_tokens=config.encoder_cache_tokens,
            max_encoder_tokens=config.max_num_encoder_input_tokens or config.max_num_batched_tokens,
            keeps_whole=bool(model.whole_image_layers),
        ),
        num_stages=config.pipeline_parallel_size if executor.runs_ahead else 1,
    )
    compiler = GrammarCompiler(model_folder, model.vocab_size, model.eos_token_ids, grammars)
    images, side = None, SideBlocks(kv_cache_manager.block_pool)
    if layout is not None and model.vision is not None:
        compatibility["images"] = "on"  # equal on paired nodes: images may shift tokens' positions
        images = _image_inputs(model_folder, layout, config, model)
    pins = PrefixPins(
        kv_cache_manager,
        int(config.pin_share * memory.num_blocks),
        config.max_pin_s,
        scheduler.counters.pins,
    )
    files = make_tier(config, executor, kv_cache_manager, side, scheduler.resume)
    features = Features(scheduler, compiler, pins, side, images, speculation, files)
    engine = Engine(executor, scheduler, features, compatibility)
    if files is not None:
        engine.figures.file_counts = files.counts
    return engine


def _image_inputs(
    model_folder: Path, layout: ImageLayout, config: EngineConfig, model: ModelConfig
) -> ImageInputs:
    """Return the intake of images, with limits that every image must fit."""
    most_in_a_step = None
    if model.whole_image_layers:
        # Leave room for the requests that decode in the image's step: one token each.
        most_in_a_step = config.max_num_batched_tokens - config.max_num_requests + 1
    pixels = PixelMaker(model_folder)
    has_three_axes = any(rope.axes for rope in model.recipe.ropes)
    most_tokens = config.encoder_cache_tokens
    return ImageInputs(layout, pixels, most_tokens, most_in_a_step, has_three_axes)


def _image_layout(model_folder: Path, config: EngineConfig) -> ImageLayout | None:
    """Return the rule that maps an image to tokens; None: this engine takes no images."""
    if not config.images:
        return None
    layout = layout_of(model_folder)
    missing = [name for name in ("transformers", "PIL") if find_spec(name) is None]
    if layout is not None and missing:
        logger.info("takes no images: pip install 'baton-serve[images]' for %s", missing[0])
        return None
    return layout


def _hasher(config: EngineConfig, compatibility: Mapping[str, str]) -> BlockHasher:
    """Make the hasher of cached blocks; hashes of two nodes differ if their KV would differ."""
    namespace = cache_namespace(compatibility)
    return BlockHasher(config.block_size, config.prefix_hash, namespace)
