"""Chooses an engine's device, dtypes, weight formats and backends for its options and machine.

Refuses to know: the model's computation, memory.
"""

from __future__ import annotations

import logging
import os
import re
from dataclasses import replace
from importlib.util import find_spec

import torch

from baton.api.errors import ConfigError
from baton.engine_config import EngineConfig
from baton.kv.layers import PagedKV
from baton.kv.manifest import KVKind
from baton_kernels import FP8, WeightFormat, reference
from baton_kernels.attention import WITH_ROW_ENDS, choose_attention_backend
from baton_kernels.dispatch import native_ops
from baton_kernels.ops import Ops
from baton_kernels.packed import FLOAT8_CAPABILITY
from baton_kernels.quantized import QuantizedFormat
from engine.worker.kv_cache import KVCacheSpec, dtype_name
from models.base import CausalLM
from models.config import ModelConfig
from models.cpu.packing import CpuPacker
from models.gpu.invariant import InvariantPacker
from models.gpu.packing import GpuPacker, quantized_kinds
from models.loading.loader import WeightPacker

logger = logging.getLogger(__name__)

_ALLOCATOR_OPTIONS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")

_ROUNDED_WEIGHTS = [one.value for one in QuantizedFormat if one != QuantizedFormat.INT8]

# Major compute capabilities for which the choice of matrix instructions does not depend on the
# number of tokens, as batch-invariant results require.
_ONE_INSTRUCTION = (8, 9, 12)
# Largest heads of the batch-invariant attention kernels: with larger heads, tiles of one size for
# all GPUs do not fit into the registers.
_LARGEST_HEAD = 256

# Name of the attention backend of each KV cache group; None: the group has state layers.
BackendNames = tuple[str | None, ...]


def choose_device(name: str) -> torch.device:
    """Return the named device, with its index, and make it the thread's current device.

    Raises ConfigError if the device does not exist, or if other processes could not map its memory.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device: {name!r} is not a device") from error
    if device.type == "cpu":
        return device
    if not torch.cuda.is_available():
        raise ConfigError(f"device: {name!r} was asked for, but there is no CUDA device here")
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= torch.cuda.device_count():
        raise ConfigError(f"device: {name!r}, but there are {torch.cuda.device_count()} here")
    check_allocator(os.environ)
    device = torch.device("cuda", index)
    make_current(device)
    return device


def make_current(device: torch.device) -> None:
    """Make a device current for this thread; each thread has its own current device.

    PyTorch launches on its tensors' device, but Triton launches on the current device.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)


def check_allocator(environment: os._Environ[str] | dict[str, str]) -> None:
    """Raise ConfigError if PyTorch is set to allocate GPU memory that cannot be shared.

    NIXL can share only memory from ``cudaMalloc`` with other processes on the same machine (CUDA
    IPC); PyTorch's expandable segments come from another function.
    """
    for option in _ALLOCATOR_OPTIONS:
        if re.search(r"expandable_segments\s*:\s*true", environment.get(option, ""), re.IGNORECASE):
            raise ConfigError(
                f"{option}: expandable_segments:True makes KV memory that no peer can map; unset it"
            )


def choose_dtype(
    name: str, device: torch.device, model: ModelConfig, has_bfloat16: bool
) -> torch.dtype:
    """Return the dtype of weights and computation.

    Args:
        name: value of the option ``dtype``; "auto" lets the device and the checkpoint decide.
        has_bfloat16: whether the CPU has instructions that multiply bfloat16.
    """
    if name == "auto":
        name = model.compute_dtype
        if device.type == "cpu":
            # Without bfloat16 instructions, float32 is the fastest dtype on a CPU (ADR 0097).
            name = "bfloat16" if has_bfloat16 and name == "bfloat16" else "float32"
        elif name == "float32":
            # On a GPU, float32 takes twice the memory and runs far below the speed of the matrix
            # units.
            name = "bfloat16"
            logger.info("dtype bfloat16 for a float32 checkpoint; --dtype float32 keeps its own")
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def has_bfloat16(config: EngineConfig) -> bool:
    """Return whether native kernels may use instructions of this CPU for bfloat16 products."""
    native = native_ops() if config.native_kernels else None
    return native is not None and native.has_bfloat16


def choose_kv_cache_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of cached keys and values of a model that computes in ``dtype``."""
    return FP8 if name == "fp8" else dtype


def choose_packer(
    config: EngineConfig, device: torch.device, dtype: torch.dtype
) -> WeightPacker | None:
    """Return the function that packs linear layers' weights; None: keep PyTorch's weight format.

    Raises ConfigError if the device does not support the format.
    """
    if device.type == "cpu":
        return CpuPacker.choose(dtype, config.weights, native_kernels=config.native_kernels)
    packer = _gpu_packer(config.weights, device, dtype)
    if not config.batch_invariant:
        return packer
    # int8 weights are allowed in batch-invariant mode, because integer sums do not depend on their
    # order.
    is_int8 = packer is not None and packer.weights == QuantizedFormat.INT8
    kind = ".".join(map(str, torch.cuda.get_device_capability(device)))
    return InvariantPacker(kind, packer if is_int8 else None)


def choose_ops(config: EngineConfig, device: torch.device) -> Ops | None:
    """Return the ops that compute a model's layers; None: the fastest ops of the device."""
    return None if config.native_kernels or device.type != "cpu" else reference


