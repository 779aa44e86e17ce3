"""Unit tests of the cost policy: each term decides if all other terms are equal."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping
from pathlib import Path

import pytest

from baton.link.words import NodeBeat, StepTime
from router.calls.decisions import DecisionLog
from router.fleet.fleet import Fleet
from router.fleet.load.node_load import NodeLoad
from router.policies.base import Candidate, RouteQuery
from router.policies.cost import Cost
from router.policies.cost_terms import CostTerms
from tests.fakes.router.fleets import FleetBook, names

DOCS = Path(__file__).parents[4] / "docs" / "routing.md"


def query_of(
    num_tokens: int = 4000, cached: Mapping[str, int] | None = None, now: float = 0.0
) -> RouteQuery:
    return RouteQuery(
        num_prompt_tokens=num_tokens,
        max_tokens=200,
        now=now,
        find_cached_tokens=lambda: cached or {},
    )


def test_what_a_decode_node_can_fetch_counts_only_if_it_computes_the_prompt() -> None:
    """In a pair, the prefill node sends all KV that the decode node's cache lacks."""
    book = FleetBook(1, 1)
    terms = CostTerms.of(query_of(4000, {"d0-0": 1000}), book.fleet())
    assert terms.num_missing(book["d0"]) == terms.num_missing(book["d0"], is_alone=True) == 3000
    query = dataclasses.replace(
        query_of(4000, {"d0-0": 1000}), find_cached_alone=lambda: {"d0-0": 3500}
    )
    terms = CostTerms.of(query, book.fleet())
    assert terms.num_missing(book["d0"]) == 3000
    assert terms.num_missing(book["d0"], is_alone=True) == 500


def open_prompt(load: NodeLoad, num_tokens: int) -> None:
    load.note_opened(num_tokens, num_uncomputed=num_tokens)


def test_a_hit_is_worth_waiting_for_as_long_as_it_saves_and_no_longer() -> None:
    book = FleetBook(2, 1)
    query = query_of(4000, {"p1-0": 3200})
    assert names(Cost().pick(query, book.fleet()))[0] == "p1"
    open_prompt(book["p1"], 2000)
    assert names(Cost().pick(query, book.fleet()))[0] == "p1"
    open_prompt(book["p1"], 12_000)
    assert names(Cost().pick(query, book.fleet()))[0] == "p0"


def test_the_busier_the_fleet_the_longer_a_hit_is_worth_waiting_for() -> None:
    """Tokens that are computed again delay all later requests."""
    book = FleetBook(3, 1)
    query = query_of(4000, {"p1-0": 3200})
    open_prompt(book["p1"], 6000)
    assert names(Cost().pick(query, book.fleet()))[0] != "p1"
    for _ in range(3):
        for name in ("p0", "p2"):
            open_prompt(book[name], 10)
    assert names(Cost().pick(query, book.fleet()))[0] == "p1"


def test_of_a_prompt_that_is_nearly_computed_little_is_left_to_wait_for() -> None:
    book = FleetBook(2, 1)
    open_prompt(book["p0"], 8000)
    open_prompt(book["p1"], 4000)
    assert names(Cost().pick(query_of(), book.fleet()))[0] == "p1"
    book["p1"].prefill_progress_at = 10.0  # it has just begun, p0 a while ago
    late = query_of(now=10.0)
    assert names(Cost().pick(late, book.fleet()))[0] == "p0"


def test_the_decode_node_with_less_context_and_fewer_requests_is_taken() -> None:
    book = FleetBook(1, 2)
    book["d0"].note_opened(5200, num_arriving=5000)
    assert names(Cost().pick(query_of(), book.fleet()))[1] == "d1"
    for _ in range(40):
        book["d1"].note_opened(300, num_arriving=100)
    assert names(Cost().pick(query_of(), book.fleet()))[1] == "d0"


def test_a_decode_node_without_room_is_left_alone_unless_room_comes_before_the_prompt() -> None:
    book = FleetBook(1, 2)
    book["d0"].note_beat(NodeBeat(num_running=1, num_free_blocks=10))
    book["d1"].note_beat(NodeBeat(num_running=3, num_free_blocks=19_000))
    assert names(Cost().pick(query_of(), book.fleet()))[1] == "d1"
    for _ in range(30):
        open_prompt(book["p0"], 16_000)  # the prompt comes much later
    place = Cost().explain(query_of(), book.fleet())
    exposed = {c.decode: c.terms["exposed_transfer_ms"] for c in place}
    assert exposed["d0"] < 100


