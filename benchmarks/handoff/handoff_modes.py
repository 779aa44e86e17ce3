"""Compare how well push modes hide the hand-off behind the prefill, with equal requests.

It also measures how soon after the commit, and at what cost, a decode node continues a request.

The checkpoint is random, because only prompt lengths and bytes of KV per token matter. Each mode
has its own router, prefill node and decode node; all modes run at once and get requests in turns.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import numpy as np
import psutil
import tokenizers
import torch
import transformers

from baton import AsyncClient, Client, Receipt, SamplingParams
from baton.deployment.local_deployment import LocalDeployment
from baton.kv.block_key import BlockKey
from benchmarks.runner.checkpoints import random_checkpoint
from benchmarks.runner.deployments import deployed, receipt_of
from benchmarks.runner.environment import summary
from kvconnector.block_digests import BlockDigests
from kvconnector.protocol.digests import Written
from tests.fakes.handoff.kv_memories import memory_of

LENGTHS = (256, 1024, 4096, 16384)  # tokens


@dataclass(frozen=True, slots=True)
class Way:
    """A way to send KV: the push mode, further options of nodes, and UCX's transport."""

    push: str
    node_args: tuple[str, ...] = ()
    ucx_tls: str = ""


TLS = ("--kv-connector", "tls")
MODES = {
    "after-prefill": Way("after-prefill"),
    "chunks": Way("chunks"),
    "layers": Way("layers"),
    "layers, digests": Way("layers", ("--kv-digests",)),
}
MAC_MODES = {name: MODES[name] for name in ("layers", "layers, digests")}
# NIXL with the transport that it chooses on one host (a copy by the kernel), and with TCP, which it
# would choose between hosts without RDMA.
TRANSPORTS = {"nixl": ((), ""), "nixl, tcp": ((), "tcp"), "tls": (TLS, "")} | {
    "tls, digests": ((*TLS, "--kv-digests"), "")
}
IDLE_S = 10.0
NUM_DECODING = 32
PARAMS = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)


def make_checkpoint(folder: Path) -> Path:
    """Write the checkpoint of a fast model with eight layers and 8 KiB of KV per token."""
    shape = {
        "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 8,
        "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32,
        "max_position_embeddings": 17000, "eos_token_id": 1,
    }  # fmt: skip
    random_checkpoint(folder, "Qwen3ForCausalLM", shape)
    vocabulary = {f"<{index}>": index for index in range(512)}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<0>"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words)
    tokenizer.save_pretrained(folder)
    return folder


@contextlib.contextmanager
def running(ways: Mapping[str, Way]) -> Iterator[dict[str, LocalDeployment]]:
    """Run a router, a prefill and a decode node for each way; yield once all are ready."""
    with contextlib.ExitStack() as stack, tempfile.TemporaryDirectory() as path:
        folder = make_checkpoint(Path(path))
        deployments = {}
        for name, way in ways.items():
            node_args = ["--kv-cache-memory", "256M", "--no-prefix-cache", *way.node_args]
            given = {"UCX_TLS": way.ucx_tls} if way.ucx_tls else {}
            with mock.patch.dict(os.environ, given):  # nodes read these variables at their start
                deployments[name] = stack.enter_context(
                    deployed(folder, node_args=node_args, prefill_args=["--push", way.push])
                )
        yield deployments


def measure_modes(num_requests: int) -> dict[str, object]:
    """Measure each mode's hand-off: by prompt length, beside other requests, and at rest."""
    with running(MODES) as deployments:
        receipts = collect_receipts(deployments, num_requests)
        results: dict[str, object] = {"modes": _modes_table(receipts)}
        results["bandwidth"] = _bandwidth(receipts)
        address = deployments["layers"].config.listen
        results["among_32_decoding"] = asyncio.run(_join_a_batch(address))
        time.sleep(3.0)  # waits until earlier work has ended
        results["idle_cpu_percent_of_a_core"] = idle_cpu(deployments["layers"])
    return results


