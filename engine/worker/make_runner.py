"""Makes model runners with the buffers, attention backends and graph inputs that they need."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec

import torch
from torch import Tensor

from baton.engine_config import EngineConfig
from baton_kernels.attention import ATTENTION_BACKENDS
from baton_kernels.attention.base import AttentionBackend
from engine.sampling.step_sampler import StepSampler
from engine.worker.chunks.chunk_graphs import MAX_NUM_REQUESTS, ChunkGraphs, chunk_sizes
from engine.worker.chunks.chunk_inputs import ChunkInputs
from engine.worker.cuda_graphs import GraphContext, Replays, StepGraphs, captured_sizes
from engine.worker.device_choice import BackendNames
from engine.worker.drafting.base import Drafting
from engine.worker.extras.rank_tokens import RankTokens
from engine.worker.extras.step_extras import StepExtras
from engine.worker.forward import Forward
from engine.worker.graph_inputs import GraphInputs
from engine.worker.input_batch import InputBatch
from engine.worker.kv_cache import KVCacheSpec
from engine.worker.model_runner import ModelRunner
from models.base import CausalLM
from models.parallel.group import ALONE, Ranks


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model on its device, with the settings of its runners.

    Attributes:
        spec: layout of the KV cache.
        backends: name of the attention backend of each KV cache group.
        ranks: the ranks that share the model.
    """

    model: CausalLM
    spec: KVCacheSpec
    config: EngineConfig
    device: torch.device
    backends: BackendNames
    ranks: Ranks = ALONE


def make_model_runner(
    loaded: LoadedModel,
    kv_cache: Tensor,
    max_model_len: int,
    *,
    with_graphs: bool = False,
    with_chunks: bool = False,
    samples_on_device: bool | None = None,
    sends_tokens: bool = False,
    drafting: Drafting | None = None,
    rejects: bool = False,
) -> ModelRunner:
    """Make a runner with attention backends and buffers of its own, on the cache's device.

    Args:
        with_graphs: whether to make the inputs that CUDA graphs of decode steps read.
        with_chunks: whether to make the inputs that CUDA graphs of steps with prompts read.
        samples_on_device: whether to sample on the device; None: only on a GPU with Triton.
    """
    spec, config, device = loaded.spec, loaded.config, kv_cache.device
    max_blocks = -(-(max_model_len + config.num_lookahead_drafts) // spec.block_size) + 1
    most = min(config.max_decode_rows, config.cuda_graph_max_batch)
    context = GraphContext(
        *(loaded.model, make_backends(loaded.backends)),
        *(spec.layer_groups, spec.layer_caches(kv_cache)),
    )
    graph_inputs, decode_graphs = None, Replays[StepGraphs]()
    if with_graphs:
        graph_inputs = GraphInputs(
            captured_sizes(most),
            num_rows=config.max_num_requests,
            max_blocks=max_blocks,
            num_groups=spec.num_groups,
            max_seq_len=max_model_len,
            device=device,
            num_steps=config.max_steps_in_flight,
        )
        decode_graphs = Replays(partial(StepGraphs, context, graph_inputs), graph_inputs.sizes)
    chunk_graphs = Replays[ChunkGraphs]()
    if with_chunks:
        chunk_inputs = ChunkInputs(
            chunk_sizes(min(config.cuda_graph_max_chunk, config.max_num_batched_tokens)),
            max_num_requests=min(config.max_num_requests, MAX_NUM_REQUESTS),
            max_blocks=max_blocks,
            num_groups=spec.num_groups,
            max_seq_len=max_model_len,
            device=device,
        )
        chunk_graphs = Replays(partial(ChunkGraphs, context, chunk_inputs), chunk_inputs.sizes)
    extras = StepExtras(
        loaded.model,
        device,
        tokens=RankTokens(loaded.ranks, are_sent=sends_tokens),
        ranks=loaded.ranks,
        drafting=drafting,
        replays=lambda: bool(decode_graphs.graphs or chunk_graphs.graphs),
    )
    return ModelRunner(
        Forward(context, decode_graphs, chunk_graphs),
        InputBatch(
            max_num_requests=config.max_num_requests,
            max_num_tokens=config.max_num_batched_tokens,
            max_decode_rows=config.max_decode_rows,
            sliding_windows=spec.sliding_windows,
            max_blocks=max_blocks,
            block_size=spec.block_size,
            state_groups=spec.state_groups,
            device=device,
            graph_inputs=graph_inputs,
            has_three_axes=any(rope.axes for rope in loaded.model.config.recipe.ropes),
            num_steps=config.max_steps_in_flight,
            whole_image_groups=_whole_image_groups(loaded),
        ),
        StepSampler(_samples_on_device(samples_on_device, device), rejects),
        extras,
        num_steps=config.max_steps_in_flight,
    )


def _samples_on_device(asked: bool | None, device: torch.device) -> bool:
    """Return ``asked``; if it is None, return whether Triton can sample on the device."""
    if asked is None:
        return device.type == "cuda" and find_spec("triton") is not None
    return asked


def _whole_image_groups(loaded: LoadedModel) -> tuple[int, ...]:
    """Return the groups in whose layers the embeddings of an image attend to each other."""
    layers = loaded.model.config.whole_image_layers
    if loaded.model.vision is None:
        return ()
    found = [i for i, group in enumerate(loaded.spec.groups) if layers.intersection(group.layers)]
    for group in (loaded.spec.groups[index] for index in found):
        # All layers of a group share metadata, except that a drafter's passes have metadata of
        # their own.
        own = {layer for layer in group.layers if layer < loaded.model.config.num_layers}
        assert own <= layers, "layers of one group attend to images in two ways"
    return tuple(found)


def make_backends(names: BackendNames) -> tuple[AttentionBackend | None, ...]:
    """Return a new attention backend for each group; None for a group of state layers."""
    return tuple(None if name is None else ATTENTION_BACKENDS.load(name)() for name in names)
