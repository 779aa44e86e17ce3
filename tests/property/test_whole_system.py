"""State machine over everything: the real router, two prefill and two decode nodes, clients.

Whatever is late, reordered, doubled, lost, cut off, stopped, killed or restarted: each client's
stream has no gap, no repeat and no wrong token and ends once; no block that a peer may write is
free; and when all is well again every call ends, every block comes back, and the next call works.

`make test` runs a few examples of it, `make property-long` many.
"""

from __future__ import annotations

import functools
import secrets
from typing import Any, get_args

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import engine.engine
from baton.block_hash import BlockHash
from baton.decode_options import DecodeOptions
from baton.engine_config import PREEMPTION
from baton.errors import DeadlineExceededError, OverloadedError
from baton.outputs import FinishReason
from baton.push_mode import PushMode
from baton.sampling_params import SamplingParams
from decode_node import gone_peers
from kvconnector.messages import Cancel, Message
from models import load_model
from router.policies import POLICIES
from tests.fakes.cache_contents import contents_of
from tests.fakes.checked_client import Client
from tests.fakes.handoff_cluster import BLOCK_SIZE, is_beat
from tests.fakes.whole_system import NAMES, ROUND_S, Setup, System, num_pairs
from tests.property.num_examples import num_examples
from tests.property.test_handoff import folder, prompt_of, reference, reference_kv

MAX_PROMPT_TOKENS = 18
MAX_TOKENS = 12  # with the longest prompt more than the model takes
STOP_TOKEN_IDS = tuple(range(12))
FAMILIES = range(3)
KINDS = [kind for kind in get_args(Message) if "request_id" in kind.__struct_fields__]
LONG_S = 10_000.0  # nobody may need it
MAX_ROUNDS_TO_RECEIVE = 12

names = st.sampled_from(NAMES)

shared_model = functools.cache(load_model)  # weights only, and nobody writes them


@functools.cache
def expected_output(
    prompt: tuple[int, ...], params: SamplingParams, *, max_model_len: int, mixed: bool
) -> tuple[tuple[int, ...], FinishReason]:
    completion = reference(mixed=mixed).generate([list(prompt)], params)[0]
    assert completion.finish_reason is not None
    room = max_model_len - len(prompt)
    if len(completion.token_ids) > room:  # nodes with so little memory take no more
        return completion.token_ids[:room], FinishReason.LENGTH
    return completion.token_ids, completion.finish_reason


@functools.cache
def known_contents() -> dict[BlockHash, torch.Tensor]:
    """Of prompts' blocks; in a model with several KV cache groups names hide more."""
    prompts = [prompt_of(family, MAX_PROMPT_TOKENS) for family in FAMILIES]
    return contents_of(((p, reference_kv(tuple(p))) for p in prompts), BLOCK_SIZE)


