"""Measure host microseconds of a decode step and an eager layer, without a GPU (`fake_gpu.py`).

    decode step   an engine that runs ahead as on a node, with graph replays that take no time;
                  also the model runner's part alone: no scheduling, no taking of tokens
    eager layer   all Python of the model except matrix products; also the launches of Triton's
                  kernels alone, from the call of an op or of the attention backend
    replayed      time per layer of a step that replays a prompt layer by layer
    counts        launches and copies of a step, graph nodes of a layer
    idle          share of time that a device with steps of a given length waits for the host,
                  while another thread computes in Python

``--against REV`` measures another revision in turns with this one, each in its own process. With a
real GPU, the host needs more time, because the driver adds time to every launch and copy.
"""

from __future__ import annotations

import contextlib
import gc
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks.engine.fake_gpu import FakeGPU
from benchmarks.runner.environment import DEMO_MODEL, ROOT
from benchmarks.runner.own_process import call_words, own_environment
from benchmarks.runner.run import Document, Run

BATCHES = (1, 32, 256)
CONTEXT = 1000  # tokens that each request has before its decode steps
WARM_UP_STEPS, STEPS = 20, 100
# The shape of Qwen3-0.6B, with fewer layers and a smaller vocabulary, which change no figure.
SHAPE = {"hidden_size": 1024, "intermediate_size": 3072, "num_layers": 8, "num_heads": 16}
SHAPE |= {"num_kv_heads": 8, "head_dim": 128}
CHUNK = 128  # tokens per chunk of a prompt
LAYER_STEPS = 60
# Milliseconds for which the other thread computes; it then sleeps twice as long.
BURSTS_MS = (0.0, 0.5, 2.0, 5.0)
DEVICE_STEP_MS, IDLE_SECONDS, IDLE_BATCH = 5.0, 2.0, 64
SWITCH_INTERVALS_MS = (5.0, 0.5)  # CPython's default, and a shorter interval
Figures = dict[str, float]
# Older revisions cannot replay chunks
REPLAYS_CHUNKS = find_spec("engine.worker.chunks") is not None


class Engines:
    """Makes engines of the demo model on the fake device, with requests that all decode."""

    def __init__(self, gpu: FakeGPU) -> None:
        self._gpu = gpu

    def decoding(self, batch: int, *, runs_ahead: bool = True) -> Any:
        from baton.api.sampling_params import SamplingParams
        from baton.engine_config import EngineConfig
        from engine.core.request import Request
        from engine.executors.uniproc import worker_of
        from engine.make_engine import make_engine

        config = EngineConfig(
            device="cpu", num_threads=1, attention_backend="triton", native_kernels=False,
            dtype="bfloat16", num_blocks=batch * 128 + 1, max_num_requests=256,
            max_num_batched_tokens=8192, long_prefill_token_threshold=4096,
            async_scheduling=runs_ahead,
        )  # fmt: skip
        engine = make_engine(DEMO_MODEL, config)
        worker_of(engine.executor).device = self._gpu.device  # type: ignore
        memory, worker = engine.kv_memory, worker_of(engine.executor)
        worker.runner = runner = _make_runner(
            worker.runner._model, memory.tensor, memory.spec, config, engine.max_model_len
        )
        runner.decode_graphs.capture(self._gpu.capture)
        self._gpu.move(runner)
        params = SamplingParams(temperature=0.8, top_p=0.95, ignore_eos=True)
        for index in range(batch):
            prompt = [(index * 7 + place) % 4000 for place in range(CONTEXT)]
            request = Request.create(
                f"request-{index}", prompt, params, seed=index, eos_token_ids=frozenset(),
                max_model_len=engine.max_model_len, max_tokens=900,
            )  # fmt: skip
            engine.add_request(request)
        while any(request.num_output_tokens < 2 for request in engine.requests.values()):
            engine.step()
        return engine


def _make_runner(
    model: Any, cache: Any, spec: Any, config: Any, max_model_len: int, **options: Any
) -> Any:
    """Make a model runner with graphs of decode steps, in this or an older revision."""
    from engine.worker import make_runner

    options |= {"with_graphs": True, "samples_on_device": True}
    make: Any = make_runner.make_model_runner
    backends = ("triton",)
    if not hasattr(make_runner, "LoadedModel"):
        return make(model, cache, spec, config, backends, max_model_len, **options)
    loaded = make_runner.LoadedModel(model, spec, config, cache.device, backends)
    return make(loaded, cache, max_model_len, **options)


