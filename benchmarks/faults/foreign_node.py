"""Start a node with wrong weights beside right nodes: clients must get no token from it.

A router serves the demo model with two right decode nodes, and a foreign decode node, whose model
differs only in its weights. Every answer is compared, token by token, with the answer of one
process. Orders of events:

    foreign first       the foreign node joins an empty router, then the right nodes join
    foreign last        the foreign node joins after the right nodes
    foreign drained     the foreign node joins, is drained and resumed, all under load
    right drained       each right node in turn is drained and resumed
    router restarted    all nodes join again, in any order
    all right drained   the foreign node takes over; every token must be of its model

Exit 1 if a token differs, a request fails, or the foreign node gets a request in another order.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from rich.console import Console
from safetensors.torch import load_file, save_file

from baton import AsyncClient, BatonError, SamplingParams
from baton.processes.free_address import free_address
from baton.v1 import admin_pb2
from benchmarks.faults.chaos_load import certain_answers
from benchmarks.runner.environment import DEMO_MODEL
from benchmarks.runner.programs import Programs, admin_of
from benchmarks.runner.run import Document, Run

NUM_CASES = 24
MAX_TOKENS = 32
CONCURRENCY = 4
JOIN_TIMEOUT_S = 120.0
SETTLED_S = 2.5  # pause in which the router decides which nodes serve
TOKENS_PER_ORDER = 2000


@dataclass(frozen=True, slots=True)
class Question:
    """A request, with the answer of the right model and the answer of the foreign model."""

    prompt: list[int]
    params: SamplingParams
    right: tuple[int, ...]
    foreign: tuple[int, ...]


@dataclass(slots=True)
class Order:
    """The result of one order of events."""

    name: str
    num_tokens: int = 0
    num_wrong: int = 0
    num_foreign_requests: int = 0
    errors: list[str] = field(default_factory=list)


class Fleet(Programs):
    """The processes of the router and the nodes."""

    def __init__(self, foreign_model: Path) -> None:
        super().__init__()
        self.address = free_address()
        self._foreign_model = foreign_model

    def begin(self, name: str) -> None:
        """Start ``router``, ``right0``, ``right1`` or ``foreign``."""
        model = self._foreign_model if name == "foreign" else DEMO_MODEL
        if name == "router":
            self.start(name, "router", "--model", DEMO_MODEL, "--listen", self.address)
            return
        self.start(
            *(name, "decode", "--model", model, "--router", self.address, "--name", name),
            *("--dtype", "float32", "--num-threads", 1, "--num-blocks", 400),
            *("--drain-timeout-s", 5, "--join-timeout-s", 60),
        )

    def nodes(self) -> dict[str, admin_pb2.NodeDescription]:
        with admin_of(self.address) as admin:
            try:
                found = admin.ListNodes(admin_pb2.ListNodesRequest(), timeout=5).nodes
            except grpc.RpcError:
                return {}
        return {node.node_name: node for node in found if not node.lost}

    def tell(self, name: str, what: str) -> None:
        """Send ``Drain`` or ``Resume`` for a node to the router."""
        with admin_of(self.address) as admin:
            getattr(admin, what)(admin_pb2.NodeRequest(node=name), timeout=5)

    async def wait_for(self, *names: str) -> None:
        give_up_at = time.monotonic() + JOIN_TIMEOUT_S
        while not set(names) <= (await asyncio.to_thread(self.nodes)).keys():
            if time.monotonic() > give_up_at:
                raise BatonError(f"{', '.join(names)} have not joined")
            await asyncio.sleep(0.1)


async def ask_all(
    fleet: Fleet, cases: Sequence[Question], order: Order, least: int, *, is_foreign: bool = False
) -> None:
    """Send requests until ``least`` more tokens have arrived; count the wrong tokens."""
    goal = order.num_tokens + least
    turn = itertools.cycle(cases)

    async def lane(client: AsyncClient) -> None:
        while order.num_tokens < goal and len(order.errors) < 10:
            case = next(turn)
            expected = case.foreign if is_foreign else case.right
            try:
                answer = await client.generate(case.prompt, case.params, timeout_s=60)
            except BatonError as error:
                order.errors.append(f"{type(error).__name__}: {error}")
                continue
            pairs = itertools.zip_longest(answer.token_ids, expected)
            order.num_wrong += sum(got != wanted for got, wanted in pairs)
            order.num_tokens += len(expected)
            receipt = answer.receipt
            assert receipt is not None
            if (receipt.decode_node == "foreign") is not is_foreign:
                order.num_foreign_requests += 1

    async with AsyncClient(fleet.address) as client:
        await asyncio.gather(*(lane(client) for _ in range(CONCURRENCY)))


@contextlib.asynccontextmanager
async def load(fleet: Fleet, cases: Sequence[Question], order: Order) -> AsyncIterator[None]:
    """Send requests during the ``with`` block, and for a while afterwards."""
    running = asyncio.create_task(ask_all(fleet, cases, order, TOKENS_PER_ORDER))
    try:
        yield
    finally:
        await running


async def foreign_first(fleet: Fleet, cases: Sequence[Question], order: Order) -> None:
    fleet.begin("router")
    fleet.begin("foreign")
    await fleet.wait_for("foreign")
    async with AsyncClient(fleet.address) as client:
        with contextlib.suppress(BatonError):  # requests may fail while no node serves
            case = cases[0]
            answer = await client.generate(case.prompt, case.params, timeout_s=3)
            order.errors.append(f"answered before a right node was there: {answer.token_ids}")
    fleet.begin("right0")
    await fleet.wait_for("right0")
    async with load(fleet, cases, order):
        fleet.begin("right1")
        await fleet.wait_for("right1")


async def foreign_last(fleet: Fleet, cases: Sequence[Question], order: Order) -> None:
    fleet.kill("foreign")
    async with load(fleet, cases, order):
        fleet.begin("foreign")
        await fleet.wait_for("foreign")


async def foreign_drained(fleet: Fleet, cases: Sequence[Question], order: Order) -> None:
    async with load(fleet, cases, order):
        for what in ("Drain", "Resume"):
            await asyncio.to_thread(fleet.tell, "foreign", what)
            await asyncio.sleep(1)


async def right_drained(fleet: Fleet, cases: Sequence[Question], order: Order) -> None:
    async with load(fleet, cases, order):
        for name in ("right0", "right1"):
            for what in ("Drain", "Resume"):
                await asyncio.to_thread(fleet.tell, name, what)
                await asyncio.sleep(1)


async def router_restarted(fleet: Fleet, cases: Sequence[Question], order: Order) -> None:
    fleet.kill("router")
    fleet.begin("router")
    await fleet.wait_for("foreign", "right0", "right1")
    await ask_all(fleet, cases, order, TOKENS_PER_ORDER)


async def all_right_drained(fleet: Fleet, cases: Sequence[Question], order: Order) -> None:
    await asyncio.sleep(SETTLED_S)
    for name in ("right0", "right1"):
        await asyncio.to_thread(fleet.tell, name, "Drain")
    await asyncio.sleep(1)
    await ask_all(fleet, cases, order, TOKENS_PER_ORDER // 2, is_foreign=True)
    await asyncio.to_thread(fleet.tell, "right0", "Resume")
    await asyncio.sleep(1)
    await ask_all(fleet, cases, order, TOKENS_PER_ORDER // 2)


ORDERS: dict[str, Callable[[Fleet, Sequence[Question], Order], Awaitable[None]]] = {
    "foreign first": foreign_first,
    "foreign last": foreign_last,
    "foreign drained": foreign_drained,
    "right drained": right_drained,
    "router restarted": router_restarted,
    "all right drained": all_right_drained,
}


def make_foreign_model(folder: Path) -> Path:
    """Write a copy of the demo model with the rows of its largest tensor shifted by one."""
    foreign = folder / "foreign_model"
    shutil.copytree(DEMO_MODEL, foreign)
    path = foreign / "model.safetensors"
    tensors = load_file(path)
    name = max(tensors, key=lambda name: (tensors[name].numel(), name))
    tensors[name] = tensors[name].roll(1, dims=0)
    save_file(tensors, path)
    return foreign


def make_cases(foreign: Path, seed: int) -> list[Question]:
    """Make requests whose answers differ between both models and do not depend on rounding."""
    draw = random.Random(seed)
    prompts = [
        [draw.randrange(4000) for _ in range(draw.choice([5, 40, 150]))] for _ in range(NUM_CASES)
    ]
    params = [
        SamplingParams(
            max_tokens=MAX_TOKENS, temperature=0.8 * (index % 2), seed=index, ignore_eos=True
        )
        for index in range(NUM_CASES)
    ]
    right, other = (certain_answers(str(model), prompts, params) for model in (DEMO_MODEL, foreign))
    return [
        Question(prompt, one, mine, theirs)
        for prompt, one, mine, theirs in zip(prompts, params, right, other, strict=True)
        if mine and theirs and mine != theirs
    ]


async def play_orders(foreign: Path, cases: list[Question], console: Console) -> list[Order]:
    orders = []
    with Fleet(foreign) as fleet:
        for name, play in ORDERS.items():
            orders.append(order := Order(name))
            await play(fleet, cases, order)
            console.print(order)
        problem = fleet.nodes()["foreign"].health_why
        console.print(f"admin nodes: foreign is {fleet.nodes()['foreign'].health}: {problem}")
        for line in fleet.log("router").splitlines():
            if "gets no requests" in line or "another model" in line:
                console.print(f"router: {line}")
    return orders


def run(run: Run, seed: int = 1) -> Document:
    """Play all orders of events."""
    with tempfile.TemporaryDirectory(prefix="baton-") as folder:
        foreign = make_foreign_model(Path(folder))
        cases = make_cases(foreign, seed)
        run.console.print(f"{len(cases)} of {NUM_CASES} requests with an answer that is certain")
        orders = asyncio.run(play_orders(foreign, cases, run.console))
    rows = {
        order.name: {
            "tokens": order.num_tokens,
            "wrong_tokens": order.num_wrong,
            "requests_on_the_wrong_model": order.num_foreign_requests,
            "errors": order.errors,
        }
        for order in orders
    }
    run.show("order", rows)
    num_tokens = sum(order.num_tokens for order in orders)
    num_wrong = sum(order.num_wrong for order in orders)
    run.problems += [
        f"{order.name}: a wrong token, node or error"
        for order in orders
        if order.num_wrong or order.num_foreign_requests or order.errors
    ]
    if num_tokens < TOKENS_PER_ORDER * 5:
        run.problems.append(f"{num_tokens} tokens are too few to tell")
    return {"seed": seed, "tokens": num_tokens, "wrong_tokens": num_wrong, "orders": rows}
