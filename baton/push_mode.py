"""When a prefill node sends the KV blocks of a prompt: the values of its option `--push`."""

from __future__ import annotations

from enum import StrEnum


class PushMode(StrEnum):
    """From the latest to the earliest; each sends the same bytes."""

    AFTER_PREFILL = "after-prefill"  # all blocks when token 1 is known; to measure the others by
    CHUNKS = "chunks"  # the blocks that a chunk filled while the next one computes
    LAYERS = "layers"  # and the last chunk's, some layers while the next ones compute
