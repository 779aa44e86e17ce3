"""State machine over the hand-off: two real nodes, and a network with every kind of fault.

Whatever is reordered, doubled, lost, cancelled, failed or killed: no KV is wrong when a request
runs on it, every transfer ends once, every block comes back, and without faults everybody finishes
with the tokens of one process.
"""

from __future__ import annotations

import functools
import random
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton.api.sampling_params import SamplingParams
from baton.engine_config import PREEMPTION
from decode_node.options import DecodeOptions
from engine import LLM
from engine.engine import Engine
from kvconnector.base import HandoffRecord, TransferEventKind
from kvconnector.peer_process import PeerProcess
from kvconnector.protocol.messages import (
    Cancel,
    Commit,
    Grant,
    Message,
    Quiet,
    Verified,
    Watermark,
    encode,
)
from kvconnector.protocol.peers import BEAT_INTERVAL_S
from kvconnector.protocol.seals import HEADER_BYTES
from prefill_node.options import PushMode
from tests.fakes.engine.drafting_executor import DraftingExecutor
from tests.fakes.handoff.handoff_cluster import BLOCK_SIZE, DECODE_OPTIONS, Cluster, is_beat, kv_of
from tests.fakes.handoff.scripted_network import ScriptedMessage
from tests.numerics.tiny_models import make_hugging_face_model, save
from tests.property.num_examples import num_examples

MAX_PROMPT_TOKENS = 18
ATTACKS = ("replay", "reflect", "alter", "cut")


MIXED: dict[str, Any] = {
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 6,
    "use_sliding_window": True,
}


@functools.cache
def reference(*, mixed: bool = False) -> LLM:
    """Load the checkpoint in one process, with memory to spare."""
    folder = tempfile.TemporaryDirectory(prefix="baton-test-")
    options: dict[str, Any] = MIXED if mixed else {}
    model = make_hugging_face_model("Qwen3ForCausalLM", max_position_embeddings=28, **options)
    llm = LLM(str(save(model, Path(folder.name))), block_size=BLOCK_SIZE, num_blocks=192)
    llm.folder = folder  # type: ignore[attr-defined]  # lives as long as the model does
    return llm


def folder(*, mixed: bool = False) -> Path:
    return Path(reference(mixed=mixed).folder.name)  # type: ignore[attr-defined]  # see above


@functools.cache
def reference_tokens(
    prompt: tuple[int, ...], params: SamplingParams, *, mixed: bool = False
) -> tuple[int, ...]:
    return reference(mixed=mixed).generate([list(prompt)], params)[0].token_ids


@functools.cache
def reference_kv(prompt: tuple[int, ...], *, mixed: bool = False) -> torch.Tensor:
    llm = reference(mixed=mixed)
    request = llm._make_choices(list(prompt), SamplingParams(max_tokens=5, ignore_eos=True))[0]
    llm.engine.add_request(request)
    while request.num_computed_tokens < len(prompt):
        llm.engine.step()
    kv = kv_of(llm.engine, request.block_ids, len(prompt))
    llm.engine.abort(request.request_id)
    return kv


def make_cluster(
    num_blocks: int,
    *,
    mixed: bool = False,
    async_scheduling: bool = False,
    push_mode: PushMode = PushMode.LAYERS,
    kv_digests: bool = False,
    options: DecodeOptions = DECODE_OPTIONS,
    preemption: str = "recompute",
    num_drafts: int = 0,
    engine_options: Mapping[str, Any] = MappingProxyType({}),
) -> Cluster:
    """Make two nodes; a mixed model has three KV cache groups.

    Args:
        engine_options: options of both nodes' engines.
        num_drafts: most drafts of a request in a step of the decode node; every third is wrong.
    """
    cluster = Cluster(
        folder(mixed=mixed),
        lambda prompt: reference_kv(tuple(prompt), mixed=mixed),
        num_blocks,
        reference(mixed=mixed).engine.kv_memory.spec.num_groups,
        async_scheduling=async_scheduling,
        push_mode=push_mode,
        kv_digests=kv_digests,
        options=options,
        preemption=preemption,
        engine_options=engine_options,
    )

    def output_of(request_id: str) -> tuple[int, ...]:
        attempt = next(a for (name, _), a in cluster.attempts.items() if name == request_id)
        return reference_tokens(tuple(attempt.prompt), attempt.params, mixed=mixed)

    if num_drafts:
        executor = cluster.d_engine.executor
        cluster.d_engine.executor = DraftingExecutor(executor, output_of, num_drafts, wrong_every=3)
    return cluster


