"""Attack the transfer of KV with forged, replayed, altered or late messages and writes.

The attacker also reflects and shortens messages, and writes into blocks before their check or after
a cancel.

In each scene, real nodes and engines run in one process; with NIXL the attacker has agents under
the names of both nodes. A scene counts the messages that a node accepted more often than its peer
had sent them, the requests with wrong tokens, and I/O threads that ended. Controls without the
checks show that the attacks work.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast
from unittest import mock

import numpy as np
import torch

from baton.api.sampling_params import SamplingParams
from baton.engine_config import EngineConfig
from baton.link.words import (
    CancelCommand,
    DecodeCommand,
    NodeEvent,
    PeerReport,
    PeerUpdate,
    PrefillCommand,
)
from benchmarks.runner.environment import DEMO_MODEL
from benchmarks.runner.own_process import answer_of, call_words
from benchmarks.runner.run import Document, Run
from decode_node.node import DecodeNode
from decode_node.options import DecodeOptions
from engine import LLM
from engine.engine import Engine
from engine.make_engine import make_engine
from kvconnector import KV_CONNECTORS
from kvconnector.base import HandoffRecord
from kvconnector.block_digests import BlockDigests
from kvconnector.blocks import LayerRange
from kvconnector.ends import Receiver, Sender
from kvconnector.layout import KVLayout
from kvconnector.peer_info import PeerInfo
from kvconnector.protocol import messages
from kvconnector.protocol.actions import Action, Input, StateMachine
from kvconnector.protocol.messages import Digests, Message
from kvconnector.protocol.seals import HEADER_BYTES, Channel, Channels, peek
from kvconnector.transports.base import KVTransport
from kvconnector.transports.in_memory import InMemoryTransport
from kvconnector.transports.nixl.agent import NixlAgent
from prefill_node.node import PrefillNode
from prefill_node.options import PushMode

P, D = "p-forged", "d-forged"
PROMPT_TOKENS, OUTPUT_TOKENS, NUM_PROMPTS = 200, 6, 8
NUM_OPEN = 3  # open requests
WRITES_PER_DIGESTS = 4
CHANCES = {"write": 0.25, "withhold": 0.02, "cancel": 0.1}
SCENE_LIMIT_S = 1200.0
KINDS = ("forged", "replayed", "reflected", "cut", "altered", "of another life", "junk")
PARAMS = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)


class Tap:
    """A transport whose messages the attacker can read, hold back and deliver late."""

    def __init__(self, transport: KVTransport, scene: Scene) -> None:
        self._transport = transport
        self._scene = scene

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def notify(self, engine_id: str, payload: bytes) -> None:
        scene, own_id = self._scene, self._transport.peer_info.engine_id
        with scene.lock:
            scene.said[own_id][payload[HEADER_BYTES:]] += 1
            scene.seen.append((own_id, engine_id, payload))
            if scene.draw.random() < CHANCES["withhold"] and scene.is_attacking:
                scene.withheld.append((own_id, engine_id, payload))
                return
        self._transport.notify(engine_id, payload)

    def take_notifications(self) -> list[tuple[str, bytes]]:
        taken = self._transport.take_notifications()
        for _, payload in taken:
            self._scene.before_it_is_heard(payload)
        return taken


class Attacker:
    """An attacker without keys, who can send messages under any name and write to any block."""

    def say(self, name: str, target: str, payload: bytes) -> None:
        raise NotImplementedError

    def write(self, block_id: int, layers: LayerRange) -> None:
        raise NotImplementedError


class MemoryAttacker(Attacker):
    """An attacker in the nodes' process, who writes directly to the nodes' memory."""

    def __init__(self, kv_cache: torch.Tensor) -> None:
        self._kv_cache = kv_cache

    def say(self, name: str, target: str, payload: bytes) -> None:
        InMemoryTransport._ends[target]._inbox.append((name, payload))

    def write(self, block_id: int, layers: LayerRange) -> None:
        with torch.inference_mode():
            self._kv_cache[block_id, slice(*layers)].view(torch.uint8).random_(0, 60)


class NixlAttacker(Attacker):
    """An attacker with NIXL agents, two of which have the nodes' names."""

    def __init__(self, infos: dict[str, PeerInfo], kv_cache: torch.Tensor) -> None:
        self._num_layers = kv_cache.shape[1]
        self._memory = torch.randint(0, 60, (4, kv_cache[0].nbytes), dtype=torch.uint8)
        own = KVLayout.of(self._memory.view(4, kv_cache.shape[1], 1, -1))
        self._agents = {name: NixlAgent(name, [own], "DRAM") for name in (P, D, "stranger")}
        for name, agent in self._agents.items():
            for target, info in infos.items():
                if name != target:
                    agent.add_peer(target, info.ranks[0].agent_metadata)
        self._writer = NixlAgent("writer", [own], "DRAM")
        self._writer.add_peer(D, infos[D].ranks[0].agent_metadata)
        self._layouts = own, KVLayout.of(kv_cache)
        self._tables: dict[LayerRange, tuple[Any, Any]] = {}

    def say(self, name: str, target: str, payload: bytes) -> None:
        self._agents[name].notify(target, payload)
        self._agents[name].take_notifications()

    def write(self, block_id: int, layers: LayerRange) -> None:
        if layers not in self._tables:
            own, remote = (
                layout.descriptors(((layers[0] * size, (layers[1] - layers[0]) * size),))
                for layout in self._layouts
                for size in (layout.block_bytes // self._num_layers,)
            )
            tables = self._writer.prepare("", own), self._writer.prepare(D, remote)
            self._tables[layers] = tables
        local, where = (np.array([number], dtype=np.int32) for number in (block_id % 4, block_id))
        handle = self._writer.post_write(
            D, self._tables[layers][0], local, self._tables[layers][1], where
        )
        until = time.monotonic() + 5
        while not self._writer.is_done(D, handle) and time.monotonic() < until:
            pass


@dataclass
class Open:
    """A request that the scene's router has placed, and that has not ended."""

    prompt: int
    tokens: dict[int, int] = field(default_factory=dict)
    is_over: bool = False


class Scene:
    """Two nodes, the attacker, and a stand-in that sends the router's messages to the nodes.

    Args:
        connector: name of the KV connector between the nodes.
        has_digests: whether blocks are checked against digests.
        too_late: whether the attacker writes into blocks only after their check.
        seed: seed of all random choices.
    """

    def __init__(self, connector: str, *, has_digests: bool, too_late: bool, seed: int) -> None:
        self.draw = random.Random(seed)
        self._too_late = too_late
        self.lock = threading.Lock()
        self.said: dict[str, Counter[bytes]] = {P: Counter(), D: Counter()}
        self.heard: dict[str, Counter[bytes]] = {P: Counter(), D: Counter()}
        self.seen: deque[tuple[str, str, bytes]] = deque(maxlen=2000)
        self.withheld: list[tuple[str, str, bytes]] = []
        self.is_attacking = False
        self.attacks: Counter[str] = Counter()
        self.deaths: list[Exception] = []
        self.reports: list[PeerReport] = []
        self.open: dict[str, Open] = {}
        self.ended: Counter[str] = Counter()
        self.granted: dict[tuple[str, int], tuple[int, tuple[int, ...]]] = {}
        draw = random.Random(0)
        self.prompts = [draw.choices(range(4000), k=PROMPT_TOKENS) for _ in range(NUM_PROMPTS)]
        reference = LLM(str(DEMO_MODEL), dtype="float32", num_blocks=100)
        outputs = reference.generate(self.prompts, PARAMS)
        self.expected = [list(output.token_ids) for output in outputs]
        config = EngineConfig(
            dtype="float32", num_blocks=200, prefix_cache=False, num_threads=1, device="cpu"
        )
        p_engine, d_engine = make_engine(DEMO_MODEL, config), make_engine(DEMO_MODEL, config)
        make = KV_CONNECTORS.load(connector)
        transports = {P: make(P, p_engine.kv_memory), D: make(D, d_engine.kv_memory)}
        self.infos = {name: transport.peer_info for name, transport in transports.items()}
        kinds = [BlockDigests(e.kv_memory) if has_digests else None for e in (p_engine, d_engine)]
        taps = {name: cast(KVTransport, Tap(t, self)) for name, t in transports.items()}
        self.sender = Sender(taps[P], _nothing, self.deaths.append, digests=kinds[0])
        self.receiver = Receiver(taps[D], _nothing, self.deaths.append, digests=kinds[1])
        for name, end in ((P, self.sender), (D, self.receiver)):
            self._listen(name, end)
        self._num_layers = d_engine.kv_memory.tensor.shape[1]
        self.p = PrefillNode(p_engine, self.sender, self._take, PushMode.LAYERS)
        options = DecodeOptions(local_prefill_threshold=0)
        self.d = DecodeNode(d_engine, self.receiver, self._take, options)
        self.attacker = (
            NixlAttacker(self.infos, d_engine.kv_memory.tensor)
            if connector == "nixl"
            else MemoryAttacker(d_engine.kv_memory.tensor)
        )
        self.p.submit(PeerUpdate(D, self.receiver.describe()))
        self.d.submit(PeerUpdate(P, self.sender.describe()))
        self._until(lambda: sum(report.connected for report in self.reports) == 2)

    def _listen(self, name: str, end: Sender | Receiver) -> None:
        """Start an end's I/O thread; count the messages that it accepts as sent by its peer."""
        machine: StateMachine = end.machine
        if isinstance(end, Receiver) and end.verifier is not None:
            machine = end.verifier
        take = machine.handle_input

        def count_and_take(item: Input, now: float) -> list[Action]:
            if isinstance(item, Message):
                self.heard[name][messages.encode(item)] += 1
            return take(item, now)

        machine.handle_input = count_and_take  # type: ignore[method-assign]
        end.loop.start()

    # ------------------------------------------------------------------ the router's part

    def _take(self, event: NodeEvent) -> None:
        if isinstance(event, PeerReport):
            self.reports.append(event)
        elif isinstance(event, tuple):
            for delta in event:
                request = self.open.get(delta.request_id)
                if request is None:
                    continue
                if delta.error is not None:
                    self._end(delta.request_id, "failed")
                    continue
                for offset, token_id in enumerate(delta.token_ids):
                    request.tokens[delta.output_index + offset] = token_id
                if len(request.tokens) == OUTPUT_TOKENS:
                    tokens = [request.tokens[i] for i in range(OUTPUT_TOKENS)]
                    is_right = tokens == self.expected[request.prompt]
                    self._end(delta.request_id, "right" if is_right else "wrong")

    def _place(self, number: int) -> None:
        prompt = number % NUM_PROMPTS
        request_id = f"r{number}"
        self.open[request_id] = Open(prompt)
        common: dict[str, Any] = {
            "request_id": request_id,
            "epoch": 1,
            "prompt_token_ids": self.prompts[prompt],
            "sampling_params": PARAMS,
            "timeout_s": 20.0,
        }
        self.d.submit(DecodeCommand(**common, prefill_engine_id=P))
        self.p.submit(PrefillCommand(**common, decode_engine_id=D))

    def _end(self, request_id: str, how: str) -> None:
        request = self.open.pop(request_id)
        self.ended[how] += 1
        if any(request.tokens[i] != self.expected[request.prompt][i] for i in request.tokens):
            self.ended["with a wrong token"] += 1
        if how != "right":
            for node in (self.p, self.d):
                node.submit(CancelCommand(request_id, 1))

    def _step(self) -> None:
        self.p.step()
        self.d.step()

    def _until(self, condition: Callable[[], bool]) -> None:
        until = time.monotonic() + 60
        while not condition():
            if time.monotonic() > until:
                raise SystemExit("the nodes do not get on")
            self._step()

    # ------------------------------------------------------------------ the attack

    def before_it_is_heard(self, payload: bytes) -> None:
        """Attack from the decode node's I/O thread, before it handles an arrived message."""
        if not self.is_attacking or len(payload) < HEADER_BYTES:
            return
        try:
            message = peek(payload)
        except Exception:  # an attacker's message may be undecodable
            return
        if isinstance(message, messages.Digests | messages.Commit) and message.engine_id == P:
            self._spoil(message)

    def _spoil(self, message: Digests | messages.Commit) -> None:
        if self._too_late or self.draw.random() >= CHANCES["write"]:
            return
        key = (message.request_id, message.epoch)
        reservation = self.d.reservations._open.get(key)
        if reservation is None or not reservation.block_ids:
            return
        indices: Sequence[int] = range(len(reservation.block_ids))
        layers = (0, self._num_layers)
        if isinstance(message, Digests):
            first = num_prompt_blocks(self.d.engine) - len(reservation.block_ids)
            indices = [i - first for i in message.indices if i >= first]
            layers = message.layers or layers  # the other layers may be checked already
        elif self.receiver.verifier is not None:
            return
        for index in self.draw.sample(list(indices), min(WRITES_PER_DIGESTS, len(indices))):
            self.attacker.write(reservation.block_ids[index], layers)
            self.attacks["write before it is checked"] += 1

    def _write_too_late(self) -> None:
        """Write into blocks after their check, right before decode steps read them."""
        commit = self.d.engine.commit

        def write_and_commit(request_id: str, token_id: int) -> None:
            block_ids = self.d.engine.requests[request_id].block_ids
            for block_id in block_ids[:WRITES_PER_DIGESTS]:
                self.attacker.write(block_id, (0, self._num_layers))
                self.attacks["write after it was checked"] += 1
            commit(request_id, token_id)

        mock.patch.object(self.d.engine, "commit", write_and_commit).start()

    def _attack(self) -> None:
        kind = self.draw.choice(KINDS)
        source, target, payload = self.draw.choice(self.seen)
        name, victim = source, target
        if kind == "forged":
            payload = self.draw.randbytes(HEADER_BYTES) + messages.encode(self._lie(source))
        elif kind == "reflected":
            name, victim = target, source
        elif kind == "cut":
            payload = payload[: self.draw.randrange(len(payload))]
        elif kind == "altered":
            changed = bytearray(payload)
            changed[self.draw.randrange(len(changed))] ^= 1 << self.draw.randrange(8)
            payload = bytes(changed)
        elif kind == "of another life":
            payload = self._other_life(source, target).seal(messages.encode(self._lie(source)))
        elif kind == "junk":
            payload = self.draw.randbytes(self.draw.randrange(2000))
        elif all(payload != old for _, _, old in self.withheld):
            kind = "replayed"
        else:
            kind = "late"
        if self.draw.random() < 0.05 and not isinstance(self.attacker, MemoryAttacker):
            name = "stranger"
        self.attacker.say(name, victim, payload)
        self.attacks[kind] += 1

    def _lie(self, source: str) -> Message:
        """Make a message that would do great harm if a node accepted it."""
        request_id = self.draw.choice([*self.open, "r0"])
        about: dict[str, Any] = {"engine_id": source, "request_id": request_id, "epoch": 1}
        if source == D:
            blocks = self.draw.sample(range(1, 190), num_prompt_blocks(self.d.engine))
            lies: list[Message] = [
                messages.Grant(**about, block_ids=blocks),
                messages.Cancel(**about),
                messages.Verified(**about),
            ]
        else:
            lies = [
                messages.Quiet(**about, reason=""),
                messages.Quiet(**about, reason="forged"),
                messages.Watermark(**about, num_tokens=PROMPT_TOKENS - 1, num_blocks=3),
                messages.Commit(
                    **about,
                    record=HandoffRecord(
                        num_tokens=PROMPT_TOKENS, token_id=self.draw.randrange(4000)
                    ),
                    num_bytes=1,
                    num_blocks=1,
                    transport="",
                    exposed_transfer_s=0.0,
                ),
            ]
        return self.draw.choice(lies)

    def _other_life(self, source: str, target: str) -> Channel:
        """Return a channel with the keys of another start of the process ``source``."""
        channels = Channels(source)
        infos = {P: self.sender.peer_info, D: self.receiver.peer_info}
        channels.learn(infos[target])
        return channels[target]

    def _deliver_late(self) -> None:
        with self.lock:
            self.draw.shuffle(self.withheld)
            late, self.withheld = self.withheld[:5], self.withheld[5:]
        for source, target, payload in late:
            self.attacker.say(source, target, payload)
            self.attacks["late"] += 1

    def _write_to_quarantine(self) -> None:
        for held in list(self.d.reservations.quarantine._held.values()):
            for block_id in held.block_ids[:2]:
                self.attacker.write(block_id, (0, self._num_layers))
                self.attacks["write after a cancel"] += 1

    def run(self, num_attacks: int) -> dict[str, Any]:
        """Serve requests under attack, and then without; return what has gone wrong."""
        self.is_attacking = True
        if self._too_late:
            self._write_too_late()
        number = 0
        while self.attacks.total() < num_attacks:
            while len(self.open) < NUM_OPEN:
                self._place(number)
                number += 1
            self._step()
            for _ in range(10):
                self._attack()
            self._deliver_late()
            if self.open and self.draw.random() < CHANCES["cancel"]:
                request_id = self.draw.choice(list(self.open))
                self.d.submit(CancelCommand(request_id, 1))
                self.d.step()
                self._write_to_quarantine()
                if request_id in self.open:
                    self._end(request_id, "cancelled")
        self.is_attacking = False
        until = time.monotonic() + 60
        while (self.open or self.d.reservations.has_open or self.sender.machine.transfers) and (
            time.monotonic() < until
        ):
            self._step()
        believed = {name: self.heard[name] - self.said[P if name == D else D] for name in (P, D)}
        kinds = Counter(
            type(messages.decode(body)).__name__
            for counter in believed.values()
            for body in counter.elements()
        )
        refused = Counter(self.sender.metrics().refused_messages)
        refused.update(self.receiver.metrics().refused_messages)
        ledger = self.d.ledger()
        return {
            "attacks": dict(self.attacks),
            "num_attacks": self.attacks.total(),
            "requests": dict(self.ended),
            "believed_messages_that_nobody_said": dict(kinds),
            "requests_with_wrong_tokens": self.ended["with a wrong token"],
            "refused_messages": dict(refused),
            "blocks_found_wrong": self.receiver.metrics().wrong_blocks,
            "blocks_not_free_at_the_end": self.d.engine.num_blocks
            - self.d.engine.block_pool.num_free,
            "orphans_or_overdrawn": len(ledger.orphans) + len(ledger.overdrawn),
            "io_threads_that_died": len(self.deaths),
        }


def num_prompt_blocks(engine: Engine) -> int:
    """Return the number of a prompt's blocks."""
    return -(-PROMPT_TOKENS // engine.kv_memory.spec.block_size)


def _nothing() -> None:
    pass


def open_unchecked(channel: Channel, payload: bytes) -> bytes:
    """Open a message without checking its MAC; a mistake that the attack must find."""
    return payload[HEADER_BYTES:]


SCENES = {
    "nixl": ("nixl", "all"),
    "in_memory": ("in_memory", "all"),
    "control: messages unchecked": ("in_memory", "digests"),
    "control: blocks unchecked": ("nixl", "seals"),
    "what remains: nixl, writes after the check": ("nixl", "too late"),
}


def run_scene(name: str, num_attacks: int) -> dict[str, Any]:
    """Run one scene in its own process, because the attack may end the process."""
    started, code, found = time.perf_counter(), 0, dict[str, Any]()
    try:
        words = call_words("benchmarks.security.forged_kv:attack_in", name, num_attacks)
        found = answer_of(words, SCENE_LIMIT_S)
    except subprocess.CalledProcessError as error:
        code = error.returncode
        print(error.stderr[-2000:], file=sys.stderr)
    return {"exit_code": code, "seconds": round(time.perf_counter() - started, 1), **found}


def attack_in(name: str, num_attacks: str) -> None:
    """Run one scene in this process; print its results as JSON."""
    connector, checks = SCENES[name]
    opened = Channel.open if checks != "digests" else open_unchecked
    with mock.patch.object(Channel, "open", opened):
        scene = Scene(
            connector, has_digests=checks != "seals", too_late=checks == "too late", seed=1
        )
        print(json.dumps(scene.run(int(num_attacks))), flush=True)
    os._exit(0)  # ends the process without shutting down the NIXL agents


def run(run: Run, attacks: int = 10_000) -> Document:
    """Attack every scene, each in its own process.

    Args:
        attacks: number of attacks per scene; controls get a tenth.
    """
    results = {}
    for name in SCENES:
        fewer = 1 if name in ("nixl", "in_memory") else 10
        results[name] = run_scene(name, attacks // fewer)
    run.show("scene", results)
    return results
