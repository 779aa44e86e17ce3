"""The deployment of `many_names.py`, and the answers of one process to compare with.

Two base models and three adapters are served at one address. Refuses to know: the drills, their
promises.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import shutil
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from baton import AsyncClient, SamplingParams
from baton.adapters.files import adapter_digest
from baton.api.errors import BatonError, NotFoundError
from baton.api.outputs import Receipt
from baton.deployment.local_deployment import LocalDeployment
from baton.v1 import admin_pb2
from benchmarks.runner.demo_adapters import ADAPTERS, write_adapters
from benchmarks.runner.deployments import deployed
from benchmarks.runner.environment import DEMO_MODEL
from benchmarks.runner.programs import admin_of
from engine.offline.llm import LLM

HUNG_S = 150.0
MOST_FAILED = 200
JOIN_TIMEOUT_S = 120.0
VOCABULARY = 4000
CHUNK_TOKENS = 64  # most prompts have several chunks


@dataclass(frozen=True, slots=True, order=True)
class Version:
    """A base model, alone or with an adapter. A name stands for one version at a time.

    Attributes:
        adapter: name of the adapter's folder; empty: the base model alone.
    """

    model: str
    adapter: str = ""


VERSIONS = tuple(
    Version(model, adapter) for model in ("demo", "tuned") for adapter in ("", *ADAPTERS)
)
# The names at the start. Both base models have an adapter "a", so its digest alone does not
# identify the base model.
NAMES = {
    "demo": Version("demo"),
    "tuned": Version("tuned"),
    "a": Version("demo", "a"),
    "b": Version("demo", "b"),
    "c": Version("demo", "c"),
    "tuned-a": Version("tuned", "a"),
}


@dataclass(frozen=True, slots=True)
class Question:
    """A request, and the tokens with which each version answers; all versions differ."""

    prompt: list[int]
    params: SamplingParams
    expected: Mapping[Version, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Reply:
    """The outcome of one request.

    Attributes:
        outcome: complete; lost: fewer tokens than asked for; unknown: the name is unknown; or
            failed.
        problem: the error of a failed request.
        seconds: seconds from sending the request to the end of its answer.
    """

    question: Question
    outcome: str
    seconds: float
    tokens: tuple[int, ...] = ()
    receipt: Receipt | None = None
    problem: str = ""

    @property
    def num_cached_tokens(self) -> int:
        """Return how many prompt tokens either node found in its prefix cache."""
        if self.receipt is None:
            return 0
        parts = (self.receipt.prefill, self.receipt.decode)
        return max((part.num_cached_tokens for part in parts if part is not None), default=0)


@dataclass(slots=True)
class Tally:
    """Counts of the outcomes of a drill's requests.

    Attributes:
        wrong: number of requests that were answered with the tokens of a wrong version.
        problems: texts of the first wrong and failed requests.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: int = 0
    tokens: int = 0
    retried: int = 0
    longest_s: float = 0.0
    problems: list[str] = field(default_factory=list)

    def as_row(self) -> dict[str, Any]:
        return {
            "requests": self.outcomes.total(),
            "tokens": self.tokens,
            "wrong": self.wrong,
            "failed": self.outcomes["failed"],
            "refused": self.outcomes["unknown"],
            "lost": self.outcomes["lost"],
            "retried": self.retried,
            "longest_request_s": round(self.longest_s, 2),
            "problems": self.problems[:5],
        }