def check_batch_invariant(config: EngineConfig, device: torch.device, model: ModelConfig) -> None:
    """Raise ConfigError if batch-invariant results are requested but impossible here."""
    if not config.batch_invariant:
        return
    kinds = {kv.kind for kv in model.kept_kv}
    if device.type == "cpu":
        has_kernels = config.native_kernels and native_ops() is not None
        problem = None if has_kernels else "on a CPU it needs native kernels"
    elif find_spec("triton") is None:
        problem = "on a GPU it needs Triton, which is not installed"
    elif torch.cuda.get_device_capability(device)[0] not in _ONE_INSTRUCTION:
        found = ".".join(map(str, torch.cuda.get_device_capability(device)))
        problem = f"on a GPU compute capability must be 8.x, 9.x or 12.x, got {found}"
    elif config.tensor_parallel_size > 1:
        problem = f"on GPUs tensor_parallel_size must be 1, got {config.tensor_parallel_size}"
    elif config.weights in _ROUNDED_WEIGHTS:
        problem = f"on a GPU weights cannot be {config.weights}; int8 they can"
    elif KVKind.LATENT in kinds:
        problem = "on a GPU not for models with latents (MLA)"
    elif KVKind.STATE in kinds:
        problem = "on a GPU not for models with states"
    elif any(isinstance(kv, PagedKV) and kv.head_dim > _LARGEST_HEAD for kv in model.kept_kv):
        problem = f"on a GPU heads must have at most {_LARGEST_HEAD} numbers"
    else:
        problem = None
    if problem is not None:
        raise ConfigError(f"batch_invariant: {problem}")
    choose_attention_backend(device, asked_backend(config), invariant=True)


def without_images_if_needed(
    config: EngineConfig, device: torch.device, model: ModelConfig
) -> EngineConfig:
    """Switch images off, with a log line, if the backend lacks the attention that images need."""
    if not config.images or not model.is_text_part or not model.whole_image_layers:
        return config
    name = asked_backend(config)
    if name is None:
        name, _ = choose_attention_backend(device, native=config.native_kernels)
    if name in WITH_ROW_ENDS:
        return config
    logger.warning(
        "prompts may have no images: the tokens of an image see each other in this model, and "
        "attention backend %s on %s only looks back; use a CPU",
        name,
        device,
    )
    return replace(config, images=False)


def _gpu_packer(weights: str, device: torch.device, dtype: torch.dtype) -> GpuPacker | None:
    own = WeightFormat.of(dtype)
    if own is not None and own.value == weights:
        return None  # without one, weights keep PyTorch's format
    if weights in [one.value for one in WeightFormat if one.keeps_numbers]:
        raise ConfigError(
            f"weights: {weights} on a GPU requires the matching --dtype, got {dtype_name(dtype)}"
        )
    wanted = None if weights == "auto" else QuantizedFormat(weights)
    if find_spec("triton") is None:
        if wanted is None:
            return None
        raise ConfigError(f"weights: {weights} on a GPU needs Triton, which is not installed")
    capability = torch.cuda.get_device_capability(device)
    has_float8 = capability >= FLOAT8_CAPABILITY
    if wanted == QuantizedFormat.FP8 and not has_float8:
        found = ".".join(map(str, capability))
        raise ConfigError(f"weights: fp8 wants a GPU of compute capability 8.9, got {found}")
    return GpuPacker(device, wanted, has_float8)


def describe_weights(asked: str, packer: WeightPacker | None, model: CausalLM) -> str:
    """Describe the linear layers' weights; only nodes with equal descriptions may be paired.

    CPUs and GPUs round quantized weights differently, and different GPU models add in different
    orders, so their descriptions differ.
    """
    if not isinstance(packer, GpuPacker | InvariantPacker):
        return asked
    kinds = quantized_kinds(model)
    if isinstance(packer, InvariantPacker):
        kinds.append(f"batch-invariant on {packer.kind}")
    return f"{asked} on a GPU: {', '.join(kinds)}" if kinds else asked


def asked_backend(config: EngineConfig) -> str | None:
    """Return the attention backend that the options name; None: they name none."""
    return None if config.attention_backend == "auto" else config.attention_backend


def choose_backends(
    spec: KVCacheSpec, config: EngineConfig, device: torch.device, model: ModelConfig
) -> tuple[str | None, ...]:
    """Choose each KV cache group's attention backend; log one line per kind of group.

    Raises ConfigError if the named backend cannot serve the model.
    """
    override = asked_backend(config)
    chosen: dict[tuple[KVKind, int], str | None] = {}
    keys = [
        (group.kv.kind, group.kv.head_dim if isinstance(group.kv, PagedKV) else 0)
        for group in spec.groups
    ]
    for key in dict.fromkeys(keys):
        kind, head_dim = key
        if kind is KVKind.STATE:
            chosen[key] = None
            continue
        chosen[key], reason = choose_attention_backend(
            device,
            override,
            spec.block_size,
            fp8=config.kv_cache_dtype == "fp8",
            latent=kind is KVKind.LATENT,
            sinks=model.has_sinks,
            half=spec.dtype.itemsize == 2,
            head_dim=head_dim,
            invariant=config.batch_invariant,
            native=config.native_kernels,
        )
        logger.info("attention backend %s for %s layers: %s", chosen[key], kind.value, reason)
    return tuple(chosen[key] for key in keys)
