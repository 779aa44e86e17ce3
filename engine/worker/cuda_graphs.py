"""CUDA graphs of decode steps: captured once per number of requests, replayed with new inputs.

Launching a step's kernels one by one takes longer than running them, in small models several times
as long. A graph holds all kernels from the requests' token ids to the next token ids:

    token ids | layers | output head | sampling | last tokens, for the next step

The largest size is captured first, and all sizes use one memory pool, so that smaller graphs reuse
the memory of the largest one. A step is padded to the next captured size (`graph_inputs.py`). Steps
with prompts have other graphs (`chunks/`). All other steps, such as those with callbacks after
layers, run eagerly. Refuses to know: requests, schedulers, how attention plans its work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from baton.engine_config import EngineConfig
from baton_kernels.attention.base import AttentionBackend
from engine.sampling.device_sampling import sample_on_device
from engine.worker.device_choice import BackendNames
from engine.worker.graph_inputs import GraphInputs
from engine.worker.inputs.prepared_step import ReplayStep
from models.base import CausalLM, ForwardContext, LayerCache

# Type of functions that capture a step's body, which they run at least once, and return a function
# that repeats the step.
Capture = Callable[[Callable[[], None]], Callable[[], None]]

# Attention backends whose decode steps launch the same kernels for requests of any length.
CAPTURABLE_BACKENDS = (
    "triton", "triton_invariant", "flash_triton", "flashinfer_triton", "sdpa_triton",
)  # fmt: skip


def captured_sizes(most: int) -> tuple[int, ...]:
    """Return the sizes to capture: 1, 2, 4, 8, every 8th up to 256, every 16th after.

    Sizes are numbers of requests; the last one is ``most``.
    """
    sizes = (1, 2, 4, *range(8, 256, 8), *range(256, most + 1, 16))
    return (*(size for size in sizes if size < most), most)


def reason_against_graphs(
    config: EngineConfig, device: torch.device, backend_names: BackendNames
) -> str | None:
    """Return why decode steps are not captured, in words for the log; None: they are captured."""
    if not config.cuda_graph_max_batch:
        return "switched off"
    return reason_against_replays(config, device, backend_names)


def reason_against_replays(
    config: EngineConfig, device: torch.device, backend_names: BackendNames
) -> str | None:
    """Return why no step can be captured, in words for the log; None: some steps can be."""
    if not config.cuda_graphs:
        return "switched off"
    if device.type != "cuda":
        return f"the model is on {device.type}"
    if config.pipeline_parallel_size > 1:
        return "only the last stage computes logits"
    for backend_name in backend_names:
        if backend_name is None:
            return "steps of models with states are not captured"
        if backend_name not in CAPTURABLE_BACKENDS:
            return f"attention backend {backend_name} cannot be captured"
    return None


@dataclass(frozen=True, slots=True)
class GraphContext:
    """The inputs that are equal in all forwards.

    Attributes:
        model: the network, on its device.
        backends: attention backend of each KV cache group; None: a group of state layers.
        layer_groups: index of each layer's KV cache group.
        layer_caches: each layer's part of the cache, whose address must never change.
    """

    model: CausalLM
    backends: Sequence[AttentionBackend | None]
    layer_groups: tuple[int, ...]
    layer_caches: tuple[LayerCache, ...]


class Graphs(Protocol):
    """The graphs of one kind of step, for all captured sizes."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the captured sizes, ascending."""
        ...

    def capture(self, size: int) -> None:
        """Capture a size; call with larger sizes first, because smaller ones reuse their memory."""
        ...


AnyGraphs = TypeVar("AnyGraphs", bound=Graphs)


