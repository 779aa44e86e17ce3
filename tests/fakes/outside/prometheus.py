"""A real Prometheus on loopback, of Debian's package, that scrapes what a test names."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.time.waiting import wait_until

NEEDS_PROMETHEUS = pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("promtool") is None,
    reason="needs Prometheus: tools/install_prometheus.sh",
)


class Prometheus:
    """A Prometheus server that answers queries."""

    def __init__(self, address: str) -> None:
        self._url = f"http://{address}/api/v1"

    def query(self, query: str) -> list[dict[str, Any]]:
        """Return the series of an instant query."""
        found: list[dict[str, Any]] = self._get("query", query=query)["result"]
        return found

    def firing(self) -> set[str]:
        """Return the names of firing alerts."""
        alerts = self._get("alerts")["alerts"]
        return {alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"}

    def targets_up(self) -> int:
        return sum(one["health"] == "up" for one in self._get("targets")["activeTargets"])

    def _get(self, path: str, **arguments: str) -> Any:
        url = f"{self._url}/{path}?{urllib.parse.urlencode(arguments)}"
        with urllib.request.urlopen(url, timeout=10) as response:
            return json.load(response)["data"]


@contextlib.contextmanager
def scraping(
    targets: Mapping[str, Sequence[str]],
    folder: Path,
    address: str,
    rules: Path | None = None,
    interval_s: float = 1,
    *,
    targets_file: Path | None = None,
) -> Iterator[Prometheus]:
    """Run a Prometheus.

    Args:
        targets: ``host:port`` by job.
        folder: folder for its files.
        address: address that it listens on.
        rules: rules that it evaluates.
        targets_file: names more, and is read again when it changes.
    """
    discovered = {"file_sd_configs": [{"files": [str(targets_file)], "refresh_interval": "2s"}]}
    config = folder / "prometheus.json"  # which is YAML, too
    config.write_text(
        json.dumps(
            {
                "global": {
                    "scrape_interval": f"{interval_s:g}s",
                    "scrape_timeout": f"{interval_s:g}s",
                    "evaluation_interval": f"{interval_s:g}s",
                },
                "rule_files": [str(rules)] if rules else [],
                "scrape_configs": [
                    {"job_name": job, "static_configs": [{"targets": list(addresses)}]}
                    for job, addresses in targets.items()
                    if addresses
                ]
                + ([{"job_name": "discovered", **discovered}] if targets_file else []),
            }
        )
    )
    command = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, f"--web.listen-address={address}"], stdout=log, stderr=log
        )
        try:
            yield Prometheus(address)
        finally:
            process.terminate()
            process.wait(20)


def wait_for_targets(prometheus: Prometheus, number: int) -> None:
    def are_up() -> bool:
        try:
            return prometheus.targets_up() == number
        except OSError:
            time.sleep(0.1)
            return False

    wait_until(are_up, f"{number} targets up", timeout_s=30)