def test_a_link_that_is_too_slow_to_hide_behind_computing_costs_what_shows() -> None:
    book = FleetBook(1, 2)
    book.reach["p0-0"] = {"d0-0": 1e8, "d1-0": 4e10}
    assert names(Cost().pick(query_of(), book.fleet()))[1] == "d1"
    costs = {c.decode: c for c in Cost().explain(query_of(), book.fleet())}
    expected_ms = 4000 * 131_072 / 1e8 * 1e3
    slow = costs["d0"].terms
    assert slow["exposed_transfer_ms"] + slow["prefill_ms"] == pytest.approx(expected_ms, rel=0.01)


def test_pairs_are_weighed_together_and_not_each_role_for_itself() -> None:
    """The best prefill node has a slow link to the best decode node."""
    book = FleetBook(2, 2)
    book.reach = {"p0-0": {"d0-0": 1e8, "d1-0": 4e10}, "p1-0": {"d0-0": 4e10, "d1-0": 4e10}}
    open_prompt(book["p1"], 300)
    book["d1"].note_opened(1200, num_arriving=1000)
    best = Cost().explain(query_of(), book.fleet())[0]
    assert names(Cost().pick(query_of(), book.fleet())) == (best.prefill, best.decode)
    assert (best.prefill, best.decode) != ("p0", "d0")


def test_local_only_where_it_is_clearly_better() -> None:
    book = FleetBook(1, 1)
    fleet = book.fleet(may_self_prefill=True)
    assert names(Cost().pick(query_of(), fleet)) == ("p0", "d0")
    for _ in range(4):
        open_prompt(book["p0"], 8000)
    assert names(Cost().pick(query_of(), fleet)) == ("", "d0")
    for _ in range(20):
        book["d0"].note_opened(400, num_arriving=100)
    assert names(Cost().pick(query_of(), fleet)) == ("", "d0")  # one prompt delays them little
    for _ in range(3):  # prompts took a fifth of the time of the answers
        book["d0"].note_closed(book["d0"].note_opened(4000, num_uncomputed=4000))
    assert names(Cost().pick(query_of(), fleet)) == ("p0", "d0")


CPU = (StepTime(1, 0.009), StepTime(512, 0.405))


def test_a_turn_goes_to_the_decode_node_that_has_the_answers_beside_running_decodes() -> None:
    """Each turn has 100 new tokens, and the prefill node lacks the 160 tokens of an answer."""
    book = FleetBook(1, 1, CPU)
    fleet = book.fleet(may_self_prefill=True)
    turn = query_of(900, {"p0-0": 635, "d0-0": 795})
    for _ in range(5):
        book["d0"].note_opened(1000, num_arriving=800)
    assert names(Cost().pick(turn, fleet)) == ("", "d0")
    assert names(Cost().pick(query_of(900), fleet)) == ("p0", "d0")  # a long prompt
    for _ in range(12):  # more and more chats
        book["d0"].note_closed(book["d0"].note_opened(105, num_uncomputed=105))
    assert names(Cost().pick(turn, fleet)) == ("p0", "d0")
    book.now = 20.0
    turn = dataclasses.replace(turn, now=20.0)
    assert names(Cost().pick(turn, fleet)) == ("", "d0")


def test_a_prompt_delays_decodes_by_its_tokens_and_not_by_the_fixed_time_of_a_step() -> None:
    book = FleetBook(1, 1, CPU)
    for _ in range(4):
        book["d0"].note_opened(1000, num_arriving=800)
    line, residence_s = book["d0"].prefill, book.shared.residence_s
    delay_s = 200 * line.per_unit
    harm = (delay_s / residence_s / 0.2) ** 2
    for num_missing, expected_s in ((200, harm * delay_s * 4), (4000, 4000 * line.per_unit * 4)):
        query = query_of(4000, {"d0-0": 4000 - num_missing})
        places = Cost().explain(query, book.fleet(may_self_prefill=True))
        [alone] = [place for place in places if not place.prefill]
        assert alone.terms["stall_ms"] == pytest.approx(1e3 * expected_s)


def test_a_prompt_that_waits_for_another_prompt_on_d_is_no_lack_of_room() -> None:
    book = FleetBook(1, 1)
    d0 = book["d0"]
    accounts = [d0.note_opened(300, num_uncomputed=100, num_arriving=200) for _ in range(2)]
    d0.note_beat(NodeBeat(num_waiting=1, num_running=1, num_free_blocks=19_000))
    for account in accounts:
        d0.note_begun(account)
    places = Cost().explain(query_of(200), book.fleet(may_self_prefill=True))
    waits = ("local_queue_ms", "exposed_transfer_ms")
    assert max(place.terms.get(wait, 0.0) for place in places for wait in waits) < 10
    d0.note_beat(NodeBeat(num_waiting=1, num_running=1, num_free_blocks=19_000))
    places = Cost().explain(query_of(200), book.fleet(may_self_prefill=True))
    assert all(place.cost > 1e3 * book.shared.residence_s for place in places)