class Replays(Generic[AnyGraphs]):
    """The graphs of one kind of steps of a model runner: captured once, then replayed.

    Args:
        make: makes the graphs, given the function that captures steps; None: nothing can be
            captured.
        capturable: sizes that may be captured, because input tensors were made for them; ascending.

    Attributes:
        capturable: the argument, unchanged.
        graphs: the captured graphs; None before `capture`.
    """

    def __init__(
        self, make: Callable[[Any], AnyGraphs] | None = None, capturable: tuple[int, ...] = ()
    ) -> None:
        self._make = make
        self.capturable = capturable
        self.graphs: AnyGraphs | None = None

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the captured sizes; empty before `capture`."""
        return self.graphs.sizes if self.graphs else ()

    @torch.inference_mode()
    def capture(self, capture: object, sizes: Sequence[int] | None = None) -> tuple[int, ...]:
        """Capture the given sizes, or all capturable ones, the largest first; return these sizes.

        Args:
            capture: captures a step: a `Capture` or a `chunk_graphs.CapturePieces`. If it raises an
                error, `graphs` stays unchanged.
        """
        assert self._make is not None, "there are no inputs for graphs"
        graphs = self._make(capture)
        for size in sorted(sizes or self.capturable, reverse=True):
            graphs.capture(size)
        self.graphs = graphs
        return graphs.sizes


class StepGraphs:
    """The graphs of decode steps, for all captured sizes, and the outputs of the latest replay.

    Args:
        context: the model and its cache.
        inputs: the tensors that the graphs read.
        capture: captures a step as a CUDA graph; tests on CPUs pass a function that computes the
            step again.
    """

    def __init__(self, context: GraphContext, inputs: GraphInputs, capture: Capture) -> None:
        self._context = context
        self._inputs = inputs
        self._capture = capture
        self._replays: dict[int, Callable[[], None]] = {}
        weight = context.layer_caches[0]
        assert isinstance(weight, Tensor), "steps of models with states are not captured"
        largest, config = inputs.sizes[-1], context.model.config
        # [largest, hidden_size] and [largest]; allocated outside the pool whose memory the graphs
        # share.
        self._hidden = torch.zeros(
            largest, config.hidden_size, dtype=weight.dtype, device=weight.device
        )
        self._token_ids = torch.zeros(largest, dtype=torch.int64, device=weight.device)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the captured sizes, ascending."""
        return tuple(sorted(self._replays))

    def capture(self, size: int) -> None:
        """Capture a decode step of ``size`` requests; call with larger sizes first."""
        self._replays[size] = self._capture(self._body(size))

    def replay(self, staged: ReplayStep) -> tuple[Tensor, Tensor]:
        """Launch a step that is staged in the graphs' inputs.

        Returns:
            ``(hidden_states, token_ids)``: `[num_requests, hidden_size]` after the last norm, and
            `[num_requests]` int64, sampled without penalties and grammars; NO_TOKEN for a row with
            NaN. Both are overwritten by the next replay.
        """
        self._inputs.upload(staged)
        self._replays[staged.size]()
        return self._hidden[: staged.num_requests], self._token_ids[: staged.num_requests]

    def correct(self, staged: ReplayStep, token_ids: Tensor) -> None:
        """Replace the tokens that the latest replay sampled by tokens that the host sampled.

        Args:
            token_ids: `[num_requests]` int64 on the device.
        """
        rows = self._inputs.section("rows", staged.num_requests)
        self._inputs.last_tokens.scatter_(0, rows, token_ids)

    def _body(self, size: int) -> Callable[[], None]:
        inputs, context = self._inputs, self._context
        attention = inputs.metadata(size)
        backends = [backend for backend in context.backends if backend is not None]
        forward_context = ForwardContext(
            positions=inputs.section("positions", size),
            groups=tuple(zip(attention, backends, strict=True)),
            layer_groups=context.layer_groups,
            layer_caches=context.layer_caches,
        )
        token_index, rows = inputs.section("token_index", size), inputs.section("rows", size)
        sampling = inputs.sampling_tensors(size)

        def body() -> None:
            for backend, metadata in zip(backends, attention, strict=True):
                backend.plan(metadata)
            input_ids = inputs.source.index_select(0, token_index)  # [size]
            hidden = context.model.forward(input_ids, forward_context)  # [size, hidden_size]
            token_ids = sample_on_device(context.model.compute_logits(hidden), sampling)
            # Replace NO_TOKEN by a valid id, because the next step embeds these tokens.
            inputs.last_tokens.scatter_(0, rows, token_ids.clamp(min=0))
            self._hidden[:size].copy_(hidden)
            self._token_ids[:size].copy_(token_ids)

        return body
