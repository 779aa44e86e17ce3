"""Names of data paths, inferred for libraries that do not tell which path they use.

Refuses to know: peers, how bandwidth is measured.
"""

from __future__ import annotations

CMA_PATH = "nixl/ucx cma"  # a posted write is complete: the sending process copies the bytes
UNKNOWN_GPU_PATH = "nixl/ucx unknown"  # name of a GPU's path until its bandwidth is known
CUDA_IPC_PATH = "nixl/ucx cuda_ipc"
# One-way bandwidth of PCIe 5.0 x16, which bounds copies through host memory or network cards.
# Within one machine, only CUDA IPC (over NVLink, or inside one GPU) is faster.
PCIE_BYTES_PER_S = 63e9


def judge_path(path: str, *, on_this_host: bool, bandwidth_bytes_per_s: float) -> str:
    """Return ``path``, or CUDA IPC's name if only CUDA IPC can have the measured bandwidth."""
    is_faster = bandwidth_bytes_per_s > PCIE_BYTES_PER_S
    return CUDA_IPC_PATH if path == UNKNOWN_GPU_PATH and on_this_host and is_faster else path