def num_references(engine: Engine) -> int:
    """Return the references that requests, pushes and quarantine hold; not the null block's own."""
    return sum(engine.block_pool.ref_counts().values()) - engine.kv_memory.spec.num_null_blocks


def prompt_of(number: int, num_tokens: int) -> list[int]:
    return [(number * 7 + 5 * i * i + 3) % 61 for i in range(num_tokens)]


def assert_clean(cluster: Cluster) -> None:
    """Check, after all is quiet, that living nodes hold nothing and have nothing open."""
    terminal = (TransferEventKind.COMMITTED, TransferEventKind.FAILED)
    if cluster.p_id not in cluster.dead:
        ends = Counter(
            (event.request_id, event.epoch)
            for event in cluster.sender.heard
            if event.kind in terminal
        )
        assert ends == Counter(cluster.sender.started)  # one terminal event per started transfer
        assert cluster.sender.machine.transfers == {}
        assert num_references(cluster.p.engine) == 0
        assert cluster.p.requests() == []
    if "d" not in cluster.dead:
        assert not cluster.d.reservations.has_open
        assert num_references(cluster.d.engine) == 0
        assert cluster.d.requests() == []
    cluster.check_spans()


class HandoffMachine(RuleBasedStateMachine):
    """All that the network and the users of one prefill and one decode node may do."""

    def __init__(self) -> None:
        super().__init__()
        self.cluster: Cluster
        self.num_requests = 0
        self.lost: list[ScriptedMessage] = []
        self.is_faulty = False  # something happened that may fail a request or need its deadline

    @initialize(
        num_blocks=st.sampled_from([7, 9, 20]),
        mixed=st.booleans(),
        async_scheduling=st.booleans(),
        push_mode=st.sampled_from(PushMode),
        kv_digests=st.booleans(),
        max_receiving_requests=st.sampled_from([1, 64]),
        local_prefill_threshold=st.sampled_from([0, 6]),
        preemption=st.sampled_from(PREEMPTION),
        num_drafts=st.sampled_from([0, 3]),
        is_attacked=st.booleans(),
    )
    def make(
        self,
        num_blocks: int,
        mixed: bool,
        async_scheduling: bool,
        push_mode: PushMode,
        kv_digests: bool,
        max_receiving_requests: int,
        local_prefill_threshold: int,
        preemption: str,
        num_drafts: int,
        is_attacked: bool,
    ) -> None:
        self.is_attacked, self.random = is_attacked, random.Random(0)
        self.mixed, self.kv_digests = mixed, kv_digests
        self.patch = pytest.MonkeyPatch()
        self.cluster = make_cluster(
            num_blocks,
            mixed=mixed,
            async_scheduling=async_scheduling,
            push_mode=push_mode,
            kv_digests=kv_digests,
            options=DecodeOptions(
                max_receiving_requests=max_receiving_requests,
                local_prefill_threshold=local_prefill_threshold,
                max_step_stretch=0,  # how long steps take is not drawn
            ),
            preemption=preemption,
            num_drafts=num_drafts,
        )
        dead = self.cluster.dead
        self.patch.setattr(PeerProcess, "has_ended", lambda peer: peer.engine_id in dead)

    # ------------------------------------------------------------ users

    @precondition(lambda self: not self.cluster.is_down)
    @rule(
        family=st.integers(0, 2),
        num_tokens=st.integers(1, MAX_PROMPT_TOKENS),
        max_tokens=st.integers(2, 6),
        seed=st.integers(0, 3),
        temperature=st.sampled_from([0.0, 3.0]),
    )
    def place(
        self, family: int, num_tokens: int, max_tokens: int, seed: int, temperature: float
    ) -> None:
        """Prompts of a family are prefixes of each other."""
        params = SamplingParams(max_tokens=max_tokens, seed=seed, temperature=temperature)
        prompt = prompt_of(family, num_tokens)
        self.cluster.place(f"r{self.num_requests}", 1, prompt, params)
        self.num_requests += 1

    @precondition(lambda self: self.cluster.attempts)
    @rule(data=st.data(), on_p=st.booleans(), on_d=st.booleans(), again=st.booleans())
    def cancel(self, data: st.DataObject, on_p: bool, on_d: bool, again: bool) -> None:
        key = data.draw(st.sampled_from(sorted(self.cluster.attempts)))
        attempt = self.cluster.attempts[key]
        self.cluster.cancel(key, on_p=on_p, on_d=on_d)
        self.is_faulty |= not (on_p and on_d)  # one leg lives on until its deadline
        retry = (key[0], key[1] + 1)
        if again and not self.cluster.is_down and retry not in self.cluster.attempts:
            self.cluster.place(*retry, attempt.prompt, attempt.params)

    @precondition(lambda self: self.cluster.attempts and not self.cluster.is_down)
    @rule(data=st.data())
    def retry(self, data: st.DataObject) -> None:
        """Retry a failed attempt, as the router does."""
        attempts = self.cluster.attempts
        failed = sorted(
            key
            for key, attempt in attempts.items()
            if attempt.error and (key[0], key[1] + 1) not in attempts
        )
        if failed:
            request_id, epoch = data.draw(st.sampled_from(failed))
            attempt = attempts[request_id, epoch]
            known = 0
            while known in attempt.tokens:
                known += 1
            output = [attempt.tokens[index] for index in range(known)]
            if known < attempt.params.max_tokens:
                self.cluster.place(request_id, epoch + 1, attempt.prompt, attempt.params, output)

    # ------------------------------------------------------------ time

    @rule(engine_id=st.sampled_from("pd"), times=st.integers(1, 3))
    def step(self, engine_id: str, times: int) -> None:
        for _ in range(times):
            self.cluster.step(engine_id)

    @rule(engine_id=st.sampled_from("pd"))
    def round(self, engine_id: str) -> None:
        self.forge()
        self.cluster.round(engine_id)

    @rule()
    def go_on(self) -> None:
        """Run a little of everything, so that runs get far."""
        self.forge()
        for engine_id in "pd":
            self.cluster.round(engine_id)
            self.cluster.step(engine_id)

    @rule(seconds=st.sampled_from([0.1, 0.3, 1.2]))
    def pass_time(self, seconds: float) -> None:
        """Let time pass, so that heartbeats, leases and repeated questions become due."""
        self.is_faulty = True
        self.cluster.clock.advance(seconds)

    @rule(engine_id=st.sampled_from("pd"))
    def stop(self, engine_id: str) -> None:
        """Stop a process: messages to it wait, and its posted writes go on."""
        self.is_faulty = True
        self.cluster.stopped.add(engine_id)

    @rule()
    def resume(self) -> None:
        self.cluster.stopped.clear()

    # ------------------------------------------------------------ the network

    @rule(deaf=st.sampled_from("pd"), num_beats=st.integers(1, 8))
    def lose_beats(self, deaf: str, num_beats: int) -> None:
        """Time passes, and one side hears only what is no beat."""
        self.is_faulty = True
        messages = self.cluster.network.messages
        for _ in range(num_beats):
            self.cluster.clock.advance(BEAT_INTERVAL_S)
            for engine_id in "pd":
                self.cluster.round(engine_id)
                lost = [m for m in messages if is_beat(m) and m.target == deaf]
                messages[:] = [m for m in messages if m not in lost]

    @precondition(lambda self: self.cluster.network.messages)
    @rule(data=st.data(), keep=st.booleans())
    def deliver(self, data: st.DataObject, keep: bool) -> None:
        network = self.cluster.network
        index = data.draw(st.integers(0, len(network.messages) - 1))
        # A doubled and reordered message may fail a request: "unknown" can overtake a commit.
        self.is_faulty |= keep or index > 0
        network.deliver(index, keep=keep)

    @precondition(lambda self: self.cluster.network.messages)
    @rule()
    def deliver_all(self) -> None:
        while self.cluster.network.messages:
            self.cluster.network.deliver(0)

    @precondition(lambda self: not all(map(is_beat, self.cluster.network.messages)))
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        self.is_faulty = True
        network = self.cluster.network
        places = [i for i, message in enumerate(network.messages) if not is_beat(message)]
        index = data.draw(st.sampled_from(places))
        self.lost.append(network.messages[index])
        network.drop(index)

    # ------------------------------------------------------------ somebody without keys

    @precondition(lambda self: self.cluster.network.seen)
    @rule(data=st.data(), how=st.sampled_from(ATTACKS))
    def attack(self, data: st.DataObject, how: str) -> None:
        """Replay or alter a message that was sent; no request may even fail because of that."""
        network = self.cluster.network
        message = data.draw(st.sampled_from(list(network.seen)))
        name, victim, payload = message.source, message.target, message.payload
        if how == "reflect":
            name, victim = victim, name
        elif how == "alter":
            place = data.draw(st.integers(0, len(payload) - 1))
            payload = payload[:place] + bytes([payload[place] ^ 1]) + payload[place + 1 :]
        elif how == "cut":
            payload = payload[: data.draw(st.integers(0, len(payload) - 1))]
        elif any(one.payload == payload for one in [*network.messages, *network.late]):
            self.is_faulty = True  # it comes for the first time, and before others
        else:
            # What was lost for good may still come; what was heard does not come again.
            self.is_faulty |= message in self.lost
        if victim in network.ends:
            network.ends[victim].inbox.append((name, payload))

    def forge(self) -> None:
        """Where blocks are promised: lies that would do harm if they were believed."""
        cluster, ends = self.cluster, self.cluster.network.ends
        pairs = [(cluster.p_id, "d"), ("d", cluster.p_id)]
        name, victim = self.random.choice(pairs)
        held = [r for r in cluster.d.reservations.held() if r.block_ids]
        if self.is_attacked and held and victim in ends:
            for lie in self.random.sample(self.lies(name), 2):
                ends[victim].inbox.append((name, bytes(HEADER_BYTES) + lie))

    def lies(self, name: str) -> list[bytes]:
        """In that node's name, about the latest requests."""
        lies: list[bytes] = []
        for (request_id, epoch), attempt in list(self.cluster.attempts.items())[-3:]:
            one: dict[str, Any] = {"engine_id": name, "request_id": request_id, "epoch": epoch}
            num_tokens = len(attempt.prompt) + attempt.num_initial
            about: tuple[Message, ...] = (
                Quiet(**one, reason="forged"),
                Cancel(**one),
                Grant(**one, block_ids=[1, 2, 3]),
                Watermark(**one, num_tokens=num_tokens // BLOCK_SIZE * BLOCK_SIZE, num_blocks=1),
                Verified(**one),
                Commit(
                    **one,
                    record=HandoffRecord(token_id=1, num_tokens=num_tokens),
                    num_bytes=1,
                    num_blocks=1,
                    transport="",
                    exposed_transfer_s=0.0,
                ),
            )
            lies += map(encode, about)
        return lies

    @precondition(lambda self: self.cluster.network.writes)
    @rule(data=st.data())
    def land(self, data: st.DataObject) -> None:
        network = self.cluster.network
        network.land(data.draw(st.integers(0, len(network.writes) - 1)))

    @precondition(lambda self: self.kv_digests and self.cluster.network.writes)
    @rule(data=st.data(), place=st.integers(0, 9), byte=st.integers(0, 4095))
    def damage(self, data: st.DataObject, place: int, byte: int) -> None:
        network = self.cluster.network
        index = data.draw(st.integers(0, len(network.writes) - 1))
        network.land_damaged(index, place, byte, bit=byte % 8)

    @precondition(lambda self: self.cluster.network.writes)
    @rule(data=st.data(), landed=st.booleans())
    def fail(self, data: st.DataObject, landed: bool) -> None:
        self.is_faulty = True
        network = self.cluster.network
        network.fail(data.draw(st.integers(0, len(network.writes) - 1)), landed=landed)

    @precondition(lambda self: self.cluster.p_id in self.cluster.dead)
    @rule()
    def restart_prefill_node(self) -> None:
        self.cluster.restart_prefill_node()

    @precondition(lambda self: not self.cluster.is_down and self.num_requests > 2)
    @rule(engine_id=st.sampled_from("pd"), chance=st.integers(0, 3))
    def kill(self, engine_id: str, chance: int) -> None:
        if chance == 0:
            self.is_faulty = True
            self.cluster.kill(engine_id)

    # ------------------------------------------------------------ what must hold

    @invariant()
    def ledgers_are_right(self) -> None:
        if hasattr(self, "cluster"):
            for node in (self.cluster.p, self.cluster.d):
                node.engine.check()
                ledger = node.ledger()
                assert (ledger.orphans, ledger.overdrawn) == ((), ())

    @invariant()
    def what_a_peer_may_write_is_not_free(self) -> None:
        if not hasattr(self, "cluster") or self.cluster.dead:
            return
        cluster = self.cluster
        held = cluster.d.engine.block_pool.ref_counts().keys()
        sources = cluster.p.engine.block_pool.ref_counts().keys()
        for write in cluster.network.writes:
            assert held >= set(write.remote_block_ids)
            assert sources >= set(write.local_block_ids)
        for transfer in cluster.sender.machine.transfers.values():
            if transfer.failure is None:  # it may still post, its lease permitting
                assert held >= set(transfer.granted.block_ids if transfer.granted else ())

    def teardown(self) -> None:
        if not hasattr(self, "cluster"):
            return
        try:
            self.drain()
        finally:
            self.patch.undo()

    def drain(self) -> None:
        cluster = self.cluster
        cluster.settle()
        open_keys = [key for key, attempt in cluster.attempts.items() if attempt.is_open]
        # What a process that died knew, its router hears no more; that is not played here.
        assert cluster.dead or not open_keys, "requests hang"
        failed = [  # who is handed back for want of memory has not failed
            key
            for key, attempt in cluster.attempts.items()
            if attempt.error and attempt.error_code != "PREEMPTED"
        ]
        assert self.is_faulty or not failed, "requests fail although nothing went wrong"
        for key in cluster.attempts:  # the deadline: the router cancels what it still knows
            cluster.cancel(key)
        cluster.settle()
        assert_clean(cluster)
        for attempt in cluster.attempts.values():
            expected = reference_tokens(tuple(attempt.prompt), attempt.params, mixed=self.mixed)
            found = [attempt.tokens[i] for i in sorted(attempt.tokens)]
            if attempt.is_complete:
                assert tuple(found) == expected
            for index, token_id in attempt.tokens.items():  # what a client may have seen
                assert token_id == expected[index]


TestHandoff = HandoffMachine.TestCase
TestHandoff.settings = settings(
    max_examples=num_examples(100), stateful_step_count=60, deadline=None
)
