"""An encode node sends encodings to a prefill node, which never waits for ever nor leaks units."""

from __future__ import annotations

import pytest

from baton.link.words import AbortAll, PeerReport, PeerUpdate
from baton.telemetry.ledger import BlockOwner
from kvconnector.protocol.peers import RECEIVING_LEASE_S
from tests.fakes.handoff.encode_pair import (
    ROUND_S,
    TIMEOUT_S,
    EncodePair,
    encoding_of_file,
    rows_of,
)
from tests.fakes.images.fake_images import file_of, pixels_of, prompt_with

CAT, DOG = file_of(range(20)), file_of(range(100, 110))
TOKENS, IMAGES = prompt_with([[1, 2], CAT, [3], DOG, [4]])


@pytest.fixture
def pair() -> EncodePair:
    made = EncodePair()
    made.meet()
    return made


@pytest.mark.parametrize("digests", [True, False])
@pytest.mark.parametrize("first", ["order", "expect"])
def test_encodings_arrive_unchanged_whoever_is_told_first(first: str, digests: bool) -> None:
    pair = EncodePair(digests=digests)
    pair.meet()
    reports = [one for one in pair.events if isinstance(one, PeerReport)]
    assert [(one.engine_id, one.connected) for one in reports] == [(pair.p, True)]
    if first == "order":
        pair.order("r", IMAGES)
        pair.run(0.2)
    prompt, waiting = pair.expect("r", IMAGES, TOKENS)
    assert waiting is not None
    assert prompt.awaits_encodings
    if first == "expect":
        pair.order("r", IMAGES)
    pair.run()
    assert pair.engine.prompts == [prompt]
    for image in IMAGES:
        wanted = encoding_of_file(pixels_of(image.data)).tolist()
        assert rows_of(prompt.received, image.span.digest) == wanted
    assert (waiting.num_received, waiting.num_lost) == (2, 0)
    assert 0 < waiting.waited_s < 1
    pair.assert_at_rest()


def test_an_image_in_many_prompts_is_encoded_once(pair: EncodePair) -> None:
    for number in range(5):
        pair.expect(f"r{number}", IMAGES, TOKENS)
        pair.order(f"r{number}", IMAGES)
    pair.run()
    pair.expect("later", IMAGES, TOKENS)
    pair.order("later", IMAGES)
    pair.run()
    assert len(pair.engine.prompts) == 6
    assert pair.num_encoded == 2
    assert all(len(prompt.received) == 2 for prompt in pair.engine.prompts)
    pair.assert_at_rest()


def test_the_least_recently_used_encoding_makes_room() -> None:
    pair = EncodePair(num_units=3)  # CAT has two units, DOG one
    pair.meet()
    for number, files in enumerate([[CAT], [DOG], [CAT], [file_of(range(30, 40))], [CAT]]):
        tokens, images = prompt_with([*files, [1]])
        pair.expect(f"r{number}", images, tokens)
        pair.order(f"r{number}", images)
        pair.run()
    assert pair.num_encoded == 3, "DOG made room, CAT is kept"
    assert all(len(prompt.received) == 1 for prompt in pair.engine.prompts)
    pair.assert_at_rest()


