"""CUDA graphs of steps with prompts: one per layer, so that a layer's KV can be sent early.

For a few hundred tokens, launching a layer's kernels from Python takes longer than running them. If
attention reads its tiles from a fixed address, the launches of a step depend only on its number of
tokens. So a step is padded to the next captured size::

    embedding, layer 0 | layer 1 | ... | layer n - 1 | last norm
                       ^         ^     ^             ^ callbacks: a layer's KV can go to peers

Sampling, and steps with more tokens or requests, run eagerly.
Refuses to know: requests, schedulers, how attention cuts its work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor

from baton.engine_config import EngineConfig
from baton_kernels.attention.base import AttentionBackend, AttentionMetadata
from engine.worker.chunks.chunk_inputs import ChunkInputs
from engine.worker.cuda_graphs import GraphContext, reason_against_replays
from engine.worker.device_choice import BackendNames
from engine.worker.inputs.prepared_step import ModelInput
from models.base import ForwardContext
from models.parallel.group import Ranks

# Type of functions that capture a step as several graphs. Their argument, the step's body, may be
# run several times; it calls its own argument where one graph ends and the next begins. The result
# has one function per graph, which replays the graph; call these functions in order.
CapturePieces = Callable[[Callable[[Callable[[], None]], None]], Sequence[Callable[[], None]]]

LEAST_SIZE = 128  # tokens; a GPU takes as long for fewer tokens
# Maximum number of requests of a captured step. A captured step has at least one attention tile for
# each of them, and unused tiles take time.
MAX_NUM_REQUESTS = 16


def chunk_sizes(most: int) -> tuple[int, ...]:
    """Return the numbers of tokens to capture: multiples of 128 up to ``most``, and ``most``."""
    return (*range(LEAST_SIZE, most, LEAST_SIZE), most)


def reason_against_chunks(
    config: EngineConfig, device: torch.device, backend_names: BackendNames, ranks: Ranks
) -> str | None:
    """Return why steps with prompts cannot be captured, in words for the log; None: they can."""
    if not config.cuda_graph_max_chunk:
        return "switched off"
    if ranks.everyone.size > 1:
        return "ranks share the model"
    if "triton_invariant" in backend_names:
        return "attention cuts prompts by their positions"
    return reason_against_replays(config, device, backend_names)


class CapturedAttention(Protocol):
    """An attention backend whose steps can be captured before their requests are known."""

    def plan_captured(self, metadata: AttentionMetadata) -> None:
        """Plan a step whose lengths are unknown; `fill_captured` sets them before each replay."""
        ...

    def fill_captured(
        self, num_tokens: int, query_lens: Sequence[int], seq_lens: Sequence[int]
    ) -> None:
        """Launch the copy of requests' lengths into the captured step of ``num_tokens`` tokens."""
        ...


@dataclass(frozen=True, slots=True)
class _Captured:
    """The graphs of a captured size, and the layer after which each graph but the last ends."""

    pieces: Sequence[Callable[[], None]]
    layers: Sequence[int]
    hidden: Tensor  # [size, hidden_size], output of the last replay


class ChunkGraphs:
    """The CUDA graphs of steps with prompts, for each captured number of tokens.

    Args:
        context: the model and its cache.
        inputs: the tensors that the graphs read.
        capture: captures a step as one graph per layer.
    """

    def __init__(self, context: GraphContext, inputs: ChunkInputs, capture: CapturePieces) -> None:
        self._context, self._inputs, self._capture = context, inputs, capture
        self._captured: dict[int, _Captured] = {}

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the captured sizes, ascending."""
        return tuple(sorted(self._captured))

    @property
    def _backends(self) -> list[CapturedAttention]:
        return [cast("CapturedAttention", backend) for backend in self._context.backends]

    def capture(self, size: int) -> None:
        """Capture a step of ``size`` tokens; call with larger sizes first (they share memory)."""
        inputs, context = self._inputs, self._context
        metadata = inputs.metadata(size)
        backends = cast("Sequence[AttentionBackend]", context.backends)
        input_ids, layers = inputs.input_ids(size), list[int]()
        hidden = torch.empty(0)

        def body(cut: Callable[[], None]) -> None:
            nonlocal hidden
            layers.clear()

            def after_layer(layer: int) -> None:
                layers.append(layer)
                cut()

            for backend, step in zip(self._backends, metadata, strict=True):
                backend.plan_captured(step)
            forward_context = ForwardContext(
                positions=inputs.positions(size),
                groups=tuple(zip(metadata, backends, strict=True)),
                layer_groups=context.layer_groups,
                layer_caches=context.layer_caches,
                after_layer=after_layer,
            )
            hidden = context.model.forward(input_ids, forward_context)

        pieces = self._capture(body)
        self._captured[size] = _Captured(pieces, tuple(layers), hidden)

    def takes(self, inputs: ModelInput) -> bool:
        """Return whether captured graphs can compute this step."""
        return self._inputs.size_for(inputs) in self._captured

    def replay(self, inputs: ModelInput, after_layer: Callable[[int], None] | None) -> Tensor:
        """Launch a step for which `takes` is True.

        Args:
            inputs: inputs on the device, with all token ids known.
            after_layer: called with the index of each layer once the layer is launched.

        Returns:
            `[num_tokens, hidden_size]` after the last norm; overwritten by the next replay.
        """
        size = self._inputs.size_for(inputs)
        assert size is not None, "the step has more tokens or requests than are captured"
        self._inputs.write(inputs, size)
        for backend, step in zip(self._backends, inputs.groups, strict=True):
            assert isinstance(step, AttentionMetadata)
            backend.fill_captured(size, step.query_lens, step.seq_lens_host)
        captured = self._captured[size]
        *pieces, last = captured.pieces
        for piece, layer in zip(pieces, captured.layers, strict=True):
            piece()
            if after_layer is not None:
                after_layer(layer)
        last()
        return captured.hidden[: len(inputs.input_ids)]
