"""Captures steps as CUDA graphs at the start, if possible, and measures the graphs' memory.

Refuses to know: the computation of a step, when a step is replayed.
"""

from __future__ import annotations

import functools
import logging
import time
import warnings
from collections.abc import Callable

import torch

from engine.worker.chunks.chunk_graphs import ChunkGraphs, reason_against_chunks
from engine.worker.cuda_graphs import Replays, StepGraphs, reason_against_graphs
from engine.worker.drafting.base import Drafting
from engine.worker.make_runner import LoadedModel, make_model_runner
from engine.worker.model_runner import ModelRunner
from models.parallel.group import Ranks

logger = logging.getLogger(__name__)

AnyReplays = Replays[StepGraphs] | Replays[ChunkGraphs]


class CaptureError(Exception):
    """Says why a step cannot be captured; the engine then works without graphs."""


@functools.cache
def capture_stream(device_index: int) -> torch.cuda.Stream:
    """Return the one stream on which all steps of a device are captured.

    The stream lives as long as the process. cuBLAS allocates a workspace for each stream (32 MiB on
    Hopper) and keeps it; this stream's workspace is allocated here, so that it is not counted as
    memory of a graph.
    """
    stream = torch.cuda.Stream(device_index)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        _multiply(torch.device("cuda", device_index))
    return stream


def _multiply(device: torch.device) -> None:
    """Make cuBLAS allocate its workspace for the current stream."""
    matrix = torch.ones(64, 64, device=device)
    torch.mm(matrix, matrix)


def _go_on() -> None:
    """Do nothing; a body that runs without capture calls this where a graph would end."""


