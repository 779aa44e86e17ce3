"""Fixtures of the unit tests of `baton`."""

from __future__ import annotations

import pytest

from baton.cli.programs import run_up
from baton.deployment.local_deployment import LocalDeploymentConfig


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[LocalDeploymentConfig]:
    """Return the deployments that `baton up` would have started; it starts none."""
    configs: list[LocalDeploymentConfig] = []

    def run(config: LocalDeploymentConfig, *, ready_timeout_s: float) -> int:
        configs.append(config)
        return 0

    monkeypatch.setattr(run_up, "run_up", run)
    return configs
