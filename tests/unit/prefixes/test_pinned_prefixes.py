"""Pinned prefixes on a prefill node and a decode node with real engines and little memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest

from baton.api.sampling_params import SamplingParams
from baton.kv.pins import PinTerms, PrefixPin
from baton.link.words import RequestCommand, SessionHint
from tests.fakes.handoff.handoff_cluster import Cluster
from tests.property.test_handoff import assert_clean, make_cluster, prompt_of, reference_tokens

GREEDY = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
PINS = PinTerms(b"tenant", b"session", (PrefixPin(60.0),))


def place(
    cluster: Cluster, name: str, prompt: list[int], pins: PinTerms | None, *, alone: bool = False
) -> None:
    """Place a request with these pins, let it end, and check its tokens."""

    def pinned(submit: Callable[[Any], None]) -> Callable[[Any], None]:
        def with_pins(command: Any) -> None:
            is_request = isinstance(command, RequestCommand)
            submit(dataclasses.replace(command, pins=pins) if is_request else command)

        return with_pins

    p, d = cluster.p, cluster.d
    with patch.object(p, "submit", pinned(p.submit)), patch.object(d, "submit", pinned(d.submit)):
        cluster.place(name, 1, prompt, GREEDY, alone=alone)
    cluster.settle()
    attempt = cluster.attempts[name, 1]
    tokens = tuple(attempt.tokens[index] for index in sorted(attempt.tokens))
    assert tokens == reference_tokens(tuple(prompt), GREEDY)


def fill(cluster: Cluster, first: int, *, alone: bool) -> None:
    """Send prompts that together need more blocks than a node has."""
    for number in range(first, first + 6):
        place(cluster, f"f{number}", prompt_of(number, 15), None, alone=alone)


@pytest.mark.parametrize("alone", [False, True])
def test_a_session_finds_its_pinned_blocks_until_they_are_dropped(alone: bool) -> None:
    cluster = make_cluster(20, engine_options={"pin_share": 0.4})
    engines = [cluster.d.engine] if alone else [cluster.p.engine, cluster.d.engine]
    prompt = prompt_of(1, 12)
    place(cluster, "a", prompt, PINS, alone=alone)
    fill(cluster, 2, alone=alone)
    assert [engine.features.pins.counts.made > 0 for engine in engines] == [True] * len(engines)
    tokens = [*prompt, *reference_tokens(tuple(prompt), GREEDY)]
    place(cluster, "b", tokens, PINS, alone=alone)
    assert cluster.receipts["b"].num_cached_tokens == 12  # cached on D, even if P computes the rest
    assert cluster.receipts["b"].num_pinned_tokens == 16
    assert_clean(cluster)
    for node in (cluster.p, cluster.d):
        node.submit(SessionHint(PINS.owner, PINS.session))
    fill(cluster, 8, alone=alone)
    assert all(engine.features.pins.counts.open == 0 for engine in engines)
    place(cluster, "c", tokens, None, alone=alone)
    assert cluster.receipts["c"].num_cached_tokens < 12
    assert_clean(cluster)


def test_a_pin_of_another_owner_is_not_dropped_and_shares_are_equal() -> None:
    cluster = make_cluster(20, engine_options={"pin_share": 0.4})
    pins = cluster.d.engine.features.pins
    for number, owner in enumerate((b"a", b"b")):
        terms = PinTerms(owner, b"session", (PrefixPin(60.0),))
        place(cluster, owner.decode(), prompt_of(number, 15), terms, alone=True)
    pins.check()
    assert pins.drop_session(b"c", b"session") == 0
    assert pins.drop_session(b"a", b"other") == 0
    assert pins.drop_session(b"a", b"session") == 1
    assert pins.counts.open == 1
    pins.clear()
    pins.check()
