"""EngineConfig: the options of an engine. Values that are found at run time are not stored here."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from baton import plugins
from baton.api.errors import ConfigError
from baton.kv.block_hash import DEFAULT_HASH_ALGORITHM, HASH_ALGORITHMS
from baton.options import check_limits, option, parse_bytes

PREEMPTION = ("recompute", "hand-back")
SCHEDULING_POLICIES = ("fcfs", "priority")
SPECULATIVE_METHODS = (
    *("none", "ngram", "draft_model", "medusa", "eagle", "mtp"),
    *plugins.allowed("baton.proposers"),
)
# Drafters that have weights and compute drafts as a part of the model's step.
DRAFTERS = ("draft_model", "medusa", "eagle", "mtp")
_READERS = ("draft_model", "eagle", "mtp")  # drafters that keep KV, so they must read all tokens
DRAFT_ACCEPTANCE = ("equality", "rejection")
MAX_SPECULATIVE_TOKENS = 32
DEFAULT_SPECULATIVE_TOKENS = 5
DTYPES = ("auto", "float32", "bfloat16", "float16")
KV_CACHE_DTYPES = ("auto", "fp8")
WEIGHTS = ("auto", "fp32", "bf16", "fp16", "int8-weight-only", "int8", "int4", "fp8")
NUMA = "numa"  # value of --cpu-list that chooses cores by NUMA node
EXPERT_PARALLEL = ("auto", "on", "off")
RANK_SUMS = ("auto", "own", "nccl")
KV_LAYOUTS = ("layers", "heads")
EXECUTOR_NAMES = ("auto", "uniproc", "multiproc", "external_launcher", "ray")
MAX_RANKS = 64
BY_DECODES = "decodes"  # value of pipeline_layers: stages take equal time to decode
MAX_ADAPTERS = 4096
DEFAULT_ENCODER_CACHE_TOKENS = 16_384
GIB = 2**30
DEFAULT_MEMORY_UTILIZATION = 0.9
DEFAULT_KV_FILES_BYTES = 10 * GIB
MAX_PROMPT_WAIT_S = 30.0  # longest wait of a prompt for cached KV that an operator may allow
MAX_BATCHED_TOKENS = 2**20  # highest limit of a step's tokens; larger steps take too long
_DEVICE = re.compile(r"auto|(cpu|cuda)(:[0-9]+)?")

_BATCH_LIMITS = {
    "cpu": {
        "max_num_requests": 64,
        "max_num_batched_tokens": 1024,
        "long_prefill_token_threshold": 512,
        "prefill_tokens_beside_decodes": 64,
    },
    "cuda": {
        "max_num_requests": 256,
        "max_num_batched_tokens": 8192,
        "long_prefill_token_threshold": 4096,
        "prefill_tokens_beside_decodes": 2048,
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """An engine's options, checked when created; raises ConfigError naming the field.

    If an option is None, its value is chosen for the machine and the model. If 0 is allowed for a
    batch limit, 0 has the same meaning.
    """

    dtype: str = option(
        "auto",
        choices=DTYPES,
        help="Type of weights and computation; auto: the checkpoint's type, and bfloat16 for "
        "GGUF files of few bits; on GPUs bfloat16 for float32 checkpoints; on CPUs float32, but "
        "where the CPU multiplies bfloat16. The same on all nodes.",
    )
    kv_cache_dtype: str = option(
        "auto",
        choices=KV_CACHE_DTYPES,
        help="Type of the KV cache; auto: as --dtype; fp8 (e4m3) takes half or a quarter of the "
        "bytes and uses the checkpoint's scales, if any. The same on all nodes.",
    )
    device: str = option("auto", help="Device to compute on: auto, cpu, cuda or cuda:N.")
    devices: str = option(
        "",
        help="GPUs of this machine's ranks, as CUDA indices such as 0,1: each rank takes the next "
        "one. Empty: all visible GPUs, in order.",
    )
    num_threads: int = option(0, least=0, help="Threads for computing on a CPU; 0: all cores.")
    cpu_list: str = option(
        "",
        help="Cores to run on, such as 0-3,8, divided among the ranks; numa: each rank uses the "
        "cores of one NUMA node; empty: all allowed cores. Threads that have computed already "
        "keep their cores.",
    )
    core_locks: str = option(
        "",
        help="Folder in which the nodes of a machine announce which cores of their --cpu-list "
        "are idle, so that other nodes compute there meanwhile. For a CPU and one rank.",
    )
    tensor_parallel_size: int = option(
        1,
        least=1,
        most=MAX_RANKS,
        help="Ranks that share every layer of the model, each in its own process.",
    )
    expert_parallel: str = option(
        "auto",
        choices=EXPERT_PARALLEL,
        help="Whether ranks that share a layer divide its experts: on (each rank has some whole "
        "experts), off (each rank has a part of every expert) or auto (on for two ranks if the "
        "larger part would be at least 1.3 times the mean part, otherwise off).",
    )
    rank_sums: str = option(
        "auto",
        choices=RANK_SUMS,
        help="Who sums over the ranks on GPUs that share a layer: nccl, own (kernels that read the "
        "other ranks' memory, for GPUs of one machine; two ranks may then share one GPU, as in "
        "--devices 0,0) or auto (nccl, and own for sizes at which it was measured faster).",
    )
    pipeline_parallel_size: int = option(
        1,
        least=1,
        most=MAX_RANKS,
        help="Stages that share the model's layers; each stage has --tensor-parallel-size ranks.",
    )
    pipeline_layers: str = option(
        "",
        help="Number of layers of each pipeline stage, first stage first, such as 8,4. Empty: "
        "equal numbers. decodes: numbers with which the stages take equal time to decode; the "
        "last stage also computes logits, which take as long as some layers.",
    )
    executor: str = option(
        "auto",
        choices=EXECUTOR_NAMES,
        help="Who starts the ranks: uniproc (one rank, in this process), multiproc (this process "
        "starts the others on its machine), external_launcher (torchrun, SLURM or Kubernetes "
        "starts this program once per rank) or ray (actors of a Ray cluster); auto: depends on "
        "the number of ranks.",
    )
    ray_address: str = option(
        "",
        help="Ray cluster for --executor ray, such as auto or ray://HOST:10001; empty: the "
        "cluster of RAY_ADDRESS, or a new one on this machine.",
    )
    weights: str = option(
        "auto",
        choices=WEIGHTS,
        help="Format of linear layers' weights; auto: the checkpoint's. On a CPU, int8 has a scale "
        "per 128 inputs, int4 a scale and a minimum per 32 inputs and an int8 head; both also "
        "round inputs to 8 bits, with a scale per row and 64 values. int8-weight-only and fp8 have "
        "a scale per output (fp8 an int8 head) and do not round inputs. On a GPU, int8 and fp8 "
        "have a scale per output and round inputs, with a scale per row; auto rounds inputs if "
        "the checkpoint says so. Must be the same on all nodes.",
    )
    check_memory: bool = option(
        True,
        help="On a CPU, refuse a model before it is loaded if its weights and the KV cache do "
        "not fit the available memory.",
    )
    weights_cache_bytes: int | None = option(
        None,
        name="weights_cache",
        least=0,
        unset="auto",
        parse=parse_bytes,
        help="On a CPU, most disk space for packed weights in the cache (~/.cache/baton, or "
        "BATON_CACHE), such as 50G. All nodes of a machine map one copy of a model there, and "
        "later starts need not pack it; auto: 20G; 0: each node packs its own copy.",
    )
    native_kernels: bool = option(
        True,
        # The variable BATON_NATIVE_KERNELS also accepts names of instruction sets.
        has_own_variable=False,
        help="On a CPU, use kernels in C (built at first use) if they can be built. The variable "
        "BATON_NATIVE_KERNELS chooses which.",
    )
    batch_invariant: bool = option(
        False,
        help="Compute a request's tokens and logprobs bit for bit alike in every batch, with any "
        "chunks and preemptions, and on every node of the same kind. This makes a GPU slower; "
        "a CPU with native kernels always does it. The same on all nodes.",
    )
    block_size: int = option(
        0,
        least=0,
        help="Tokens per KV block; 0: 16, but in a model with states (Mamba, convolutions) the "
        "fewest whose keys and values take as many bytes as the states, and 256 for FlashAttention "
        "2. The same on all nodes.",
    )
    kv_layout: str = option(
        "layers",
        choices=KV_LAYOUTS,
        help="Order of bytes in a KV block: layers, so that the last chunk of a prompt can be "
        "sent layer by layer; heads, so that a rank's part of a block is one range between nodes "
        "of different --tensor-parallel-size. The same on all nodes.",
    )
    num_blocks: int | None = option(
        None, least=1, unset=0, help="Number of KV blocks; 0: as many as --kv-cache-memory holds."
    )
    kv_cache_bytes: int | None = option(
        None,
        name="kv_cache_memory",
        least=1,
        unset="auto",
        parse=parse_bytes,
        help="Memory for KV blocks, such as 2G; auto: measured at start, see --memory-utilization.",
    )
    memory_utilization: float | None = option(
        None,
        above=0,
        most=1,
        unset=0.0,
        help="Share of the device's memory that weights, activations and KV blocks may use "
        "together with other programs. On a CPU, share of the machine's or the control "
        "group's memory, whichever is less. 0: 0.9, and on a CPU at most 1 GiB of KV blocks, "
        "so that several nodes fit a machine.",
    )
    max_model_len: int | None = option(
        None,
        least=1,
        unset=0,
        help="Most tokens of a request, prompt and output together; 0: the model's limit, or "
        "what the KV cache holds if that is less.",
    )
    max_num_requests: int = option(
        0, least=0, help="Most requests in a batch; 0: 64 on a CPU, 256 on a GPU."
    )
    max_num_batched_tokens: int = option(
        0,
        least=0,
        most=MAX_BATCHED_TOKENS,
        help="Most tokens in a step; 0: 1024 on a CPU, 8192 on a GPU.",
    )
    long_prefill_token_threshold: int = option(
        0,
        least=0,
        help="Most tokens of one prompt in a step (its chunk), so that a long prompt leaves room "
        "for others; 0: 512 on a CPU, 4096 on a GPU.",
    )
    prefill_tokens_beside_decodes: int = option(
        0,
        least=0,
        help="Most prompt tokens in a step that also decodes: fewer keep the gaps between a "
        "stream's tokens short, more finish prompts sooner; 0: 64 on a CPU, 2048 on a GPU.",
    )
    preemption: str = option(
        "recompute",
        choices=PREEMPTION,
        help="What to do with a request whose memory an older one needs: hand-back (its sender "
        "places it again) or recompute (this node computes it again, prompt included).",
    )
    scheduling_policy: str = option(
        "fcfs",
        choices=SCHEDULING_POLICIES,
        help="Which waiting request goes first, and which running one is preempted last: fcfs (the "
        "one that came first) or priority (the one with the smallest priority, and among equals "
        "the one that came first). A running request is never stopped for a waiting one. With "
        "priority, a request may wait until its deadline while more important ones keep coming. "
        "No token changes.",
    )
    prefix_cache: bool = option(True, help="Reuse KV blocks of prefixes that were computed before.")
    prefix_hash: str = option(
        DEFAULT_HASH_ALGORITHM,
        choices=tuple(HASH_ALGORITHMS),
        help="Hash that identifies prefixes; xxh3_128 is faster, but a client can make it collide.",
    )
    pin_share: float = option(
        0.25,
        least=0,
        most=0.9,
        help="Largest share of the KV blocks that pinned prefixes may keep; tenants with pins have "
        "equal parts of this share. Pinned blocks leave the cache after all others, and never "
        "delay a request. 0: nothing is pinned.",
    )
    max_pin_s: float = option(
        86_400.0,
        above=0,
        help="Longest time, in seconds, for which a request may pin its prefix.",
    )
    kv_files: str = option(
        "",
        help="Where to store KV of ended requests, which later requests with an equal prefix read "
        "back, also after a restart: a folder, which nodes of one machine may share, or "
        "s3://BUCKET/PREFIX, which nodes of several machines may share. Empty: nowhere.",
    )
    kv_files_secret: str = option(
        "",
        help="File with the key of the stored KV's digests: 32 random bytes. The file must belong "
        "to this user or root, and must not be open to all users. Needed with s3://; all nodes "
        "that share a bucket need the same key. Empty: a folder has a key of its own.",
    )
    kv_files_bytes: int | None = option(
        None,
        name="kv_files_size",
        least=2**20,
        unset="auto",
        parse=parse_bytes,
        help="With --kv-files: maximum bytes of all files or objects, such as 50G; auto: "
        f"{DEFAULT_KV_FILES_BYTES // GIB}G.",
    )
    kv_files_timeout_s: float = option(
        10.0,
        above=0,
        most=MAX_PROMPT_WAIT_S,
        help="With --kv-files: longest time that a prompt waits for files before the node computes "
        "what is missing, seconds. A prompt waits only while reading is faster than computing.",
    )
    attention_backend: str = option("auto", help="Attention backend: its name, or auto.")
    async_scheduling: bool | None = option(
        None,
        help="Schedule a step while the previous one runs, and with pipeline stages as many steps "
        "as stages; the tokens stay the same. By default on if the device computes asynchronously "
        "(a GPU), or there are several stages.",
    )
    max_adapters: int = option(
        0,
        least=0,
        most=MAX_ADAPTERS,
        help="Most LoRA adapters in memory; the least recently used one leaves for another. 0: "
        "none can be loaded. For a CPU.",
    )
    adapter_cache_bytes: int | None = option(
        None,
        name="adapter_cache",
        least=0,
        unset="auto",
        parse=parse_bytes,
        help="Most memory for the numbers of adapters that were read before, such as 1G: such an "
        "adapter is loaded again without its files; auto: 256M.",
    )
    peak_flops: float = option(
        0.0,
        least=0,
        help="Floating-point operations per second of all devices of this engine together, such as "
        "989e12, for MFU in dashboards; 0: unknown.",
    )
    peak_bandwidth: float = option(
        0.0,
        least=0,
        help="Bytes per second that the memory of all devices of this engine gives together, such "
        "as 4.8e12, for the used share in dashboards; 0: unknown.",
    )
    images: bool = option(
        True,
        help="Load the vision encoder of a checkpoint that has one, so that prompts may have "
        "images. Off: the model computes text only, and its encoder takes no memory.",
    )
    max_num_encoder_input_tokens: int = option(
        0,
        least=0,
        help="Most tokens of the images that one step encodes; one larger image is encoded "
        "alone. 0: --max-num-batched-tokens.",
    )
    encoder_cache_tokens: int = option(
        DEFAULT_ENCODER_CACHE_TOKENS,
        least=1,
        help="Tokens of all images whose encodings are kept for later prompts; the least recently "
        "used ones leave. No image may have more.",
    )
    cuda_graphs: bool = option(
        True, help="On a GPU, replay captured steps instead of launching kernel by kernel."
    )
    cuda_graph_max_batch: int = option(
        512,
        least=0,
        help="Most requests in a decode step that is replayed; 0: no such steps are replayed.",
    )
    cuda_graph_max_chunk: int = option(
        512,
        least=0,
        help="Most tokens in a step with prompts that is replayed, layer by layer; 0: no such "
        "steps are replayed.",
    )
    speculative_method: str = option(
        "none",
        choices=SPECULATIVE_METHODS,
        help="Drafter: proposes the next tokens, so that one step may yield several; outputs do "
        "not change. none: no drafter; ngram: copies what followed the output's last words "
        "earlier in the prompt or output; draft_model: a smaller model with the same vocabulary; "
        "medusa, eagle, mtp: heads or a layer trained for the model.",
    )
    speculative_model: str = option(
        "",
        help="Folder of the drafter, for draft_model, medusa and eagle; for mtp empty if the "
        "model's own checkpoint has the layer. The same on all nodes.",
    )
    draft_acceptance: str = option(
        "equality",
        choices=DRAFT_ACCEPTANCE,
        help="Which drafts are kept: equality (drafts equal to the token sampled in their place, "
        "so that no token changes) or rejection (by chance: outputs have the same distribution, "
        "but other tokens).",
    )
    num_speculative_tokens: int = option(
        0,
        least=0,
        most=MAX_SPECULATIVE_TOKENS,
        help="Most drafts for a request in a step; 0: 5, or the number of Medusa heads if that "
        "is less.",
    )
    adaptive_speculation: bool = option(
        True,
        help="Compute only as many drafts as pay off, by measured step times and acceptance "
        "rates; none if batches are large. Off: all drafts.",
    )
    ngram_min: int = option(
        2,
        least=1,
        help="Method ngram: fewest last tokens that must occur earlier, so that the tokens after "
        "them are drafted.",
    )
    ngram_max: int = option(
        4,
        least=1,
        help="Method ngram: a match of this many tokens ends the search for longer matches.",
    )

    def __post_init__(self) -> None:
        check_limits(self)
        if self.cpu_list != NUMA:
            parse_cpu_list(self.cpu_list)
        if self.core_locks and self.cpu_list in ("", NUMA):
            raise ConfigError("core_locks: cpu_list must say which cores are this node's own")
        if not _DEVICE.fullmatch(self.device):
            raise ConfigError(f"device: must be auto, cpu, cuda or cuda:N, got {self.device!r}")
        self._check_devices()
        if 0 < self.max_num_batched_tokens < self.max_num_requests:
            raise ConfigError(
                f"max_num_batched_tokens: must be at least max_num_requests "
                f"({self.max_num_requests}), got {self.max_num_batched_tokens}"
            )
        if self.executor == "uniproc" and self.num_ranks > 1:
            raise ConfigError(
                f"executor: uniproc has one rank, but tensor_parallel_size is "
                f"{self.tensor_parallel_size} and pipeline_parallel_size "
                f"{self.pipeline_parallel_size}"
            )
        self._check_layers()
        self._check_kv_files()
        if self.ngram_max < self.ngram_min:
            raise ConfigError(
                f"ngram_max: must be at least ngram_min ({self.ngram_min}), got {self.ngram_max}"
            )

        if self.batch_invariant and self.draft_acceptance == "rejection":
            raise ConfigError("draft_acceptance: batch_invariant wants equality, got rejection")
        if self.speculative_method in DRAFTERS:
            self._check_drafter()

    def _check_devices(self) -> None:
        devices = parse_devices(self.devices)
        if len(set(devices)) < len(devices) and self.rank_sums != "own":
            raise ConfigError(
                f"devices: must name each GPU once without rank_sums own, got {self.devices!r}"
            )
        if devices and self.device not in ("auto", "cuda"):
            raise ConfigError(f"devices: device must be cuda or auto, got {self.device}")
        if devices and self.executor_name == "ray":
            raise ConfigError(f"devices: Ray chooses the GPUs of its ranks, got {self.devices!r}")
        if devices and self.executor_name == "multiproc" and len(devices) < self.num_ranks:
            raise ConfigError(
                f"devices: {self.num_ranks} ranks on one machine need {self.num_ranks} GPUs, "
                f"got {len(devices)}"
            )
        if self.device.startswith("cuda:") and self.num_ranks > 1:
            raise ConfigError(
                f"device: {self.device} is one GPU, but there are {self.num_ranks} ranks; "
                "use cuda, and devices"
            )

    def _check_layers(self) -> None:
        if self.pipeline_layers == BY_DECODES:
            return
        parts = self.pipeline_layers.split(",") if self.pipeline_layers else []
        if not all(part.isdecimal() and int(part) > 0 for part in parts):
            got = repr(self.pipeline_layers)
            raise ConfigError(
                f"pipeline_layers: must be decodes, or numbers above 0 such as 8,4, got {got}"
            )
        if parts and self.pipeline_parallel_size == 1:
            raise ConfigError("pipeline_layers: needs pipeline_parallel_size of 2 or more, got 1")
        if parts and len(parts) != self.pipeline_parallel_size:
            raise ConfigError(
                f"pipeline_layers: must have one number for each of the "
                f"{self.pipeline_parallel_size} stages of pipeline_parallel_size, got {len(parts)}"
            )

    def _check_kv_files(self) -> None:
        if not self.kv_files:
            if self.kv_files_bytes is not None:
                raise ConfigError(f"kv_files_size: needs kv_files, got {self.kv_files_bytes}")
            if self.kv_files_secret:
                raise ConfigError(f"kv_files_secret: needs kv_files, got {self.kv_files_secret!r}")
            return
        scheme, found, place = self.kv_files.partition("://")
        if found and (scheme != "s3" or not place.partition("/")[0]):
            raise ConfigError(
                f"kv_files: must be a folder or s3://BUCKET/PREFIX, got {self.kv_files!r}"
            )
        if found and not self.kv_files_secret:
            raise ConfigError(
                "kv_files_secret: s3:// needs a file with the key of the digests, because whoever "
                "can write to the bucket could change a key in the bucket"
            )
        if not self.prefix_cache:
            raise ConfigError("kv_files: needs prefix_cache, which is off")
        if self.executor_name not in ("uniproc", "multiproc"):
            raise ConfigError(
                f"kv_files: needs all ranks on one machine, got the executor {self.executor_name}"
            )

    def _check_drafter(self) -> None:
        method = self.speculative_method
        if not self.speculative_model and method != "mtp":
            raise ConfigError(f"speculative_model: {method} needs the drafter's folder")
        if self.num_ranks > 1:
            raise ConfigError(
                f"speculative_method: {method} drafts with one rank only, got {self.num_ranks}; "
                "use ngram"
            )

    @property
    def executor_name(self) -> str:
        """Name of the executor in the registry of executors."""
        if self.executor == "ray" and self.num_ranks == 1:
            # One rank needs no further process, even if Ray places the node.
            return "uniproc"
        if self.executor != "auto":
            return self.executor
        return "uniproc" if self.num_ranks == 1 else "multiproc"

    @property
    def num_ranks(self) -> int:
        """Number of workers that share the model, each in its own process."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def stage_layers(self) -> tuple[int, ...]:
        """Number of layers of each pipeline stage; empty: as equal as possible, or by decodes."""
        if self.pipeline_layers == BY_DECODES:
            return ()
        return tuple(map(int, filter(None, self.pipeline_layers.split(","))))

    @property
    def max_steps_in_flight(self) -> int:
        """Maximum number of steps that are launched before the oldest one has ended."""
        return max(self.pipeline_parallel_size, 2)

    @property
    def leader(self) -> int:
        """Rank of the worker in the engine's process: the first of the last stage; it samples."""
        return self.num_ranks - self.tensor_parallel_size

    @property
    def max_num_drafts(self) -> int:
        """Maximum number of draft tokens of a request per step; 0: no drafts."""
        if self.speculative_method == "none":
            return 0
        return self.num_speculative_tokens or DEFAULT_SPECULATIVE_TOKENS

    @property
    def num_lookahead_drafts(self) -> int:
        """Maximum number of drafts of a request that a drafter with weights makes in a step.

        0: drafts are made in another way, or there are no drafts.
        """
        return self.max_num_drafts if self.speculative_method in DRAFTERS else 0

    @property
    def drafter_reads(self) -> bool:
        """Return whether the drafter keeps KV of all computed tokens, so it must read them all."""
        return self.speculative_method in _READERS

    @property
    def max_decode_rows(self) -> int:
        """Maximum number of tokens of a step without prompts: each request's token and drafts."""
        most = self.max_num_requests * (1 + self.max_num_drafts)
        return max(min(most, self.max_num_batched_tokens), self.max_num_requests)

    def for_device(self, device_type: str) -> EngineConfig:
        """Return a copy in which all batch limits are set, to those of `_BATCH_LIMITS` by default.

        The limits of GPUs are higher, because a GPU's steps take about the same time until they are
        large. If a limit that the user gave conflicts with a default limit, the default limit is
        changed.
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
            prefill_tokens_beside_decodes=self.prefill_tokens_beside_decodes
            or limits["prefill_tokens_beside_decodes"],
        )


def parse_devices(text: str) -> tuple[int, ...]:
    """Parse device numbers: ``0,2`` becomes (0, 2), an empty text (). Raises ConfigError."""
    parts = [part.strip() for part in text.split(",")] if text else []
    if not all(part.isascii() and part.isdecimal() for part in parts):
        raise ConfigError(f"devices: must be CUDA indices such as 0,1, got {text!r}")
    return tuple(map(int, parts))


_MOST_CORES = 2**16  # more than any machine has; limits the memory of the set


def parse_cpu_list(text: str) -> frozenset[int]:
    """Parse a list of cores: ``0-3,8`` becomes {0, 1, 2, 3, 8}. Raises ConfigError."""
    cores: set[int] = set()
    for part in filter(None, text.split(",")):
        first, dash, last = part.partition("-")
        try:
            span = range(int(first), int(last if dash else first) + 1)
        except ValueError:
            span = range(0)
        if not span or span.stop > _MOST_CORES:
            raise ConfigError(f"cpu_list: must be cores such as 0-3,8, or numa, got {text!r}")
        cores.update(span)
    return frozenset(cores)
