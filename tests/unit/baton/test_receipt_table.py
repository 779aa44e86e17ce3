"""Unit tests of receipts as people read them: one line for each way that a request can end."""

from __future__ import annotations

import dataclasses

from baton.telemetry.receipt_table import receipt_line
from tests.fakes.router.nodes import PREFILL_RECEIPT, make_receipt

RECEIPT = make_receipt()
START = "3 + 5 tokens | TTFT 10 ms | 10.0 ms/token | "


def test_an_ordinary_request() -> None:
    expected = "p0 pushed 1 B (1 blocks) by t | d0 computed 0 prompt tokens"
    assert receipt_line(RECEIPT) == START + expected


def test_attempts_are_told_when_there_was_more_than_one() -> None:
    assert receipt_line(dataclasses.replace(RECEIPT, num_attempts=3)).startswith(
        START + "3 attempts | p0 pushed"
    )


def test_a_decode_node_that_computed_the_rest_itself() -> None:
    line = receipt_line(dataclasses.replace(RECEIPT, prefill=None))
    assert line == START + "d0 computed 0 prompt tokens and had the others cached"


def test_an_end_without_an_account_of_the_decode_node() -> None:
    stopped = dataclasses.replace(RECEIPT, decode=None)
    assert receipt_line(stopped) == START + "ended on d0 by a stop string"
    first = dataclasses.replace(stopped, decode_node="")
    assert receipt_line(first) == START + "ended on p0 with its token"


def test_no_more_than_the_prompt_was_cached_of_it() -> None:
    """A retry behind four outputs found these with the prompt: 7 of 3 tokens were told."""
    retried = dataclasses.replace(PREFILL_RECEIPT, num_cached_tokens=7)
    receipt = dataclasses.replace(RECEIPT, num_attempts=2, prefill=retried)
    assert receipt.num_cached_tokens == 3


def test_a_push_of_nothing_has_no_transport() -> None:
    assert RECEIPT.decode is not None
    push = dataclasses.replace(RECEIPT.decode.push, num_bytes=0, num_blocks=0, transport="")
    decode = dataclasses.replace(RECEIPT.decode, push=push)
    line = receipt_line(dataclasses.replace(RECEIPT, decode=decode))
    assert "p0 pushed nothing | " in line
