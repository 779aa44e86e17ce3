"""Answer operators' requests that router and nodes answer alike: log levels and profiles."""

from __future__ import annotations

import asyncio
import logging

from baton.api.errors import ConfigError, InvalidRequestError
from baton.telemetry.logs import change_log_level
from baton.telemetry.stack_sampler import sample_stacks
from baton.v1 import admin_pb2

logger = logging.getLogger(__name__)


def set_log_level(request: admin_pb2.SetLogLevelRequest) -> admin_pb2.SetLogLevelResponse:
    """Set the log level of this process; raises InvalidRequestError."""
    # Log the change first, because the new level may hide INFO lines.
    logger.info("log-level %r %s", request.level, request.module)
    try:
        previous = change_log_level(request.level, request.module)
    except ConfigError as error:
        raise InvalidRequestError(*str(error).split(": ", 1)) from None
    return admin_pb2.SetLogLevelResponse(previous=previous)


async def profile(thread_name: str, seconds: float) -> admin_pb2.ProfileResponse:
    """Sample the stack of one thread of this process; raises InvalidRequestError."""
    found = await asyncio.to_thread(sample_stacks, thread_name, seconds)
    return admin_pb2.ProfileResponse(
        thread=found.thread,
        num_samples=found.num_samples,
        seconds=found.seconds,
        functions=[
            admin_pb2.ProfiledFunction(
                function=one.name, place=one.place, num_own=one.num_own, num_total=one.num_total
            )
            for one in found.functions
        ],
    )