class Site:
    """The running deployment, its names, and the digests of its adapters."""

    def __init__(self, deployment: LocalDeployment, folders: Mapping[str, Path]) -> None:
        self.deployment, self._folders = deployment, folders
        self.address = deployment.config.listen
        root = folders["adapters"]
        self._digests = {name: adapter_digest(root / name) for name in ADAPTERS} | {"": ""}

    def call(self, method: str, **fields: Any) -> Any:
        """Send an operator's call to the router; raises BatonError with the router's error."""
        service = admin_pb2.DESCRIPTOR.services_by_name["Admin"]
        kind = getattr(admin_pb2, service.methods_by_name[method].input_type.name)
        try:
            with admin_of(self.address) as admin:
                return getattr(admin, method)(kind(**fields), timeout=80)
        except grpc.RpcError as error:
            raise BatonError(f"{method}: {error.details()}") from error

    def load(self, name: str, version: Version) -> None:
        """Load a version's adapter under a name, which then stands for this version."""
        model = str(self._folders[version.model])
        self.call("LoadAdapter", name=name, source=version.adapter, model=model)

    def holders(self, version: Version) -> list[str]:
        """Return the nodes of a version's base model that have the version's adapter in memory."""
        model = str(self._folders[version.model])
        return [
            node
            for one in self.call("ListAdapters").adapters
            if one.digest == self._digests[version.adapter] and one.model == model
            for node in one.nodes
        ]

    def joined(self) -> dict[str, str]:
        """Return, by name, the engine ids of nodes that have joined and reach at least one peer."""
        with contextlib.suppress(BatonError):
            return {
                node.node_name: node.engine_id
                for node in self.call("ListNodes").nodes
                if not node.lost and any(peer.connected for peer in node.peers)
            }
        return {}

    async def kill_and_restart(self, name: str) -> None:
        """Kill a node, start it again, and wait until it has joined; raises BatonError."""
        old = (await asyncio.to_thread(self.joined)).get(name)
        await asyncio.to_thread(self.deployment.restart, name)
        give_up_at = time.monotonic() + JOIN_TIMEOUT_S
        while (await asyncio.to_thread(self.joined)).get(name) in (None, old):
            if time.monotonic() > give_up_at:
                raise BatonError(f"{name} has not joined again")
            await asyncio.sleep(0.2)

    def judge(self, reply: Reply, allowed: Collection[Version], tally: Tally) -> Version | None:
        """Count a reply's outcome; return the allowed version that gave it, or None.

        Raises BatonError if too many requests have failed, because the deployment must then be
        broken.
        """
        tally.outcomes[reply.outcome] += 1
        tally.longest_s = max(tally.longest_s, reply.seconds)
        if reply.problem:
            tally.problems.append(reply.problem)
        if tally.outcomes["failed"] > MOST_FAILED:
            raise BatonError(f"{MOST_FAILED} requests failed: {reply.problem}")
        if reply.outcome != "complete":
            return None
        receipt = reply.receipt
        tally.tokens += len(reply.tokens)
        tally.retried += receipt is not None and receipt.num_attempts > 1
        for version in allowed:
            is_told = receipt is not None and receipt.adapter == self._digests[version.adapter]
            if is_told and reply.question.expected[version] == reply.tokens:
                return version
        tally.wrong += 1
        tally.problems.append(self._what_is_wrong(reply, allowed))
        return None

    def _what_is_wrong(self, reply: Reply, allowed: Collection[Version]) -> str:
        expected = reply.question.expected
        said = next((str(one) for one in VERSIONS if expected[one] == reply.tokens), "nobody")
        told = reply.receipt.adapter if reply.receipt else "none"
        name = next((name for name, digest in self._digests.items() if digest == told), told)
        return f"tokens of {said}, receipt of {name!r}, allowed {sorted(allowed)}"


async def ask(client: AsyncClient, name: str, question: Question) -> Reply:
    """Send one question under a name; return the reply. Never raises."""
    began_at = time.monotonic()
    outcome, problem = "failed", ""
    try:
        async with asyncio.timeout(HUNG_S):
            answer = await client.generate(question.prompt, question.params, model=name)
    except NotFoundError:
        outcome = "unknown"
    except TimeoutError:
        outcome, problem = "lost", f"{name}: no end after {HUNG_S:g} s"
    except BatonError as error:
        problem = f"{name}: {type(error).__name__}: {error}"
    else:
        is_whole = len(answer.token_ids) == question.params.max_tokens
        return Reply(
            question,
            "complete" if is_whole else "lost",
            time.monotonic() - began_at,
            tuple(answer.token_ids),
            answer.receipt,
            "" if is_whole else f"{name}: {len(answer.token_ids)} tokens",
        )
    return Reply(question, outcome, time.monotonic() - began_at, problem=problem)


