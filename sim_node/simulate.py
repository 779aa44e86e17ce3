"""Runs a process of simulated nodes until it is told to stop."""

from __future__ import annotations

import asyncio
import logging

from baton.processes.process import stop_event
from sim_node.cluster import SimCluster

logger = logging.getLogger(__name__)


async def simulate(cluster: SimCluster) -> None:
    """Run a cluster until a stop signal comes or a node fails; raises the node's error."""
    stopping = asyncio.create_task(stop_event(asyncio.get_running_loop()).wait())
    running = asyncio.create_task(_start_and_run(cluster))
    await asyncio.wait([stopping, running], return_when=asyncio.FIRST_COMPLETED)
    if running.done():
        running.result()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    stats = cluster.stats()
    logger.info(
        "%d tokens in %.1f s, %.1f s of CPU; the latest timer came %.0f ms late",
        stats.num_tokens,
        stats.elapsed_s,
        stats.cpu_s,
        stats.max_lag_s * 1000,
    )


async def _start_and_run(cluster: SimCluster) -> None:
    async with cluster:
        logger.info("%d simulated nodes have joined", len(cluster.names))
        await cluster.run()
