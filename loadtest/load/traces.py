"""Traces: reads and writes files of timed requests in the format of Mooncake's public traces.

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, ...]}

A line is one JSON object: milliseconds, prompt tokens, output tokens, and one id per block of 512
prompt tokens (the last block may be shorter). An id names a block together with all blocks before
it: prompts whose ids begin alike have equal first tokens (Qin et al., arXiv 2407.00079, section 4).
Refuses to know: routers, clocks.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from baton.api.bounded_files import MAX_DATA_BYTES, parse_json, read_text, refuse_devices
from baton.api.errors import ConfigError, reason_of

BLOCK_TOKENS = 512
_MOST = 1e15
_FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """One request of a trace.

    Attributes:
        timestamp_ms: arrival, in milliseconds since the beginning of the trace.
        input_length: tokens of the prompt, at least 1.
        output_length: tokens to generate, at least 1.
        hash_ids: one id per block of 512 prompt tokens, also for a partial last block.
        session: number of the request's session in a generated trace; trace files do not contain
            this number.
    """

    timestamp_ms: int
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]
    session: int = field(default=0, compare=False)


def num_blocks(input_length: int) -> int:
    """Return the number of a prompt's blocks, including a partial last block."""
    return -(-input_length // BLOCK_TOKENS)


def write_trace(path: Path, requests: Iterable[TraceRequest]) -> None:
    """Write a trace file, replacing an existing one."""
    with path.open("w", encoding="utf-8") as file:
        for request in requests:
            values = (
                request.timestamp_ms,
                request.input_length,
                request.output_length,
                list(request.hash_ids),
            )
            file.write(json.dumps(dict(zip(_FIELDS, values, strict=True))) + "\n")


def read_trace(path: Path) -> Iterator[TraceRequest]:
    """Read the requests of a trace file, in the file's order.

    Some tools omit all ids, or the id of a partial last block; each missing id becomes a unique
    negative id.

    Raises:
        ConfigError: the file is unreadable, or a line is wrong; the error names the line and the
            reason.
    """
    try:
        refuse_devices(path)
        lines = read_text(path, MAX_DATA_BYTES).splitlines()
    except OSError as error:
        raise ConfigError(f"trace: {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"trace: {path} cannot be read: {reason_of(error)}") from error
    next_id = -1
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            request = _parse(line, next_id)
        except ValueError as error:
            raise ConfigError(f"trace: {path}, line {number}: {error}") from error
        next_id = min([next_id, *(hash_id - 1 for hash_id in request.hash_ids)])
        yield request


def _parse(line: str, next_id: int) -> TraceRequest:
    """Parse a line of a trace file; missing ids count down from ``next_id``.

    Raises ValueError.
    """
    fields: Any = parse_json(line)
    if not isinstance(fields, dict):
        raise ValueError("must be a JSON object")
    numbers = []
    for name, least in zip(_FIELDS, (0, 1, 1), strict=False):
        value: Any = fields.get(name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not least <= value <= _MOST:
            raise ValueError(f"{name}: must be a number, {least} to {_MOST:g}, got {value!r:.60}")
        numbers.append(int(value))
    timestamp_ms, input_length, output_length = numbers
    hash_ids = fields.get("hash_ids") or []
    if not isinstance(hash_ids, list) or not all(isinstance(one, int) for one in hash_ids):
        raise ValueError(f"hash_ids: must be a list of whole numbers, got {hash_ids!r:.60}")
    num_missing = num_blocks(input_length) - len(hash_ids)
    if num_missing < 0:
        raise ValueError(
            f"hash_ids: must be at most {num_blocks(input_length)} for {input_length} tokens in "
            f"blocks of {BLOCK_TOKENS}, got {len(hash_ids)}"
        )
    return TraceRequest(
        timestamp_ms=timestamp_ms,
        input_length=input_length,
        output_length=output_length,
        hash_ids=(*hash_ids, *range(next_id, next_id - num_missing, -1)),
    )


def block_seed(hash_id: int, seed: str) -> str:
    """Return the seed with which a block's 512 token ids are drawn."""
    return f"{seed} block {hash_id}"


def prompt_token_ids(
    hash_ids: Sequence[int], input_length: int, vocab_size: int, seed: str = ""
) -> list[int]:
    """Make a prompt's token ids; prompts with equal first block ids get equal first tokens.

    The id and ``seed`` together are the seed for the 512 token ids of a block; the last block is
    cut to the prompt's length.

    Raises:
        ConfigError: the number of ids differs from the number of blocks.
    """
    if len(hash_ids) != num_blocks(input_length):
        raise ConfigError(
            f"hash_ids: must be {num_blocks(input_length)} for {input_length} tokens, "
            f"got {len(hash_ids)}"
        )
    token_ids: list[int] = []
    for hash_id in hash_ids:
        chance = random.Random(block_seed(hash_id, seed))
        token_ids += chance.choices(range(vocab_size), k=BLOCK_TOKENS)
    return token_ids[:input_length]
