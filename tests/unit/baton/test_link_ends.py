"""Unit tests of both ends of a link, without a stream between them."""

from __future__ import annotations

import dataclasses

import pytest

from baton.api.errors import ConfigError
from baton.api.outputs import FinishReason, RequestDelta
from baton.api.sampling_params import SamplingParams
from baton.link import wire
from baton.link.beat_pace import INTERVALS_AT_REST, MAX_INTERVALS_AT_REST
from baton.link.node_end import MAX_MISSED_BEATS, NodeEnd, merge_steps
from baton.link.router_end import read_event, registered, write_command
from baton.link.words import (
    AbortAll,
    CancelCommand,
    DecodeCommand,
    NodeBeat,
    NodeEvent,
    NodeRole,
    RouterBeat,
    StepDeltas,
)
from baton.v1 import node_pb2
from tests.fakes.router.nodes import PREFILL_RECEIPT, make_registration

COMMAND = DecodeCommand(
    request_id="a",
    epoch=7,
    prompt_token_ids=[1, 2],
    sampling_params=SamplingParams(max_tokens=3),
    prefill_engine_id="p",
    timeout_s=1.0,
)


def joined(role: NodeRole = NodeRole.DECODE) -> NodeEnd:
    end = NodeEnd(make_registration("d", role))
    end.take_first(registered("", "r1"))
    return end


def sent(command: object) -> node_pb2.RouterMessage:
    message = write_command(command, "d")  # type: ignore[arg-type]  # some are of no known kind
    assert isinstance(message, node_pb2.RouterMessage)
    return message


def test_a_node_joins_under_a_key_that_each_router_has_for_itself() -> None:
    end = joined()
    assert (end.joined, end.router_id, end.obstacle) == (True, "r1", "")
    other = NodeEnd(make_registration("d", NodeRole.DECODE))
    keys = {one.register().register.process_key for one in (end, end, other)}
    assert len(keys) == 2
    assert all(len(key) == 16 for key in keys)


def test_who_may_come_back_has_an_obstacle_and_who_may_not_an_error() -> None:
    end = NodeEnd(make_registration("d", NodeRole.DECODE))
    end.take_first(registered("d lives", may_retry=True))
    assert (end.joined, end.obstacle) == (False, "d lives")
    assert end.leave() is None
    end.take_first(registered("", "r1"))
    assert (end.joined, end.obstacle) == (True, "")
    with pytest.raises(ConfigError, match=r"^the router refused this node: another model$"):
        end.take_first(registered("another model"))


def test_requests_have_the_routers_names_between_the_ends_and_both_names_behind_one() -> None:
    end = joined()
    command = end.take(sent(COMMAND))
    assert isinstance(command, DecodeCommand)
    assert command.request_id == "a~r1"
    assert end.take(sent(CancelCommand("a", 7))) == CancelCommand("a~r1", 7)
    delta = RequestDelta("a~r1", 0, (5, 6), FinishReason.STOP, epoch=7)
    (message,) = end.say((delta,), now=0.0)
    event, problem = read_event(message)
    assert problem == ""
    assert isinstance(event, StepDeltas)
    assert [(d.request_id, d.token_ids) for d in event.deltas] == [("a", (5, 6))]


def test_a_command_that_makes_no_sense_is_answered_with_its_requests_error() -> None:
    end = joined()
    message = wire.command_to_proto(COMMAND)
    message.decode.sampling_params.temperature = -1
    (answer,) = end.take(message)  # type: ignore[misc]  # deltas
    assert isinstance(answer, RequestDelta)
    assert (answer.request_id, answer.epoch) == ("a~r1", 7)
    assert answer.error is not None
    assert answer.error.code == "INVALID_ARGUMENT"


def test_a_prefill_node_says_how_long_it_had_token_1() -> None:
    delta = RequestDelta("a~r1", 0, (5,), epoch=7, prefill=PREFILL_RECEIPT, sampled_at=10.0)
    (message,) = joined(NodeRole.PREFILL).say((delta,), now=10.25)
    event, _ = read_event(message)
    assert isinstance(event, StepDeltas)
    assert event.deltas[0].prefill == dataclasses.replace(PREFILL_RECEIPT, send_s=0.25)
    assert event.deltas[0].sampled_at == 0.0  # a moment by another machine's clock says nothing


def test_what_cannot_be_sent_ends_its_request_and_nothing_else() -> None:
    told = write_command(dataclasses.replace(COMMAND, prompt_token_ids=[-1]), "d")
    assert isinstance(told, RequestDelta)
    assert (told.request_id, told.epoch) == ("a", 7)
    assert write_command(CancelCommand("a", 2**40), "d") is None
    assert joined().say((RequestDelta("a~r1", 0, (-1,), epoch=7),), now=0.0) == []


def test_a_router_is_silent_after_so_many_beats_and_any_word_counts() -> None:
    end = joined()
    for _ in range(MAX_MISSED_BEATS):
        assert not end.miss_beat()
    assert end.take(sent(RouterBeat())) is None
    assert [end.miss_beat() for _ in range(MAX_MISSED_BEATS + 1)] == [False] * MAX_MISSED_BEATS + [
        True
    ]


def test_a_node_at_rest_counts_two_intervals_per_beat_until_an_answer_is_late() -> None:
    end = joined()
    for _ in range(10):
        assert not end.miss_beat(INTERVALS_AT_REST)
        assert not end.awaits_answer
        assert end.take(sent(RouterBeat())) is None
    found = []
    num_intervals = INTERVALS_AT_REST
    while not end.miss_beat(num_intervals):
        num_intervals = 1 if end.awaits_answer else INTERVALS_AT_REST
        found.append(num_intervals)
    # The router last spoke at the beat before; the node leaves it after eight intervals, 2 s
    assert found == [2, 1, 1, 1, 1]


def test_a_router_with_many_nodes_asks_for_fewer_beats_at_rest() -> None:
    end = NodeEnd(make_registration("d", NodeRole.DECODE))
    end.take_first(registered("", "r1", intervals_at_rest=3))
    assert end.intervals_at_rest == 3
    assert end.take(sent(RouterBeat(2**20))) is None
    assert end.intervals_at_rest == MAX_INTERVALS_AT_REST
    found: list[int] = []
    while not end.miss_beat(found[-1] if found else MAX_INTERVALS_AT_REST):
        found.append(1 if end.awaits_answer else MAX_INTERVALS_AT_REST)
    assert found == [4, *[1] * 6]  # the node leaves the router after 3.5 s
    end.take_first(registered("", "r2"))  # a router of a release without the field
    assert end.intervals_at_rest == INTERVALS_AT_REST


def test_a_broken_link_ends_what_its_router_had_placed_once() -> None:
    end = joined()
    assert end.leave() == AbortAll("the link to the router broke", "r1")
    assert end.leave() is None
    assert not end.joined
    end.take_first(registered("", "r2"))  # a router of another process start
    assert end.leave() == AbortAll("the link to the router broke", "r2")


def test_steps_that_wait_become_one_message_and_keep_their_order() -> None:
    plain = [(RequestDelta("a", index, (7,), epoch=1),) for index in range(4)]
    last = (RequestDelta("a", 4, (8,), FinishReason.LENGTH, epoch=1),)
    beat = NodeBeat()
    events: list[NodeEvent] = [plain[0], plain[1], last, plain[2], beat, plain[3]]
    merged = merge_steps(events)
    assert merged == [(*plain[0], *plain[1], *last), plain[2], beat, plain[3]]
    assert merge_steps([beat]) == [beat]