class DeviceCapture:
    """Captures steps on the current CUDA device; all graphs share one memory pool."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = capture_stream(torch.cuda.current_device())

    def __call__(self, body: Callable[[], None]) -> Callable[[], None]:
        """Capture a body as one graph; return its replay (see `cuda_graphs.Capture`)."""
        self._warm_up(body)
        graph = torch.cuda.CUDAGraph()
        # Other threads, such as those of a connector, may use the device during the capture.
        try:
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                body()
        except RuntimeError as error:
            raise CaptureError(f"a step cannot be captured: {error}") from error
        return graph.replay

    def pieces(self, body: Callable[[Callable[[], None]], None]) -> tuple[Callable[[], None], ...]:
        """Capture a body as several graphs (see `chunk_graphs.CapturePieces`)."""
        self._warm_up(lambda: body(_go_on))
        graphs = [torch.cuda.CUDAGraph()]

        def cut() -> None:
            graphs[-1].capture_end()
            graphs.append(torch.cuda.CUDAGraph())
            graphs[-1].capture_begin(self._pool, "thread_local")

        # This does what `torch.cuda.graph` does, but a graph may end in the middle of a call.
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        try:
            with torch.cuda.stream(self._stream):
                graphs[-1].capture_begin(self._pool, "thread_local")
                try:
                    body(cut)
                finally:
                    graphs[-1].capture_end()
        except RuntimeError as error:
            raise CaptureError(f"a step cannot be captured: {error}") from error
        return tuple(graph.replay for graph in graphs)

    def _warm_up(self, body: Callable[[], None]) -> None:
        """Compile kernels, let libraries allocate memory, then look for operations that
        synchronize.

        During a capture, such an operation would raise an error that does not name its cause.
        """
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            body()
            torch.cuda.synchronize()
            with warnings.catch_warnings():  # torch warns that this mode is incomplete
                warnings.simplefilter("ignore")
                torch.cuda.set_sync_debug_mode("error")
            try:
                body()
            except RuntimeError as error:
                raise CaptureError(f"a step cannot be captured: {error}") from error
            finally:
                torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()


def make_captured_runner(
    loaded: LoadedModel,
    kv_cache: torch.Tensor,
    max_model_len: int,
    *,
    sends_tokens: bool = False,
    drafting: Drafting | None = None,
    rejects: bool = False,
) -> ModelRunner:
    """Make a runner and capture its decode steps and prompts, if possible; log the outcome."""
    where = loaded.config, kv_cache.device, loaded.backends
    reason_against = reason_against_graphs(*where)
    against_chunks = reason_against_chunks(*where, loaded.ranks)
    runner = make_model_runner(
        *(loaded, kv_cache, max_model_len),
        with_graphs=reason_against is None,
        with_chunks=against_chunks is None,
        sends_tokens=sends_tokens,
        drafting=drafting,
        rejects=rejects,
    )
    if reason_against is None:
        _capture("decode steps", "requests", runner.decode_graphs, DeviceCapture())
        drop_unless_on_all_ranks(runner.decode_graphs, loaded.ranks, kv_cache.device)
    else:
        logger.info("cuda graphs of decode steps off: %s", reason_against)
    if against_chunks is None:
        _capture("prompts", "tokens", runner.chunk_graphs, DeviceCapture().pieces)
    else:
        logger.info("cuda graphs of prompts off: %s", against_chunks)
    return runner


def _capture(steps: str, unit: str, replays: AnyReplays, capture: object) -> None:
    """Capture all sizes of one kind of step, and log how many graphs there are or why none.

    Args:
        steps: name of the kind of step, for the log.
        unit: unit of the sizes, for the log, such as tokens.
        capture: captures a step.
    """
    started = time.monotonic()
    try:
        sizes = replays.capture(capture)
    except CaptureError as error:
        logger.warning("cuda graphs of %s off: %s", steps, error)
        return
    seconds = time.monotonic() - started
    counted = f"{len(sizes)} sizes of up to {sizes[-1]} {unit}"
    logger.info("cuda graphs of %s on: %s in %.1f s", steps, counted, seconds)


def drop_unless_on_all_ranks(replays: AnyReplays, ranks: Ranks, device: torch.device) -> None:
    """Drop this rank's graphs if another rank has none: all ranks must compute steps alike."""
    if ranks.everyone.size == 1:
        return
    captured = torch.tensor([replays.graphs is not None], dtype=torch.int64, device=device)
    on_all = bool(ranks.everyone.all_gather(captured).all())
    if replays.graphs is not None and not on_all:
        logger.warning("cuda graphs off: another rank cannot capture")
        replays.graphs = None


def measure_graph_bytes(make_runner: Callable[[], ModelRunner]) -> int:
    """Return the memory that a runner's graphs will take, estimated from its two largest sizes.

    Smaller graphs reuse the memory of the largest one; each of them is assumed to add as many bytes
    as the second largest adds. Returns 0 if steps cannot be captured.

    Args:
        make_runner: makes a runner with inputs for graphs, which this function drops.
    """
    # Let cuBLAS allocate its workspace now, so that it is not measured.
    capture_stream(torch.cuda.current_device())
    free_before = _free_bytes()
    runner = make_runner()
    free_inputs = _free_bytes()
    needed = max(free_before - free_inputs, 0)
    try:  # a failure is logged later, at the real capture
        needed += _measure_kind(runner.decode_graphs, DeviceCapture)
        needed += _measure_kind(runner.chunk_graphs, lambda: DeviceCapture().pieces)
    except CaptureError:
        return 0
    return needed


def _measure_kind(replays: AnyReplays, make_capture: Callable[[], object]) -> int:
    """Return the bytes of all graphs of one kind of step, estimated from the two largest sizes."""
    free, sizes = [_free_bytes()], replays.capturable
    for num_graphs in (1, 2)[: len(sizes)]:
        replays.capture(make_capture(), sizes[-num_graphs:])
        free.append(_free_bytes())
    if not sizes:
        return 0
    each = max(free[1] - free[-1], 0)
    return max(free[0] - free[1], 0) + each * (len(sizes) - 1)


def _free_bytes() -> int:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free: int = torch.cuda.mem_get_info()[0]
    return free
