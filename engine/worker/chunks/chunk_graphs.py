"""CUDA graphs of steps with prompts: one for each layer, so that what follows a layer can begin.

Python around the launches of a layer takes longer than a GPU does for a few hundred tokens. What
such a step launches depends on nothing but its size, when attention finds its tiles where they
always are; so a step is padded to the next size that was captured::

    embedding, layer 0 | layer 1 | ... | layer n - 1 | last norm
                       ^         ^     ^             ^ callbacks: a layer's KV can go to peers

Sampling, and steps with more tokens or requests, are launched kernel by kernel.
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
from engine.worker.input_batch import ModelInput
from models.base import ForwardContext
from models.parallel.group import Ranks

# Runs a body once or more, which calls what it is given between two pieces; gives what computes
# each piece again. They are computed again in their order.
CapturePieces = Callable[[Callable[[Callable[[], None]], None]], Sequence[Callable[[], None]]]

LEAST_SIZE = 128  # tokens; a GPU takes as long for fewer
MAX_NUM_REQUESTS = 16  # each is a tile at least, and a place for one costs time where there is none


def chunk_sizes(most: int) -> tuple[int, ...]:
    """Return the numbers of tokens that are captured: every 128th up to ``most``, and that."""
    return (*range(LEAST_SIZE, most, LEAST_SIZE), most)


def reason_against_chunks(
    config: EngineConfig, device: torch.device, backend_names: BackendNames, ranks: Ranks
) -> str | None:
    """Say why steps with prompts are not captured, as one phrase for the log; None: they are."""
    if not config.cuda_graph_max_chunk:
        return "switched off"
    if ranks.everyone.size > 1:
        return "ranks share the model"
    if "triton_invariant" in backend_names:
        return "attention cuts prompts by their positions"
    return reason_against_replays(config, device, backend_names)


class CapturedAttention(Protocol):
    """What an attention backend whose steps can be captured before their requests are known has."""

    def plan_captured(self, metadata: AttentionMetadata) -> None:
        """Plan a step whose lengths are told before each replay."""
        ...

    def fill_captured(
        self, num_tokens: int, query_lens: Sequence[int], seq_lens: Sequence[int]
    ) -> None:
        """Launch the copy that tells the captured step of so many tokens its lengths."""
        ...


@dataclass(frozen=True, slots=True)
class _Captured:
    """A captured size: its pieces, and the layer behind each of them but the last."""

    pieces: Sequence[Callable[[], None]]
    layers: Sequence[int]
    hidden: Tensor  # [size, hidden_size], of the last replay


class ChunkGraphs:
    """The captured sizes of steps with prompts.

    Args:
        context: the model and its cache.
        inputs: what the graphs read.
        capture: records the pieces of a step.
    """

    def __init__(self, context: GraphContext, inputs: ChunkInputs, capture: CapturePieces) -> None:
        self._context, self._inputs, self._capture = context, inputs, capture
        self._captured: dict[int, _Captured] = {}

    @property
    def sizes(self) -> tuple[int, ...]:
        """What is captured, rising."""
        return tuple(sorted(self._captured))

    @property
    def _backends(self) -> list[CapturedAttention]:
        return [cast("CapturedAttention", backend) for backend in self._context.backends]

    def capture(self, size: int) -> None:
        """Capture a size; larger ones before smaller ones, which live in their memory."""
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
        """Say whether a step can be replayed."""
        return self._inputs.size_for(inputs) in self._captured

    def replay(self, inputs: ModelInput, after_layer: Callable[[int], None] | None) -> Tensor:
        """Launch a step that `takes` has said yes to.

        Args:
            inputs: on the device, all token ids known.
            after_layer: called with each layer's number when it has been launched.

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
