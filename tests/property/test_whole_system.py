"""State machine over everything: the real router, two prefill and two decode nodes, clients.

Whatever is late, reordered, doubled, lost, cut off, stopped, killed or restarted: each client's
stream has no gap, no repeat and no wrong token and ends once; no block that a peer may write is
free; and when all is well again every call ends, every block comes back, and the next call works.

`make test` runs a few examples of it, `make property-long` many.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from baton.api.outputs import FinishReason
from baton.api.sampling_params import SamplingParams
from kvconnector.protocol.messages import (
    Cancel,
    Commit,
    Grant,
    Message,
    Quiet,
    Start,
    Watermark,
)
from prefill_node.options import PushMode
from router.policies import POLICIES
from tests.fakes.engine.drafting_executor import DraftingExecutor
from tests.fakes.handoff.handoff_cluster import is_beat
from tests.fakes.system.checked_client import Client
from tests.fakes.system.whole_system import NAMES, ROUND_S
from tests.property.num_examples import num_examples
from tests.property.system_machine import (
    FAMILIES,
    LONG_S,
    MAX_PROMPT_TOKENS,
    SALTS,
    SystemMachine,
)
from tests.property.test_handoff import prompt_of

MAX_TOKENS = 12  # with the longest prompt more than the model takes
STOP_TOKEN_IDS = tuple(range(12))
KINDS = [kind for kind in get_args(Message) if "request_id" in kind.__struct_fields__]
KINDS_OF_ALL = (Start, Grant, Watermark, Commit, Cancel, Quiet)  # without digests, too
MAX_ROUNDS = 12  # until something comes that may come
SOON_S = 10.0  # of virtual time; a lost message costs one or two

names = st.sampled_from(NAMES)


class WholeSystemMachine(SystemMachine):
    """All that may happen to a cluster."""

    @property
    def is_busy(self) -> bool:
        """Whether a call is open; faults without one are cheap and find little."""
        return not all(client.is_done for client in self.system.clients)

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
        salt=st.sampled_from(SALTS),
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
        salt: bytes,
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
        self._call(request_id, prompt_of(family, num_tokens), params, timeout_s, salt)
        for number in range(1, num_siblings + 1):
            prompt = prompt_of(family, max(num_tokens - 3 * number, 1))
            self._call(f"r{len(clients)}", prompt, params, timeout_s, salt)

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
        if until_receiving:
            states = self.system.states_of
            self._flow_until(lambda: client.is_done or "RECEIVING" in states(client).values())
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

    @rule(
        family=st.sampled_from(FAMILIES),
        num_tokens=st.integers(9, MAX_PROMPT_TOKENS),
        kind=st.sampled_from(KINDS),
    )
    def call_and_lose_a_message(self, family: int, num_tokens: int, kind: type[Message]) -> None:
        """Lose a message of a call without other faults: the call still ends soon."""
        self.is_faulty = True
        system = self.system
        system.heal(restart=True)
        system.loses.add(kind)
        client = self._call(
            f"r{len(system.clients)}", prompt_of(family, num_tokens), SamplingParams(seed=1)
        )
        give_up_at = system.clock() + SOON_S
        while not client.is_done:
            assert system.clock() < give_up_at, f"a lost {kind.__name__} holds a call up"
            self.flow(1, ROUND_S, True)
        system.loses.clear()

    @rule(
        families=st.permutations(FAMILIES),
        num_tokens=st.integers(9, MAX_PROMPT_TOKENS),
        kind=st.sampled_from(KINDS_OF_ALL),
        keep=st.booleans(),
    )
    def call_another_by_this_name(
        self, families: list[int], num_tokens: int, kind: type[Message], keep: bool
    ) -> None:
        """Call, leave, and call with another prompt under the same id; a message of the first
        call comes when the second one has its blocks.

        Args:
            keep: whether a copy of the message came in time.
        """
        self.is_faulty = True
        system = self.system
        system.network.delays[kind] = keep
        request_id = f"r{len(system.clients)}"
        first = self._call(request_id, prompt_of(families[0], num_tokens), SamplingParams(seed=1))
        self._flow_until(lambda: first.is_done or bool(system.network.late))
        system.leave(first)
        system.loop.run_until_idle()
        prompt = prompt_of(families[1], num_tokens)
        second = self._call(request_id, prompt, SamplingParams(seed=1))
        self._flow_until(lambda: "GRANTED" in system.states_of(second).values(), lands=False)
        while system.network.late:
            system.network.arrive(0)

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
        self._call(request_id, call.prompt_token_ids, call.sampling_params, salt=call.cache_salt)

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
        """Let the router do all that it can do now."""
        self.system.loop.run_until_idle()

    @rule(times=st.integers(1, 3))
    def go_on(self, times: int) -> None:
        """Run a little of everything, so that runs get far."""
        for _ in range(times):
            self.system.turn()

    @rule(
        times=st.integers(1, 5) | st.integers(1, 30),
        seconds=st.sampled_from([0.002, 0.05, 0.25]),
        lands=st.booleans(),
    )
    def flow(self, times: int, seconds: float, lands: bool) -> None:
        """Run everything for a while, except what is cut off or stopped."""
        for _ in range(times):
            num_steps = self.system.num_steps
            self.system.flow(seconds, lands=lands)
            self.system.check_writes()
            if self.system.num_steps != num_steps:
                self.system.check()

    def _flow_until(self, is_there: Callable[[], bool], *, lands: bool = True) -> None:
        for _ in range(MAX_ROUNDS):
            if is_there():
                return
            self.flow(1, ROUND_S, lands)

    @precondition(lambda self: self.is_busy)
    @rule(seconds=st.sampled_from([0.1, 0.3, 1.2]))
    def pass_time(self, seconds: float) -> None:
        """Let time pass, so that heartbeats, leases and repeated questions become due."""
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
        """Delay the next message of a kind, or its copy, until long after it is expected."""
        self.is_faulty = True
        self.system.network.delays[kind] = keep

    @precondition(lambda self: self.is_busy)
    @rule(kind=st.sampled_from(KINDS))
    def lose(self, kind: type[Message]) -> None:
        """Lose the next message of a kind."""
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
        """Lose all of a node's KV messages and heartbeats from now on, or stop losing them."""
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
        """Block all messages between a node and the router silently, or let them pass again."""
        self.is_faulty = True
        self.system.processes[name].muted ^= True

    @precondition(lambda self: self.is_busy)
    @rule(name=names, num_copies=st.sampled_from([0, 2]))
    def lose_or_repeat_kv_events(self, name: str, num_copies: int) -> None:
        """Lose or repeat a node's next prefix cache message; no call may fail because of that."""
        self.system.processes[name].num_copies = num_copies

    @precondition(lambda self: self.is_busy)
    @rule(name=names)
    def stop(self, name: str) -> None:
        """Stop a process: messages to it wait, and its posted writes go on."""
        self.is_faulty = True
        self.system.processes[name].stopped = True

    @rule()
    def resume(self) -> None:
        """Undo all stops, mutes, cuts and drains."""
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