def measure_macs(num_requests: int) -> dict[str, object]:
    """Compare hand-offs with plain and keyed digests: ms from the first step to the commit."""
    with running(MAC_MODES) as deployments:
        receipts = collect_receipts(deployments, num_requests, LENGTHS[:3])
    table: dict[str, object] = {}
    for length in LENGTHS[:3]:
        plain, keyed = (
            [
                (r.decode.parked_s - r.prefill.queue_s) * 1e3
                for r in receipts[mode, length]
                if r.decode and r.prefill
            ]
            for mode in MAC_MODES
        )
        ratios = [after / before for before, after in zip(plain, keyed, strict=True)]
        table[f"{length} tokens"] = {
            "num_requests": len(ratios),
            "handoff_ms": summary(plain),
            "handoff_with_macs_ms": summary(keyed),
            "ratio": summary(ratios, 4),
        }
    return table


def measure_transports(num_requests: int) -> dict[str, object]:
    """Compare NIXL with TLS sockets for each push mode; both get the same requests in turns."""
    results: dict[str, object] = {}
    for push in ("layers", "after-prefill"):
        ways = {name: Way(push, *rest) for name, rest in TRANSPORTS.items()}
        with running(ways) as deployments:
            receipts = collect_receipts(deployments, num_requests, LENGTHS[:3])
            rows = {
                f"{length} tokens": {name: push_figures(receipts[name, length]) for name in ways}
                for length in LENGTHS[:3]
            }
            results[push] = rows
            if push == "layers":
                time.sleep(3.0)  # waits until earlier work has ended
                results["idle_cpu_percent_of_a_core"] = {
                    name: idle_cpu(deployment) for name, deployment in deployments.items()
                }
    results["gb_per_s_after_prefill"] = {
        name: round(row["num_bytes"] / row["exposed_transfer_ms"] / 1e6, 2)
        for name, row in rows[f"{LENGTHS[2]} tokens"].items()
    }
    return results


def collect_receipts(
    deployments: dict[str, LocalDeployment], num_requests: int, lengths: Sequence[int] = LENGTHS
) -> dict[tuple[str, int], list[Receipt]]:
    """Send the same requests to each mode; return the receipts by mode and prompt length."""
    receipts: dict[tuple[str, int], list[Receipt]] = {}
    draw = random.Random(0)
    for length in lengths:
        fewer = 1.0 if length <= 1024 else 0.4 if length <= 4096 else 0.2
        rounds = max(1, round(fewer * num_requests))
        for index in range(rounds + (length <= 1024)):  # the first round warms up
            prompt = draw.choices(range(2, 500), k=length)
            for mode, deployment in deployments.items():
                with Client(deployment.config.listen) as client:
                    receipt, decode = receipt_of(client, prompt, PARAMS)
                assert decode.num_forwards == PARAMS.max_tokens - 1
                if index or length > 1024:
                    receipts.setdefault((mode, length), []).append(receipt)
    return receipts


def push_figures(receipts: list[Receipt]) -> dict[str, float]:
    """Return the medians of the figures about the push."""
    decodes = [receipt.decode for receipt in receipts if receipt.decode is not None]
    median = statistics.median
    # Both nodes' parts of a request begin at about the same time, so the difference is the time
    # after the prefill.
    parked = [
        r.decode.parked_s - r.prefill.queue_s - r.prefill.prefill_s
        for r in receipts
        if r.decode and r.prefill
    ]
    return {
        "exposed_transfer_ms": round(median(d.push.exposed_transfer_s for d in decodes) * 1e3, 3),
        "posting_ms": round(median(d.push.posting_s for d in decodes) * 1e3, 3),
        "prefill_ms": round(median(r.prefill.prefill_s for r in receipts if r.prefill) * 1e3, 1),
        "token_1_to_commit_taken_ms": round(median(parked) * 1e3, 3),
        "num_bytes": decodes[0].push.num_bytes,
        "num_descriptors": median(d.push.num_descriptors for d in decodes),
        "num_requests": len(receipts),
    }


