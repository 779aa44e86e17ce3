"""Names of data paths, for libraries that do not tell which path they chose.

Refuses to know: peers, how bandwidth is measured.
"""

from __future__ import annotations

UNKNOWN_GPU_PATH = "nixl/ucx unknown"  # name of a GPU's path until its bandwidth is known
CUDA_IPC_PATH = "nixl/ucx cuda_ipc"
# One-way bandwidth of PCIe 5.0 x16. Copies via the host or via network cards are slower. On one
# machine, only CUDA IPC (over NVLink, or within a GPU) is faster.
PCIE_BYTES_PER_S = 63e9


def judge_path(path: str, *, on_this_host: bool, bandwidth_bytes_per_s: float) -> str:
    """Return the path's name, or CUDA IPC's name if the bandwidth exceeds PCIe's."""
    is_faster = bandwidth_bytes_per_s > PCIE_BYTES_PER_S
    return CUDA_IPC_PATH if path == UNKNOWN_GPU_PATH and on_this_host and is_faster else path
