"""Switch names, unload adapters and kill nodes under load, with two base models.

A router, and a prefill and two decode nodes for each of two base models, run on this machine, with
two slots for three adapters. Each answer is compared, token by token, with the answer of one
process, and its receipt must contain the adapter's digest. Drills:

    switches   a name is switched at random among eight versions while clients ask it
    unloads    an adapter is unloaded while clients ask its name
    kills      requests under random names while a node of each base model is killed twice
    refusals   a name that nobody knows, and names whose nodes are gone

Exit 1 if a token comes from another version, a request fails or does not end, a version reuses KV
of another version, or the base model answers for an adapter.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from baton import AsyncClient
from baton.api.errors import BatonError, NodeUnavailableError, NotFoundError
from benchmarks.faults.many_names_site import (
    NAMES,
    VERSIONS,
    Question,
    Reply,
    Site,
    Tally,
    Version,
    ask,
    make_folders,
    make_questions,
    running_site,
)
from benchmarks.runner.run import Document, Run

LIVE, GONE = "live", "gone"  # names that are switched and unloaded
# Number of questions that the load repeats; each other question belongs to one switch
NUM_LOAD = 24
# Draw more questions by this factor, because two versions may answer some of them equally.
SPARE = 1.25
# Nodes to kill, two of each base model: demo has p0, d0 and d1; tuned has p1, d2 and d3.
VICTIMS = ("d0", "p1", "d2", "p0")
NODES_OF_TUNED = ("p1", "d2", "d3")
SETTLE_S = 0.4  # seconds between the beginning of a load and an unload
QUIET_S = 5.0  # seconds in which restarted nodes measure their steps
NUM_REFUSALS = 40
REFUSAL_LIMIT_MS = 50.0  # limit for 19 of 20 refusals; all programs share two cores

Row = dict[str, Any]


@dataclass(slots=True)
class Alias:
    """The history of the name `LIVE`.

    Attributes:
        history: the versions that the name has stood for, in order; the last switch may not be in
            effect yet.
        num_settled: number of entries whose switch is over.
    """

    history: list[Version]
    num_settled: int = 1

    @property
    def current(self) -> Version:
        return self.history[-1]

    def since(self, mark: int) -> set[Version]:
        """Return the versions that may answer a request that was sent after ``mark`` switches."""
        return set(self.history[mark - 1 :])


class Drills:
    """Play the drills on one site, one after another.

    Args:
        questions: the questions; the load repeats the first of them, and the others are asked
            around a switch.
        lanes: number of requests that are open at a time.
    """

    def __init__(
        self, site: Site, questions: Sequence[Question], lanes: int, draw: random.Random
    ) -> None:
        self._site, self._draw, self._lanes = site, draw, lanes
        self._load, self._probes = questions[:NUM_LOAD], questions[NUM_LOAD:]

    # ------------------------------------------------------------------ switches

    async def switches(self, number: int) -> Row:
        """Switch a name under load; ask a new question before and after each switch."""
        await self._call("SetName", name=LIVE, target="a")
        alias, tally, is_over = Alias([NAMES["a"]]), Tally(), asyncio.Event()
        durations: list[float] = []
        hits = {"hits_across_versions": 0, "hits_of_own_version": 0}

        async def lane(client: AsyncClient) -> None:
            while not is_over.is_set():
                name = LIVE if self._draw.random() < 0.75 else self._any_name()
                mark = alias.num_settled
                reply = await self._ask(client, name)
                allowed = alias.since(mark) if name == LIVE else {NAMES[name]}
                self._site.judge(reply, allowed, tally)

        async def finds(client: AsyncClient, question: Question) -> bool:
            reply = await ask(client, LIVE, question)
            self._site.judge(reply, {alias.current}, tally)
            return reply.num_cached_tokens > 0

        async def play(client: AsyncClient) -> None:
            for question in self._probes[:number]:
                # From now on, KV of the old version is in the prefix caches
                await finds(client, question)
                before, after = alias.current, self._next_version(alias.current)
                alias.history.append(after)
                durations.append(await self._switch(before, after))
                alias.num_settled = len(alias.history)
                hits["hits_across_versions"] += await finds(client, question)
                hits["hits_of_own_version"] += await finds(client, question)

        await self._beside(play, lane, is_over)
        # Otherwise the name's adapter could not be unloaded
        await self._call("RemoveName", name=LIVE)
        return {
            "switches": len(durations),
            **tally.as_row(),
            **hits,
            "switch_s_median": round(statistics.median(durations), 3),
            "switch_s_max": round(max(durations), 3),
        }

    def _next_version(self, current: Version) -> Version:
        """Draw another version: a version with a name of its own, or one that `LIVE` can load."""
        named = NAMES.values()
        return self._draw.choice(
            [one for one in VERSIONS if one != current and (one in named or current.adapter)]
        )

    async def _switch(self, before: Version, after: Version) -> float:
        """Switch `LIVE` to a version, by loading the version or by an alias; return the seconds."""
        names = [name for name, one in NAMES.items() if one == after]
        may_load = bool(before.adapter and after.adapter)
        began_at = time.monotonic()
        if not names or (may_load and self._draw.random() < 0.5):
            await asyncio.to_thread(self._site.load, LIVE, after)
        else:
            await self._call("SetName", name=LIVE, target=names[0])
        return time.monotonic() - began_at

    # ------------------------------------------------------------------ unloads

    async def unloads(self, number: int) -> Row:
        """Unload an adapter under load, again and again; the base models take turns."""
        tally = Tally()
        counts = {"of_base": 0, "after_unload": 0, "still_loaded": 0}
        # Otherwise the adapter would stay in the nodes' memory
        await self._call("RemoveName", name="c")
        for turn in range(number):
            version = Version(("demo", "tuned")[turn % 2], "c")
            await self._unload_once(version, tally, counts)
        await asyncio.to_thread(self._site.load, "c", NAMES["c"])
        return {"unloads": number, **tally.as_row(), **counts}

    async def _unload_once(self, version: Version, tally: Tally, counts: dict[str, int]) -> None:
        await asyncio.to_thread(self._site.load, GONE, version)
        is_over = asyncio.Event()

        async def lane(client: AsyncClient) -> None:
            outcome = ""
            while outcome != "unknown":
                was_gone = is_over.is_set()
                reply = await self._ask(client, GONE)
                outcome = reply.outcome
                self._site.judge(reply, {version}, tally)
                counts["after_unload"] += was_gone and outcome != "unknown"
                base = reply.question.expected[Version(version.model)]
                counts["of_base"] += reply.tokens == base

        async def play(client: AsyncClient) -> None:
            await asyncio.sleep(SETTLE_S)
            await self._call("UnloadAdapter", name=GONE)

        await self._beside(play, lane, is_over)
        holders = await asyncio.to_thread(self._site.holders, version)
        counts["still_loaded"] += len(holders)

    # ------------------------------------------------------------------ kills

    async def kills(self, number: int) -> Row:
        """Kill and restart nodes while requests under random names arrive."""
        tally, is_over = Tally(), asyncio.Event()
        begun_at: list[int] = []

        async def lane(client: AsyncClient) -> None:
            while tally.outcomes.total() < number or not is_over.is_set():
                name = self._any_name()
                self._site.judge(await self._ask(client, name), {NAMES[name]}, tally)

        async def play(client: AsyncClient) -> None:
            for turn, victim in enumerate(VICTIMS):
                due = number * (1 + 2 * turn) // (2 * len(VICTIMS) + 1)
                while tally.outcomes.total() < due:  # noqa: ASYNC110 - counts set no event
                    await asyncio.sleep(0.02)
                begun_at.append(tally.outcomes.total())
                await self._site.kill_and_restart(victim)

        await self._beside(play, lane, is_over)
        return {**tally.as_row(), "kills": dict(zip(VICTIMS, begun_at, strict=True))}

    # ------------------------------------------------------------------ refusals

    async def refusals(self) -> Row:
        """Measure how soon an unknown name and names without nodes are refused."""
        await asyncio.sleep(QUIET_S)
        row = await self._refused("nobody", NotFoundError, 404)
        for node in NODES_OF_TUNED:
            await self._call("Remove", node=node, force=True)
        for name in ("tuned", "tuned-a"):
            row |= await self._refused(name, NodeUnavailableError, 503)
        return row

    async def _refused(self, name: str, error: type[BatonError], status: int) -> Row:
        samples: dict[str, list[float]] = {"grpc": [], "http": []}
        async with AsyncClient(self._site.address) as client:
            await client.models()  # connects
            for _ in range(NUM_REFUSALS):
                began_at, found = time.monotonic(), ""
                try:
                    await client.generate([1, 2, 3], model=name)
                except BatonError as refusal:
                    found = type(refusal).__name__
                samples["grpc"].append(time.monotonic() - began_at)
                if found != error.__name__:
                    raise BatonError(f"{name}: must be {error.__name__}, got {found!r}")
                samples["http"].append(
                    await asyncio.to_thread(_refused_over_http, self._site, name, status)
                )
        return {
            f"{name}, {status} over {api}": {
                "median_ms": round(1e3 * statistics.median(seconds), 2),
                "p95_ms": round(1e3 * statistics.quantiles(seconds, n=20)[-1], 2),
                "max_ms": round(1e3 * max(seconds), 2),
            }
            for api, seconds in samples.items()
        }

    # ------------------------------------------------------------------ inside

    def _any_name(self) -> str:
        return self._draw.choice(list(NAMES))

    async def _ask(self, client: AsyncClient, name: str) -> Reply:
        return await ask(client, name, self._draw.choice(self._load))

    async def _call(self, method: str, **fields: Any) -> None:
        await asyncio.to_thread(self._site.call, method, **fields)

    async def _beside(
        self,
        play: Callable[[AsyncClient], Awaitable[None]],
        lane: Callable[[AsyncClient], Awaitable[None]],
        is_over: asyncio.Event,
    ) -> None:
        """Run ``play`` while the load's lanes run, and end the lanes; raise the errors of both."""

        async def to_the_end() -> None:
            try:
                await play(client)
            finally:
                is_over.set()

        async with AsyncClient(self._site.address) as client:
            await asyncio.gather(to_the_end(), *(lane(client) for _ in range(self._lanes)))