def decode_steps(engines: Engines, batch: int) -> dict[str, Figures]:
    """Return the host's microseconds of a decode step: all, and those in the model runner."""
    from engine.executors.uniproc import worker_of

    engine = engines.decoding(batch)
    runner = worker_of(engine.executor).runner
    whole, inside = [], []
    with without_collections(), timed((runner, "prepare"), (runner, "launch")) as calls:
        for _ in range(WARM_UP_STEPS + STEPS):
            # CPU time of all threads; only one of them computes at a time
            start = time.process_time()
            engine.step()
            whole.append(time.process_time() - start)
            inside.append(sum(calls))
            calls.clear()
    engine.executor.thread.shutdown()
    return {"whole": quantiles(whole[WARM_UP_STEPS:]), "runner": quantiles(inside[WARM_UP_STEPS:])}


@contextmanager
def timed(*places: tuple[Any, str]) -> Iterator[list[float]]:
    """Collect the CPU seconds (of the calling thread) of each call of these methods."""
    seconds: list[float] = []

    def around(inner: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            start = time.thread_time()
            found = inner(*arguments, **options)
            seconds.append(time.thread_time() - start)
            return found

        return call

    before = [getattr(owner, name) for owner, name in places]
    for (owner, name), inner in zip(places, before, strict=True):
        setattr(owner, name, around(inner))
    try:
        yield seconds
    finally:
        for (owner, name), inner in zip(places, before, strict=True):
            setattr(owner, name, inner)


def step_counts(gpu: FakeGPU, engines: Engines, batch: int) -> dict[str, int]:
    """Count the launches and copies of one decode step."""
    engine = engines.decoding(batch, runs_ahead=False)
    engine.step()
    with gpu.counting() as found:
        engine.step()
    return found


class Layers:
    """A model runner, for a model of `SHAPE`, that launches each kernel without graphs."""

    def __init__(self, gpu: FakeGPU, num_layers: int = SHAPE["num_layers"]) -> None:
        from baton.engine_config import EngineConfig
        from engine.worker.kv_cache import allocate_kv_cache, kv_cache_spec
        from models.config import ModelConfig
        from models.decoder import DecoderForCausalLM

        shape = {
            "hidden_size": SHAPE["hidden_size"],
            "intermediate_size": SHAPE["intermediate_size"],
            "num_hidden_layers": num_layers,
            "num_attention_heads": SHAPE["num_heads"],
            "num_key_value_heads": SHAPE["num_kv_heads"],
            "head_dim": SHAPE["head_dim"],
        }
        values = json.loads((DEMO_MODEL / "config.json").read_text(encoding="utf-8"))
        config = ModelConfig.from_dict({**values, **shape, "layer_types": None})
        torch.set_default_dtype(torch.bfloat16)
        model = DecoderForCausalLM(config)
        torch.set_default_dtype(torch.float32)
        with torch.no_grad():
            for weight in model.model.embed_tokens.parameters():
                weight.zero_()
        spec = kv_cache_spec(model.kv_layers, 16, torch.bfloat16)
        options = EngineConfig(
            device="cpu", max_num_requests=32, max_num_batched_tokens=2048, block_size=16,
            long_prefill_token_threshold=2048,
        )  # fmt: skip
        cache = allocate_kv_cache(spec, 64, torch.device("cpu"))
        self.num_layers = num_layers
        # Older revisions, which this module also measures, lack these options.
        options_of_runner: dict[str, Any] = {"with_chunks": True} if REPLAYS_CHUNKS else {}
        self.runner = _make_runner(model, cache, spec, options, 1024, **options_of_runner)
        gpu.move(self.runner)
        self._gpu = gpu
        self._request = 0

    def prompt(self) -> Any:
        """Schedule a step that computes a prompt's first chunk."""
        return self._scheduled(CHUNK + 1, 0, CHUNK)

    def decode(self) -> Any:
        """Schedule a step that computes one request's next token."""
        return self._scheduled(CHUNK, CHUNK - 1, 1)

    def _scheduled(self, num_tokens: int, num_computed: int, count: int) -> Any:
        from baton.api.sampling_params import SamplingParams
        from engine.core.outputs import ScheduledRequest
        from engine.core.request import Request
        from engine.core.step_plan import StepPlanner

        self._request += 1
        request = Request.create(
            str(self._request), [7] * num_tokens, SamplingParams(ignore_eos=True), seed=1,
            eos_token_ids=frozenset(), max_model_len=1024, max_tokens=100,
        )  # fmt: skip
        request.num_computed_tokens, request.block_ids = num_computed, list(range(1, 12))
        return StepPlanner(1).plan([ScheduledRequest(request, count)])

    def time(self, scheduled: Any) -> dict[str, Figures]:
        """Return the host's microseconds per layer: all, and those in launches of kernels."""
        from baton_kernels import dispatch
        from models.decoder import Decoder

        ops = dispatch._triton_ops()
        launches: list[tuple[Any, str]] = [(ops, name) for name in dispatch._TRITON]
        launches += [(backend, "run") for backend in self.runner._context.backends]
        return {
            "whole": self._time(scheduled, [(Decoder, "_layers")]),
            "launches": self._time(scheduled, launches),
        }

    def time_replay(self) -> Figures:
        """Return the host's microseconds per layer of a step that replays a prompt's chunk."""
        self.runner.chunk_graphs.capture(self._gpu.capture_pieces)
        step = self.prompt()
        prepared = self.runner.prepare(step, eager=True)
        chunks: Any = self.runner.chunk_graphs.graphs
        assert chunks.takes(prepared.model)
        found = self._time(step, [(self.runner, "launch")])
        self.runner.chunk_graphs.graphs = None
        return found

    @torch.inference_mode()
    def _time(self, scheduled: Any, places: list[tuple[Any, str]]) -> Figures:
        """Return the host's microseconds per layer that the calls of these methods take."""
        of_layers = []
        with without_collections(), timed(*places) as calls:
            for _ in range(LAYER_STEPS):
                self.runner.launch(self.runner.prepare(scheduled, eager=True)).wait()
                of_layers.append(sum(calls) / self.num_layers)
                calls.clear()
        return quantiles(of_layers[5:])

    def count_step(self, scheduled: Any) -> dict[str, int]:
        """Count the launches and copies of a step without graphs."""
        self.runner.launch(self.runner.prepare(scheduled, eager=True)).wait()
        with self._gpu.counting() as found:
            self.runner.launch(self.runner.prepare(scheduled, eager=True)).wait()
        return found

    @torch.inference_mode()
    def count_nodes(self) -> int:
        """Count the launches while a decode step is captured, which are its graph's nodes."""
        bodies = []
        self.runner.decode_graphs.capture(lambda body: bodies.append(body) or body, [8])  # type: ignore
        bodies[0]()
        with self._gpu.counting() as found:
            bodies[0]()
        return sum(found.values())


def graph_nodes(gpu: FakeGPU) -> Figures:
    """Count the graph nodes per layer, and a step's graph nodes outside the layers."""
    few, many = (Layers(gpu, num_layers).count_nodes() for num_layers in (2, 4))
    each = (many - few) / 2
    return {"per layer": each, "besides": few - 2 * each}


def idle_shares(gpu: FakeGPU, engines: Engines) -> dict[str, Figures]:
    """Return, by switch interval and burst, the share of time that the device is idle."""
    found: dict[str, Figures] = {}
    for interval_ms in SWITCH_INTERVALS_MS:
        sys.setswitchinterval(interval_ms / 1e3)
        found[f"switch interval {interval_ms:g} ms"] = {
            f"bursts of {burst:g} ms": idle_share(gpu, engines, burst) for burst in BURSTS_MS
        }
    return found


def idle_share(gpu: FakeGPU, engines: Engines, burst_ms: float) -> float:
    engine = engines.decoding(IDLE_BATCH)
    gpu.timeline.step_s = DEVICE_STEP_MS / 1e3
    for _ in range(5):
        engine.step()
    stop = threading.Event()
    other = threading.Thread(target=compute_in_bursts, args=(burst_ms / 1e3, stop))
    if burst_ms:
        other.start()
    gpu.timeline.start_over()
    until = time.perf_counter() + IDLE_SECONDS
    while time.perf_counter() < until:
        engine.step()
    share = gpu.timeline.idle_share
    stop.set()
    if burst_ms:
        other.join()
    engine.executor.thread.shutdown()
    gpu.timeline.step_s = 0.0
    return round(share, 4)


def compute_in_bursts(burst_s: float, stop: threading.Event) -> None:
    """Compute in pure Python for a burst, then sleep twice as long; repeat until ``stop``."""
    while not stop.is_set():
        until = time.perf_counter() + burst_s
        while time.perf_counter() < until:
            sum(range(50))
        stop.wait(2 * burst_s)


@contextmanager
def without_collections() -> Iterator[None]:
    """Switch garbage collection off during the ``with`` block."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def quantiles(seconds: list[float]) -> Figures:
    tenths = statistics.quantiles(seconds, n=10, method="inclusive")
    return {
        "median": round(statistics.median(seconds) * 1e6, 1),
        "p10": round(tenths[0] * 1e6, 1),
        "p90": round(tenths[-1] * 1e6, 1),
    }


# ---------------------------------------------------------------------- one revision


def measure(parts: list[str]) -> dict[str, Any]:
    """Measure the parts in this process, with the revision that it has imported."""
    gpu = FakeGPU()
    engines = Engines(gpu)
    found: dict[str, Any] = {}
    if "times" in parts:
        layers = Layers(gpu)
        found["eager layer us"] = {
            f"prompt chunk of {CHUNK}": layers.time(layers.prompt()),
            "decode": layers.time(layers.decode()),
        }
        if REPLAYS_CHUNKS:
            found["eager layer us"]["the prompt's step, replayed"] = layers.time_replay()
        found["decode step us"] = {
            f"batch {batch}": decode_steps(engines, batch) for batch in BATCHES
        }
    if "counts" in parts:
        layers = Layers(gpu)
        found["graph nodes"] = graph_nodes(gpu)
        found["eager step"] = {
            f"prompt chunk of {CHUNK}": layers.count_step(layers.prompt()),
            "decode": layers.count_step(layers.decode()),
        }
        found["replayed step"] = step_counts(gpu, engines, 32)
    if "idle" in parts:
        found["idle share"] = idle_shares(gpu, engines)
    return found


def measure_apart(tree: Path, parts: Sequence[str]) -> dict[str, Any]:
    """Measure the parts of a source tree in a new process."""
    with tempfile.NamedTemporaryFile("r", suffix=".json") as file:
        environment = own_environment(tree, OMP_NUM_THREADS="1", TRITON_INTERPRET="0")
        words = call_words("benchmarks.engine.host_overhead:measure_into", file.name, *parts)
        subprocess.run(words, env=environment, cwd=tree, check=True)
        found: dict[str, Any] = json.load(file)
        return found


# ---------------------------------------------------------------------- both, in turns


@contextmanager
def checkout(revision: str) -> Iterator[Path]:
    """Check out another revision into a temporary folder, which is removed when the block ends."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(tree), revision], check=True)
        try:
            (tree / ".venv").symlink_to(ROOT / ".venv")
            # the other revision is also measured by this tree's benchmarks
            shutil.rmtree(tree / "benchmarks")
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


def merged(runs: list[Any]) -> Any:
    """Return the minimum of each figure over the runs, because other processes only add time."""
    first = runs[0]
    if isinstance(first, dict):
        return {key: merged([run[key] for run in runs]) for key in first}
    return min(runs)


def measure_into(path: str, *parts: str) -> None:
    """Measure the source tree that this process has imported; write its figures as JSON."""
    Path(path).write_text(json.dumps(measure(list(parts))), encoding="utf-8")


def run(
    run: Run,
    rounds: int = 3,
    parts: Sequence[Literal["times", "counts", "idle"]] = ("times", "counts", "idle"),
    against: str = "",
) -> Document:
    """Measure this source tree, in turns with another revision if one is given.

    Args:
        against: git revision to compare with; empty: none.
    """
    with contextlib.ExitStack() as stack:
        trees = {"now": ROOT}
        if against:
            trees["before"] = stack.enter_context(checkout(against))
        runs: dict[str, list[Any]] = {name: [] for name in trees}
        for _ in range(rounds):
            for name, tree in trees.items():
                runs[name].append(measure_apart(tree, parts))
    results = {name: merged(found) for name, found in runs.items()}
    for name, found in results.items():
        for part, figures in found.items():
            run.show(f"{name}: {part}", figures)
    shape = {"layer": SHAPE, "context": CONTEXT, "device_step_ms": DEVICE_STEP_MS}
    shape |= {"rounds": rounds, "against": against or None}
    return {"shape": shape, **results}
