"""Unit tests of DigestVerifier: whose messages change a transfer, and what a repeat costs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch

from baton.kv.block_key import DIGEST_BYTES, BlockKey
from baton.limits import NUM_LAYER_GROUPS
from kvconnector.base import HandoffRecord, KVReservation
from kvconnector.block_digests import BlockDigests
from kvconnector.blocks import LayerRange, Slices, layer_groups
from kvconnector.protocol.actions import Action, Input, Send
from kvconnector.protocol.digests import MAX_RANGES_PER_BLOCK, DigestVerifier, Written
from kvconnector.protocol.messages import Commit, Digests, Quiet, Resend
from kvconnector.protocol.repeats import REPEAT_S
from kvconnector.protocol.seals import Channels
from kvconnector.protocol.transfer import MAX_ATTEMPTS
from tests.fakes.handoff.kv_memories import memory_of
from tests.fakes.handoff.peer_infos import peer_info
from tests.fakes.time.line_counts import count_lines

NUM_LAYERS = 32


class NoMemory:
    """Blocks without contents; no test here compares them."""

    num_layers = NUM_LAYERS

    def of(
        self,
        block_ids: Sequence[int],
        written: Written,
        key: BlockKey,
        slices: Slices | None = None,
        *,
        writes: bool = True,
    ) -> bytes:
        raise NotImplementedError


class Listed:
    """A state machine that keeps its inputs."""

    def __init__(self) -> None:
        self.inputs: list[Input] = []

    def handle_input(self, item: Input, now: float) -> list[Action]:
        del now
        self.inputs.append(item)
        return []

    def tick(self, now: float) -> list[Action]:
        del now
        return []


def granted(machine: Listed, num_blocks: int) -> DigestVerifier:
    """Return a verifier with one open transfer, request ``r`` from prefill node ``p``."""
    verifier = DigestVerifier(machine, NoMemory(), "d", Channels("d"))
    blocks = tuple(range(num_blocks))
    verifier.handle_input(
        KVReservation(request_id="r", epoch=0, engine_id="p", block_ids=blocks), 0.0
    )
    machine.inputs.clear()
    return verifier


def commit_of(num_blocks: int) -> Commit:
    return Commit(
        engine_id="p",
        request_id="r",
        epoch=0,
        record=HandoffRecord(num_tokens=16 * num_blocks, token_id=0),
        num_bytes=0,
        num_blocks=num_blocks,
        transport="",
        exposed_transfer_s=0.0,
    )


def test_work_for_a_repeated_commit_grows_in_proportion_to_its_blocks() -> None:
    """Regression: 8,192 blocks took 5 s of the KV I/O thread, and all leases of peers ended."""

    def work(num_blocks: int, repeats: int = 3) -> int:
        verifier, commit = granted(Listed(), num_blocks), commit_of(num_blocks)
        return count_lines(
            lambda: [verifier.handle_input(commit, REPEAT_S * turn) for turn in range(repeats)]
        )

    assert work(800) < 9 * work(100)


def test_each_repeat_requests_all_unverified_blocks_with_the_next_attempt() -> None:
    machine = Listed()
    verifier, commit = granted(machine, 700), commit_of(700)
    assert verifier.handle_input(commit, 0.0) == []
    for attempt in (1, 2):
        actions = verifier.handle_input(commit, REPEAT_S * attempt)
        asked = [action.message for action in actions if isinstance(action, Send)]
        assert all(isinstance(message, Resend) for message in asked)
        resends = [message for message in asked if isinstance(message, Resend)]
        assert [index for resend in resends for index in resend.indices] == list(range(700))
        assert {(resend.layers, resend.attempt) for resend in resends} == {
            ((0, NUM_LAYERS), attempt)
        }
    assert machine.inputs == []


def test_a_quiet_of_another_peer_ends_no_transfer() -> None:
    """Regression: the sender's Commit was confirmed, but never reached the state machine."""
    machine = Listed()
    verifier = granted(machine, 2)
    quiet = Quiet(engine_id="stranger", request_id="r", epoch=0, reason="")
    verifier.handle_input(quiet, 0.0)
    assert len(verifier) == 1
    assert verifier.handle_input(commit_of(2), 0.0) == []  # not Verified: no digest has come
    assert machine.inputs == [quiet]
    verifier.handle_input(Quiet(engine_id="p", request_id="r", epoch=0, reason=""), 0.0)
    assert len(verifier) == 0


