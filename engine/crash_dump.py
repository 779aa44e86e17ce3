"""Crash dump: writes the state of an engine that cannot continue to one JSON file.

The file contains numbers and ids, never users' tokens or texts: no prompts, stop strings or
schemas, and no exception messages, which may quote such texts. Only the file's owner may read it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import logging
import os
import platform
import secrets
import tempfile
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from baton.api.sampling_params import SamplingParams
from baton.version import __version__
from engine.core.request import Request
from engine.engine import Engine

logger = logging.getLogger(__name__)

FOLDER_VARIABLE = "BATON_DUMP_FOLDER"
PREFIX = "baton-crash-"
MAX_DUMPS = 20  # maximum number of dumps kept in a folder
# Maximum number of requests in a dump, and maximum number of block ids for each request
MAX_REQUESTS, MAX_BLOCKS = 1000, 64
MAX_BYTES = 4 * 2**20
_MAX_ID_CHARS = 128
_MAX_FRAMES = 100
# Only values of these types are dumped, because others may contain a client's text.
_NUMBERS = (bool, int, float, type(None))


def dump_crash(engine: Engine, error: BaseException) -> Path | None:
    """Write the dump and return its path; None, with a log line, if it cannot be written.

    The environment variable BATON_DUMP_FOLDER names the dump's folder; without the variable, the
    dump goes to a private folder in the system's temporary folder. Never raises, because the caller
    is handling another failure. A slow disk may block this function, so callers report the engine's
    death first.
    """
    path: Path | str = os.environ.get(FOLDER_VARIABLE) or "a temporary folder"
    try:
        text = json.dumps(describe(engine, error), indent=1)
        if len(text) > MAX_BYTES:
            raise ValueError(f"it would be {len(text)} bytes long, more than {MAX_BYTES}")
        folder = _folder()
        stamp = time.strftime("%Y%m%d-%H%M%S")
        path = folder / f"{PREFIX}{stamp}-{os.getpid()}-{secrets.token_hex(8)}.json"
        _write(path, text)
        _remove_old(folder)
    except Exception as problem:  # memory or disk is full, or the engine changed meanwhile
        logger.error("cannot write a crash dump to %s: %s", path, problem)
        return None
    logger.critical("the state of the engine was dumped to %s", path)
    return path


def _folder() -> Path:
    """Return the folder for dumps: the operator's folder, or a private one."""
    named = os.environ.get(FOLDER_VARIABLE)
    if named:
        Path(named).mkdir(mode=0o700, parents=True, exist_ok=True)
        return Path(named)
    folder = Path(tempfile.gettempdir()) / f"{PREFIX}dumps-{os.geteuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if found.st_uid == os.geteuid() and folder.is_dir() and not folder.is_symlink():
        folder.chmod(0o700)
        return folder
    return Path(tempfile.mkdtemp(prefix=PREFIX))  # another user owns the folder


def _write(path: Path, text: str) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, mode=0o600), "w", encoding="utf-8") as file:
        file.write(text)


def _remove_old(folder: Path) -> None:
    """Delete all but the latest `MAX_DUMPS` dumps; their names sort by time."""
    for path in sorted(folder.glob(f"{PREFIX}*.json"))[:-MAX_DUMPS]:
        with contextlib.suppress(OSError):
            path.unlink()


def describe(engine: Engine, error: BaseException) -> dict[str, Any]:
    """Return the dump's content: the engine's state without users' texts."""
    last = engine.last_scheduled
    scheduled = itertools.islice(last.scheduled if last is not None else (), MAX_REQUESTS)
    requests = list(engine.requests.values())
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "versions": {
            "baton": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "error": _describe_error(error),
        "num_steps": engine.num_steps,
        "model": str(engine.model_config),
        "scheduled": [
            {
                "request_id": item.request.request_id[:_MAX_ID_CHARS],
                "num_tokens": item.num_scheduled_tokens,
            }
            for item in scheduled
        ],
        "num_requests": len(requests),
        "requests": [_describe_request(request) for request in requests[:MAX_REQUESTS]],
        "blocks": {
            "num_blocks": engine.num_blocks,
            "num_free": engine.block_pool.num_free,
            "by_ref_count": _count(engine.block_pool.ref_counts()),
        },
        "metrics": dataclasses.asdict(engine.metrics()),
    }


def _describe_error(error: BaseException) -> list[str]:
    """Describe an error's stack frames, outermost first, and its causes; leave out messages."""
    lines: list[str] = []
    cause: BaseException | None = error
    while cause is not None and len(lines) < _MAX_FRAMES:
        lines.append(f"{type(cause).__module__}.{type(cause).__qualname__}")
        frames = traceback.extract_tb(cause.__traceback__, limit=-_MAX_FRAMES)
        lines += [f"  {frame.filename}:{frame.lineno} in {frame.name}" for frame in frames]
        cause = cause.__cause__ or cause.__context__
    return lines


def _count(ref_counts: Mapping[int, int]) -> dict[str, int]:
    """Return a histogram of reference counts: how many blocks have each count."""
    counts: dict[str, int] = {}
    for number in ref_counts.values():
        counts[str(number)] = counts.get(str(number), 0) + 1
    return counts


def _describe_request(request: Request) -> dict[str, Any]:
    return {
        "request_id": request.request_id[:_MAX_ID_CHARS],
        "status": request.status.value,
        "num_prompt_tokens": request.num_prompt_tokens,
        "num_tokens": request.num_tokens,
        "num_computed_tokens": request.num_computed_tokens,
        "num_cached_tokens": request.num_hit_tokens,
        "num_preemptions": request.num_preemptions,
        "num_blocks": len(request.block_ids),
        "block_ids": request.block_ids[:MAX_BLOCKS],
        "sampling_params": _describe_params(request.sampling_params),
    }


def _describe_params(params: SamplingParams) -> dict[str, bool | float | None]:
    values = ((field.name, getattr(params, field.name)) for field in dataclasses.fields(params))
    return {name: value for name, value in values if isinstance(value, _NUMBERS)}