def test_drafts_are_taken_and_those_of_a_node_that_dies_are_made_good() -> None:
    """Do surely what the machine does at random: end a node after it delivered some tokens."""
    machine = WholeSystemMachine()
    machine.make(
        num_blocks=20,
        mixed=False,
        async_scheduling=True,
        push_mode=PushMode.LAYERS,
        kv_digests=False,
        max_receiving_requests=64,
        local_prefill_threshold=0,
        preemption="recompute",
        policy=POLICIES.names()[0],
        router_is_busy=False,
        sometimes_alone=False,
        rounds_per_step=4,
        chunk_s=0.0,
        index_is_small=False,
        num_drafts=3,
        restarts_at_end=True,
    )
    system = machine.system
    params = SamplingParams(max_tokens=MAX_TOKENS, seed=1, temperature=3.0, ignore_eos=True)
    client = machine._call("a", prompt_of(1, 9), params)
    for _ in range(200):
        if len(client.token_ids) > 3:
            break
        system.flow()
    decoding = [name for name, state in system.states_of(client).items() if name.startswith("d")]
    [name] = decoding
    assert not client.is_done
    system.kill(name, quietly=False)
    machine.teardown()
    assert client.finish_reason is FinishReason.LENGTH
    assert client.num_attempts == 2
    executors = [process.node.engine.executor for process in system.by_id.values()]
    drafting = [one for one in executors if isinstance(one, DraftingExecutor)]
    num_computed = sum(one.num_computed for one in drafting)
    assert 0 < sum(one.num_accepted for one in drafting) < num_computed


TestWholeSystem = WholeSystemMachine.TestCase
TestWholeSystem.settings = settings(
    max_examples=num_examples(28), stateful_step_count=60, deadline=None
)
