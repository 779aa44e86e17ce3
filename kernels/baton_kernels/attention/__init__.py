"""Attention backends: the table of them, and which one a device gets.

Refuses to know: how any backend works, what a model is. Importing this imports no backend.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

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
    },
)


def choose_attention_backend(
    device: torch.device | str, override: str | None = None
) -> tuple[str, str]:
    """Pick the attention backend for a device.

    Args:
        device: where the KV cache lives, for example ``"cpu"`` or ``"cuda:0"``.
        override: a name from ``ATTENTION_BACKENDS`` that the user insists on.

    Returns:
        ``(name, reason)``; the reason is one phrase for the log.

    Raises:
        ConfigError: ``override`` is not a registered name.
    """
    if override is not None:
        ATTENTION_BACKENDS.load(override)
        return override, "asked for by the user"
    kind = str(device).partition(":")[0]
    if kind == "cpu":
        from baton_kernels.dispatch import native_ops  # here, because it imports torch

        if native_ops() is not None:
            return "native", "the KV cache is on the CPU"
        return "cpu", "the KV cache is on the CPU, and there are no native kernels"
    return "reference", f"no faster backend for {kind!r} is registered"


__all__ = ["ATTENTION_BACKENDS", "choose_attention_backend"]
