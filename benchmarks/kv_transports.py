"""What encryption costs: the same requests with KV over NIXL and over TLS sockets, in one run.

The shape of `handoff_modes.py`: one router, prefill and decode node per transport, all of them
running, and the requests go to them in turn. NIXL twice: as it chooses on one host (a copy by the
kernel), and held to TCP, which is what it has between hosts without RDMA.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from baton.deployment.local_deployment import LocalDeployment, LocalDeploymentConfig
from baton.processes.free_address import free_address
from environment import record_environment, write_results
from handoff_modes import (
    READY_TIMEOUT_S,
    collect_receipts,
    idle_cpu,
    make_checkpoint,
    push_figures,
)

# Name -> (what the environment says to UCX, arguments of the nodes).
TRANSPORTS = {
    "nixl": ("", []),
    "nixl, tcp": ("tcp", []),
    "tls": ("", ["--kv-connector", "tls"]),
    "tls, digests": ("", ["--kv-connector", "tls", "--kv-digests"]),
}
LENGTHS = (256, 1024, 4096)  # tokens of 8 KiB of KV
PUSHES = ("layers", "after-prefill")


def measure(num_requests: int) -> dict[str, object]:
    """By push mode and prompt length, what each transport did."""
    results: dict[str, object] = {}
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as name:
        folder = make_checkpoint(Path(name))
        for push in PUSHES:
            with contextlib.ExitStack() as stack:
                deployments = {
                    transport: stack.enter_context(_deployment(folder, transport, push))
                    for transport in TRANSPORTS
                }
                for deployment in deployments.values():
                    deployment.wait_ready(READY_TIMEOUT_S)
                receipts = collect_receipts(deployments, num_requests, LENGTHS)
                rows = {
                    f"{length} tokens": {
                        transport: push_figures(receipts[transport, length])
                        for transport in TRANSPORTS
                    }
                    for length in LENGTHS
                }
                results[push] = rows
                if push == "layers":
                    time.sleep(3.0)  # what was done last is settled
                    results["idle_cpu_percent_of_a_core"] = {
                        transport: idle_cpu(deployment)
                        for transport, deployment in deployments.items()
                    }
        longest = rows[f"{LENGTHS[-1]} tokens"]
        results["gb_per_s_after_prefill"] = {
            transport: round(row["num_bytes"] / row["exposed_transfer_ms"] / 1e6, 2)
            for transport, row in longest.items()
        }
    return results


@contextlib.contextmanager
def _deployment(folder: Path, transport: str, push: str) -> Iterator[LocalDeployment]:
    ucx_tls, arguments = TRANSPORTS[transport]
    before = os.environ.pop("UCX_TLS", None)
    if ucx_tls:
        os.environ["UCX_TLS"] = ucx_tls
    config = LocalDeploymentConfig(
        model=str(folder),
        listen=free_address(),
        router_args=["--no-local-prefill"],
        node_args=["--kv-cache-memory", "256M", "--no-prefix-cache", *arguments],
        prefill_args=["--push", push],
    )
    with LocalDeployment(config) as deployment:
        os.environ.pop("UCX_TLS", None)  # the nodes have it
        if before is not None:
            os.environ["UCX_TLS"] = before
        yield deployment


def main() -> None:
    """Measure, print, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10, help="per short prompt length")
    arguments = parser.parse_args()
    environment = record_environment()
    results = measure(arguments.requests)
    Console(highlight=False, width=120).print_json(data=results)
    write_results("kv_transports", environment, results)


if __name__ == "__main__":
    main()