@pytest.mark.parametrize("file", [b"bad", file_of([1, -1, 2]), file_of(range(100))])
def test_an_image_that_cannot_be_encoded_is_left_to_the_prefill_node(
    pair: EncodePair, file: bytes
) -> None:
    tokens, images = prompt_with([file, DOG, [1]])
    prompt, waiting = pair.expect("r", images, tokens)
    pair.order("r", images)
    pair.run()
    assert waiting is not None
    assert pair.engine.prompts == [prompt]
    assert (waiting.num_received, waiting.num_lost) == (1, 1)
    assert list(prompt.received) == [images[1].span.digest]
    assert waiting.lost_images == (0,)
    pair.assert_at_rest()


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("can't allocate memory")])
def test_an_encoding_without_memory_here_is_lost(
    pair: EncodePair, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """The prompt continues: this node encodes the image in a step, or ends only this request."""

    def read(*_: object) -> None:
        raise error

    monkeypatch.setattr(pair.target, "read", read)
    tokens, images = prompt_with([DOG, [1]])
    prompt, waiting = pair.expect("r", images, tokens)
    pair.order("r", images)
    pair.run()
    assert waiting is not None
    assert pair.engine.prompts == [prompt]
    assert (waiting.num_received, waiting.num_lost) == (0, 1)
    pair.assert_at_rest()


def test_a_refusal_that_overtakes_its_prompt_is_remembered(pair: EncodePair) -> None:
    tokens, images = prompt_with([b"bad", DOG, [1]])
    pair.order("r", images)
    pair.run(1.0)
    prompt, waiting = pair.expect("r", images, tokens)
    assert waiting is not None
    assert waiting.num_lost == 1
    pair.run(0.5)
    assert pair.engine.prompts == [prompt], "well before the time is up"
    assert (waiting.num_received, waiting.num_lost) == (1, 1)
    pair.assert_at_rest()


def test_an_encode_node_is_told_at_once_that_nobody_expects_its_encoding() -> None:
    pair = EncodePair()
    pair.expect("r", IMAGES, TOKENS)  # the nodes are not connected yet
    pair.meet()
    pair.order("r", IMAGES)
    pair.run(1.5)
    pair.assert_at_rest()


def test_an_attempt_that_has_ended_is_not_expected_again(pair: EncodePair) -> None:
    pair.expect("r", IMAGES, TOKENS)
    pair.order("r", IMAGES)
    pair.run(0.1)
    pair.cancel("r")
    prompt, waiting = pair.expect("r", IMAGES, TOKENS)
    assert waiting is not None
    assert waiting.num_lost == 2
    assert not prompt.awaits_encodings
    pair.run(3.0)
    pair.assert_at_rest()


@pytest.mark.parametrize("when_s", [0.0, 0.05, 0.1, 0.15, 0.2, 0.3])
def test_an_encode_node_that_stands_still_costs_three_seconds_and_no_prompt(
    pair: EncodePair, when_s: float
) -> None:
    prompt, _ = pair.expect("r", IMAGES, TOKENS)
    pair.order("r", IMAGES)
    pair.run(when_s)
    pair.stopped.add("e")
    pair.run(RECEIVING_LEASE_S + 1.0)
    assert pair.engine.prompts == [prompt], "the silence was noticed"
    assert not prompt.awaits_encodings
    late, waiting = pair.expect("late", IMAGES, TOKENS)
    if pair.arrivals.incoming.num_transfers or not late.awaits_encodings:
        assert waiting is not None
        assert waiting.num_lost == 2, "nothing is expected of a silent node"
    pair.stopped.clear()
    pair.run(3.0)
    pair.assert_at_rest()


@pytest.mark.parametrize("expected_s", [0.0, 3.0])
def test_a_node_that_never_answers_is_given_up_in_time(pair: EncodePair, expected_s: float) -> None:
    # No command reaches the encode node
    prompt, waiting = pair.expect("r", IMAGES, TOKENS, expected_s=expected_s)
    pair.run(2 * expected_s + TIMEOUT_S - 0.5)
    assert not pair.engine.prompts
    pair.run(1.0)
    assert pair.engine.prompts == [prompt]
    assert waiting is not None
    assert waiting.num_lost == pair.arrivals.num_lost_total == 2
    pair.order("r", IMAGES)  # it comes after all
    pair.run(2.0)
    assert not prompt.received
    pair.assert_at_rest()


@pytest.mark.parametrize("when_s", [0.0, 0.05, 0.1, 0.15, 0.2, 0.3])
def test_a_cancelled_prompt_leaves_nothing(pair: EncodePair, when_s: float) -> None:
    pair.expect("r", IMAGES, TOKENS)
    pair.order("r", IMAGES)
    pair.run(when_s)
    pair.cancel("r")
    pair.run(2.0)
    pair.assert_at_rest()
    prompt, _ = pair.expect("r", IMAGES, TOKENS, epoch=2)
    pair.order("r", IMAGES, epoch=2)
    pair.run()
    assert len(prompt.received) == 2
    pair.assert_at_rest()


def test_a_command_that_comes_twice_holds_nothing_twice(pair: EncodePair) -> None:
    prompt, _ = pair.expect("r", IMAGES, TOKENS)
    for _ in range(2):
        pair.order("r", IMAGES)
    pair.run(0.1)
    pair.order("r", IMAGES)
    pair.run(2.0)
    assert len(prompt.received) == 2
    pair.assert_at_rest()


def test_an_encode_node_that_joins_again_is_used_again(pair: EncodePair) -> None:
    for pause_s in (0.0, 1.0):
        pair.arrivals.incoming.lose_peer(pair.e)
        pair.node.submit(PeerUpdate(pair.p, removed=True))
        pair.run(pause_s)
        pair.meet()
        pair.run(3.0)
        prompt, _ = pair.expect(f"r{pause_s}", IMAGES, TOKENS)
        pair.order(f"r{pause_s}", IMAGES)
        pair.run(2.0)
        assert len(prompt.received) == 2
        pair.assert_at_rest()


def test_prompts_hold_few_encodings_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = EncodePair(num_units=2)  # room for one encoding on its way
    pair.meet()
    monkeypatch.setattr("prefill_node.arrivals.MAX_RECEIVED_BYTES", 300)
    tokens, images = prompt_with([CAT, [1]])  # 320 bytes
    prompts = []
    for number in range(3):
        prompts.append(pair.expect(f"r{number}", images, tokens)[0])
        pair.order(f"r{number}", images)
    for number in range(3):
        pair.run(0.5)
        assert [bool(one.received) for one in prompts] == [one == number for one in range(3)]
        prompts[number].remove_user("")  # the prompt is computed
    pair.assert_at_rest()


def test_a_prompt_larger_than_the_memory_gets_all_its_encodings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pair = EncodePair(num_units=2)
    pair.meet()
    monkeypatch.setattr("prefill_node.arrivals.MAX_RECEIVED_BYTES", 300)
    files = [file_of(range(start, start + 20)) for start in (0, 30, 60)]  # 320 bytes each
    tokens, images = prompt_with([files[0], [1], files[1], [2], files[2], [3]])
    prompt, waiting = pair.expect("r", images, tokens)
    pair.order("r", images)
    pair.run(TIMEOUT_S / 2)
    assert waiting is not None
    assert (len(prompt.received), waiting.num_lost) == (3, 0)


def test_granted_and_quarantined_units_have_owners(pair: EncodePair) -> None:
    pair.expect("r#1", IMAGES, TOKENS)
    pair.order("r#1", IMAGES)
    while not (granted := pair.arrivals.ledger().holdings):
        pair.run(ROUND_S)
    assert {(one.owner, one.request_id) for one in granted} == {(BlockOwner.GRANT, "r#1")}
    pair.stopped.add("e")
    pair.cancel("r#1")
    held = pair.arrivals.ledger()
    assert {(one.owner, one.request_id) for one in held.holdings} == {
        (BlockOwner.QUARANTINE, "r#1")
    }
    assert (held.num_orphans, held.num_overdrawn) == (0, 0)
    pair.stopped.clear()
    pair.run(2.0)
    pair.assert_at_rest()


def test_a_lost_router_ends_all_work(pair: EncodePair) -> None:
    pair.expect("r~router", IMAGES, TOKENS)
    pair.order("r~router", IMAGES)
    pair.node.submit(AbortAll("the link broke", "router"))
    pair.arrivals.cancel("r~router", 1)
    pair.run(2.0)
    pair.assert_at_rest()


def test_a_prefill_node_without_connection_encodes_itself() -> None:
    pair = EncodePair()
    prompt, waiting = pair.expect("r", IMAGES, TOKENS)
    assert not prompt.awaits_encodings
    assert waiting is not None
    assert (waiting.num_received, waiting.num_lost) == (0, 2)


def test_an_encode_node_that_is_gone_is_forgotten(pair: EncodePair) -> None:
    prompt, _ = pair.expect("r", IMAGES, TOKENS)
    pair.order("r", IMAGES)
    pair.run(0.1)
    pair.stopped.add("e")
    pair.arrivals.incoming.lose_peer(pair.e)
    assert pair.engine.prompts == [prompt]
    pair.stopped.clear()
    pair.node.submit(PeerUpdate(pair.p, removed=True))
    pair.run(3.0)
    pair.assert_at_rest()
