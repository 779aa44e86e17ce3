"""Attention backends: the table of their names, and the choice of a backend for a device.

Refuses to know: how any backend works, models. Importing this package does not import any backend.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from baton.api.errors import ConfigError
from baton.registry import Registry

if TYPE_CHECKING:
    import torch

    from baton_kernels.attention.base import AttentionBackend

ATTENTION_BACKENDS: Registry[type[AttentionBackend]] = Registry(
    "attention backend",
    {
        "reference": "baton_kernels.attention.reference:ReferenceAttention",
        "cpu": "baton_kernels.attention.cpu:CpuAttention",
        "native": "baton_kernels.attention.native:NativeAttention",
        "triton": "baton_kernels.attention.triton:TritonAttention",
        "triton_invariant": "baton_kernels.attention.triton_invariant:InvariantTritonAttention",
        "triton_latents": "baton_kernels.attention.triton_latents:TritonLatentAttention",
        "sdpa": "baton_kernels.attention.cpu:CpuAttention",
        "flash_attn": "baton_kernels.attention.flash:FlashAttention",
        "flashinfer": "baton_kernels.attention.flashinfer:FlashInferAttention",
        "sdpa_triton": "baton_kernels.attention.library_prompts:SdpaTritonAttention",
        "flash_triton": "baton_kernels.attention.library_prompts:FlashTritonAttention",
        "flashinfer_triton": "baton_kernels.attention.library_prompts:FlashInferTritonAttention",
    },
    plugin_group="baton.attention",
)

# Library -> backend in which the library computes steps with prompts, and Triton all other steps.
_FOR_PROMPTS = {
    "sdpa": "sdpa_triton",
    "flash_attn": "flash_triton",
    "flashinfer": "flashinfer_triton",
}
_LIBRARY_OF = {name: name for name in _FOR_PROMPTS} | {
    both: library for library, both in _FOR_PROMPTS.items()
}
# Backends that can read a cache of latents: one vector per token instead of keys and values.
_LATENT_BACKENDS = ("reference", "cpu", "native", "triton_latents")
# Backend -> the backend to use in its place if the cache has latents.
_OVER_LATENTS = {"triton": "triton_latents"}
# Backends that support `AttentionMetadata.row_ends`, so that an image's tokens can attend to later
# tokens of the image.
WITH_ROW_ENDS = ("reference", "cpu", "native")
_TRITON = ("triton", "triton_invariant", "triton_latents", *_FOR_PROMPTS.values())
LARGEST_TRITON_HEAD = 512  # largest head for which `triton.tile_sizes` has tiles


def choose_attention_backend(
    device: torch.device | str,
    override: str | None = None,
    block_size: int = 16,
    *,
    fp8: bool = False,
    latent: bool = False,
    sinks: bool = False,
    half: bool = False,
    head_dim: int = 0,
    invariant: bool = False,
    native: bool = True,
) -> tuple[str, str]:
    """Pick the attention backend for a device.

    Args:
        device: device of the KV cache, for example ``"cpu"`` or ``"cuda:0"``.
        override: a name from ``ATTENTION_BACKENDS`` to use in place of the automatic choice.
        block_size: tokens per block of the KV cache.
        fp8: whether the KV cache is float8.
        latent: whether the cache holds one vector per token instead of keys and values (MLA).
        sinks: whether each head has an attention sink.
        half: whether queries and cache have a dtype of 16 bits.
        head_dim: size of a head; 0: not known.
        invariant: whether a query's result must not depend on the rest of the batch.
        native: whether native kernels may be chosen.

    Returns:
        The backend's name, and the reason for the choice, one phrase for the log.

    Raises:
        ConfigError: ``override`` is not a registered name, or does not support these options.
    """
    if invariant:
        override = _invariant(device, override)
    if latent:
        return _choose_for_latents(device, override, block_size, fp8=fp8, native=native)
    if override is not None:
        _check(override, block_size, device, head_dim)
        if override in _OVER_LATENTS.values():
            raise ConfigError(f"attention_backend: {override} takes latents (MLA) only")
        if sinks and _LIBRARY_OF.get(override, "sdpa") != "sdpa":
            raise ConfigError(f"attention_backend: {override} takes no attention sinks")
        problem = _reason_against_fp8(override, device) if fp8 else None
        if problem is not None:
            raise ConfigError(f"kv_cache_dtype: fp8 with {override}: {problem}")
        return override, "asked for by the user"
    name, reason = _fastest(device, native=native)
    if name == "triton" and head_dim > LARGEST_TRITON_HEAD:
        return "reference", f"heads have {head_dim} numbers, and triton takes {LARGEST_TRITON_HEAD}"
    if name == "triton" and half and not (fp8 or sinks):
        found = _library_for_prompts(device, block_size, head_dim)
        if found is not None:
            return found
    problem = _reason_against_fp8(name, device) if fp8 else None
    if problem is not None:
        return "reference", f"the KV cache is fp8, and {name}: {problem}"
    return name, reason


def wanted_block_size(backend: str) -> int:
    """Return the block size, in tokens, that a backend requires; 0: any size.

    Only FlashAttention 2 has a requirement: a multiple of 256.
    """
    from baton_kernels.attention.flash import block_size_multiple, installed_version

    version = installed_version()
    if _LIBRARY_OF.get(backend) != "flash_attn" or version is None:
        return 0
    multiple = block_size_multiple(version)
    return multiple if multiple > 1 else 0


def _library_for_prompts(
    device: torch.device | str, block_size: int, head_dim: int
) -> tuple[str, str] | None:
    """Pick a library that computes prompts faster than Triton, and the reason for the log.

    Returns None if no library is known to be faster on this GPU.
    """
    import torch

    from baton_kernels.attention import flash
    from baton_kernels.attention.measured import fastest_library

    gpu = torch.cuda.get_device_name(device)
    usable = [
        name
        for name in _FOR_PROMPTS
        if _reason_against_library(name, block_size, device, head_dim) is None
    ]
    fastest = fastest_library(gpu, usable)
    if fastest is not None:
        library, ratio = fastest
        return _FOR_PROMPTS[library], (
            f"on {gpu}, steps with prompts were measured to take {ratio:.2f} of Triton's time"
        )
    if "flash_attn" in usable and flash.installed_version() == flash.NEWEST:
        return "flash_triton", "the KV cache is on an NVIDIA GPU with FlashAttention-3"
    return None


def _invariant(device: torch.device | str, override: str | None) -> str:
    """Return a device's batch-invariant backend; raises ConfigError if another is asked for."""
    name = "native" if str(device).startswith("cpu") else "triton_invariant"
    if override not in (None, name):
        raise ConfigError(f"attention_backend: must be {name} with batch_invariant, got {override}")
    return name


