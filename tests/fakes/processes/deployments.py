"""Split deployments of real processes, and clients that ask them for many outputs at once."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from baton import AsyncClient, Completion, SamplingParams
from baton.deployment.local_deployment import LocalDeployment, LocalDeploymentConfig
from baton.processes.free_address import free_address

READY_TIMEOUT_S = 90.0


@contextlib.contextmanager
def split_deployment(
    model: Path | str, *node_args: str, dtype: str = "float32", **options: Any
) -> Iterator[LocalDeployment]:
    """Run a router, a prefill node and a decode node that computes no prompts; yield when ready.

    Args:
        node_args: more arguments of both nodes.
        options: further fields of `LocalDeploymentConfig`.
    """
    config = LocalDeploymentConfig(
        model=str(model),
        listen=free_address(),
        router_args=["--no-local-prefill"],
        node_args=["--dtype", dtype, *node_args],
        **options,
    )
    with LocalDeployment(config) as running:
        running.wait_ready(READY_TIMEOUT_S)
        yield running


def complete_all(
    running: LocalDeployment,
    prompts: Sequence[str | list[int]],
    params: SamplingParams | Sequence[SamplingParams],
) -> list[Completion]:
    """Complete all prompts at once; see `complete_each`."""
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    return asyncio.run(complete_each(running.config.listen, prompts, each))


async def complete_each(
    address: str, prompts: Sequence[str | list[int]], params: Sequence[SamplingParams]
) -> list[Completion]:
    """Complete all prompts at once, each with its own parameters on a stream of its own."""
    async with AsyncClient(address) as client:
        calls = [client.generate(*one) for one in zip(prompts, params, strict=True)]
        return await asyncio.gather(*calls)
