"""Kill, stop and restart real processes under load; exit 1 if the hand-off breaks a promise.

A router, two prefill and two decode nodes with NIXL run on this machine. The nodes serve the demo
model to a continuous load with known answers. Half of the requests ask for one of two LoRA
adapters. An operator also loads a third adapter, which needs the slot of one of them. After each
drill, every request must have ended, no token may be wrong, every block of every node must be free,
and only killed processes may have ended. Drills kill processes at arrows of the diagram in
docs/protocol/README.md, which numbers the arrows.
Drills of encode nodes have a model and a load with images (`chaos_images.py`), and drills of
fetched prefixes have a load of conversations (`chaos_fetches.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

from rich.console import Console

from baton import AsyncClient
from baton.api.errors import BatonError
from baton.deployment.local_deployment import LocalDeployment, LocalDeploymentConfig
from baton.processes.free_address import free_address
from benchmarks.faults.chaos_fetches import (
    DECODE_FETCH_ARROWS,
    FETCH_ARROWS,
    count_fetches,
    fetch_config,
    make_conversations,
)
from benchmarks.faults.chaos_images import (
    ENCODING_ARROWS,
    count_encodings,
    image_config,
    make_image_cases,
    vision_checkpoint,
)
from benchmarks.faults.chaos_load import (
    BROKEN,
    CHUNK_TOKENS,
    NO_ADAPTERS,
    Load,
    ask,
    make_cases,
    under_load,
)
from benchmarks.faults.chaos_site import (
    DETECTION_TIMEOUT_S,
    READY_TIMEOUT_S,
    STOP_S,
    Site,
    change_adapters,
    flush_caches,
    left_behind,
    list_nodes,
    wait_until_free,
)
from benchmarks.faults.chaos_witness import Witness
from benchmarks.runner.answers import Case
from benchmarks.runner.demo_adapters import write_adapters
from benchmarks.runner.environment import DEMO_MODEL
from benchmarks.runner.run import Run

DRAFTERS = ("eagle", "medusa", "mtp")  # trained for the demo model
STORM_REQUESTS = 1000
NODE_ARGS = [
    *("--dtype", "float32", "--num-blocks", "400", "--max-num-requests", "16"),
    *("--long-prefill-token-threshold", str(CHUNK_TOKENS)),
]
ADAPTER_ARGS = ["--max-adapters", "2"]
SPARE = "c"  # the adapter that no request asks for
FILES_BACK_S = 15.0  # longer than the 5 s for which the router avoids a node after an error
RANK_ARGS = ["--tensor-parallel-size", "2"]
# Arrow of the diagram -> process to kill, and when (as in the option --inject-faults kill=).
ARROWS = {
    4: [("p0", "Start:send"), ("d0", "Start:recv")],
    5: [("d0", "Grant:send"), ("p0", "Grant:recv")],
    6: [("p0", "Write:send")],
    7: [("p0", "Watermark:send"), ("d0", "Watermark:recv")],
    8: [("p0", "Commit:send"), ("d0", "Commit:recv")],
    9: [("d0", "Cancel:send"), ("p0", "Cancel:recv")],
    10: [("p0", "Quiet:send"), ("d0", "Quiet:recv")],
}
KILL_AT_COUNT = 5
FETCH_KILL_AT_COUNT = 2  # messages of fetches are rare on a busy machine
DEATH_S = 20.0  # limit until a process reaches the point at which it dies
# After a lost encoding or prefix, the router does not use its sender for 5 s.
SUPPLY_DEATH_S = 60.0
RANK_DETECTION_S = 1.0  # limit of the seconds from the signal until the router notices
# If the drill itself did not run for this many seconds, its clients' waits say nothing.
STOPPED_S = 5.0
# Seconds between flushes of the prefix caches: drills need hand-offs of whole prompts
FLUSH_INTERVAL_S = 1.0
# Drills of fetches need cached prefixes: on a busy machine, a turn may take several seconds.
FETCH_FLUSH_INTERVAL_S = 5.0


@dataclass(slots=True)
class Result:
    """The result of a drill.

    Attributes:
        broken: the promises that were broken.
        told: lines of the witness, if a promise was broken or a client waited long.
    """

    name: str
    counts: dict[str, int] = field(default_factory=dict)
    retried: int = 0
    supplies: dict[str, int] = field(default_factory=dict)
    drafts: int = 0
    accepted_drafts: int = 0
    detection_s: float | None = None
    recovery_s: float = 0.0
    free_after_s: float | None = None
    longest_wait_s: float = 0.0
    broken: list[str] = field(default_factory=list)
    told: list[str] = field(default_factory=list)


Action = Callable[[Site], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Drill:
    """The faults of one drill under load; the drill calls ``prepare`` before the load starts.

    Attributes:
        num_leavers: number of lanes whose clients all leave early (`Load`).
        of_ranks: whether each node has two ranks.
        with_images: whether there is an encode node, and requests have images.
        with_fetches: whether nodes fetch prefixes, and requests form conversations.
        by_decode_nodes: whether, with fetches, there are only decode nodes.
    """

    name: str
    action: Action
    prepare: Action | None = None
    num_leavers: int = 0
    in_short: bool = False
    of_ranks: bool = False
    with_images: bool = False
    with_fetches: bool = False
    by_decode_nodes: bool = False

    @property
    def site_kind(self) -> tuple[bool, bool, bool, bool]:
        """The kind of deployment that the drill needs."""
        return self.of_ranks, self.with_images, self.with_fetches, self.by_decode_nodes


# ---------------------------------------------------------------------- what happens


async def kill_one(site: Site, name: str) -> None:
    await site.kill(name)


async def kill_and_restart(site: Site, name: str) -> None:
    nodes = await asyncio.to_thread(list_nodes, site.address) or {}
    await site.kill(name)
    listen = ["--listen", nodes[name]] if name in nodes else []
    await asyncio.to_thread(site.deployment.restart, name, *listen)
    site.doomed.discard(name)
    await site.wait_ready()
    await site.some_time()


async def kill_all_prefill(site: Site) -> None:
    await site.kill("p0")
    await site.kill("p1")
    await site.restart("p1")
    begin = time.monotonic()
    while "p1" not in (await asyncio.to_thread(list_nodes, site.address) or {}):
        if time.monotonic() > begin + READY_TIMEOUT_S:
            return
        await asyncio.sleep(0.1)
    await asyncio.sleep(2.0)


async def stop_one(site: Site, name: str) -> None:
    await site.stop(name)
    await asyncio.sleep(2.0)


async def end_rank(site: Site, name: str, which: int, number: signal.Signals) -> None:
    """Kill or stop one rank of a node at a random moment of the load, then restart the node."""
    before = left_behind()
    await site.end_rank(name, which, number)
    await asyncio.to_thread(site.deployment.restart, name)
    site.doomed.discard(name)
    await site.wait_ready()
    left = left_behind() - before
    if left:
        raise BatonError(f"left behind: {', '.join(sorted(left))}")
    await site.some_time()


async def abort_storm(site: Site) -> None:
    """Start 1,000 clients that disconnect at random moments."""
    seed = site.draw.randrange(2**32)
    storm = Load(site.address, site.cases, 64, seed, leaving=1.0, most=STORM_REQUESTS)
    await storm.run()
    broken = [answer for answer in storm.answers if answer.outcome in BROKEN]
    if broken:
        raise BatonError(f"storm: {broken[0].outcome}: {broken[0].detail}")


async def load_and_unload(site: Site) -> None:
    """Load and unload a third adapter, again and again, while a prefill node is restarted."""
    is_over = False

    async def change() -> int:
        number = 0
        while not is_over:
            loads = {"name": SPARE, "source": site.adapters[SPARE].name}
            await asyncio.to_thread(change_adapters, site.address, "LoadAdapter", **loads)
            await asyncio.to_thread(change_adapters, site.address, "UnloadAdapter", name=SPARE)
            number += 1
        return number

    changing = asyncio.create_task(change())
    try:
        await kill_and_restart(site, "p1")
    finally:
        is_over = True
    if not await changing:
        raise BatonError("no adapter was loaded meanwhile")


async def take_files_away(site: Site) -> None:
    """Restart all decode nodes without the files of an adapter, then put the files back.

    Meanwhile, requests for this adapter must be refused, and must not be answered by the base
    model.
    """
    case = next(case for case in site.cases if case.model)
    folder = site.adapters[case.model]
    hidden = folder.with_name(f".{folder.name}")
    marks = {name: _log_size(site, name) for name in ("d0", "d1")}
    folder.rename(hidden)
    try:
        for name in marks:
            await site.kill(name)
            await site.restart(name)
        await site.wait_ready()
        await asyncio.sleep(2.0)
    finally:
        hidden.rename(folder)
    told = [site.deployment.child(name).log.read_bytes()[mark:] for name, mark in marks.items()]
    if not any(b"cannot load adapter" in text for text in told):
        raise BatonError("no node missed the adapter's files")
    give_up_at = time.monotonic() + FILES_BACK_S
    async with AsyncClient(site.address) as client:
        while (await ask(client, case, site.draw, leaving=0.0)).outcome != "complete":
            if time.monotonic() > give_up_at:
                raise BatonError(f"the adapter is not served {FILES_BACK_S:g} s after its return")
            await asyncio.sleep(0.2)


async def check_served(site: Site) -> None:
    """Ask once for each model name; raise BatonError if a name gets no complete answer.

    Otherwise, drills could pass on a site that refuses every request for an adapter.
    """
    firsts = {case.model: case for case in reversed(site.cases)}
    async with AsyncClient(site.address) as client:
        for name, case in firsts.items():
            answer = await ask(client, case, site.draw, leaving=0.0)
            if answer.outcome != "complete":
                raise BatonError(f"{name or 'the base model'}: {answer.outcome}: {answer.detail}")


def _log_size(site: Site, name: str) -> int:
    return site.deployment.child(name).log.stat().st_size


async def arm(site: Site, name: str, point: str, count: int) -> None:
    await site.restart(name, "--inject-faults", f"kill={point}:{count}")
    await site.wait_ready()


async def wait_for_death(
    site: Site, name: str, point: str, count: int, within_s: float, flush_s: float
) -> None:
    site.doomed.add(name)
    child = site.deployment.child(name)
    process = child.process
    begin = flushed_at = time.monotonic()
    while process.poll() is None:
        now = time.monotonic()
        if now > begin + within_s:
            process.kill()  # kill the node, so that it does not disturb the next drill
            raise BatonError(f"{name} never came to where it should die")
        if now > flushed_at + flush_s:
            with contextlib.suppress(BatonError):  # the node may be dead by now
                await asyncio.to_thread(flush_caches, site.address)
            flushed_at = time.monotonic()
        await asyncio.sleep(0.01)
    told = f"killed before {point}:{count}" in child.log.read_text(errors="replace")
    if process.returncode != -signal.SIGKILL or not told:
        raise BatonError(f"{name} died elsewhere, with exit code {process.returncode}")
    await site.watch_detection(name)


def drills() -> list[Drill]:
    """Return all drills; drills at arrows need connectors that can inject faults."""
    found = [
        Drill("kill -9 of a prefill node", partial(kill_one, name="p0")),
        Drill("kill -9 of a decode node", partial(kill_one, name="d0"), in_short=True),
        Drill("kill -9 of the router, restart", partial(kill_and_restart, name="router")),
        Drill(
            "kill -9 of a prefill node, restart",
            partial(kill_and_restart, name="p1"),
            in_short=True,
        ),
        Drill("kill -9 of a decode node, restart", partial(kill_and_restart, name="d1")),
        Drill("both prefill nodes killed, one restarted", kill_all_prefill),
        Drill(f"SIGSTOP of a prefill node, {STOP_S:g} s", partial(stop_one, name="p0")),
        Drill(f"SIGSTOP of a decode node, {STOP_S:g} s", partial(stop_one, name="d0")),
        Drill(f"abort storm, {STORM_REQUESTS} requests", abort_storm),
        Drill("adapters loaded and unloaded, a prefill node killed, restarted", load_and_unload),
        Drill("an adapter's files away, both decode nodes restarted", take_files_away),
    ]
    found += [
        Drill(
            f"{verb} of rank {which} of a {role} node of two",
            partial(end_rank, name=name, which=which, number=number),
            of_ranks=True,
        )
        for name, role in (("p0", "prefill"), ("d0", "decode"))
        for number, verb in ((signal.SIGKILL, "kill -9"), (signal.SIGSTOP, "SIGSTOP"))
        for which in (0, 1)
    ]
    found += [
        Drill("kill -9 of the encode node", partial(kill_one, name="e0"), with_images=True),
        Drill(
            "kill -9 of the encode node, restart",
            partial(kill_and_restart, name="e0"),
            with_images=True,
        ),
        Drill(
            f"SIGSTOP of the encode node, {STOP_S:g} s",
            partial(stop_one, name="e0"),
            with_images=True,
        ),
        Drill(
            "kill -9 of a prefill node beside an encode node",
            partial(kill_and_restart, name="p0"),
            with_images=True,
        ),
    ]
    found += [
        Drill(
            f"{verb} of a {role} node beside fetches",
            partial(action, name=name),
            with_fetches=True,
        )
        for name, role in (("p0", "prefill"), ("d0", "decode"))
        for verb, action in (("kill -9", kill_and_restart), (f"SIGSTOP, {STOP_S:g} s,", stop_one))
    ]
    found.append(
        Drill(
            "kill -9 of the router beside fetches",
            partial(kill_and_restart, name="router"),
            with_fetches=True,
        )
    )
    found += [
        Drill(
            f"{verb} of a decode node beside fetches of decode nodes",
            partial(action, name="d0"),
            with_fetches=True,
            by_decode_nodes=True,
        )
        for verb, action in (("kill -9", kill_and_restart), (f"SIGSTOP, {STOP_S:g} s,", stop_one))
    ]
    return found + (drills_at_arrows() if can_inject_faults() else [])


def drills_at_arrows() -> list[Drill]:
    """Return a drill for each process and arrow of the diagrams."""
    kinds = {
        "arrow": ARROWS,
        "encoding's arrow": ENCODING_ARROWS,
        "fetch's arrow": FETCH_ARROWS,
        "decode nodes' fetch, arrow": DECODE_FETCH_ARROWS,
    }
    return [
        _drill_at_arrow(f"{what} {arrow}: {name} dies at {point}", arrows, arrow, name, point)
        for what, arrows in kinds.items()
        for arrow, points in arrows.items()
        for name, point in points
    ]


def _drill_at_arrow(
    title: str, arrows: Mapping[int, object], arrow: int, name: str, point: str
) -> Drill:
    """Return the drill of a process that dies at an arrow of one of the diagrams."""
    is_fetch = arrows is FETCH_ARROWS or arrows is DECODE_FETCH_ARROWS
    count = FETCH_KILL_AT_COUNT if is_fetch else KILL_AT_COUNT
    wait = partial(
        wait_for_death,
        name=name,
        point=point,
        count=count,
        within_s=DEATH_S if arrows is ARROWS else SUPPLY_DEATH_S,
        flush_s=FETCH_FLUSH_INTERVAL_S if is_fetch else FLUSH_INTERVAL_S,
    )
    return Drill(
        title,
        wait,
        prepare=partial(arm, name=name, point=point, count=count),
        # Fetches are also cancelled when two prompts need the same prefix.
        num_leavers=4 if arrow in (9, 10) and not is_fetch else 0,
        with_images=arrows is ENCODING_ARROWS,
        with_fetches=is_fetch,
        by_decode_nodes=arrows is DECODE_FETCH_ARROWS,
    )


def can_inject_faults() -> bool:
    told = subprocess.run(
        [sys.executable, "-m", "baton", "prefill", "--help"],
        capture_output=True,
        text=True,
        check=True,
        env={"COLUMNS": "200", "PATH": ""},
    )
    return "--inject-faults" in told.stdout


# ---------------------------------------------------------------------- what must hold


async def run_drill(site: Site, drill: Drill, concurrency: int, seed: int) -> Result:
    """Run a drill under load, end the load, and check the promises."""
    result = Result(drill.name)
    site.doomed.clear()
    site.detection_s = None
    site.undetected.clear()
    if drill.prepare is not None:
        await drill.prepare(site)
    try:
        await asyncio.to_thread(flush_caches, site.address)
    except BatonError as error:
        result.broken.append(str(error))
    load = Load(site.address, site.cases, concurrency, seed, num_leavers=drill.num_leavers)
    with Witness(site.deployment, load.longest_wait_s) as witness:
        async with under_load(load):
            try:
                await site.some_time()
                await drill.action(site)
                await asyncio.sleep(1.5)
            except BatonError as error:
                result.broken.append(str(error))
    result.counts = dict(sorted(load.counts().items()))
    result.retried = sum(answer.attempts > 1 for answer in load.answers)
    receipts = [answer.receipt for answer in load.answers if answer.receipt is not None]
    decodes = [receipt.decode for receipt in receipts if receipt.decode is not None]
    result.drafts = sum(decode.num_drafts for decode in decodes)
    result.accepted_drafts = sum(decode.num_accepted_drafts for decode in decodes)
    if drill.with_images:
        result.supplies = count_encodings(load.answers)
        if not result.supplies["received"]:
            result.broken.append("no encoding was received")
    if drill.with_fetches:
        result.supplies = count_fetches(load.answers)
        if not result.supplies["fetched"]:
            result.broken.append("no prefix was fetched")
    result.detection_s = site.detection_s
    complete = [answer for answer in load.answers if answer.outcome == "complete"]
    result.recovery_s = max((answer.longest_gap_s for answer in complete), default=0.0)
    if drill.of_ranks and (site.detection_s or 0.0) > RANK_DETECTION_S:
        result.broken.append(f"noticed only after {site.detection_s:.2f} s")
    for name in site.undetected:
        result.broken.append(f"{name} not missed within {DETECTION_TIMEOUT_S:g} s")
    for outcome in BROKEN:
        those = [answer for answer in load.answers if answer.outcome == outcome]
        if those:
            details = sorted({answer.detail for answer in those})
            result.broken.append(f"{len(those)} {outcome}: {'; '.join(details[:5])}")
    result.longest_wait_s = max((one.total_s for one in load.answers), default=0.0)
    if witness.late_s > STOPPED_S:
        result.broken.append(f"the drill itself was stopped for {witness.late_s:.0f} s")
    if result.broken or witness.stacks:
        result.told = witness.tell()
    for child in site.deployment.children:
        code = child.process.poll()
        if code is not None and child.name not in site.doomed:
            result.broken.append(f"{child.name} died with exit code {code}")
    result.free_after_s, held = await wait_until_free(site)
    if held:
        result.broken.append(f"held: {held}")
    return result


# ---------------------------------------------------------------------- the whole run


async def run_all(
    chosen: list[Drill],
    cases: list[Case],
    concurrency: int,
    seed: int,
    console: Console,
    kv_connector: str,
    method: str = "none",
    adapters: Mapping[str, Path] = NO_ADAPTERS,
    vision: tuple[Path, list[Case]] | None = None,
    conversations: Sequence[Case] = (),
) -> list[Result]:
    """Run each drill on a site with all nodes; replace a site that cannot be repaired.

    Nodes of several ranks have no adapters, so the load on them asks only the base model.

    Args:
        vision: model and cases of the drills with images.
        conversations: cases of the drills with fetches.
    """
    draft_args = drafting_args(method)
    results: list[Result] = []
    root = ["--adapter-root", str(next(iter(adapters.values())).parent)] if adapters else []
    names = [f"{name}={folder.name}" for name, folder in adapters.items() if name != SPARE]
    while len(results) < len(chosen):
        kind = of_ranks, with_images, with_fetches, by_decode = chosen[len(results)].site_kind
        named = [] if of_ranks else [word for name in names for word in ("--adapter", name)]
        config = LocalDeploymentConfig(
            model=str(DEMO_MODEL),
            listen=free_address(),
            num_prefill=2,
            num_decode=2,
            # Without --no-local-prefill, a decode node could compute the prompt if the hand-off
            # fails.
            router_args=["--no-local-prefill", "--served-model-name", "demo", *root, *named],
            node_args=[
                *(*NODE_ARGS, *draft_args, "--kv-connector", kv_connector),
                *(RANK_ARGS if of_ranks else [*root, *(ADAPTER_ARGS if root else [])]),
            ],
            decode_args=["--no-adaptive-speculation"] if draft_args else [],
        )
        asked = [case for case in cases if not (of_ranks and case.model)]
        if with_images:
            assert vision is not None
            config, asked = image_config(vision[0], kv_connector), vision[1]
        if with_fetches:
            config = fetch_config(kv_connector, by_decode_nodes=by_decode)
            asked = list(conversations)
        with LocalDeployment(config) as deployment:
            site = Site(deployment, asked, seed + len(results), adapters)
            await site.wait_ready()
            await check_served(site)
            while len(results) < len(chosen) and chosen[len(results)].site_kind == kind:
                drill = chosen[len(results)]
                result = await run_drill(site, drill, concurrency, seed + len(results))
                drafts = draft_args and not (with_images or with_fetches)
                if drafts and not result.accepted_drafts:
                    result.broken.append(f"{result.drafts} drafts, and none was right")
                results.append(result)
                mark = "; ".join(result.broken) or "holds"
                counts = result.counts | result.supplies
                console.print(f"{drill.name}: {counts} {mark}", highlight=False)
                for line in result.told:
                    print(line)
                if len(results) == len(chosen) or chosen[len(results)].site_kind != kind:
                    break
                try:
                    await site.repair()
                except BatonError as error:
                    result.broken.append(f"not whole again: {error}")
                    break
                if result.free_after_s is None:
                    break
    return results


def drafting_args(method: str) -> list[str]:
    """Return the options with which nodes draft by this method."""
    if method == "none":
        return []
    drafter = ["--speculative-model", str(DEMO_MODEL / method)] if method in DRAFTERS else []
    return ["--speculative-method", method, "--num-speculative-tokens", "3", *drafter]


def run(
    run: Run,
    short: bool = False,
    only: str = "",
    concurrency: int = 8,
    seed: int = -1,
    kv_connector: Literal["nixl", "tls"] = "nixl",
    speculative_method: str = "none",
) -> None:
    """Run the drills; every broken promise counts as a problem.

    Args:
        short: whether to run only two drills, and save nothing.
        only: part of the names of the drills to run; nothing is saved.
        seed: seed of the drills; -1: random.
        speculative_method: none, ngram, or a drafter of the demo model.
    """
    seed = random.randrange(2**16) if seed < 0 else seed
    method = speculative_method
    if method not in ("none", "ngram", *DRAFTERS):
        raise SystemExit(f"speculative-method: unknown, got {method!r}")
    print(f"seed {seed}")
    chosen = [
        drill
        for drill in drills()
        if only in drill.name
        and (drill.in_short or not short)
        and not (drill.of_ranks and method in DRAFTERS)  # trained drafters need one rank
    ]
    with tempfile.TemporaryDirectory(prefix="baton-") as folder:
        adapters = write_adapters(Path(folder))
        asked = {name: one for name, one in adapters.items() if name != SPARE}
        cases = list[Case]()
        if not all(drill.with_images or drill.with_fetches for drill in chosen):
            cases = make_cases(str(DEMO_MODEL), 12 if short else 32, seed, asked)
        vision = None
        if any(drill.with_images for drill in chosen):
            model, marker = vision_checkpoint(Path(folder) / "vision")
            vision = model, make_image_cases(str(model), marker, 24, seed)
        talks = list[Case]()
        if any(drill.with_fetches for drill in chosen):
            talks = make_conversations(8, seed)
        given = (concurrency, seed, run.console, kv_connector, method, adapters, vision, talks)
        results = asyncio.run(run_all(chosen, cases, *given))
    run.problems += [f"{r.name}: {'; '.join(r.broken)}" for r in results if r.broken]
    drills_by_name = {r.name: asdict(r) for r in results}
    for row in drills_by_name.values():
        del row["name"], row["told"]
    run.show("drill", drills_by_name)
    if not short and not only:
        document = {
            "seed": seed,
            "concurrency": concurrency,
            "median_recovery_s": statistics.median(r.recovery_s for r in results),
            "drills": drills_by_name,
        }
        name = "chaos" if kv_connector == "nixl" else f"chaos_{kv_connector}"
        name += "" if method == "none" else f"_{method}"
        run.judge(document, name)
        run.save(document, name)
