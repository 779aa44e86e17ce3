"""Suspicion: what one call has to do with the nodes that died under it, and how it is tried again.

Made at its first loss: nearly no call has one. See `suspects.py` for the whole of it.
"""

from __future__ import annotations

from router.calls.attempt import Attempt
from router.calls.call import Call
from router.calls.recovery.suspects import WINDOW_S, Suspects, Trial
from router.fleet.fleet import Fleet
from router.fleet.load.node_load import NodeLoad
from router.policies.base import Placement

# A request that had so many tokens on a node does not end nodes by being begun.
PROVEN_TOKENS = 8
# A suspect waits no longer for a node without another one.
MAX_WAIT_S = 5.0
POLL_S = 0.02
_FEW_LOSSES = 2


class Suspicion:
    """Of one call.

    Args:
        suspects: of the router.
        pause_s: a suspect is tried when no node has died for so long.
    """

    def __init__(self, suspects: Suspects, call: Call, pause_s: float) -> None:
        self._suspects = suspects
        self._call = call
        self._pause_s = pause_s
        self._fingerprint = suspects.fingerprint(call)
        self._lost_on: set[str] = set()  # engine ids, since it went on well
        self._index = 0  # of the output, at the last loss
        self._lost_at = 0.0
        self._waits = False  # to be tried alone
        self._trial: Trial | None = None

    def note_loss(self, attempt: Attempt, lost: set[str], num_nodes: int) -> None:
        """An attempt ended as nodes of it were lost.

        Args:
            lost: their engine ids.
            num_nodes: that are left.

        Raises:
            PoisonRequestError: it is why.
        """
        suspects, now = self._suspects, self._suspects.clock()
        trial, num_tokens = self._trial, attempt.start_index + attempt.num_tokens
        self.close()
        if num_tokens - self._index >= PROVEN_TOKENS:
            self._lost_on.clear()
            suspects.forget_losses(self._fingerprint)
        self._index, self._lost_at = num_tokens, now
        self._lost_on |= lost
        suspects.note_lost_with(self._fingerprint, lost)
        if (
            trial is not None
            and trial.is_alone
            and attempt.num_tokens < PROVEN_TOKENS
            and not suspects.others_lost(self._fingerprint, trial.begun_at - self._pause_s)
        ):
            raise suspects.quarantine(self._call, self._fingerprint)
        num_others = len(suspects.others_lost(self._fingerprint, now - WINDOW_S))
        if num_others >= max(_FEW_LOSSES, num_nodes // 4):
            self._waits = False  # nodes die anyway: nothing can be told from one more
            return
        is_repeated = len(self._lost_on) > 1
        self._waits = is_repeated or (had_begun(attempt, lost) and suspects.admit(lost))

    def wait_s(self, fleet: Fleet) -> float:
        """How long not to place it yet; to be asked again behind that.

        Raises:
            PoisonRequestError: one like it was found to be why, meanwhile.
        """
        suspects, now = self._suspects, self._suspects.clock()
        suspects.check_fingerprint(self._fingerprint)
        if not self._waits or now >= self._lost_at + self._pause_s + MAX_WAIT_S:
            return 0.0
        quiet_at = max(suspects.lost_nodes.last_loss_at, self._lost_at) + self._pause_s
        if now < quiet_at:
            return quiet_at - now
        has_place = bool(self._alone_in(fleet)) or not fleet
        return 0.0 if has_place and not suspects.is_tried(self._fingerprint) else POLL_S

    def narrow(self, fleet: Fleet) -> Fleet:
        """Nodes without another suspect, if there are any."""
        return self._alone_in(fleet) or fleet

    def begin(self, placement: Placement) -> None:
        """It was placed."""
        nodes = filter(None, (placement.prefill, placement.decode))
        now = self._suspects.clock()
        is_quiet = now >= self._suspects.lost_nodes.last_loss_at + self._pause_s
        self._trial = Trial(
            self._fingerprint,
            {node.engine_id for node in nodes},
            now,
            is_alone=self._waits and is_quiet,
        )
        self._suspects.begin_trial(self._trial)

    def note_progress(self, attempt: Attempt) -> None:
        """Its tokens came."""
        if self._trial is None:
            return
        if attempt.num_tokens > PROVEN_TOKENS:
            self.close()
            self._waits = False
            self._lost_on.clear()
            self._suspects.forget_losses(self._fingerprint)
        elif attempt.prefill is not None and attempt.began:
            self._suspects.end_trial(self._trial, {attempt.prefill.engine_id})

    def close(self) -> None:
        """It is on no node any more."""
        if self._trial is not None:
            self._suspects.end_trial(self._trial)
            self._trial = None

    def _alone_in(self, fleet: Fleet) -> Fleet:
        def is_free(node: NodeLoad) -> bool:
            return not self._suspects.has_trial(node.engine_id)

        return fleet.only(is_free, is_free)


def had_begun(attempt: Attempt, lost: set[str]) -> bool:
    """Whether a lost node may have computed something of a call that it had not before."""
    if attempt.prefill is not None and attempt.prefill.engine_id in lost and not attempt.began:
        return True
    if attempt.decode is None or attempt.decode.engine_id not in lost:
        return False
    # (It compiles a grammar while the prompt is computed elsewhere.)
    has_begun = attempt.prefill is None or attempt.began or attempt.has_grammar
    return has_begun and attempt.num_tokens < PROVEN_TOKENS