def test_an_idle_decode_node_gets_no_prompt_because_nobody_measured_it() -> None:
    """Both nodes serve a third slower than their profiles, and only the prefill node shows it."""
    book = FleetBook(1, 1, (StepTime(1, 0.01), StepTime(512, 0.4)))
    for _ in range(6):
        book["p0"].prefill.measure(1500, 1.3 * 1.18)
    for node in ("p0", "d0"):
        book[node].note_beat(NodeBeat(num_free_blocks=20_000))
    fleet = book.fleet(may_self_prefill=True)
    assert names(Cost().pick(query_of(1500), fleet)) == ("p0", "d0")


def test_who_leaves_room_to_others_waits_on_no_decode_node() -> None:
    """Prompts of a greedy tenant piled up there, as the gate looks at prefill nodes alone."""
    book = FleetBook(1, 1)
    fleet, query = (
        book.fleet(may_self_prefill=True),
        dataclasses.replace(query_of(), num_waiting=30),
    )
    greedy = dataclasses.replace(query, leaves_room=True)
    assert names(Cost().pick(greedy, fleet)) == ("", "d0")
    book["d0"].note_opened(4000, num_uncomputed=4000, num_arriving=4000)
    assert names(Cost().pick(query, fleet)) == ("", "d0")
    assert names(Cost().pick(greedy, fleet)) == ("p0", "d0")
    assert names(Cost().pick(greedy, FleetBook(0, 1).fleet(may_self_prefill=True))) == ("", "d0")


def test_local_where_the_decode_node_has_nearly_all_of_the_prompt() -> None:
    book = FleetBook(1, 2)
    query = query_of(8000, {"d1-0": 7900})
    assert names(Cost().pick(query, book.fleet(may_self_prefill=True))) == ("", "d1")
    assert names(Cost().pick(query, book.fleet()))[0] == "p0"


@pytest.mark.parametrize("num_tokens", [600, 2500, 13_000])
def test_a_conversation_stays_on_the_idle_decode_node_that_has_more_of_it(num_tokens: int) -> None:
    """The prefill node lacks the tokens that D computed itself, and D's answers."""
    book = FleetBook(1, 1)
    fleet = book.fleet(may_self_prefill=True)
    query = query_of(num_tokens, {"p0-0": num_tokens - 80, "d0-0": num_tokens - 40})
    assert names(Cost().pick(query, fleet)) == ("", "d0")
    for _ in range(3):
        book["d0"].note_opened(400, num_arriving=100)  # they would stand still
    assert names(Cost().pick(query, fleet)) == ("p0", "d0")


def test_it_agrees_with_looking_at_every_place() -> None:
    """Compare the policy's choice with the best of all places, within its tolerance."""
    draw = random.Random(3)
    for _ in range(60):
        book = FleetBook(draw.randint(1, 30), draw.randint(1, 30))
        for load in book.prefills:
            for _ in range(draw.randint(0, 3)):
                open_prompt(load, draw.randint(1, 6000))
            for engine_id in book.reach[load.engine_id]:
                book.reach[load.engine_id][engine_id] = draw.choice([2e9, 2e10, 4e10])
        for load in book.decodes:
            for _ in range(draw.randint(0, 10)):
                load.note_opened(1000, num_arriving=draw.randint(1, 2000))
        ids = [load.engine_id for load in (*book.prefills, *book.decodes)]
        cached = {i: draw.randint(1, 4000) for i in ids if draw.random() < 0.3}
        query, fleet = query_of(4000, cached), book.fleet(may_self_prefill=True)
        placement = Cost().pick(query, fleet)
        every = Cost().explain(query, fleet)
        assert len(every) == len(book.prefills) * len(book.decodes) + len(book.decodes)
        [chosen] = [c for c in every if (c.prefill, c.decode) == names(placement)]
        spare_ms = 2.0 + 0.02 * chosen.terms["prefill_ms"]
        assert chosen.cost <= every[0].cost + spare_ms


def test_decode_nodes_alone_may_be_others_than_those_that_prefill_nodes_reach() -> None:
    book = FleetBook(1, 10)
    reach = {"p0-0": {f"d{i}-0": 0.0 for i in range(5)}}
    fleet = Fleet(book.prefills, book.decodes, reach, self_prefilling=book.decodes[5:])
    for name in ("p0", "p0", "d4", "d5", "d6", "d7", "d8"):
        open_prompt(book[name], 20_000)
    assert names(Cost().pick(query_of(), fleet)) == ("", "d9")