# ---------------------------------------------------------------------- the site's parts


def make_folders(root: Path) -> dict[str, Path]:
    """Write the second base model and the adapters; return all folders."""
    from safetensors.torch import load_file, save_file

    weights = load_file(DEMO_MODEL / "model.safetensors")
    tuned = root / "tuned"
    shutil.copytree(DEMO_MODEL, tuned)
    changed = {name: one.flip(0) if "mlp" in name else one for name, one in weights.items()}
    save_file(changed, tuned / "model.safetensors", metadata={"format": "pt"})
    write_adapters(root / "adapters")
    return {"demo": DEMO_MODEL, "tuned": tuned, "adapters": root / "adapters"}


def make_questions(folders: Mapping[str, Path], number: int, seed: int) -> list[Question]:
    """Make requests, greedy and seeded, and compute each version's tokens in one process.

    Prompts to which two versions give equal answers are left out, because such prompts cannot show
    that versions were confused.
    """
    draw = random.Random(seed)
    prompts = [
        [draw.randrange(VOCABULARY) for _ in range(draw.choice([40, 80, 150]))]
        for _ in range(number)
    ]
    params = [
        SamplingParams(
            max_tokens=draw.choice([10, 16, 24]), temperature=0.8 * (i % 2), seed=i, ignore_eos=True
        )
        for i in range(number)
    ]
    expected: list[dict[Version, tuple[int, ...]]] = [{} for _ in prompts]
    paths = {name: folders["adapters"] / name for name in ADAPTERS}
    for model in ("demo", "tuned"):
        llm = LLM(
            str(folders[model]), dtype="float32", kv_cache_bytes=2**28, max_num_requests=64,
            adapters=paths,
        )  # fmt: skip
        for adapter in ("", *ADAPTERS):
            answers = llm.generate(prompts, params, adapter=adapter)
            for one, answer in zip(expected, answers, strict=True):
                one[Version(model, adapter)] = tuple(answer.token_ids)
    return [
        Question(*one)
        for one in zip(prompts, params, expected, strict=True)
        if len(set(one[2].values())) == len(VERSIONS)
    ]


@contextlib.contextmanager
def running_site(folders: Mapping[str, Path]) -> Iterator[Site]:
    """Run a router, and a prefill and two decode nodes for each base model, with two slots each.

    Three adapters share two slots, so adapters are loaded again and again.
    """
    demo, tuned = str(folders["demo"]), str(folders["tuned"])
    root = ["--adapter-root", str(folders["adapters"])]
    models = {"demo": demo, "tuned": tuned}
    names = [f"{name}={models[one.model]}" for name, one in NAMES.items() if not one.adapter]
    adapters = [f"{name}={one.adapter}={one.model}" for name, one in NAMES.items() if one.adapter]
    router_args = [
        "--no-local-prefill", *root, "--return-timeout-s", "120",
        *itertools.chain(*(("--served-model-name", one) for one in names)),
        *itertools.chain(*(("--adapter", one) for one in adapters)),
    ]  # fmt: skip
    node_args = [
        "--dtype", "float32", "--num-blocks", "600", "--max-num-requests", "16", *root,
        "--max-adapters", "2", "--long-prefill-token-threshold", str(CHUNK_TOKENS),
    ]  # fmt: skip
    with deployed(
        demo, more_models=[tuned], num_decode=2, with_http=True, router_args=router_args,
        node_args=node_args,
    ) as deployment:  # fmt: skip
        yield Site(deployment, folders)
