"""Starts deployments with real nodes on this machine, for measurements."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from baton import Client, Receipt, SamplingParams
from baton.api.outputs import DecodeReceipt
from baton.deployment.local_deployment import LocalDeployment, LocalDeploymentConfig
from baton.processes.free_address import free_address
from benchmarks.runner.environment import DEMO_MODEL

READY_TIMEOUT_S = 300.0


@contextmanager
def deployed(
    model: str | Path = DEMO_MODEL,
    *,
    with_http: bool = False,
    router_args: Sequence[str] = ("--no-local-prefill",),
    ready_timeout_s: float = READY_TIMEOUT_S,
    **options: Any,
) -> Iterator[LocalDeployment]:
    """Run a router and nodes on free ports; yield once all pairs of nodes are connected.

    Args:
        with_http: whether the router also serves HTTP.
        options: further fields of `LocalDeploymentConfig`.
    """
    config = LocalDeploymentConfig(
        model=str(model),
        listen=free_address(),
        http_listen=free_address() if with_http else "",
        router_args=router_args,
        **options,
    )
    with LocalDeployment(config) as deployment:
        deployment.wait_ready(ready_timeout_s)
        yield deployment


def receipt_of(
    client: Client, prompt: list[int], params: SamplingParams
) -> tuple[Receipt, DecodeReceipt]:
    """Send a request; return its receipt, and the decode node's part of the receipt."""
    receipt = client.generate(prompt, params).receipt
    assert receipt is not None
    assert receipt.decode is not None
    return receipt, receipt.decode
