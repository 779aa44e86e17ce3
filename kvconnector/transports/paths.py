"""Names of the paths that bytes take, where the library beneath does not tell which it chose.

Refuses to know: peers, how bandwidth is measured.
"""

from __future__ import annotations

UNKNOWN_GPU_PATH = "nixl/ucx unknown"  # a GPU's path until the real one is known
CUDA_IPC_PATH = "nixl/ucx cuda_ipc"
# What PCIe 5.0 x16 carries one way. Copies by way of the host and network cards stay below it: on
# one machine only CUDA IPC, over NVLink or inside a GPU, is faster.
PCIE_BYTES_PER_S = 63e9


def judge_path(path: str, *, on_this_host: bool, bandwidth_bytes_per_s: float) -> str:
    """Return a path's name, after a measured bandwidth; the name stays unless that proves more."""
    is_faster = bandwidth_bytes_per_s > PCIE_BYTES_PER_S
    return CUDA_IPC_PATH if path == UNKNOWN_GPU_PATH and on_this_host and is_faster else path
