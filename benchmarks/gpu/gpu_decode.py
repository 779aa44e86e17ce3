"""Parts of the GPU suite that measure speed: decode steps, and nano-vllm's workload.

The floor of a step is the time to read all bytes that the step must read (weights of the layers and
the output head, all requests' KV) at the copy bandwidth of this device, measured in the same run.
Idle is the share of a decode's time between the end of one graph replay and the start of the next,
measured with CUDA events: in this time the device waits for the host, except for copies of some
microseconds.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise

import torch

from baton_kernels.quantized import QuantizedFormat
from benchmarks.gpu.gpu_models import add_decoding, make_engine, make_request
from benchmarks.gpu.gpu_report import Report
from benchmarks.kernels.gpu_timing import copy_gb_per_s
from engine.engine import Engine
from engine.executors.uniproc import worker_of

CONTEXT = 1024
WEIGHTS = tuple(one.value for one in QuantizedFormat)
STEPS, WARM_STEPS = 100, 10
BATCHES = {"0.6B": (1, 8, 64, 256), "8B": (1, 8, 64)}
# https://github.com/GeeeekExplorer/nano-vllm, bench.py
NANO_REQUESTS, NANO_LENGTH, NANO_TEMPERATURE = 256, 1024, 0.6


class ReplayTimer:
    """Records CUDA events before and after each further replay of an engine's graphs.

    The copies before a replay are not between its two events. Otherwise an idle device would pass
    the first event early, and the time in which it then waits for the host would count as work.
    """

    def __init__(self, engine: Engine) -> None:
        self._events: list[tuple[torch.Event, torch.Event]] = []
        graphs = worker_of(engine.executor).runner.decode_graphs.graphs
        if graphs is None:
            return
        for size, replay in graphs._replays.items():
            graphs._replays[size] = partial(self._timed, replay)

    def _timed(self, replay: Callable[[], None]) -> None:
        start: torch.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end: torch.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record()
        replay()
        end.record()
        self._events.append((start, end))

    def take_ms(self) -> tuple[list[float], list[float]]:
        """Return the ms of each replay since the last call, and of each gap between replays.

        The device must finish all work first, so this waits.
        """
        torch.cuda.synchronize()
        events, self._events = self._events, []
        busy = [start.elapsed_time(end) for start, end in events]
        gaps = [before[1].elapsed_time(after[0]) for before, after in pairwise(events)]
        return busy, gaps


def measure_decode(device: str, report: Report) -> bool:
    """Measure milliseconds per decode step with a context of 1k tokens, and the floors."""
    return measure_shapes(device, report, BATCHES)


def measure_shapes(device: str, report: Report, shapes: Mapping[str, Sequence[int]]) -> bool:
    """Measure decode steps of these shapes and batches; on a CPU, of a tiny shape."""
    on_gpu = device != "cpu"
    bandwidth = copy_gb_per_s(device, 2**30 if on_gpu else 2**16)
    report["copy, GB/s"] = bandwidth
    right = True
    for shape, batches in shapes.items() if on_gpu else (("tiny", (1, 3)),):
        context = CONTEXT if on_gpu else 20
        engine = _engine(shape, device, batches, context)
        timer = ReplayTimer(engine)
        sizes = worker_of(engine.executor).runner.decode_graphs.sizes
        report[f"{shape}: graphs"] = len(sizes)
        right = right and (bool(sizes) or not on_gpu)
        for batch in batches:
            floor_ms = (
                (_weight_bytes(engine) + batch * context * _kv_bytes(engine)) / bandwidth / 1e6
            )
            wall_ms, busy_ms, gap_ms = _time_decode(engine, timer, batch, context)
            report[f"{shape}, batch {batch}: ms per step"] = wall_ms
            report[f"{shape}, batch {batch}: floor / measured"] = floor_ms / wall_ms
            if busy_ms:
                report[f"{shape}, batch {batch}: GPU ms"] = busy_ms
                report[f"{shape}, batch {batch}: gap ms"] = gap_ms
                report[f"{shape}, batch {batch}: idle"] = gap_ms / (busy_ms + gap_ms)
        del engine, timer
        gc.collect()
    return right


def measure_few_bits(device: str, report: Report) -> bool:
    """Measure milliseconds per decode step of the 8B shape, by format of the linear layers."""
    on_gpu = device != "cpu"
    weights = ("auto", *WEIGHTS) if on_gpu else ("auto", "int4")
    for name in weights:
        context = CONTEXT if on_gpu else 20
        batches = BATCHES["8B"] if on_gpu else (1, 3)
        engine = _engine("8B" if on_gpu else "tiny", device, batches, context, weights=name)
        timer = ReplayTimer(engine)
        report[f"{name}: weights, GB"] = _weight_bytes(engine) / 1e9
        for batch in batches:
            report[f"{name}, batch {batch}: ms per step"] = _time_decode(
                engine, timer, batch, context
            )[0]
        del engine, timer
        gc.collect()
    return True


def measure_invariant(device: str, report: Report) -> bool:
    """Measure decode steps and a prompt of the 8B shape with batch_invariant, in ms.

    Also compare the results of requests in a batch with the results of the requests alone.
    """
    on_gpu = device != "cpu"
    context, batches = (CONTEXT, BATCHES["8B"]) if on_gpu else (20, (1, 3))
    for name, invariant in {"as usual": False, "batch-invariant": True}.items():
        shape = "8B" if on_gpu else "tiny"
        engine = _engine(shape, device, batches, context, batch_invariant=invariant)
        timer = ReplayTimer(engine)
        for batch in batches:
            report[f"{name}, batch {batch}: ms per step"] = _time_decode(
                engine, timer, batch, context
            )[0]
        prompt = list(range(context))
        _run(engine, [prompt], [1])  # compiles the kernels for prompts
        report[f"{name}, prompt: ms"] = _run(engine, [prompt], [1]) * 1e3
        del engine, timer
        gc.collect()
    return True


def _engine(
    shape: str, device: str, batches: Sequence[int], context: int, **options: str | bool
) -> Engine:
    """Make an engine whose KV cache has room for the largest of these batches."""
    tokens = context + STEPS + WARM_STEPS + 16
    return make_engine(
        shape,
        device,
        **options,
        max_num_requests=max(batches),
        max_num_batched_tokens=2048,
        num_blocks=max(batches) * (tokens // 16 + 2),
        max_model_len=tokens + 16,
        prefix_cache=False,
        async_scheduling=True,
    )


def _time_decode(
    engine: Engine, timer: ReplayTimer, batch: int, context: int
) -> tuple[float, float, float]:
    """Return the mean milliseconds of a step, of its replay, and between replays (0: none)."""
    add_decoding(engine, batch, context, STEPS + WARM_STEPS + 8)
    for _ in range(WARM_STEPS):
        engine.step()
    on_gpu = engine.kv_memory.tensor.is_cuda
    if on_gpu:
        timer.take_ms()
    first, started = engine.num_steps, time.perf_counter()
    for _ in range(STEPS):
        engine.step()
    num_steps, wall_ms = engine.num_steps - first, (time.perf_counter() - started) * 1e3
    busy, gaps = timer.take_ms() if on_gpu else ([], [])
    for request_id in list(engine.requests):
        engine.abort(request_id)
    while engine.has_work:
        engine.step()
    return wall_ms / num_steps, _mean(busy), _mean(gaps)


def _mean(values: list[float]) -> float:
    return sum(values) / max(len(values), 1)


def _weight_bytes(engine: Engine) -> int:
    """Return the bytes of weights that each step reads: all but those of an untied embedding."""
    model = worker_of(engine.executor).runner._model
    assert isinstance(model, torch.nn.Module)
    weights = {name: p.numel() * p.itemsize for name, p in model.named_parameters()}
    tied = engine.model_config.tie_word_embeddings
    return sum(n for name, n in weights.items() if tied or "embed_tokens" not in name)


def _kv_bytes(engine: Engine) -> float:
    """Return the bytes of KV per token, over all layers."""
    return engine.kv_memory.spec.block_bytes / engine.kv_memory.spec.block_size


def measure_nano(device: str, report: Report) -> bool:
    """Measure nano-vllm's workload: 256 prompts and outputs of 100 to 1024 tokens each."""
    on_gpu = device != "cpu"
    shape, num_requests = ("0.6B", NANO_REQUESTS) if on_gpu else ("tiny", 4)
    shortest, longest = (100, NANO_LENGTH) if on_gpu else (3, 12)
    draw = random.Random(0)
    prompts = [
        [draw.randint(0, 10000) for _ in range(draw.randint(shortest, longest))]
        for _ in range(num_requests)
    ]
    lengths = [draw.randint(shortest, longest) for _ in range(num_requests)]
    engine = make_engine(
        shape,
        device,
        max_num_requests=num_requests,
        max_num_batched_tokens=16384,
        long_prefill_token_threshold=16384,
        max_model_len=4096 if on_gpu else 64,
        prefix_cache=False,
        **({} if on_gpu else {"num_blocks": 64}),
    )
    report["KV blocks"] = engine.num_blocks
    report["graphs"] = len(worker_of(engine.executor).runner.decode_graphs.sizes)
    report["prompt tokens"], report["output tokens"] = sum(map(len, prompts)), sum(lengths)
    _run(engine, [prompts[0]], [8])  # compiles the kernels for prompts
    timer = ReplayTimer(engine)
    wall_s = _run(engine, prompts, lengths)
    report["seconds"] = wall_s
    report["output tokens per second"] = sum(lengths) / wall_s
    if on_gpu:
        replays, _ = timer.take_ms()
        report["replayed steps"] = len(replays)
        report["replays, share of the time"] = sum(replays) / 1e3 / wall_s
    return bool(worker_of(engine.executor).runner.decode_graphs.sizes) or not on_gpu


def _run(engine: Engine, prompts: list[list[int]], lengths: list[int]) -> float:
    """Compute all prompts' outputs; return the seconds from the first request to the last token."""
    vocab_size, started = engine.model_config.vocab_size, time.perf_counter()
    for index, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        token_ids = [token_id % vocab_size for token_id in prompt]
        name = f"{engine.num_steps}-{index}"
        engine.add_request(make_request(name, token_ids, engine, length, NANO_TEMPERATURE))
    num_tokens = 0
    while engine.has_work:
        num_tokens += len(engine.step().outputs)
    assert num_tokens == sum(lengths), f"{num_tokens} tokens came, {sum(lengths)} were asked for"
    return time.perf_counter() - started
