"""Unit tests of usage in OpenAI's terms: the drafts that it counts."""

from __future__ import annotations

import dataclasses

import msgspec

from baton.api.outputs import Receipt
from baton.telemetry.receipt_table import receipt_line
from router.api.http.responses import usage_of
from tests.fakes.router.nodes import DECODE_RECEIPT, make_receipt


def receipt(num_drafts: int, num_accepted: int) -> Receipt:
    decode = dataclasses.replace(
        DECODE_RECEIPT, num_drafts=num_drafts, num_accepted_drafts=num_accepted
    )
    return make_receipt(prefill=None, decode=decode)


def test_drafts_are_summed_over_the_outputs() -> None:
    usage = usage_of([receipt(5, 3), receipt(0, 0), receipt(4, 4)], 1)
    details = msgspec.to_builtins(usage)["completion_tokens_details"]
    assert details == {"accepted_prediction_tokens": 7, "rejected_prediction_tokens": 2}


def test_where_nobody_drafted_nothing_is_said() -> None:
    ended_on_its_prefill_node = dataclasses.replace(receipt(0, 0), decode=None)
    usage = usage_of([receipt(0, 0), ended_on_its_prefill_node], 1)
    assert "completion_tokens_details" not in msgspec.to_builtins(usage)


def test_a_receipt_says_how_many_were_right() -> None:
    assert "3 of 5 drafts accepted" in receipt_line(receipt(5, 3))
    assert "draft" not in receipt_line(receipt(0, 0))
