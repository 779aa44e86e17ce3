"""Unit tests of usage: the tokens charged to a tenant, and what a shared cache reveals."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from baton.access.identity import ANYBODY, Principal
from baton.api.outputs import PrefillReceipt, Receipt
from router.calls.call import Call, Terms
from router.fleet.prefix.placement_memory import PlacementMemory
from router.gate.ticket import Ticket
from router.intake.answers.usage import OwnPrompts, told
from router.intake.cache_salts import CacheSalts
from tests.fakes.router.nodes import DECODE_RECEIPT, make_receipt
from tests.fakes.router.router_scene import Scene
from tests.fakes.time.virtual_clock import VirtualClock

PROMPT = list(range(100))
PREFILL = PrefillReceipt(
    queue_s=0.0, prefill_s=0.1, num_chunks=2, num_computed_tokens=36, num_cached_tokens=64
)
DECODE = dataclasses.replace(DECODE_RECEIPT, num_cached_tokens=80, num_prompt_tokens_computed=0)
RECEIPT = make_receipt(num_prompt_tokens=100, num_output_tokens=7, prefill=PREFILL, decode=DECODE)


def call_of(tenant: str, group: str = "group", prompt: list[int] = PROMPT) -> Call:
    principal = Principal(name=tenant, tenant=tenant, cache_group=group)
    terms = Terms(received_at=0.0, principal=principal)
    return dataclasses.replace(Scene.make(), terms=terms, prompt_token_ids=prompt)


@pytest.mark.parametrize(
    ("changes", "used"),
    [
        ({}, 36 + 7),
        ({"prefill": None, "decode": None}, 50 + 7),  # nobody said what was computed: as expected
        ({"prefill": None, "decode": None, "num_attempts": 0}, 0),  # it never got to a node
        (
            {
                "prefill": None,
                "decode": dataclasses.replace(DECODE, num_prompt_tokens_computed=20),
            },
            20 + 7,
        ),
        # A second attempt computed the answer's beginning, too; that is not the client's.
        ({"prefill": dataclasses.replace(PREFILL, num_computed_tokens=105)}, 100 + 7),
    ],
)
def test_used_is_what_was_computed_of_the_prompt_and_what_was_sampled(
    changes: dict[str, object], used: int
) -> None:
    receipt = dataclasses.replace(RECEIPT, **changes)  # type: ignore[arg-type]
    ticket = Ticket(
        order=(0, 0),
        num_prompt_tokens=100,
        num_kv_tokens=107,
        num_uncached_tokens=50,
        arrived_at=0.0,
        expires_at=1.0,
    )
    ticket.note_cost(receipt)
    assert ticket.num_tokens_used == used


def test_who_shares_its_cache_with_nobody_is_told_everything() -> None:
    own = OwnPrompts(CacheSalts())
    for principal in (ANYBODY, Principal(name="a", tenant="a")):
        call = dataclasses.replace(call_of("a"), terms=Terms(received_at=0.0, principal=principal))
        assert own.num_tokens(call) is None
    assert told(RECEIPT, None) == RECEIPT


def test_in_a_group_only_what_one_sent_itself_is_ones_own() -> None:
    own = OwnPrompts(CacheSalts())
    own.note(call_of("victim"))
    assert own.num_tokens(call_of("attacker")) == 0
    own.note(call_of("attacker", prompt=[*PROMPT[:40], 7]))
    assert own.num_tokens(call_of("attacker")) == 32  # whole blocks
    assert own.num_tokens(call_of("victim")) == 96
    assert own.num_tokens(call_of("victim", group="another")) == 96


def test_what_was_sent_long_ago_is_forgotten() -> None:
    clock = VirtualClock()
    own = OwnPrompts(CacheSalts(), PlacementMemory(1000, 60.0, clock))
    own.note(call_of("a"))
    clock.advance(29)
    assert own.num_tokens(call_of("a")) == 96
    clock.advance(60)
    assert own.num_tokens(call_of("a")) == 0


@pytest.mark.parametrize("others", [0, 16, 64])
@pytest.mark.parametrize("num_own", [0, 16, 48])
def test_a_receipt_says_the_same_whatever_others_sent(others: int, num_own: int) -> None:
    """The nodes had ``max(num_own, others)`` tokens, each in another way; times aside, nothing of
    what the client is told depends on ``others``."""

    def fetch_of(num_cached: int) -> dict[str, Any]:
        return {"num_fetched_tokens": num_cached, "num_fetches_lost": 1, "fetch_wait_s": num_cached}

    def receipts(num_cached: int) -> list[Receipt]:
        prefill = dataclasses.replace(
            PREFILL,
            num_cached_tokens=num_cached,
            num_computed_tokens=100 - num_cached,
            num_chunks=1 + num_cached // 32,
            **fetch_of(num_cached),
        )
        push = dataclasses.replace(DECODE.push, num_bytes=1000 - num_cached, num_blocks=num_cached)
        decode = dataclasses.replace(
            DECODE, num_cached_tokens=num_cached, push=push, **fetch_of(num_cached)
        )
        alone = dataclasses.replace(decode, num_prompt_tokens_computed=100 - num_cached)
        return [
            dataclasses.replace(RECEIPT, prefill=prefill, decode=decode),
            dataclasses.replace(RECEIPT, prefill=prefill, decode=None),
            dataclasses.replace(RECEIPT, prefill=None, decode=alone),
        ]

    shown = [told(receipt, num_own) for receipt in receipts(max(num_own, others))]
    assert shown == [told(receipt, num_own) for receipt in receipts(num_own)]
    assert all(receipt.num_cached_tokens == num_own for receipt in shown)
