"""Compare the time to the first token by the router's receipts with that by a client's clock.

    python -m benchmarks receipt_sum [--model FOLDER] [--threads 1] [--prompt-tokens 128,1900]

A split deployment (one prefill and one decode node) on loopback serves one request after the
other, over gRPC and over HTTP. A client in a process of its own notes when it sent a request and
when token 1 came. The receipt's parts sum to the router's own TTFT. What the client's clock has
more ("untold") is the kernel, both ends' libraries and the client itself. An empty call to the same
router (its models by gRPC, `/health` by HTTP) has all of that, too, and nothing else: the
difference to its round trip is at most 1 ms for half of the requests. Medians of all parts are
shown, in milliseconds.

Exit code 1: the parts of a receipt do not sum to its TTFT, or that difference is above 1 ms.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import msgspec

from baton.api.outputs import Receipt
from baton.api.sampling_params import SamplingParams
from baton.client.client import AsyncClient
from baton.deployment.local_deployment import LocalDeploymentConfig
from baton.text.tokenizer import Tokenizer
from benchmarks.runner.deployments import deployed
from benchmarks.runner.environment import DEMO_MODEL
from benchmarks.runner.run import Document, Run

MODEL_NAME = "measured"
NUM_REQUESTS, NUM_WARM = 40, 5  # of each API; fewer of long prompts
LEAST_REQUESTS = 12
PROMPT_TOKENS, OUTPUT_TOKENS = 128, 8
PAUSE_S = 0.02  # between requests: the one before has ended everywhere
MOST_UNTOLD_S = 0.001


@dataclass(frozen=True, slots=True)
class Measured:
    """One request: its TTFT in seconds by the client's clock, and the router's receipt.

    Attributes:
        empty_s: round trip of an empty call right after the request.
    """

    client_s: float
    receipt: Receipt
    empty_s: float

    @property
    def untold_s(self) -> float:
        """Seconds of the client's wait for token 1 that the receipt does not explain."""
        return self.client_s - self.receipt.ttft_s


class Prompts:
    """Texts of given lengths in tokens, no two with the same beginning."""

    def __init__(self, model: str) -> None:
        self._tokenizer = Tokenizer(Path(model))
        self._random = random.Random(1)

    def text(self, num_tokens: int) -> str:
        numbers = " ".join(str(self._random.randrange(10**6)) for _ in range(num_tokens))
        return self._tokenizer.decode(self._tokenizer.encode(numbers)[:num_tokens])


async def over_grpc(client: AsyncClient, prompt: str) -> Measured:
    params = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)
    sent_at, first_at, receipt = time.perf_counter(), 0.0, None
    async for delta in client.stream(prompt, params):
        first_at = first_at or time.perf_counter()
        receipt = delta.receipt
    assert receipt is not None
    empty_at = time.perf_counter()
    await client.models()
    return Measured(first_at - sent_at, receipt, time.perf_counter() - empty_at)


async def over_http(session: aiohttp.ClientSession, url: str, prompt: str) -> Measured:
    body = {
        "model": MODEL_NAME, "prompt": prompt, "max_tokens": OUTPUT_TOKENS, "temperature": 0,
        "ignore_eos": True, "stream": True, "include_receipt": True,
    }  # fmt: skip
    sent_at, first_at, receipt = time.perf_counter(), 0.0, None
    async with session.post(url, json=body) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            first_at = first_at or time.perf_counter()
            if found := json.loads(line[6:]).get("baton"):
                [receipt] = found["receipts"]
    empty_at = time.perf_counter()
    async with session.get(url.partition("/v1/")[0] + "/health") as response:
        await response.read()
    empty_s = time.perf_counter() - empty_at
    return Measured(first_at - sent_at, msgspec.convert(receipt, Receipt), empty_s)


async def measure(
    config: LocalDeploymentConfig, prompts: Prompts, num_tokens: int
) -> dict[str, list[Measured]]:
    """Return the requests by API; APIs take turns."""
    found: dict[str, list[Measured]] = {"grpc": [], "http": []}
    url = f"http://{config.http_listen}/v1/completions"
    async with AsyncClient(config.listen) as client, aiohttp.ClientSession() as session:
        for _ in range(NUM_WARM + max(NUM_REQUESTS * PROMPT_TOKENS // num_tokens, LEAST_REQUESTS)):
            found["grpc"].append(await over_grpc(client, prompts.text(num_tokens)))
            await asyncio.sleep(PAUSE_S)
            found["http"].append(await over_http(session, url, prompts.text(num_tokens)))
            await asyncio.sleep(PAUSE_S)
    return {api: measured[NUM_WARM:] for api, measured in found.items()}


def median_ms(seconds: Sequence[float]) -> float:
    return 1000 * statistics.median(seconds)


def rows_of(measured: Sequence[Measured]) -> dict[str, float]:
    """Return the milliseconds of a row of the table, by name."""
    receipts = [one.receipt for one in measured]
    untold = sorted(one.untold_s for one in measured)
    return {
        "client": median_ms([one.client_s for one in measured]),
        "receipt": median_ms([one.ttft_s for one in receipts]),
        "untold p50": median_ms(untold),
        "empty call": median_ms([one.empty_s for one in measured]),
        "untold p90": 1000 * untold[int(0.9 * len(untold))],
        **{
            name.removesuffix("_s"): median_ms([one.ttft_parts[name] for one in receipts])
            for name in receipts[0].ttft_parts
        },
        "handoff": median_ms([one.handoff_s or 0.0 for one in receipts]),
    }


def run(
    run: Run,
    model: str = str(DEMO_MODEL),
    threads: int = 1,
    prompt_tokens: Sequence[int] = (128, 1900),
    lend_cores: bool = False,
) -> Document:
    """Compare the clocks, over gRPC and over HTTP."""
    prompts, rows = Prompts(model), list[dict[str, object]]()
    with deployed(
        model,
        with_http=True,
        router_args=["--no-local-prefill", "--served-model-name", MODEL_NAME],
        node_args=["--num-threads", str(threads)],
        lend_cores=lend_cores,
    ) as deployment:
        for num_tokens in prompt_tokens:
            for api, measured in asyncio.run(
                measure(deployment.config, prompts, num_tokens)
            ).items():
                row = rows_of(measured)
                rows.append({"api": api, "prompt_tokens": num_tokens, **row})
                for one in (each.receipt for each in measured):
                    if abs(sum(one.ttft_parts.values()) - one.ttft_s) > 1e-6:
                        run.problems.append(f"{api}: parts do not sum: {one}")
                untold_ms = row["untold p50"] - row["empty call"]
                if untold_ms > 1000 * MOST_UNTOLD_S:
                    run.problems.append(f"{api}, {num_tokens} tokens: {untold_ms:.2f} ms untold")
    return {"most_untold_s": MOST_UNTOLD_S, "rows": rows}
