"""MaskThreads: computes grammars' masks on threads, so that steps wait only for cheap masks.

A mask takes about 0.01 ms, but a hundred times as long if the grammar library meets new parser
states; this cannot be predicted. Refuses to know: requests, steps.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref

from engine.core.grammars.grammar import GrammarState

NUM_THREADS = 2
# Maximum number of seconds per step that the engine's thread waits for the masks of the previous
# step.
WAIT_S = 0.004
# If all requests need masks before they can run: maximum number of seconds that the engine's thread
# waits before it looks for new requests.
IDLE_WAIT_S = 0.01
# A grammar whose latest mask took less than `CHEAP_S` seconds gets its next mask on the engine's
# thread, as starting another thread would take longer; the engine's thread spends at most
# `AT_ONCE_S` seconds per step on masks.
CHEAP_S = 0.0005
AT_ONCE_S = 0.002


class MaskThreads:
    """A pool of threads that compute masks; starts with the first mask, or with `start`.

    Only the engine's thread calls these methods; see `engine.core.grammars.grammar.MaskMaker`.
    """

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[tuple[GrammarState, int] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._state = _Open()
        self._left_s = AT_ONCE_S

    def start(self) -> None:
        """Start the threads; raises RuntimeError if the system allows no more threads."""
        if not self._threads:
            for number in range(NUM_THREADS):
                thread = threading.Thread(
                    target=_compute,
                    args=(self._work, self._state),
                    name=f"masks-{number}",
                    daemon=True,
                )
                thread.start()
                self._threads.append(thread)
            weakref.finalize(self, _stop, self._work)

    def begin_mask(self, grammar: GrammarState) -> None:
        """Compute a mask now if it probably takes little time, else on another thread."""
        if grammar.mask_s < CHEAP_S and self._left_s > 0:
            began_at = time.thread_time()
            grammar.compute_mask()
            self._left_s -= time.thread_time() - began_at
            return
        self.start()
        self._work.put((grammar, self._state.note_begun()))

    def wait(self) -> None:
        """Wait a few milliseconds at most for all masks begun since the last call."""
        self._left_s = AT_ONCE_S
        if self._state.num_open:
            self._state.wait_for_young(WAIT_S)

    def wait_for_any(self) -> None:
        """Wait a few milliseconds at most until any pending mask is ready."""
        if self._state.num_open:
            self._state.wait_for_any(IDLE_WAIT_S)


class _Open:
    """Counts the masks being computed, in total and since the last `wait_for_young`.

    Attributes:
        num_open: number of masks that are being computed.
    """

    def __init__(self) -> None:
        self.num_open = 0
        self._num_young = 0
        self._round = 0
        self._changed = threading.Condition()

    def note_begun(self) -> int:
        """Count one more mask; return the number of its round."""
        with self._changed:
            self.num_open += 1
            self._num_young += 1
            return self._round

    def note_ready(self, begun_in: int) -> None:
        with self._changed:
            self.num_open -= 1
            self._num_young -= begun_in == self._round
            self._changed.notify()

    def wait_for_young(self, seconds: float) -> None:
        """Wait for the masks begun in this round, for ``seconds`` at most; begin the next round."""
        with self._changed:
            self._changed.wait_for(lambda: not self._num_young, seconds)
            self._round += 1
            self._num_young = 0

    def wait_for_any(self, seconds: float) -> None:
        with self._changed:
            num_open = self.num_open
            self._changed.wait_for(lambda: self.num_open < num_open, seconds)


def _compute(work: queue.SimpleQueue[tuple[GrammarState, int] | None], state: _Open) -> None:
    while (item := work.get()) is not None:
        grammar, begun_in = item
        try:
            grammar.compute_mask()
        except BaseException as error:  # a panic in Rust is no Exception
            grammar.fail(str(error) or type(error).__name__)
        state.note_ready(begun_in)


def _stop(work: queue.SimpleQueue[tuple[GrammarState, int] | None]) -> None:
    for _ in range(NUM_THREADS):
        work.put(None)
