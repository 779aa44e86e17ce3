"""Comparison: different deployments serve the same load on the same cores, one after another.

All deployments get the same requests and the same cores, which the nodes of a deployment divide.
Each repeat starts the deployments one after another, so that a slow phase of the machine does not
slow only one of them. In a search for the highest rates, each deployment is started only once.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from baton.api.errors import BatonError, ConfigError
from loadtest.drills.site import UpOptions, started
from loadtest.load.shapes import Deployment
from loadtest.plan import LoadPlan, Search
from loadtest.report.confidence import MAX_REPEATS
from loadtest.run import RunResult
from loadtest.search import play_search
from loadtest.session import Session
from loadtest.targets import open_target
from loadtest.targets.base import TargetOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The deployments to compare, and how; the constructor raises ConfigError.

    Attributes:
        up: options that all deployments have in common, such as model and cores.
        colocated_args: additional arguments for nodes that both prefill and decode.
        search: compare deployments at the highest rate that each holds; None: at the plan's rate.
    """

    plan: LoadPlan
    deployments: tuple[Deployment, ...]
    up: UpOptions
    repeats: int
    colocated_args: tuple[str, ...] = ()
    search: Search | None = None

    def __post_init__(self) -> None:
        names = [one.name for one in self.deployments]
        is_both = {one.is_colocated for one in self.deployments} == {True, False}
        with_encode = {one.num_encode > 0 for one in self.deployments}
        if len(set(names)) != len(names) or not (is_both or with_encode == {True, False}):
            raise ConfigError(
                "deployments: must be different ones, with a colocated and a split one, or with "
                f"one with and one without encode nodes, at least, got {', '.join(names)}"
            )
        if True in with_encode and self.plan.images is None:
            raise ConfigError("images: must be given, because encode nodes encode only images")
        if not 2 <= self.repeats <= MAX_REPEATS:
            raise ConfigError(f"repeats: must be 2 to {MAX_REPEATS}, got {self.repeats!r}")
        if not self.plan.slo.limits:
            raise ConfigError("slo: must be given; goodput decides")
        # Encode nodes may share the cores of other nodes.
        most = max(one.num_prefill + one.num_decode for one in self.deployments)
        if len(self.up.cores) < most:
            raise ConfigError(
                f"cores: must be at least one for each of {most} nodes, got {len(self.up.cores)}"
            )

    def up_options(self, deployment: Deployment) -> UpOptions:
        return dataclasses.replace(
            self.up,
            num_prefill=deployment.num_prefill,
            num_decode=deployment.num_decode,
            num_encode=deployment.num_encode,
            router_args=(
                *self.up.router_args,
                *([] if deployment.is_local_allowed else ["--no-local-prefill"]),
            ),
            node_args=(
                *self.up.node_args, *(self.colocated_args if deployment.is_colocated else ()),
            ),
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One run of one deployment. Without a search, all runs of a repeat send the same requests.

    Attributes:
        holds_none: whether a search found no rate that keeps the SLO; ``result`` is then that of
            the lowest rate tried.
    """

    deployment: Deployment
    repeat: int
    result: RunResult
    holds_none: bool = False


OnTrial = Callable[[Trial], None]


async def play_comparison(
    comparison: Comparison, options: TargetOptions, stop: asyncio.Event, on_trial: OnTrial
) -> list[Trial]:
    """Play all trials, or those before ``stop`` was set; raises BatonError."""
    trials: list[Trial] = []
    if comparison.search is not None:
        return await _search(comparison, comparison.search, options, stop, on_trial)
    for repeat in range(comparison.repeats):
        plan = dataclasses.replace(comparison.plan, round=repeat)
        for deployment in _in_turn(comparison.deployments, repeat):
            if stop.is_set():
                return trials
            try:
                async with _session(comparison, deployment, options, stop) as session:
                    result = await session.play(plan)
            except BatonError:
                if stop.is_set():  # the run was stopped during the deployment's start
                    return trials
                raise
            trials.append(Trial(deployment=deployment, repeat=repeat, result=result))
            on_trial(trials[-1])
            if result.was_stopped:
                return trials
    return trials


async def _search(
    comparison: Comparison,
    search: Search,
    options: TargetOptions,
    stop: asyncio.Event,
    on_trial: OnTrial,
) -> list[Trial]:
    """Search the highest rate that each deployment holds; return each repeat's run at this rate."""
    trials: list[Trial] = []
    for deployment in comparison.deployments:
        try:
            async with _session(comparison, deployment, options, stop) as session:
                found = await play_search(session.play, comparison.plan, search, lambda step: None)
        except BatonError:
            if stop.is_set():  # the run was stopped during the deployment's start
                return trials
            raise
        for repeat, highest in enumerate(found.highest):
            lowest = min(found.steps, key=lambda step: step.value)
            result = (highest or lowest).result
            trials.append(
                Trial(
                    deployment=deployment,
                    repeat=repeat,
                    result=result,
                    holds_none=highest is None,
                )
            )
            on_trial(trials[-1])
        if found.was_stopped:
            break
    return trials


@contextlib.asynccontextmanager
async def _session(
    comparison: Comparison, deployment: Deployment, options: TargetOptions, stop: asyncio.Event
) -> AsyncIterator[Session]:
    """Start a deployment and open a session with it; stop the deployment after the session."""
    async with started(comparison.up_options(deployment), stop) as (site, address):
        api_key = options.api_key or site.admin_token
        options = dataclasses.replace(options, url=f"grpc://{address}", api_key=api_key)
        target = await open_target(options)
        try:
            yield Session(target, stop)
        finally:
            await target.close()


def _in_turn(deployments: Sequence[Deployment], repeat: int) -> Sequence[Deployment]:
    """Rotate the deployments, so that each repeat begins with a different deployment."""
    first = repeat % len(deployments)
    return (*deployments[first:], *deployments[:first])
