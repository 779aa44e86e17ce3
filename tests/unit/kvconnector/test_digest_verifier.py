"""Unit tests of DigestVerifier: whose messages change a transfer, and what a repeat costs."""

from __future__ import annotations

from collections.abc import Sequence

from baton.kv.block_key import BlockKey
from kvconnector.base import HandoffRecord, KVReservation
from kvconnector.blocks import Slices
from kvconnector.protocol.actions import Action, Input, Send
from kvconnector.protocol.digests import DigestVerifier, Written
from kvconnector.protocol.messages import REPEAT_S, Commit, Quiet, Resend
from kvconnector.protocol.seals import Channels
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
