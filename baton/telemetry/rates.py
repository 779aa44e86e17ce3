"""Format bandwidths for people to read."""

from __future__ import annotations


def format_rate(bytes_per_s: float) -> str:
    """Return a bandwidth as text such as ``4.1 GB/s``, in the decimal units usual for networks."""
    for unit in ("B/s", "kB/s", "MB/s"):
        if bytes_per_s < 999.5:
            return f"{bytes_per_s:.3g} {unit}"
        bytes_per_s /= 1000
    return f"{bytes_per_s:.1f} GB/s"
