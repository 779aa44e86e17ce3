"""Serve LoRA adapters over HTTP, and time requests whose adapters have to be loaded first.

`measure_cold`: users decode with the base model without pause, while requests for adapters arrive.
The adapters are in memory in one phase, and only on disk in the next phase, so the phases differ
only in the loads of adapters.

`measure_routing`: 1,000 adapters are on disk; requests ask for 64 of them by Zipf's law, on two
prefill and two decode nodes with 16 slots each. The cost policy is compared with policies that
ignore adapters.

Refuses to know: how fast adapters are computed (engine_cpu/adapters.py measures this).
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import aiohttp

from baton.adapters.digest import shorten_digest
from baton.adapters.files import adapter_digest
from baton.api.outputs import Receipt
from baton.deployment.local_deployment import LocalDeployment
from benchmarks.runner.deployments import deployed
from benchmarks.runner.environment import DEMO_MODEL
from benchmarks.runner.random_adapters import random_matrices, save_adapter
from benchmarks.served.served_client import percentile
from loadtest.targets.openai_http import OpenAITarget

BASE = "base"
RANK = 16
# `measure_cold`: users of the base model with their requests, and requests for adapters.
NUM_USERS, BASE_PROMPT, BASE_OUTPUT = 4, 64, 96
COLD_PROMPT, COLD_OUTPUT = 256, 4
EVERY_S = 2.0
COLD_SLOTS, NUM_WARM = 8, 4
WARM, COLD = "warm", "cold"
# Routing.
NUM_ON_DISK, NUM_IN_USE, SLOTS = 1000, 64, 16
POLICIES = ("cost", "least_tokens", "round_robin")
ROUTED_PROMPT, ROUTED_OUTPUT, NUM_ASKING = 64, 8, 8
UNMEASURED = 0.25  # share of the requests that come first, fill the slots, and are not counted

_LOADED = re.compile(r"loaded adapter ([0-9a-f]+) in ([\d.e+-]+) s")
Numbers = dict[str, float]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Asked:
    """The outcome of one request; times are in seconds, on the clock `time.perf_counter`."""

    name: str
    sent_at: float
    times: tuple[float, ...]
    receipt: Receipt

    @property
    def ttft_s(self) -> float:
        """Return the seconds to the first token."""
        return self.times[0] - self.sent_at


@dataclass(slots=True)
class Phase:
    """The outcomes of one phase with requests for adapters.

    Attributes:
        gaps_s: seconds between two tokens of requests for the base model.
        asked: the outcomes of the requests for adapters.
    """

    gaps_s: list[float] = field(default_factory=list)
    asked: list[Asked] = field(default_factory=list)


class Site:
    """A deployment with adapters, and a client for it."""

    def __init__(self, deployment: LocalDeployment, session: aiohttp.ClientSession) -> None:
        self._deployment, self._session = deployment, session
        self._draw = random.Random(7)

    async def ask(self, name: str, prompt_tokens: int, output_tokens: int) -> Asked:
        """Stream one request with a new prompt; raises TargetError."""
        body = {
            "model": name, "stream": True, "temperature": 0, "ignore_eos": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "include_receipt": True,
        }  # fmt: skip
        url = f"http://{self._deployment.config.http_listen}/v1"
        target = OpenAITarget(self._session, url, body, "continuous-usage")
        prompt = self._draw.choices(range(3, 4000), k=prompt_tokens)
        times: list[float] = []
        receipt: Receipt | None = None
        sent_at = time.perf_counter()
        async for frame in target.stream(target.prepare(prompt, output_tokens)):
            if frame.num_tokens:
                times.append(time.perf_counter())
            receipt = frame.receipt or receipt
        assert receipt is not None, "a stream without a receipt"
        return Asked(name, sent_at, tuple(times), receipt)

    def loads_s(self, role: str) -> list[tuple[str, float]]:
        """Return all loads on nodes of a role: the adapter's short digest, and the seconds."""
        found: list[tuple[str, float]] = []
        for path in sorted(self._deployment.log_folder.glob(f"{role}[0-9].log")):
            matches = _LOADED.findall(path.read_text(errors="replace"))
            found += [(digest, float(seconds)) for digest, seconds in matches]
        return found


@contextmanager
def adapters_on_disk(shape: Mapping[str, Any], count: int) -> Iterator[Path]:
    """Write ``count`` adapters that differ in two values; yield the folder that holds them."""
    matrices = random_matrices(shape, RANK)
    first = next(iter(matrices.values()))
    with tempfile.TemporaryDirectory(prefix="baton-adapters-") as root:
        for number in range(count):
            first[0, 0], first[0, 1] = number % 64 / 64, number // 64 / 64
            save_adapter(Path(root) / str(number), matrices, RANK)
        yield Path(root)


