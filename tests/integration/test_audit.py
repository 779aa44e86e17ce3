"""Tests of `baton admin audit` with real nodes, at rest and at work."""

from __future__ import annotations

import asyncio

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
    params = SamplingParams(max_tokens=1500, temperature=0.0, ignore_eos=True)
    outputs: list[str] = []

    async def ask_again_and_again(client: AsyncClient) -> None:
        while True:
            await client.generate([5, 6, 7] * 100, params)

    async def run() -> None:
        async with AsyncClient(address) as client:
            asking = asyncio.create_task(ask_again_and_again(client))
            # An audit may take longer than a request, and so find none.
            while len(outputs) < 5 or not any("RUNNING" in output for output in outputs):
                assert not asking.done()
                outputs.append(await asyncio.to_thread(audit, address))
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    asyncio.run(run())
    for output in outputs:
        assert output.count("of them with an owner") == 2
    wait_until(lambda: "RUNNING" not in audit(address))
