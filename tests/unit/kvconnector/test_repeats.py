"""Unit tests of Repeats: which messages are sent again, when, and until when."""

from __future__ import annotations

from kvconnector.protocol.messages import Start
from kvconnector.protocol.repeats import REPEAT_S, RETRY_S, Repeats


def start(request_id: str) -> Start:
    return Start(engine_id="p", request_id=request_id, epoch=1, num_tokens=4)


def due(repeats: Repeats, now: float) -> list[str]:
    return [key[0] for key, _ in repeats.take_due(now)]


def test_a_message_is_due_again_and_again_until_its_peer_answers() -> None:
    repeats = Repeats()
    repeats.add_message(("a", 1), "d", start("a"), 0.0)
    repeats.add_message(("b", 1), "d", start("b"), REPEAT_S / 2)
    assert due(repeats, REPEAT_S * 0.9) == []
    assert due(repeats, REPEAT_S) == ["a"]
    assert due(repeats, REPEAT_S * 1.5) == ["b"]
    assert due(repeats, REPEAT_S * 2) == ["a"]
    repeats.remove(("a", 1), "someone else")
    repeats.remove(("b", 1), "d")
    repeats.remove(("b", 1), "d")
    assert due(repeats, REPEAT_S * 3) == ["a"]
    repeats.remove(("a", 1), "d")
    assert due(repeats, REPEAT_S * 9) == []


def test_a_sign_of_the_transfer_puts_the_question_off() -> None:
    repeats = Repeats()
    repeats.add_message(("a", 1), "d", start("a"), 0.0)
    repeats.put_off(("a", 1), "d", REPEAT_S * 0.9)
    repeats.put_off(("nobody", 1), "d", 0.0)
    assert due(repeats, REPEAT_S * 1.8) == []
    assert due(repeats, REPEAT_S * 1.9) == ["a"]


def test_a_message_that_was_not_sent_is_tried_again_before_the_repeats_of_others() -> None:
    """The others would else fill the queue again, and the message would never be sent."""
    repeats = Repeats()
    repeats.add_message(("a", 1), "d", start("a"), 0.0)
    repeats.add_message(("b", 1), "d", start("b"), 0.0)
    repeats.retry(("b", 1), "someone else", 0.0)
    assert due(repeats, RETRY_S) == []
    repeats.retry(("b", 1), "d", 0.0)
    assert due(repeats, RETRY_S) == ["b"]
    assert due(repeats, REPEAT_S) == ["a"]
    assert due(repeats, REPEAT_S + RETRY_S) == ["b"]


def test_a_peer_that_is_gone_is_asked_nothing_more() -> None:
    repeats = Repeats()
    repeats.add_message(("a", 1), "d", start("a"), 0.0)
    repeats.add_message(("b", 1), "e", start("b"), 0.0)
    repeats.remove_peer("d")
    assert due(repeats, REPEAT_S) == ["b"]
    assert len(repeats) == 1