class WholeSystemMachine(RuleBasedStateMachine):
    """What may happen to a cluster."""

    def __init__(self) -> None:
        super().__init__()
        self.system: System
        self.is_faulty = False  # something happened that may fail a call

    @property
    def is_busy(self) -> bool:
        """Whether a call is open; faults without one are cheap and find little."""
        return not all(client.is_done for client in self.system.clients)

    @initialize(
        num_blocks=st.sampled_from([7, 9, 20]),
        mixed=st.booleans(),
        async_scheduling=st.booleans(),
        push_mode=st.sampled_from(PushMode),
        kv_digests=st.booleans(),
        max_receiving_requests=st.sampled_from([1, 64]),
        local_prefill_threshold=st.sampled_from([0, 6]),
        preemption=st.sampled_from(PREEMPTION),
        policy=st.sampled_from(POLICIES.names()),
        router_is_busy=st.booleans(),
        sometimes_alone=st.booleans(),
        rounds_per_step=st.sampled_from([1, 4]),
        chunk_s=st.sampled_from([0.0, 0.12]),
        index_is_small=st.booleans(),
        restarts_at_end=st.booleans(),
    )
    def make(
        self,
        mixed: bool,
        kv_digests: bool,
        max_receiving_requests: int,
        local_prefill_threshold: int,
        restarts_at_end: bool,
        **choices: Any,
    ) -> None:
        """The others are as `Setup` has them."""
        self.mixed, self.kv_digests = mixed, kv_digests
        self.restarts_at_end = restarts_at_end
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(secrets, "randbelow", lambda limit: limit // 2)
        self.patch.setattr(engine.engine, "load_model", shared_model)
        self.system = System(
            Setup(
                folder=folder(mixed=mixed),
                expected_kv=lambda prompt: reference_kv(tuple(prompt), mixed=mixed),
                num_groups=reference(mixed=mixed).engine.kv_cache_spec.num_groups,
                kv_digests=kv_digests,
                options=DecodeOptions(
                    max_receiving_requests=max_receiving_requests,
                    local_prefill_threshold=local_prefill_threshold,
                ),
                contents={} if mixed else known_contents(),
                **choices,
            )
        )
        dead = self.system.dead
        self.patch.setattr(gone_peers, "is_dead", lambda peer: peer.engine_id in dead)

    # ------------------------------------------------------------ clients

    @rule(
        family=st.sampled_from(FAMILIES),
        num_tokens=st.integers(1, MAX_PROMPT_TOKENS),
        max_tokens=st.sampled_from([1, 2, 3, 5, MAX_TOKENS]),
        seed=st.integers(0, 3),
        temperature=st.sampled_from([0.0, 3.0]),
        stops=st.booleans(),
        timeout_s=st.sampled_from([*[LONG_S] * 6, 0.4, 3.0]),
        again=st.booleans(),
        num_siblings=st.integers(0, 2),
    )
    def call(
        self,
        family: int,
        num_tokens: int,
        max_tokens: int,
        seed: int,
        temperature: float,
        stops: bool,
        timeout_s: float,
        again: bool,
        num_siblings: int,
    ) -> None:
        """Prompts of a family are prefixes of each other.

        Args:
            again: under a request id that was in use before.
            num_siblings: calls with prefixes of this prompt that come at the same time.
        """
        params = SamplingParams(
            max_tokens=max_tokens,
            seed=seed,
            temperature=temperature,
            stop_token_ids=STOP_TOKEN_IDS if stops else (),
        )
        clients = self.system.clients
        request_id = f"r{len(clients)}"
        if again and clients and clients[-1].is_done:
            request_id = clients[-1].call.request_id
        self._call(request_id, prompt_of(family, num_tokens), params, timeout_s)
        for number in range(1, num_siblings + 1):
            prompt = prompt_of(family, max(num_tokens - 3 * number, 1))
            self._call(f"r{len(clients)}", prompt, params, timeout_s)

    def _call(
        self, request_id: str, prompt: list[int], params: SamplingParams, timeout_s: float = LONG_S
    ) -> Client:
        expected = expected_output(
            tuple(prompt), params, max_model_len=self.system.max_model_len, mixed=self.mixed
        )
        return self.system.call(request_id, prompt, params, timeout_s, expected)

    def _pick(self, data: st.DataObject) -> Client | None:
        reading = [client for client in self.system.clients if not client.is_done]
        return data.draw(st.sampled_from(reading)) if reading else None

    @rule(
        family=st.sampled_from(FAMILIES),
        num_tokens=st.integers(9, MAX_PROMPT_TOKENS),
        until_receiving=st.booleans(),
        times=st.integers(0, 8),
        lands=st.booleans(),
        loses=st.sets(st.sampled_from(KINDS), max_size=2),
        then=st.sampled_from(["go on", "leave", "come back", "kill", "kill quietly"]),
    )
    def call_and_break_off(
        self,
        family: int,
        num_tokens: int,
        until_receiving: bool,
        times: int,
        lands: bool,
        loses: set[type[Message]],
        then: str,
    ) -> None:
        """Amid the hand-off; what has arrived of the prompt is kept.

        Args:
            until_receiving: not before something has.
            then: what the client does, or is done to its prefill node.
        """
        self.is_faulty |= bool(loses)
        self.system.loses |= loses
        number = len(self.system.clients)
        client = self._call(f"r{number}", prompt_of(family, num_tokens), SamplingParams(seed=1))
        for _ in range(MAX_ROUNDS_TO_RECEIVE if until_receiving else 0):
            if client.is_done or "RECEIVING" in self.system.states_of(client).values():
                break
            self.flow(1, ROUND_S, True)
        self.flow(times, 0.002, lands)
        if client.is_done or then == "go on":
            return
        if then == "come back":
            self._leave_and_call_again(client, same_id=True, cancels_again=True)
        elif then == "leave":
            self.system.leave(client)
        else:
            for name in self.system.states_of(client):
                if name.startswith("p"):
                    self.kill(name, quietly=then == "kill quietly")

    @precondition(lambda self: self.is_busy)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        client = self._pick(data)
        if client is not None:
            self.system.leave(client)

    @precondition(lambda self: self.is_busy)
    @rule(data=st.data(), same_id=st.booleans(), cancels_again=st.booleans())
    def leave_and_call_again(self, data: st.DataObject, same_id: bool, cancels_again: bool) -> None:
        """At once, while the nodes still clear up after the first time.

        Args:
            cancels_again: the decode node's Cancel of the first time comes late once more.
        """
        client = self._pick(data)
        if client is not None:
            self._leave_and_call_again(client, same_id=same_id, cancels_again=cancels_again)

    def _leave_and_call_again(self, client: Client, *, same_id: bool, cancels_again: bool) -> None:
        if cancels_again:
            self.is_faulty = True
            self.system.network.delays[Cancel] = True
        self.system.leave(client)
        self.system.loop.run_until_idle()
        call, number = client.call, len(self.system.clients)
        request_id = call.request_id if same_id else f"r{number}"
        self._call(request_id, call.prompt_token_ids, call.sampling_params)

    @precondition(lambda self: self.is_busy)
    @rule(data=st.data())
    def read_slowly_or_on(self, data: st.DataObject) -> None:
        client = self._pick(data)
        if client is not None and client.may_read.is_set():
            client.may_read.clear()
        elif client is not None:
            client.may_read.set()

    # ------------------------------------------------------------ time

    @rule(name=names, times=st.integers(1, 3))
    def step(self, name: str, times: int) -> None:
        for _ in range(times):
            self.system.processes[name].step(waits=False)

    @rule(name=names)
    def round(self, name: str) -> None:
        self.system.processes[name].round()

    @rule(name=names, num_up=st.integers(0, 3), num_down=st.integers(0, 3))
    def talk(self, name: str, num_up: int, num_down: int) -> None:
        self.system.talk(name, num_up, num_down)

    @rule()
    def route(self) -> None:
        """The router does what it can do now."""
        self.system.loop.run_until_idle()

    @rule(times=st.integers(1, 3))
    def go_on(self, times: int) -> None:
        """A little of everything, so that runs come far."""
        for _ in range(times):
            self.system.turn()

    @rule(
        times=st.integers(1, 5) | st.integers(1, 30),
        seconds=st.sampled_from([0.002, 0.05, 0.25]),
        lands=st.booleans(),
    )
    def flow(self, times: int, seconds: float, lands: bool) -> None:
        """All goes on for a while, but what is cut off or stands still."""
        for _ in range(times):
            num_steps = self.system.num_steps
            self.system.flow(seconds, lands=lands)
            self.system.check_writes()
            if self.system.num_steps != num_steps:
                self.system.check()

    @precondition(lambda self: self.is_busy)
    @rule(seconds=st.sampled_from([0.1, 0.3, 1.2]))
    def pass_time(self, seconds: float) -> None:
        """Nothing happens for a while: beats, leases and repeated questions become due."""
        self.is_faulty = True
        self.system.clock.advance(seconds)

    # ------------------------------------------------------------ the network between the nodes

    @precondition(lambda self: self.system.network.messages)
    @rule(data=st.data(), keep=st.booleans())
    def deliver(self, data: st.DataObject, keep: bool) -> None:
        network = self.system.network
        index = data.draw(st.integers(0, len(network.messages) - 1))
        # A doubled and reordered message may fail a request: "unknown" can overtake a commit.
        self.is_faulty |= keep or index > 0
        network.deliver(index, keep=keep)

    @precondition(lambda self: self.system.network.messages)
    @rule()
    def deliver_all(self) -> None:
        self.system.deliver_all()

    @precondition(lambda self: not all(map(is_beat, self.system.network.messages)))
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        self.is_faulty = True
        network = self.system.network
        places = [i for i, message in enumerate(network.messages) if not is_beat(message)]
        network.drop(data.draw(st.sampled_from(places)))

    @precondition(lambda self: self.is_busy)
    @rule(kind=st.sampled_from(KINDS), keep=st.booleans())
    def delay(self, kind: type[Message], keep: bool) -> None:
        """The next message of a kind, or its double, comes when nobody thinks of it any more."""
        self.is_faulty = True
        self.system.network.delays[kind] = keep

    @precondition(lambda self: self.is_busy)
    @rule(kind=st.sampled_from(KINDS))
    def lose(self, kind: type[Message]) -> None:
        """The next message of a kind."""
        self.is_faulty = True
        self.system.loses.add(kind)

    @precondition(lambda self: self.system.network.late)
    @rule(data=st.data())
    def arrive_late(self, data: st.DataObject) -> None:
        network = self.system.network
        network.arrive(data.draw(st.integers(0, len(network.late) - 1)))

    @precondition(lambda self: self.system.network.writes)
    @rule(data=st.data())
    def land(self, data: st.DataObject) -> None:
        network = self.system.network
        network.land(data.draw(st.integers(0, len(network.writes) - 1)))

    @precondition(lambda self: self.kv_digests and self.system.network.writes)
    @rule(data=st.data(), place=st.integers(0, 9), byte=st.integers(0, 4095))
    def damage(self, data: st.DataObject, place: int, byte: int) -> None:
        self.is_faulty = True  # it may hit one block too often
        network = self.system.network
        index = data.draw(st.integers(0, len(network.writes) - 1))
        network.land_damaged(index, place, byte, bit=byte % 8)

    @precondition(lambda self: self.system.network.writes)
    @rule(data=st.data(), landed=st.booleans())
    def fail(self, data: st.DataObject, landed: bool) -> None:
        self.is_faulty = True
        network = self.system.network
        network.fail(data.draw(st.integers(0, len(network.writes) - 1)), landed=landed)

    @precondition(lambda self: self.is_busy)
    @rule(name=names)
    def cut_or_join(self, name: str) -> None:
        """A node's KV messages, beats too, are lost from now on; or no longer."""
        self.is_faulty = True
        self.system.cut ^= {name}

    # ------------------------------------------------------------ links and processes

    @precondition(lambda self: self.is_busy)
    @rule(name=names, router_first=st.booleans(), lossy=st.booleans())
    def break_link(self, name: str, router_first: bool, lossy: bool) -> None:
        self.is_faulty = True
        process = self.system.processes[name]
        if process.is_going:
            process.break_link(router_first=router_first, lossy=lossy)

    @precondition(lambda self: self.is_busy)
    @rule(name=names)
    def mute_or_unmute(self, name: str) -> None:
        """Nothing passes between a node and the router, and nobody is told; or it does again."""
        self.is_faulty = True
        self.system.processes[name].muted ^= True

    @precondition(lambda self: self.is_busy)
    @rule(name=names, num_copies=st.sampled_from([0, 2]))
    def lose_or_repeat_kv_events(self, name: str, num_copies: int) -> None:
        """The node's next message about its prefix cache; no call may fail for that."""
        self.system.processes[name].num_copies = num_copies

    @precondition(lambda self: self.is_busy)
    @rule(name=names)
    def stop(self, name: str) -> None:
        """A process stands still; what is sent to it waits, what it has posted goes on."""
        self.is_faulty = True
        self.system.processes[name].stopped = True

    @rule()
    def resume(self) -> None:
        """Whatever was stopped, muted, cut off or drained is as before."""
        self.system.heal(restart=False)

    @precondition(lambda self: self.is_busy)
    @rule(name=names, quietly=st.booleans())
    def kill(self, name: str, quietly: bool) -> None:
        if not self.system.processes[name].dead:
            self.is_faulty = True
            self.system.kill(name, quietly=quietly)

    @precondition(lambda self: self.is_busy)
    @rule(quietly=st.booleans())
    def restart_router(self, quietly: bool) -> None:
        self.is_faulty = True
        self.system.restart_router(quietly=quietly)

    @precondition(lambda self: self.is_busy)
    @rule(name=names, resume=st.booleans())
    def drain_node(self, name: str, resume: bool) -> None:
        self.is_faulty = True  # perhaps no node is left
        self.system.drain(name, resume=resume)

    @precondition(lambda self: any(p.dead for p in self.system.processes.values()))
    @rule()
    def restart(self) -> None:
        for name, process in list(self.system.processes.items()):
            if process.dead:
                self.system.start(name)

    # ------------------------------------------------------------ what must hold

    @invariant()
    def it_is_sound(self) -> None:
        if hasattr(self, "system"):
            self.system.check()

    def teardown(self) -> None:
        if not hasattr(self, "system"):
            return
        try:
            self.drain()
        finally:
            self.system.abandon()
            self.patch.undo()

    def drain(self) -> None:
        system = self.system
        system.heal(restart=self.restarts_at_end)
        system.network.release()
        system.settle()
        system.check()
        system.check_clean()
        for client in system.clients:
            late = client.call.timeout_s < LONG_S and isinstance(
                client.error, DeadlineExceededError | OverloadedError
            )
            if not (self.is_faulty or client.left or late):
                assert client.error is None, f"nothing went wrong, and yet: {client.error!r}"
            if client.call.timeout_s == LONG_S:
                assert not isinstance(client.error, DeadlineExceededError), "it was left to wait"
        if all(not process.dead for process in system.processes.values()):
            assert num_pairs(system.pool) == 4, "not all are together again"
            params = SamplingParams(max_tokens=3, seed=1, ignore_eos=True)
            last = self._call("last", prompt_of(1, 9), params)
            system.settle()
            assert last.error is None, "the next call fails"
            system.check_clean()
        system.close()


TestWholeSystem = WholeSystemMachine.TestCase
TestWholeSystem.settings = settings(
    max_examples=num_examples(40), stateful_step_count=60, deadline=None
)