class Checked:
    """A verifier over real memory with one open transfer, request ``r`` from prefill node ``p``."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.machine = Listed()
        self.memory = BlockDigests(memory_of(torch.rand(num_blocks, NUM_LAYERS, 2, 1, 1, 4)))
        channels, theirs = Channels("d"), Channels("p")
        channels.learn(peer_info("p", public_key=theirs.public_key))
        theirs.learn(peer_info("d", public_key=channels.public_key))
        self._key = theirs["d"].keys.send_blocks
        self.verifier = DigestVerifier(self.machine, self.memory, "d", channels)
        blocks = tuple(range(num_blocks))
        self.verifier.handle_input(
            KVReservation(request_id="r", epoch=0, engine_id="p", block_ids=blocks), 0.0
        )
        self.machine.inputs.clear()
        self._number = 0

    def tell(self, layers: LayerRange, attempt: int = 0, *, is_right: bool = False) -> list[Resend]:
        """Let the prefill node send digests of all blocks; return the requests to write again."""
        indices = list(range(self.num_blocks))
        numbers = [self._number + index for index in indices]
        digests = bytes(DIGEST_BYTES * self.num_blocks)
        if is_right:
            written = Written("r", 0, indices, layers, attempt, numbers, "d")
            digests = self.memory.of(indices, written, self._key)
        message = Digests(
            engine_id="p",
            request_id="r",
            epoch=0,
            indices=indices,
            digests=digests,
            layers=layers,
            attempt=attempt,
            first_number=self._number,
        )
        self._number += self.num_blocks
        actions = self.verifier.handle_input(message, 0.0)
        said = [action.message for action in actions if isinstance(action, Send)]
        return [message for message in said if isinstance(message, Resend)]

    @property
    def num_noted(self) -> int:
        """Return the number of blocks' ranges that the verifier keeps for the transfer."""
        arrival = self.verifier._arrivals["r", 0]
        return len(arrival.attempts) + len(arrival.missing)


ALL_RANGES = list(itertools.combinations(range(NUM_LAYERS + 1), 2))


def test_memory_for_wrong_blocks_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    """Regression: each of 528 ranges of 32 layers added an entry for each granted block."""
    checked = Checked(num_blocks=4)
    for layers in ALL_RANGES:
        checked.tell(layers)
    assert checked.num_noted <= 2 * checked.num_blocks * MAX_RANGES_PER_BLOCK
    warnings = [r.message for r in caplog.records if "ranges of layers" in r.message]
    assert warnings == [
        "request r: prefill node p sent digests of more than "
        f"{MAX_RANGES_PER_BLOCK} wrong ranges of layers per block; dropped the others"
    ]


def test_memory_for_blocks_that_are_requested_again_is_bounded() -> None:
    """A sender may verify every second layer, and so divide the others into many ranges."""
    checked = Checked(num_blocks=4)
    for first in range(0, NUM_LAYERS, 2):
        assert checked.tell((first, first + 1), is_right=True) == []
    for turn in range(3):
        checked.verifier.handle_input(commit_of(4), REPEAT_S * turn)
    assert checked.num_noted <= 2 * checked.num_blocks * MAX_RANGES_PER_BLOCK


def test_digests_after_the_last_attempt_are_not_compared() -> None:
    """Regression: a sender could let this node compute digests of the same blocks for ever."""
    checked = Checked(num_blocks=2)
    for attempt in range(MAX_ATTEMPTS + 1):
        assert [r.attempt for r in checked.tell((0, 4), attempt)] == [attempt + 1]
    # A correct sender has failed the transfer by now
    assert checked.tell((0, 4), MAX_ATTEMPTS + 1) == []


def test_a_sender_whose_blocks_are_all_wrong_at_first_can_still_commit() -> None:
    checked = Checked(num_blocks=4)
    groups = layer_groups(NUM_LAYERS, NUM_LAYER_GROUPS)
    for attempt in range(MAX_ATTEMPTS):
        for layers in groups:
            assert checked.tell(layers, attempt) != []
    assert checked.verifier.handle_input(commit_of(4), 0.0) == []
    for layers in groups:
        assert checked.tell(layers, MAX_ATTEMPTS, is_right=True) == []
    assert commit_of(4) in checked.machine.inputs
