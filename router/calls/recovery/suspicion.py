"""Suspicion: tracks which lost nodes one call may have killed, and has the call tried alone.

A call gets a suspicion when one of its nodes is lost for the first time; most calls never do. See
`suspects.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

from router.calls.attempt import Attempt
from router.calls.call import Call
from router.calls.recovery.suspects import WINDOW_S, Suspects, Verdict
from router.fleet.fleet import Fleet
from router.fleet.load.node_load import NodeLoad
from router.fleet.lost_nodes import Fate, Loss
from router.policies.base import Placement

# A request is cleared after a node computed this many tokens for it, because a request that kills
# nodes does so earlier.
PROVEN_TOKENS = 8
# A suspect waits at most this many seconds for a node of its own; then it is placed without a
# trial.
MAX_WAIT_S = 5.0
POLL_S = 0.02
_FEW_LOSSES = 2


class Work(Enum):
    """Kinds of a node's work on a request; each trial tests the request for one kind."""

    PROMPT = "prompt"
    TOKENS = "tokens"  # sampling tokens after the prompt, or compiling a grammar for them


class Suspicion:
    """The suspicion that one call kills nodes, which lasts until the call's work has succeeded.

    Args:
        suspects: the suspects of the call's base model.
        pause_s: seconds without a lost node before the call is tried alone.
    """

    def __init__(self, suspects: Suspects, call: Call, pause_s: float) -> None:
        self._suspects = suspects
        self._call = call
        self._pause_s = pause_s
        self._fingerprint = suspects.fingerprint(call)
        self._blamed: dict[
            Work, set[Loss]
        ] = {}  # losses that the call may have caused, by the work during which the node died
        self._index = 0  # number of output tokens at the last loss
        self._waits_since = 0.0
        # Work for which the call must be tried alone; None: no trial is due
        self._work: Work | None = None
        # The call's work that the most recently lost node had begun
        self._begun: Work | None = None
        self._room = ""  # engine id of the node kept for the trial, once it is idle; else empty
        self._tried_on = ""  # engine id of the trial's node while the trial runs; else empty
        self._verdict: Verdict | None = None
        self._num_trials = 0  # number of trials during which the trial's node died

    # ------------------------------------------------------------------ a node was lost

    def note_loss(self, attempt: Attempt, losses: Iterable[Loss], num_nodes: int) -> None:
        """Note that an attempt ended because its nodes were lost.

        Args:
            num_nodes: number of joined prefill and decode nodes that are left.
        """
        suspects, now = self._suspects, self._suspects.clock()
        tried_on, num_tokens = self._tried_on, attempt.start_index + attempt.num_tokens
        self.close()
        if num_tokens - self._index >= PROVEN_TOKENS:
            self._clear(*Work)
        self._index, self._waits_since = num_tokens, now
        work = None
        for loss in losses:
            begun = begun_on(attempt, loss.engine_id)
            # If the node had begun no work for the call, the KV that was arriving may have killed
            # it.
            part = begun or Work.TOKENS
            blamed = self._blamed.setdefault(part, set())
            blamed.add(loss)
            suspects.note_lost_with(self._fingerprint, (loss,))
            is_alike = part is self._work and begun is self._begun
            if loss.engine_id == tried_on and is_alike and loss.num_open == 1:
                verdict = Verdict(self._call, self._fingerprint, loss, self._num_trials + 1)
                self._verdict = verdict
            if len(blamed) > 1 or (begun is not None and suspects.admit(loss)):
                work, self._begun = part, begun
        num_others = len(suspects.others_lost(self._fingerprint, now - WINDOW_S))
        if num_others >= max(_FEW_LOSSES, num_nodes // 4):
            # Many nodes died lately, so this call is probably not the cause
            work = self._verdict = None
        self._work = work

    # ------------------------------------------------------------------ when and where it is tried

    def wait_s(self, fleet: Fleet) -> float:
        """Return for how many seconds the call must wait before it is placed; 0: place it now.

        After a wait, ask again.

        Raises:
            PoisonRequestError: this call or an equal call was found to kill nodes.
        """
        suspects, now = self._suspects, self._suspects.clock()
        suspects.check_fingerprint(self._fingerprint)
        if self._verdict is not None and not self._has_verdict():
            return POLL_S
        self._forget_returned()
        if self._work is None:
            return 0.0
        if not fleet:
            self._waits_since = now  # no node has joined that could be kept for the trial
            return 0.0
        quiet_at = max(suspects.lost_nodes.last_loss_at, self._waits_since) + self._pause_s
        if now >= self._waits_since + self._pause_s + MAX_WAIT_S:
            self._leave_room()
            return 0.0
        if now < quiet_at:
            return min(quiet_at - now, 5 * POLL_S)
        if suspects.is_tried(self._fingerprint):
            return POLL_S
        self._room = suspects.rooms.acquire(self, _nodes_for(self._work, fleet))
        return 0.0 if self._room else POLL_S

    def narrow(self, fleet: Fleet) -> Fleet:
        """Return the trial's node with its partners; the whole fleet if no trial is due."""
        if not self._room:
            return fleet

        def is_room(node: NodeLoad) -> bool:
            return node.engine_id == self._room

        if self._work is Work.TOKENS or not fleet.prefills:
            return fleet.only(decode=is_room) or fleet
        # Leave out decode nodes without a prefill node: they would compute the prompt, which the
        # prefill node must do in this trial.
        pairs = {("", node.engine_id) for node in fleet.self_prefilling}
        return fleet.only(prefill=is_room, ruled_out=pairs) or fleet

    def note_placed(self, placement: Placement) -> None:
        """Note that the call was placed, and begin its trial if it got the node kept for it."""
        prefill, decode = placement.prefill, placement.decode
        computes = prefill if prefill is not None and self._work is Work.PROMPT else decode
        if self._room and computes.engine_id == self._room:
            self._tried_on = self._room
            self._suspects.begin_trial(self._fingerprint)
        else:
            self._leave_room()  # the policy could not use the node that was kept for the call

    def note_progress(self, attempt: Attempt) -> None:
        """Note that an attempt yielded tokens.

        The first token proves that computing the call's prompt kills no node. After
        `PROVEN_TOKENS` tokens, the call is no longer blamed for any loss.
        """
        if attempt.num_tokens > PROVEN_TOKENS:
            self._clear(*Work)
        elif attempt.began:
            self._clear(Work.PROMPT)

    def close(self) -> None:
        """End the call's trial, and release the node that was kept for it."""
        if self._tried_on:
            self._suspects.end_trial(self._fingerprint)
            self._tried_on = ""
        self._leave_room()

    def note_ended(self) -> None:
        """Note that the call has ended; its last trial may be judged later."""
        self.close()
        if self._verdict is not None:
            self._suspects.keep_open(self._verdict)
            self._verdict = None

    # ------------------------------------------------------------------ outcome of the trial

    def _has_verdict(self) -> bool:
        """Return whether it is known if the trial's node died.

        Raises PoisonRequestError if the death proves that the call kills nodes.
        """
        verdict = self._verdict
        assert verdict is not None
        fate = self._suspects.lost_nodes.fate(verdict.loss)
        if fate is Fate.OPEN:
            return False
        self._verdict, self._waits_since = None, self._suspects.clock()
        if fate is Fate.DEAD:
            self._num_trials = verdict.num_trials
            if (error := self._suspects.judge(verdict)) is not None:
                raise error
        return True

    def _forget_returned(self) -> None:
        """Forget the losses of nodes whose process has joined again."""
        for work, losses in list(self._blamed.items()):
            returned = {loss for loss in losses if loss.fate is Fate.RETURNED}
            losses -= returned
            self._suspects.forget_losses(self._fingerprint, returned)
            if not losses:
                self._clear(work)

    def _clear(self, *works: Work) -> None:
        """Stop blaming the call for nodes that were lost during these kinds of work."""
        for work in works:
            self._suspects.forget_losses(self._fingerprint, self._blamed.pop(work, ()))
            if self._work is work:
                self._work, self._num_trials = None, 0
                self.close()

    def _leave_room(self) -> None:
        self._room = ""
        self._suspects.rooms.release(self)


def begun_on(attempt: Attempt, engine_id: str) -> Work | None:
    """Return the work of an attempt that a node may have begun but not completed, or None."""
    prefill, decode = attempt.prefill, attempt.decode
    if prefill is not None and prefill.engine_id == engine_id and not attempt.began:
        return Work.PROMPT
    if decode is None or decode.engine_id != engine_id or attempt.num_tokens >= PROVEN_TOKENS:
        return None
    if prefill is None and not attempt.began:
        return Work.PROMPT
    # A decode node compiles the grammar while the prefill node computes the prompt.
    return Work.TOKENS if attempt.began or attempt.has_grammar else None


def _nodes_for(work: Work, fleet: Fleet) -> Iterable[NodeLoad]:
    """Return the nodes of a fleet that do this kind of work."""
    if work is Work.PROMPT and fleet.prefills:
        return fleet.prefills
    return {*fleet.decodes, *fleet.self_prefilling}
