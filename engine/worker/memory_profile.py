"""Memory profile: measures how much memory weights and activations leave for the KV cache.

Computes the largest step once, and reads the peak of memory use. Refuses to know: what the step
contains, what the result is used for.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import torch
from torch import nn

from baton.api.errors import ConfigError
from baton.engine_config import DEFAULT_MEMORY_UTILIZATION, GIB
from engine.core.step_plan import StepPlan
from engine.worker.chunks.chunk_graphs import reason_against_chunks
from engine.worker.cuda_graphs import reason_against_graphs
from engine.worker.graph_capture import measure_graph_bytes
from engine.worker.host.host_memory import peak_growth, read_host_memory
from engine.worker.kv_cache import allocate_kv_cache
from engine.worker.make_runner import LoadedModel, make_model_runner
from engine.worker.model_runner import ModelRunner
from engine.worker.warm_up import compute_dummies, largest_step, too_large
from models.parallel.group import ALONE

logger = logging.getLogger(__name__)

# Default limit of the KV cache on a CPU, in bytes, because several nodes may share a machine
# without knowing of each other.
MAX_CPU_CACHE_BYTES = GIB
# If weights and KV cache fit this many times into the memory of a CPU, the activations of a step
# surely fit, too.
PLENTY = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryProfile:
    """Uses of a device's memory, in bytes.

    Attributes:
        total: the device's memory; on a CPU, what this process's control group may use.
        used: memory that this process (weights included) and others use before the largest step
            runs.
        weights: memory that the model's weights take; a part of ``used``.
        activations: memory that the largest step takes beyond ``used``.
        graphs: memory of CUDA graphs.
        utilization: share of ``total`` for weights, activations, graphs and KV cache together.
        largest_cache: maximum number of bytes of the KV cache, even if more memory is free.
    """

    total: int
    used: int
    weights: int
    activations: int
    graphs: int = 0
    utilization: float
    largest_cache: int

    @property
    def room(self) -> int:
        """Return the bytes left for the KV cache within ``utilization``; may be negative."""
        return int(self.total * self.utilization) - self.used - self.activations - self.graphs

    @property
    def kv_cache_bytes(self) -> int:
        """Return the bytes of the KV cache: `room`, but at most `largest_cache`, and at least 0."""
        return max(min(self.room, self.largest_cache), 0)

    @property
    def has_plenty(self) -> bool:
        """Return whether the KV cache gets `largest_cache`, however much activations take."""
        return self.room >= PLENTY * (self.weights + self.largest_cache)

    def __str__(self) -> str:
        free = self.total - self.used - self.activations - self.graphs - self.kv_cache_bytes
        graphs = f"CUDA graphs {_gib(self.graphs)}, " if self.graphs else ""
        return (
            f"{_gib(self.total)} GiB: weights {_gib(self.weights)}, "
            f"others {_gib(self.used - self.weights)}, activations {_gib(self.activations)}, "
            f"{graphs}KV cache {_gib(self.kv_cache_bytes)}, free {_gib(free)}"
        )


def measure_kv_cache_bytes(loaded: LoadedModel) -> int:
    """Return the size of the KV cache in bytes; log the sizes that it is computed from.

    Computes a dummy of the largest step, unless a CPU has plenty of memory.

    Raises ConfigError if the memory is too small for two blocks or, on a GPU, for the largest step.
    """
    model, spec, config, device = loaded.model, loaded.spec, loaded.config, loaded.device
    everyone, utilization = loaded.ranks.everyone, config.memory_utilization
    total, used = _total_and_used(device)
    if device.type == "cpu":
        # Count mapped pages of weight files as used, although the system counts them as available:
        # every step reads them.
        used += model.mapped_bytes
        # All ranks share the CPU's memory: this rank leaves the others their parts.
        used += (total - used) * (everyone.size - 1) // everyone.size
    assert isinstance(model, nn.Module)
    profile = MemoryProfile(
        total=total,
        used=used,
        weights=sum(weight.numel() * weight.itemsize for weight in model.parameters()),
        activations=0,
        utilization=DEFAULT_MEMORY_UTILIZATION if utilization is None else utilization,
        largest_cache=_largest_cpu_cache(loaded)
        if device.type == "cpu" and utilization is None
        else total,
    )
    if device.type == "cpu" and everyone.size == 1 and profile.has_plenty:
        logger.info("memory of %s: %s; activations are not measured", device, profile)
        return profile.kv_cache_bytes
    # No request can be longer than the largest possible cache.
    num_tokens = profile.kv_cache_bytes // spec.block_bytes // spec.num_groups * spec.block_size
    if everyone.size > 1:  # all ranks must compute the same step
        num_tokens = int(everyone.all_gather(torch.tensor([num_tokens], device=device)).min())
    if num_tokens > 0:
        longest = min(num_tokens, model.config.max_model_len)
        step = largest_step(config, longest, spec)
        try:
            activations = _measure_peak(loaded, step)
            graphs = _measure_graphs(loaded, longest)
        except torch.OutOfMemoryError as error:
            raise too_large(longest, f"{device} ({profile})") from error
        # On a GPU, measure the used memory again, because libraries keep memory after their first
        # step. On a CPU, memory that the allocator keeps after the step would be counted twice.
        used = used if device.type == "cpu" else _total_and_used(device)[1]
        profile = replace(profile, activations=activations, graphs=graphs, used=used)
    if profile.kv_cache_bytes < 2 * spec.block_bytes:
        raise ConfigError(
            f"memory_utilization: {profile.utilization:g} of {device} leaves "
            f"{max(profile.room, 0)} bytes for KV blocks of {spec.block_bytes} bytes; at least 2 "
            f"are needed ({profile})"
        )
    logger.info("memory of %s: %s", device, profile)
    return profile.kv_cache_bytes


def _measure_peak(loaded: LoadedModel, step: StepPlan) -> int:
    """Compute ``step``; return its peak memory in bytes, beyond what was allocated before."""
    device = loaded.device

    def compute() -> None:
        compute_dummies(loaded, [step])

    if device.type == "cpu":
        return peak_growth(compute)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    compute()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def _measure_graphs(loaded: LoadedModel, longest: int) -> int:
    """Return the bytes that CUDA graphs take for requests of up to ``longest`` tokens."""
    where = loaded.config, loaded.device, loaded.backends
    with_graphs = reason_against_graphs(*where) is None
    with_chunks = reason_against_chunks(*where, loaded.ranks) is None
    if not with_graphs and not with_chunks:
        return 0

    def make_runner() -> ModelRunner:
        return make_model_runner(
            replace(loaded, ranks=ALONE),
            allocate_kv_cache(loaded.spec, 1, loaded.device),
            longest,
            with_graphs=with_graphs,
            with_chunks=with_chunks,
        )

    return measure_graph_bytes(make_runner)


def _total_and_used(device: torch.device) -> tuple[int, int]:
    """Return the total memory of a device, and the memory that all processes use, in bytes."""
    if device.type == "cpu":
        memory = read_host_memory()
        return memory.total, memory.total - memory.available
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return total, total - free


def _largest_cpu_cache(loaded: LoadedModel) -> int:
    """Return the default limit of a CPU's KV cache: room for a full batch of longest requests."""
    spec, num_requests = loaded.spec, loaded.config.max_num_requests
    blocks_each = -(-loaded.model.config.max_model_len // spec.block_size)
    num_blocks = num_requests * blocks_each * spec.num_groups + spec.num_null_blocks
    return min(num_blocks * spec.block_bytes, MAX_CPU_CACHE_BYTES)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f}"
