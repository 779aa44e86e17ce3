"""KVFileCounts: counts of a node's file tier of the prefix cache. Knows no file and no engine."""

from __future__ import annotations

from dataclasses import dataclass, field

# Causes for which a look-up or a read gives fewer blocks than a prompt needs. absent: no file has
# the next block. gone: another node removed the file. foreign: the file has other content than its
# name says. late: the read took longer than its deadline. no_blocks: this node has too few free
# blocks. off: the tier has turned itself off for a while.
MISS_CAUSES = (
    *("absent", "gone", "short", "damaged", "foreign", "error", "late", "no_blocks", "off"),
)
# Outcomes of runs of blocks that were queued for writing. skipped: the blocks of a run were evicted
# first, or too many runs were waiting.
WRITE_ENDS = ("written", "skipped", "failed")


@dataclass(slots=True)
class KVFileCounts:
    """Counts since the start, and the bytes in the folder. Each field has one writing thread.

    Attributes:
        hits: requests that got blocks from files.
        misses: look-ups and reads that ended early, by cause.
        tokens_read, bytes_read: tokens and bytes of KV that requests got from files.
        runs: runs of blocks that were queued for writing, by outcome.
        bytes_written: bytes of the written files.
        files_evicted: files that this node removed because the folder was full.
        bytes_stored, files_stored: files in the folder, those of other nodes and models included.
    """

    hits: int = 0
    misses: dict[str, int] = field(default_factory=lambda: dict.fromkeys(MISS_CAUSES, 0))
    tokens_read: int = 0
    bytes_read: int = 0
    runs: dict[str, int] = field(default_factory=lambda: dict.fromkeys(WRITE_ENDS, 0))
    bytes_written: int = 0
    files_evicted: int = 0
    bytes_stored: int = 0
    files_stored: int = 0
