"""Crash dump: what an engineer needs when an engine cannot continue, in one JSON file.

Holds lengths and ids, never the users' tokens or text.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import platform
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from baton.version import __version__
from engine.engine import Engine
from engine.request import Request

logger = logging.getLogger(__name__)

FOLDER_VARIABLE = "BATON_DUMP_FOLDER"


def dump_crash(engine: Engine, error: BaseException) -> Path | None:
    """Write the dump and say where it is; None (and a log line) when it cannot be written.

    The folder is that of the environment variable BATON_DUMP_FOLDER, or the system's for temporary
    files. Never raises: it runs when something else has gone wrong.
    """
    folder = Path(os.environ.get(FOLDER_VARIABLE) or tempfile.gettempdir())
    path = folder / f"baton-crash-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.json"
    try:
        path.write_text(json.dumps(describe(engine, error), indent=1), encoding="utf-8")
    except (OSError, ValueError, TypeError) as problem:
        logger.error("cannot write a crash dump to %s: %s", path, problem)
        return None
    logger.critical("the state of the engine was dumped to %s", path)
    return path


def describe(engine: Engine, error: BaseException) -> dict[str, Any]:
    """The dump's content."""
    last = engine.last_scheduled
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "versions": {
            "baton": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "error": traceback.format_exception(error),
        "num_steps": engine.num_steps,
        "model": str(engine.model_config),
        "scheduled": [
            {"request_id": item.request.request_id, "num_tokens": item.num_scheduled_tokens}
            for item in (last.scheduled if last is not None else ())
        ],
        "requests": [_describe_request(request) for request in engine.requests.values()],
        "blocks": {
            "num_blocks": engine.num_blocks,
            "num_free": engine.num_free_blocks,
            "ref_counts": engine.block_ref_counts(),
        },
        "metrics": dataclasses.asdict(engine.metrics()),
    }


def _describe_request(request: Request) -> dict[str, Any]:
    return {
        "request_id": request.request_id,
        "status": request.status.value,
        "num_prompt_tokens": request.num_prompt_tokens,
        "num_tokens": request.num_tokens,
        "num_computed_tokens": request.num_computed_tokens,
        "num_cached_tokens": request.num_cached_tokens,
        "num_preemptions": request.num_preemptions,
        "block_ids": request.block_ids,
        "sampling_params": str(request.sampling_params),
    }
