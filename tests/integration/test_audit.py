"""`baton admin audit` of real nodes, at rest and while they work."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from typer.testing import CliRunner

from baton import AsyncClient, SamplingParams
from baton.cli.app import app
from baton.deployment.local_deployment import LocalDeployment
from tests.fakes.time.waiting import wait_until

pytestmark = [pytest.mark.nixl, pytest.mark.timeout(200)]


def audit(address: str) -> str:
    result = CliRunner(env={"COLUMNS": "250"}).invoke(app, ["admin", "audit", "--router", address])
    assert result.exit_code == 0, result.output
    return result.output


def test_every_block_has_an_owner_while_requests_come_and_go(deployment: LocalDeployment) -> None:
    address = deployment.config.listen
    # More than are computed while it is asked: leaving the stream ends the request.
    params = SamplingParams(max_tokens=1500, temperature=0.0, ignore_eos=True)

    async def run() -> list[str]:
        outputs: list[str] = []
        async with (
            AsyncClient(address) as client,
            contextlib.aclosing(client.stream([5, 6, 7] * 100, params)) as deltas,
        ):
            async for delta in deltas:
                if delta.token_ids:
                    outputs.append(await asyncio.to_thread(audit, address))
                if len(outputs) == 5:
                    break
        return outputs

    outputs = asyncio.run(run())
    assert len(outputs) == 5
    assert any("RUNNING" in output for output in outputs)
    for output in outputs:
        assert output.count("of them with an owner") == 2
    wait_until(lambda: "RUNNING" not in audit(address))