def _modes_table(receipts: dict[tuple[str, int], list[Receipt]]) -> dict[str, object]:
    table: dict[str, object] = {}
    for length in LENGTHS:
        rows = {mode: push_figures(receipts[mode, length]) for mode in MODES}
        latest = rows["after-prefill"]["exposed_transfer_ms"]
        for row in rows.values():
            row["exposed_ratio_to_after_prefill"] = round(row["exposed_transfer_ms"] / latest, 3)
        table[f"{length} tokens"] = rows
    return table


def _bandwidth(receipts: dict[tuple[str, int], list[Receipt]]) -> dict[str, float]:
    """Compare the speed of a push within one host with the speed of a copy in one process.

    The fastest push and the fastest copy count, because they run at different moments on a shared
    machine.
    """
    pushes = [r.decode.push for r in receipts["after-prefill", LENGTHS[-1]] if r.decode]
    num_bytes = pushes[0].num_bytes
    push_gb = max(push.num_bytes / push.posting_s for push in pushes) / 1e9
    return {"num_bytes": num_bytes, "push_gb_per_s": round(push_gb, 2)} | copy_and_digest(num_bytes)


def copy_and_digest(num_bytes: int) -> dict[str, float]:
    """Return the GB/s of a plain copy, and of digests of blocks of 128 KiB."""
    source = torch.ones(num_bytes // 2**17, 8, 2**14, dtype=torch.uint8)
    # zeros, so that the target's pages exist before the copy
    target = torch.zeros_like(source)
    digests, key = BlockDigests(memory_of(source)), BlockKey(bytes(32))
    written = Written("r", 1, range(len(source)), (0, 8), 0, range(len(source)))
    copy_s, digest_s = [], []
    for _ in range(7):
        started = time.perf_counter()
        np.copyto(target.numpy(), source.numpy())
        copied = time.perf_counter()
        digests.of(range(len(source)), written, key)
        copy_s.append(copied - started)
        digest_s.append(time.perf_counter() - copied)
    return {
        "memory_copy_gb_per_s": round(num_bytes / min(copy_s) / 1e9, 2),
        "digests_gb_per_s": round(num_bytes / min(digest_s) / 1e9, 2),
    }


async def _join_a_batch(address: str) -> dict[str, object]:
    """Fill a batch; count the decode steps from a further request's commit to its first step."""
    draw = random.Random(1)
    long = SamplingParams(max_tokens=1500, temperature=0.0, ignore_eos=True)
    async with AsyncClient(address) as client:

        async def run(params: SamplingParams) -> Receipt:
            receipt = (await client.generate(draw.choices(range(2, 500), k=100), params)).receipt
            assert receipt is not None
            return receipt

        decoding = [asyncio.create_task(run(long)) for _ in range(NUM_DECODING)]
        await asyncio.sleep(5.0)  # waits until all requests have started
        joined = [await run(PARAMS) for _ in range(60)]
        still = sum(not task.done() for task in decoding)
        for task in decoding:
            task.cancel()
        await asyncio.gather(*decoding, return_exceptions=True)
    decodes = [receipt.decode for receipt in joined if receipt.decode is not None]
    # The receipt's count includes the request's first step, so 1 means no wait.
    steps = sorted(decode.steps_until_first - 1 for decode in decodes)
    return {
        "num_still_decoding_at_the_end": still,
        "whole_steps_between_commit_and_first_step": {
            "p50": steps[len(steps) // 2],
            "p99": steps[int(len(steps) * 0.99)],
        },
        "commit_to_token_2_ms": summary([decode.first_step_s * 1e3 for decode in decodes]),
        "time_per_token_ms": summary([r.time_per_token_s * 1e3 for r in joined]),
        "forwards_less_generated": sorted({d.num_forwards - PARAMS.max_tokens for d in decodes}),
    }


def idle_cpu(deployment: LocalDeployment) -> dict[str, float]:
    """Return how much of a core each process uses without requests, in percent."""

    def seconds() -> dict[str, float]:
        return {
            child.name: sum(psutil.Process(child.process.pid).cpu_times()[:2])
            for child in deployment.children
        }

    before = seconds()
    time.sleep(IDLE_S)
    return {
        name: round((after - before[name]) / IDLE_S * 100, 2) for name, after in seconds().items()
    }