def run_site(
    model: Path,
    root: Path,
    work: Callable[[Site], Coroutine[Any, Any, T]],
    *,
    slots: int,
    router_args: Sequence[str] = (),
    **options: Any,
) -> T:
    """Serve a model and all adapters of a folder; return the result of ``work``.

    Args:
        slots: number of adapters that fit in each node's memory.
        options: further fields of `LocalDeploymentConfig`.
    """
    names = sorted(path.name for path in root.iterdir())
    of_names = [word for name in names for word in ("--adapter", f"{name}={name}")]
    where = ("--adapter-root", str(root))

    async def run(deployment: LocalDeployment) -> T:
        headers = {"Content-Type": "application/json"}
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(connector=connector, headers=headers) as session:
            return await work(Site(deployment, session))

    with deployed(
        model,
        with_http=True,
        router_args=(
            *("--no-local-prefill", "--served-model-name", BASE),
            *(*where, *of_names, *router_args),
        ),
        # Nodes keep no weights of adapters that have left their slots, so each load reads files.
        node_args=(*where, "--max-adapters", str(slots), "--adapter-cache", "1"),
        **options,
    ) as deployment:
        return asyncio.run(run(deployment))


# ---------------------------------------------------------------- cold adapters


async def play_phase(site: Site, names: Sequence[str]) -> Phase:
    """Ask for one adapter after another, at even times, while users use the base model."""
    phase, is_over = Phase(), False
    began_at = ended_at = time.perf_counter()

    async def use() -> list[Asked]:
        done: list[Asked] = []
        while not is_over:
            done.append(await site.ask(BASE, BASE_PROMPT, BASE_OUTPUT))
        return done

    users = [asyncio.create_task(use()) for _ in range(NUM_USERS)]
    await asyncio.sleep(EVERY_S)
    began_at = time.perf_counter()
    asked = []
    for name in names:
        asked.append(asyncio.create_task(site.ask(name, COLD_PROMPT, COLD_OUTPUT)))
        await asyncio.sleep(EVERY_S)
    phase.asked = list(await asyncio.gather(*asked))
    ended_at, is_over = time.perf_counter(), True
    for done in await asyncio.gather(*users):
        for one in done:
            pairs = itertools.pairwise(one.times)
            phase.gaps_s += [b - a for a, b in pairs if began_at <= a and b <= ended_at]
    return phase


async def play_cold(site: Site, num_cold: int, rounds: int) -> dict[str, list[Phase]]:
    """Play phases with adapters in memory and phases with adapters only on disk, in turns."""
    found: dict[str, list[Phase]] = {WARM: [], COLD: []}
    numbers = itertools.count(NUM_WARM)
    for turn in range(rounds):
        for kind in (WARM, COLD) if turn % 2 == 0 else (COLD, WARM):
            names = [str(number % NUM_WARM) for number in range(num_cold)]
            if kind == COLD:
                names = [str(next(numbers)) for _ in range(num_cold)]
            for name in dict.fromkeys(names) if kind == WARM else ():
                await site.ask(name, COLD_PROMPT, COLD_OUTPUT)  # makes the nodes load the adapter
            found[kind].append(await play_phase(site, names))
    return found


def summarize_cold(
    found: Mapping[str, Sequence[Phase]], loads_s: Mapping[str, Mapping[str, float]]
) -> Numbers:
    """Return the figures of all phases; times are in milliseconds.

    Args:
        loads_s: seconds of each load, by role and adapter. Token 1 waits only for the load on the
            prefill node.
    """
    gaps = {kind: [gap for one in phases for gap in one.gaps_s] for kind, phases in found.items()}
    asked = {
        kind: [one for phase in phases for one in phase.asked] for kind, phases in found.items()
    }
    over_parts, over_overlapped = [], []
    for one in asked[COLD]:
        prefill = one.receipt.prefill
        assert prefill is not None
        load_s = loads_s["p"][one.name]
        over_parts.append(one.ttft_s / max(load_s, prefill.queue_s + prefill.prefill_s))
        queue_s = max(prefill.queue_s - load_s, 0.0)  # TTFT without the time of the load
        over_overlapped.append(one.ttft_s / max(load_s, queue_s + prefill.prefill_s))
    numbers: Numbers = {"num_loads": len(asked[COLD])}
    for kind in (WARM, COLD):
        ttfts = [one.ttft_s for one in asked[kind]]
        numbers[f"{kind}_ttft_p50_ms"] = 1e3 * percentile(ttfts, 0.5)
        numbers[f"{kind}_ttft_p90_ms"] = 1e3 * percentile(ttfts, 0.9)
        second = [b - a for a, b in (one.times[:2] for one in asked[kind])]
        numbers[f"{kind}_second_token_p50_ms"] = 1e3 * statistics.median(second)
        numbers[f"{kind}_itl_p50_ms"] = 1e3 * percentile(gaps[kind], 0.5)
        numbers[f"{kind}_itl_p99_ms"] = 1e3 * percentile(gaps[kind], 0.99)
        numbers[f"{kind}_itl_longest_ms"] = 1e3 * max(gaps[kind])
        numbers[f"{kind}_num_gaps"] = len(gaps[kind])
    numbers["itl_p99_ratio"] = numbers["cold_itl_p99_ms"] / numbers["warm_itl_p99_ms"]
    prefills = [one.receipt.prefill for one in asked[COLD] if one.receipt.prefill]
    for role, name in (("p", "load"), ("d", "decode_load")):
        loads = [loads_s[role][one.name] for one in asked[COLD]]
        numbers[f"{name}_p50_ms"] = 1e3 * statistics.median(loads)
    numbers["queue_p50_ms"] = 1e3 * statistics.median(one.queue_s for one in prefills)
    numbers["prefill_p50_ms"] = 1e3 * statistics.median(one.prefill_s for one in prefills)
    for name, ratios in (("of_parts", over_parts), ("of_longer_part", over_overlapped)):
        numbers[f"ttft_{name}_p50"] = percentile(ratios, 0.5)
        numbers[f"ttft_{name}_p90"] = percentile(ratios, 0.9)
    return {name: round(value, 3) for name, value in numbers.items()}