def _refused_over_http(site: Site, name: str, status: int) -> float:
    """Return the seconds after which a completion under this name is refused with ``status``."""
    body = json.dumps({"model": name, "prompt": "x", "max_tokens": 1}).encode()
    request = urllib.request.Request(
        f"http://{site.deployment.config.http_listen}/v1/completions",
        body,
        {"Content-Type": "application/json"},
    )
    began_at = time.monotonic()
    found = 200
    try:
        with urllib.request.urlopen(request, timeout=30):
            pass
    except urllib.error.HTTPError as error:
        found = error.code
    if found != status:
        raise BatonError(f"{name}: must be {status}, got {found}")
    return time.monotonic() - began_at


# ---------------------------------------------------------------------- the whole run


def run(
    run: Run,
    switches: int = 100,
    unloads: int = 10,
    requests: int = 2000,
    lanes: int = 6,
    seed: int = 1,
) -> Document:
    """Play all drills; every broken promise is a problem.

    Args:
        switches: how often a name is switched.
        unloads: how often an adapter is unloaded.
        requests: minimum number of requests while nodes are killed.
        lanes: number of requests that are open at a time.
        seed: seed of the random names, questions and versions.
    """
    with tempfile.TemporaryDirectory(prefix="baton-") as folder:
        folders = make_folders(Path(folder))
        wanted = NUM_LOAD + switches
        questions = make_questions(folders, int(SPARE * wanted), seed)
        run.console.print(f"{len(questions)} questions on which all versions differ")
        if len(questions) < wanted:
            raise BatonError(f"{len(questions)} questions are too few, {wanted} are needed")

        async def play(site: Site) -> Document:
            drills = Drills(site, questions, lanes, random.Random(seed))
            document: Document = {"seed": seed, "lanes": lanes}
            plays: Mapping[str, Callable[[], Awaitable[Row]]] = {
                "switches": partial(drills.switches, switches),
                "unloads": partial(drills.unloads, unloads),
                "kills": partial(drills.kills, requests),
                "refusals": drills.refusals,
            }
            for name, drill in plays.items():
                row = await drill()
                run.show(name, {name: row} if name != "refusals" else row)
                document = {**document, name: row}
            return document

        with running_site(folders) as site:
            document = asyncio.run(play(site))
    run.problems += _problems(document)
    return document


def _problems(document: Document) -> list[str]:
    """Return a line for each broken promise."""
    common = ("wrong", "failed", "lost")
    none_of = {
        "switches": (*common, "refused", "hits_across_versions"),
        "unloads": (*common, "of_base", "after_unload", "still_loaded"),
        "kills": (*common, "refused"),
    }
    found = [
        f"{name}: {what} {document[name][what]}: {'; '.join(document[name]['problems'])}"
        for name, counts in none_of.items()
        for what in counts
        if document[name][what]
    ]
    if not document["switches"]["hits_of_own_version"]:
        found.append("switches: no version found its own KV, so no hit could have shown")
    return found + [
        f"refusals: {name}, 95th percentile {row['p95_ms']} ms"
        for name, row in document["refusals"].items()
        if row["p95_ms"] > REFUSAL_LIMIT_MS
    ]
