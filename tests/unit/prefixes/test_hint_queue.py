"""Unit tests of prefetches that wait on a node: whose turn it is, and how much time they take."""

from __future__ import annotations

from node_runtime.prefixes.hint_queue import MAX_SAVED_S, MAX_WAITING, SHARE, HintQueue


class Scene:
    """A queue whose prefetches take some seconds each; ``done`` lists them."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.now, self.seconds = 0.0, seconds
        self.done: list[tuple[bytes, bytes, float]] = []
        self.queue = HintQueue(self.prefetch, lambda: self.now)

    def prefetch(self, owner: bytes, session: bytes, keep_s: float) -> None:
        self.done.append((owner, session, keep_s))
        self.now += self.seconds


def test_the_last_prefetch_of_a_session_counts_unless_the_session_is_dropped() -> None:
    scene = Scene()
    scene.queue.put(b"a", b"s", 5.0)
    scene.queue.put(b"a", b"s", 7.0)
    scene.queue.put(b"a", b"t", 5.0)
    assert len(scene.queue) == 2
    scene.queue.forget(b"a", b"t")
    scene.queue.forget(b"b", b"s")
    scene.queue.handle_waiting()
    assert scene.done == [(b"a", b"s", 7.0)]
    assert len(scene.queue) == 0


def test_owners_take_turns() -> None:
    scene = Scene()
    for session in (b"1", b"2", b"3"):
        scene.queue.put(b"a", session, 1.0)
    scene.queue.put(b"b", b"1", 1.0)
    scene.queue.handle_waiting()
    assert [owner + session for owner, session, _ in scene.done] == [b"a1", b"b1", b"a2", b"a3"]


def test_prefetches_take_a_small_share_of_the_time() -> None:
    scene = Scene(seconds=0.02)
    num_rounds = 1000
    for number in range(num_rounds):
        scene.queue.put(b"a", b"%d" % number, 1.0)
        scene.queue.handle_waiting()
        scene.now += 0.01  # a step
    assert len(scene.done) * 0.02 <= MAX_SAVED_S + 0.02 + SHARE * scene.now
    assert len(scene.done) >= SHARE * num_rounds * 0.01 / 0.02
    assert len(scene.queue) == num_rounds - len(scene.done)


def test_the_owner_with_most_waiting_sessions_loses_the_oldest() -> None:
    scene = Scene()
    scene.queue.put(b"few", b"s", 1.0)
    for number in range(MAX_WAITING):
        scene.queue.put(b"many", b"%d" % number, 1.0)
    assert len(scene.queue) == MAX_WAITING
    scene.queue.handle_waiting()
    assert (b"few", b"s", 1.0) in scene.done
    assert (b"many", b"0", 1.0) not in scene.done