def _choose_for_latents(
    device: torch.device | str,
    override: str | None,
    block_size: int,
    *,
    fp8: bool,
    native: bool,
) -> tuple[str, str]:
    if fp8:
        raise ConfigError("kv_cache_dtype: fp8 is not supported for latents (MLA)")
    if override is not None:
        override = _OVER_LATENTS.get(override, override)
        _check(override, block_size, device)
        if override not in _LATENT_BACKENDS:
            raise ConfigError(f"attention_backend: {override} does not take latents (MLA)")
        return override, "asked for by the user"
    name, reason = _fastest(device, native=native)
    return _OVER_LATENTS.get(name, name), reason


def _fastest(device: torch.device | str, *, native: bool) -> tuple[str, str]:
    kind = str(device).partition(":")[0]
    if kind == "cpu":
        from baton_kernels.dispatch import native_ops  # imported here, because it imports torch

        if native and native_ops() is not None:
            return "native", "the KV cache is on the CPU"
        return "cpu", "the KV cache is on the CPU, and there are no native kernels"
    if kind != "cuda":
        return "reference", f"no faster backend for {kind!r} is registered"
    if find_spec("triton") is None:
        return "reference", "triton is not installed"
    return "triton", "the KV cache is on an NVIDIA GPU"


def _reason_against_fp8(name: str, device: torch.device | str) -> str | None:
    import torch  # imported here, so that this module needs no torch

    return ATTENTION_BACKENDS.load(name).reason_against_fp8(torch.device(device))


def _check(name: str, block_size: int, device: torch.device | str, head_dim: int = 0) -> None:
    if name in _TRITON and find_spec("triton") is None:
        raise ConfigError("attention_backend: triton is not installed")
    if name in _TRITON and head_dim > LARGEST_TRITON_HEAD:
        raise ConfigError(
            f"attention_backend: {name} takes heads of at most {LARGEST_TRITON_HEAD} numbers, got "
            f"{head_dim}; reference takes any"
        )
    if name in _LIBRARY_OF:
        problem = _reason_against_library(_LIBRARY_OF[name], block_size, device, head_dim)
        if problem is not None:
            field, reason = problem
            raise ConfigError(f"{field}: {name} cannot be used: {reason}")
    ATTENTION_BACKENDS.load(name)


def _reason_against_library(
    library: str, block_size: int, device: torch.device | str, head_dim: int
) -> tuple[str, str] | None:
    """Return which option a library does not support, and why; None: the library can be used.

    Args:
        head_dim: size of a head; 0: not known.
    """
    from baton_kernels.attention import flash, flashinfer

    if library == "sdpa":
        return None
    if library == "flashinfer":
        if not flashinfer.is_installed():
            return "attention_backend", "FlashInfer is not installed"
        head = flashinfer.reason_against_head(head_dim) if head_dim else None
        return ("attention_backend", head) if head else None
    version = flash.installed_version()
    if version is None:
        return "attention_backend", "FlashAttention is not installed"
    if (problem := flash.reason_against_gpu(version, device)) is not None:
        return "attention_backend", problem
    multiple = flash.block_size_multiple(version)
    if block_size % multiple:
        return "block_size", (
            f"FlashAttention {version} needs a multiple of {multiple}, got {block_size}"
        )
    head = flash.reason_against_head(head_dim) if head_dim else None
    return ("attention_backend", head) if head else None


__all__ = [
    "ATTENTION_BACKENDS",
    "LARGEST_TRITON_HEAD",
    "WITH_ROW_ENDS",
    "choose_attention_backend",
    "wanted_block_size",
]
