"""EngineConfig: the options of an engine. Nothing found at run time is stored here."""

from __future__ import annotations

from dataclasses import dataclass, replace

from baton.api.errors import ConfigError
from baton.block_hash import DEFAULT_HASH_ALGORITHM

PREEMPTION = ("recompute", "hand-back")
DTYPES = ("auto", "float32", "bfloat16", "float16")
KV_CACHE_DTYPES = ("auto", "fp8")
WEIGHTS = ("auto", "fp32", "bf16", "int8")
GIB = 2**30
DEFAULT_MEMORY_UTILIZATION = 0.9
MAX_BATCHED_TOKENS = 2**20  # more would only make one step take for ever

_BATCH_LIMITS = {
    "cpu": {
        "max_num_requests": 64,
        "max_num_batched_tokens": 1024,
        "long_prefill_token_threshold": 512,
    },
    "cuda": {
        "max_num_requests": 256,
        "max_num_batched_tokens": 8192,
        "long_prefill_token_threshold": 4096,
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Checked when made; raises ConfigError naming the option.

    Attributes:
        dtype: of weights and computation; ``auto`` is float32 on a CPU, else the checkpoint's own,
            and bfloat16 where that is float32.
        kv_cache_dtype: of keys and values in the cache: ``auto`` as ``dtype``, or ``fp8`` (e4m3),
            which takes half or a quarter of the bytes, with the checkpoint's scales where it has
            any.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
        block_size: tokens per KV block.
        num_blocks: KV blocks; None: as many as ``kv_cache_bytes`` holds.
        kv_cache_bytes: memory for KV blocks when ``num_blocks`` is None; None: measured at start,
            see ``memory_utilization``.
        memory_utilization: share, above 0 and at most 1, of the device's memory that may be in use
            when weights, activations and KV blocks are there; others' use counts. On a CPU the
            memory is the machine's or the control group's, whichever is less. None: 0.9, and on a
            CPU KV blocks for ``max_num_requests`` longest requests and 1 GiB at most, so that
            several nodes fit a machine.
        max_model_len: most tokens (prompt and output) of a request; None: what the model was
            made for, or what the KV cache holds if that is less.
        max_num_requests: most requests in one batch; 0: by the device, see `for_device`.
        max_num_batched_tokens: most tokens that one step computes; 0: likewise.
        long_prefill_token_threshold: most tokens of one prompt in a step, so that a long prompt is
            cut into chunks and leaves room for others; 0: likewise.
        scheduling_policy: ``fcfs`` or ``priority``.
        preemption: of a request whose blocks an older one needs. ``recompute``: it waits here and
            is computed anew; ``hand-back``: it ends here, and whoever placed it places it again.
        prefix_cache: find prompts' prefixes again that were computed before.
        prefix_hash: names their blocks: ``blake2b``, ``sha256``, or ``xxh3_128``, which is faster
            and can be made to collide by a client.
        attention_backend: a name, or ``auto``.
        async_scheduling: schedule a step while the one before it runs; None: where the device
            computes by itself (a GPU). The tokens are the same with it and without.
        cuda_graphs: replay decode steps on a GPU instead of launching kernel by kernel.
        cuda_graph_max_batch: most requests in a step that is replayed.
        num_threads: of the process's computations on a CPU; 0 leaves it to torch.
        cpu_list: the cores this process may run on, such as ``0-3,8``; empty: those it has. Threads
            that computed before stay where they are.
        weights: how a CPU stores the weights of linear layers: ``auto`` as ``dtype``, or ``fp32``,
            ``bf16``, ``int8`` (one scale per output; activations stay in ``dtype``).
        native_kernels: compute on a CPU with kernels in C where they can be built; false: with
            torch alone. Of the whole process.
    """

    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    device: str = "auto"
    block_size: int = 16
    num_blocks: int | None = None
    kv_cache_bytes: int | None = None
    memory_utilization: float | None = None
    max_model_len: int | None = None
    max_num_requests: int = 0
    max_num_batched_tokens: int = 0
    long_prefill_token_threshold: int = 0
    scheduling_policy: str = "fcfs"
    preemption: str = "recompute"
    prefix_cache: bool = True
    prefix_hash: str = DEFAULT_HASH_ALGORITHM
    attention_backend: str = "auto"
    async_scheduling: bool | None = None
    cuda_graphs: bool = True
    cuda_graph_max_batch: int = 512
    num_threads: int = 0
    cpu_list: str = ""
    weights: str = "auto"
    native_kernels: bool = True

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype: must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if self.kv_cache_dtype not in KV_CACHE_DTYPES:
            known = ", ".join(KV_CACHE_DTYPES)
            raise ConfigError(
                f"kv_cache_dtype: must be one of {known}, got {self.kv_cache_dtype!r}"
            )
        if self.weights not in WEIGHTS:
            raise ConfigError(f"weights: must be one of {', '.join(WEIGHTS)}, got {self.weights!r}")
        parse_cpu_list(self.cpu_list)
        if self.preemption not in PREEMPTION:
            known = ", ".join(PREEMPTION)
            raise ConfigError(f"preemption: must be one of {known}, got {self.preemption!r}")
        for name in (
            "block_size",
            "cuda_graph_max_batch",
            "kv_cache_bytes",
            "num_blocks",
            "max_model_len",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}: must be 1 or more, got {value}")
        for name in _BATCH_LIMITS["cpu"]:
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}: must be 0 or more, got {getattr(self, name)}")
        share = self.memory_utilization
        if share is not None and not 0 < share <= 1:
            raise ConfigError(f"memory_utilization: must be in (0, 1], got {share:g}")
        if self.max_num_batched_tokens > MAX_BATCHED_TOKENS:
            raise ConfigError(
                f"max_num_batched_tokens: must be {MAX_BATCHED_TOKENS} or less, "
                f"got {self.max_num_batched_tokens}"
            )
        if 0 < self.max_num_batched_tokens < self.max_num_requests:
            raise ConfigError(
                f"max_num_batched_tokens: must be at least max_num_requests "
                f"({self.max_num_requests}), got {self.max_num_batched_tokens}"
            )

    def for_device(self, device_type: str) -> EngineConfig:
        """The same with a number for every limit of a batch: 64 requests, 1,024 tokens and 512 of
        one prompt on a CPU; 256, 8,192 and 4,096 on a GPU, whose steps cost much the same until
        they are as large. A limit that is given moves the others that do not fit it.
        """
        limits = _BATCH_LIMITS[device_type]
        tokens = self.max_num_batched_tokens or max(
            limits["max_num_batched_tokens"], self.max_num_requests
        )
        return replace(
            self,
            max_num_requests=self.max_num_requests or min(limits["max_num_requests"], tokens),
            max_num_batched_tokens=tokens,
            long_prefill_token_threshold=self.long_prefill_token_threshold
            or limits["long_prefill_token_threshold"],
        )


def parse_cpu_list(text: str) -> frozenset[int]:
    """``0-3,8`` -> {0, 1, 2, 3, 8}; raises ConfigError."""
    cores: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        try:
            span = range(int(first), int(last or first) + 1)
        except ValueError:
            span = range(0)
        if not span:
            raise ConfigError(f"cpu_list: must be cores such as 0-3,8, got {text!r}")
        cores.update(span)
    return frozenset(cores)