def measure_cold(model: Path, shape: Mapping[str, Any], num_cold: int, rounds: int) -> Numbers:
    """Measure requests for cold adapters, and the base model's requests meanwhile.

    Args:
        num_cold: number of adapters per phase.
        rounds: number of pairs of phases.
    """

    async def work(site: Site) -> Numbers:
        await site.ask(BASE, BASE_PROMPT, BASE_OUTPUT)
        found = await play_cold(site, num_cold, rounds)
        return summarize_cold(found, loads_of_names(site, root))

    with adapters_on_disk(shape, NUM_WARM + num_cold * rounds) as root:
        return run_site(model, root, work, slots=COLD_SLOTS, lend_cores=True)


def loads_of_names(site: Site, root: Path) -> dict[str, dict[str, float]]:
    """Return the seconds of each adapter's last load, by role and by name of the adapter."""
    names = {shorten_digest(adapter_digest(path)): path.name for path in root.iterdir()}
    return {
        role: {names[digest]: seconds for digest, seconds in site.loads_s(role)} for role in "pd"
    }


# ---------------------------------------------------------------- routing


def draw_names(num_requests: int, seed: int) -> list[str]:
    """Draw adapters by Zipf's law: the n-th of 64 is drawn 1 / n times as often as the first."""
    draw = random.Random(seed)
    in_use = [str(number) for number in draw.sample(range(NUM_ON_DISK), NUM_IN_USE)]
    weights = [1 / place for place in range(1, NUM_IN_USE + 1)]
    return draw.choices(in_use, weights, k=num_requests)


async def play_routed(site: Site, names: Sequence[str]) -> Numbers:
    """Send requests, several at a time; count those whose adapter was in memory."""
    left = iter(enumerate(names))
    num_unmeasured = round(UNMEASURED * len(names))
    asked: list[tuple[int, Asked]] = []
    num_before: dict[str, int] = {}

    async def use() -> None:
        for place, name in left:
            if place == num_unmeasured:
                num_before.update({role: len(site.loads_s(role)) for role in "pd"})
            asked.append((place, await site.ask(name, ROUTED_PROMPT, ROUTED_OUTPUT)))

    await asyncio.gather(*(use() for _ in range(NUM_ASKING)))
    ttfts_ms = [1e3 * one.ttft_s for place, one in asked if place >= num_unmeasured]
    num_loads = {role: len(site.loads_s(role)) - num_before[role] for role in "pd"}
    hits = {role: 1 - count / len(ttfts_ms) for role, count in num_loads.items()}
    return {
        "num_requests": len(ttfts_ms),
        "prefill_hit_rate": round(hits["p"], 3),
        "decode_hit_rate": round(hits["d"], 3),
        "hit_rate": round((hits["p"] + hits["d"]) / 2, 3),
        "ttft_p50_ms": round(percentile(ttfts_ms, 0.5), 2),
        "ttft_p99_ms": round(percentile(ttfts_ms, 0.99), 2),
        "ttft_mean_ms": round(statistics.fmean(ttfts_ms), 2),
    }


def measure_routing(num_requests: int, seed: int = 1) -> dict[str, Numbers]:
    """Measure the hit rate and the TTFT with each policy, for the same requests."""
    shape: dict[str, Any] = json.loads((DEMO_MODEL / "config.json").read_text(encoding="utf-8"))
    names = draw_names(num_requests, seed)
    found: dict[str, Numbers] = {}
    with adapters_on_disk(shape, NUM_ON_DISK) as root:
        for policy in POLICIES:
            found[policy] = run_site(
                *(DEMO_MODEL, root, lambda site: play_routed(site, names)),
                slots=SLOTS,
                num_prefill=2,
                num_decode=2,
                router_args=("--policy", policy),
            )
    return found
