"""A router over hand-driven nodes, for tests that say in what order nodes speak, fail and leave."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any

from baton.access.identity import Principal
from baton.api.images import PromptImage
from baton.api.outputs import TextDelta
from baton.api.sampling_params import SamplingParams
from baton.link.words import NodeRole, PrefillCommand
from baton.telemetry.spans import TraceContext
from router.calls.call import Call, Terms
from router.calls.dispatcher import Dispatcher
from router.calls.recovery.recovery import Recoveries
from router.calls.recovery.retry_budget import RetryBudget, RetryOptions
from router.policies.cost import Cost
from router.policies.least_tokens import LeastTokens
from tests.fakes.router.nodes import HandNode, make_pool, make_registration

PARAMS = SamplingParams(max_tokens=3, seed=1)
NO_RETRIES = RetryOptions(max_attempts=1, pair_timeout_s=0, return_timeout_s=0)


class RecordingDispatcher(Dispatcher):
    """Dispatcher that records the calls it was given."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.calls: list[Call] = []

    def run(self, call: Call) -> AsyncGenerator[TextDelta, None]:
        self.calls.append(call)
        return super().run(call)


class Scene:
    """A router with hand-driven nodes, and one call in progress on them.

    Nodes are placed on by tokens; with ``may_self_prefill`` by cost, and decode nodes may be alone.

    ``prefill`` and ``decode`` are the first pair; ``reads`` is cleared to have the client read
    nothing.
    """

    def __init__(
        self,
        max_model_len: int = 1000,
        *,
        options: RetryOptions = NO_RETRIES,
        num_prefill: int = 1,
        num_decode: int = 1,
        budget: RetryBudget | None = None,
        may_self_prefill: bool = False,
    ) -> None:
        self._may_self_prefill = may_self_prefill
        self.pool = make_pool(max_model_len, may_self_prefill=may_self_prefill)
        self.prefills = [self.join("p", i) for i in range(num_prefill)]
        self.decodes = [self.join("d", i) for i in range(num_decode)]
        self.prefill, self.decode = self.prefills[0], self.decodes[0]
        self.connect()
        policy = Cost() if may_self_prefill else LeastTokens()
        self.dispatcher = Dispatcher(self.pool, policy, Recoveries(self.pool, options, budget))
        self.outputs: list[TextDelta] = []
        self.reads = asyncio.Event()
        self.reads.set()
        self.task: asyncio.Task[None] | None = None

    def join(self, letter: str, number: int, *, incarnation: int = 0) -> HandNode:
        """Join a node ("p" or "d") that reaches no other node yet."""
        role = NodeRole.PREFILL if letter == "p" else NodeRole.DECODE
        registration = dataclasses.replace(
            make_registration(f"{letter}{number}", role, incarnation=incarnation),
            computes_prompts=self._may_self_prefill and letter == "d",
        )
        return HandNode(self.pool, registration)

    def connect(self) -> None:
        """Have all prefill nodes reach all decode nodes."""
        for prefill in self.prefills:
            for decode in self.decodes:
                prefill.reach(decode)

    async def call(
        self,
        request_id: str = "a",
        params: SamplingParams = PARAMS,
        timeout_s: float = 60.0,
        tenant: str = "",
        trace: TraceContext | None = None,
        adapter: str = "",
        images: tuple[PromptImage, ...] = (),
    ) -> None:
        """Begin a call; its outputs come in while the test goes on."""

        async def collect() -> None:
            async with contextlib.aclosing(self.dispatcher.run(self.make(
                request_id, params, timeout_s, tenant, trace, adapter, images
            ))) as outputs:  # fmt: skip
                async for output in outputs:
                    self.outputs.append(output)
                    await self.reads.wait()

        self.task = asyncio.create_task(collect())
        await self.pause()

    @staticmethod
    def make(
        request_id: str = "a",
        params: SamplingParams = PARAMS,
        timeout_s: float = 60,
        tenant: str = "",
        trace: TraceContext | None = None,
        adapter: str = "",
        images: tuple[PromptImage, ...] = (),
    ) -> Call:
        return Call(
            request_id=request_id,
            prompt_token_ids=[1, 2, 3],
            sampling_params=params,
            terms=Terms(
                received_at=time.perf_counter(),
                principal=Principal(name=tenant, tenant=tenant),
                trace=trace,
                adapter=adapter,
            ),
            timeout_s=timeout_s,
            images=images,
        )

    @property
    def epoch(self) -> int:
        return self.prefill.of(PrefillCommand)[-1].epoch

    @property
    def token_ids(self) -> list[int]:
        return [token_id for item in self.outputs for token_id in item.token_ids]

    @staticmethod
    async def pause() -> None:
        """Let every task run as far as it can."""
        for _ in range(10):
            await asyncio.sleep(0)

    async def end(self) -> None:
        """Wait for the call's end; raise its error."""
        assert self.task is not None
        await asyncio.wait_for(self.task, 5)

    def assert_no_leg_is_left(self) -> None:
        for hand in (*self.prefills, *self.decodes):
            assert hand.node.legs == {}
            assert_idle(hand)
        assert self.dispatcher.num_open == 0


def assert_idle(hand: HandNode) -> None:
    """Assert that no request is counted on a node any more."""
    load = hand.node.load
    assert (load.num_open_requests, load.num_open_tokens, load.num_arriving_tokens) == (0, 0, 0)
    assert load.prefill_queue_s == 0
    assert load.num_free_tokens == load.num_blocks * load.block_size


def asynchronous(
    test: Callable[[], Coroutine[Any, Any, None]],
) -> Callable[[], None]:
    """Run a coroutine as a test."""

    def run() -> None:
        asyncio.run(asyncio.wait_for(test(), 60))

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run
