"""Forward: runs the model over a step's inputs, layer by layer or as a captured graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from baton_kernels.attention.base import AttentionBackend, AttentionMetadata
from baton_kernels.state_metadata import StateMetadata
from engine.worker.chunks.chunk_graphs import ChunkGraphs
from engine.worker.cuda_graphs import GraphContext, Replays, StepGraphs
from engine.worker.inputs.prepared_step import ModelInput
from models.base import ForwardContext, GroupStep


class Forward:
    """Runs the forward pass of one model over its KV cache.

    Args:
        context: the model, its cache, and the attention backend of each KV cache group.
        decode_graphs: graphs of decode steps; empty until they are captured.
        chunk_graphs: graphs of steps with prompts; empty until they are captured.

    Attributes:
        context, decode_graphs, chunk_graphs: the arguments, unchanged.
    """

    def __init__(
        self,
        context: GraphContext,
        decode_graphs: Replays[StepGraphs],
        chunk_graphs: Replays[ChunkGraphs],
    ) -> None:
        self.context = context
        self.decode_graphs, self.chunk_graphs = decode_graphs, chunk_graphs

    def run(self, inputs: ModelInput, after_layer: Callable[[int], None] | None) -> Tensor:
        """Compute a step; return the hidden states, `[num_tokens, hidden_size]`.

        Args:
            after_layer: called after each layer; None: no callback.
        """
        context, chunks = self.context, self.chunk_graphs.graphs
        on_axes = inputs.positions.dim() > 1
        if chunks is not None and not inputs.images and not on_axes and chunks.takes(inputs):
            return chunks.replay(inputs, after_layer)
        forward_context = ForwardContext(
            positions=inputs.positions,
            groups=_plan_groups(inputs.groups, context.backends),
            layer_groups=context.layer_groups,
            layer_caches=context.layer_caches,
            after_layer=after_layer,
            adapters=inputs.adapters,
            images=inputs.images,
        )
        return context.model.forward(inputs.input_ids, forward_context)


def _plan_groups(
    groups: Sequence[AttentionMetadata | StateMetadata],
    backends: Sequence[AttentionBackend | None],
) -> tuple[GroupStep, ...]:
    """Let each backend plan the attention of its group; return each group with its backend."""
    steps: list[GroupStep] = []
    for metadata, backend in zip(groups, backends, strict=True):
        if isinstance(metadata, StateMetadata):
            steps.append((metadata, None))
        else:
            assert backend is not None
            backend.plan(metadata)
            steps.append((metadata, backend))
    return tuple(steps)
