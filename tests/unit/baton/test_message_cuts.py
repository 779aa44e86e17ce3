"""Unit tests of the cuts between messages of a link, and of the bound on prompt logprobs."""

from __future__ import annotations

import pytest

from baton.api.errors import InvalidRequestError
from baton.api.prompt import MAX_PROMPT_LOGPROBS, check_prompt_logprobs
from baton.api.sampling_params import SamplingParams
from baton.link.message_cuts import (
    MAX_LINK_DELTAS,
    MAX_LINK_MESSAGE_BYTES,
    MAX_PARTS,
    MAX_READ_DELTAS,
    cut_message,
    parts_problem,
)
from baton.serving.rpc import MAX_CLIENT_MESSAGE_BYTES
from baton.v1 import node_pb2, types_pb2


def delta(epoch: int, num_logprobs: int, num_top: int = 0) -> node_pb2.RequestDelta:
    one = types_pb2.TokenLogprobs(
        logprob=-1.5, top_token_ids=[2**18] * num_top, top_logprobs=[-1.5] * num_top
    )
    return node_pb2.RequestDelta(
        request_id="r", epoch=epoch, token_ids=[1], prompt_logprobs=[one] * num_logprobs
    )


def test_a_step_is_cut_between_requests_and_a_request_that_is_too_long_ends() -> None:
    step = node_pb2.StepDeltas(
        epochs=[9], output_indexes=[4], token_ids=[7], deltas=[delta(i, 100) for i in range(9)]
    )
    step.deltas[4].CopyFrom(delta(4, 1000))
    parts = list(cut_message(node_pb2.NodeMessage(deltas=step), 2000))
    assert len(parts) > 1
    assert all(part.deltas.ByteSize() <= 2000 for part in parts)
    assert list(parts[0].deltas.epochs) == [9]
    told = [one for part in parts for one in part.deltas.deltas]
    assert [one.epoch for one in told] == list(range(9))
    assert [one.epoch for one in told if one.HasField("error")] == [4]
    assert told[4].error.code == "INVALID_ARGUMENT"  # nobody tries it again elsewhere


def test_what_fits_is_one_message() -> None:
    message = node_pb2.NodeMessage(deltas=node_pb2.StepDeltas(deltas=[delta(1, 5)]))
    assert list(cut_message(message)) == [message]


@pytest.mark.parametrize("num_top", [0, 1, 5, 20])
def test_the_most_that_a_request_may_ask_for_fits_in_a_message(num_top: int) -> None:
    num_tokens = MAX_PROMPT_LOGPROBS // (num_top + 1)
    check_prompt_logprobs(SamplingParams(prompt_logprobs=num_top), num_tokens)
    assert delta(1, num_tokens, num_top).ByteSize() < MAX_LINK_MESSAGE_BYTES
    assert 2 * MAX_LINK_MESSAGE_BYTES <= MAX_CLIENT_MESSAGE_BYTES
    with pytest.raises(InvalidRequestError, match="prompt_logprobs: must be "):
        check_prompt_logprobs(SamplingParams(prompt_logprobs=num_top), num_tokens + 1)


def test_what_a_node_cuts_a_router_reads() -> None:
    step = node_pb2.StepDeltas(deltas=[delta(1, 0)] * (2 * MAX_LINK_DELTAS + 1))
    step.deltas[0].CopyFrom(delta(1, MAX_PARTS - 1))
    step.deltas[1].CopyFrom(delta(1, MAX_PARTS))
    parts = list(cut_message(node_pb2.NodeMessage(deltas=step)))
    told = [one for part in parts for one in part.deltas.deltas]
    assert not any(map(parts_problem, parts))
    assert len(told) == len(step.deltas)
    assert [place for place, one in enumerate(told) if one.HasField("error")] == [1]


@pytest.mark.parametrize(
    "message",
    [
        node_pb2.NodeMessage(
            deltas=node_pb2.StepDeltas(deltas=[node_pb2.RequestDelta()] * (MAX_READ_DELTAS + 1))
        ),
        node_pb2.NodeMessage(deltas=node_pb2.StepDeltas(deltas=[delta(1, MAX_PARTS + 1)])),
        node_pb2.NodeMessage(deltas=node_pb2.StepDeltas(token_ids=[1] * (MAX_PARTS + 1))),
        node_pb2.NodeMessage(kv_events=node_pb2.KVCacheEvents(stored=[1] * (MAX_PARTS + 1))),
    ],
    ids=["deltas", "logprobs", "rows", "hashes"],
)
def test_a_message_of_too_many_parts_is_not_read(message: node_pb2.NodeMessage) -> None:
    assert " at most " in parts_problem(message)