def test_an_explanation_has_the_chosen_place_first_and_adds_up() -> None:
    book = FleetBook(3, 3)
    placement = Cost().pick(query_of(), book.fleet(may_self_prefill=True))
    assert placement is not None
    candidates = placement.explain()
    assert (candidates[0].prefill, candidates[0].decode) == names(placement)
    assert 2 <= len(candidates) <= 8
    for candidate in Cost().explain(query_of(), book.fleet(may_self_prefill=True)):
        assert candidate.cost == pytest.approx(sum(candidate.terms.values()))
        assert min(candidate.terms.values()) >= 0


def test_an_explanation_says_whose_speed_is_only_assumed() -> None:
    book = FleetBook(1, 2)
    book["p0"].prefill.measure(100, 0.1)
    book["d1"].step.measure(100, 0.1)
    assumed = {c.decode: c.assumed for c in Cost().explain(query_of(), book.fleet())}
    assert assumed == {"d0": ("d0",), "d1": ()}


def test_the_example_in_the_docs_is_right() -> None:
    book = FleetBook(2, 2)
    book.reach = {p: dict.fromkeys(reached, 20e9) for p, reached in book.reach.items()}
    open_prompt(book["p0"], 2000)
    for _ in range(10):
        book["d0"].note_opened(1200, num_arriving=1000)
    fleet = book.fleet(may_self_prefill=True)
    query = query_of(4000, {"p0-0": 3200, "d1-0": 1600})
    table = DOCS.read_text(encoding="utf-8").partition("| place |")[2]
    for candidate in Cost().explain(query, fleet):
        alone = f"{candidate.decode} alone"
        place = f"{candidate.prefill}, {candidate.decode}" if candidate.prefill else alone
        row = table.partition(f"| {place} | ")[2].partition("\n")[0]
        written = [float(cell.strip(" *|")) for cell in row.split("|") if cell.strip(" *|")]
        assert written[-1] == pytest.approx(candidate.cost, abs=0.6)
        assert written[:-1] == pytest.approx(list(candidate.terms.values()), abs=0.6)


def test_the_log_keeps_the_terms_as_they_were_and_the_last_requests_only() -> None:
    book, log = FleetBook(2, 2), DecisionLog(max_requests=2)
    placement = Cost().pick(query_of(), book.fleet())
    assert placement is not None
    log.note("a", query_of(), placement)
    before: list[Candidate] = list(log.get("a")[0].candidates)
    open_prompt(book["p0"], 100_000)
    log.note("a", query_of(), placement)  # another attempt
    decisions = log.get("a")
    assert len(decisions) == 2
    assert list(decisions[0].candidates) == before
    assert (decisions[0].prefill_node, decisions[0].decode_node) == names(placement)
    log.note("b", query_of(), placement)
    log.note("c", query_of(), placement)
    assert log.get("a") == []
    assert len(log.get("c")) == 1


def test_a_prompt_is_computed_on_d_only_if_all_there_keep_their_deadlines() -> None:
    book = FleetBook(1, 1)
    open_prompt(book["p0"], 20_000)
    query = query_of(4000)

    def prefill() -> str:
        return names(Cost().pick(query, book.fleet(may_self_prefill=True)))[0]

    assert prefill() == ""
    steps_s = 0.010
    promise = book["d0"].promises.open(finish_by=2.0, num_steps=1.5 / steps_s, arrives_at=0.0)
    assert prefill() == "p0"
    assert all(c.prefill for c in Cost().explain(query, book.fleet(may_self_prefill=True)))
    book["d0"].promises.close(promise)
    assert prefill() == ""
    query = dataclasses.replace(query, timeout_s=2.0)  # 0.4 s, and 200 steps of its own
    assert prefill() == "p0"


def test_where_no_prefill_node_is_deadlines_leave_no_choice() -> None:
    book = FleetBook(0, 1)
    book["d0"].promises.open(finish_by=0.5, num_steps=100, arrives_at=0.0)
    fleet = book.fleet(may_self_prefill=True)
    assert names(Cost().pick(query_of(4000), fleet)) == ("", "d0")


def test_those_that_wait_at_the_router_make_a_prompt_on_d_worth_while() -> None:
    book = FleetBook(2, 1)
    for _ in range(3):
        book["d0"].note_opened(220, num_arriving=200)
    fleet, query = book.fleet(may_self_prefill=True), query_of(4000)
    assert names(Cost().pick(query, fleet))[0] != ""
    assert names(Cost().pick(dataclasses.replace(query, num_waiting=20), fleet))[0] == ""
