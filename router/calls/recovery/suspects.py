"""Suspects: which requests may be why nodes die, and those that are refused for it.

    a node is lost --> suspects: what it had begun to compute and had not computed well before
    the same process joins again --> no request is suspected any more
    a suspect is tried alone on a node, when no other node was lost for a while
    that node dies     --> the suspect is ended, and its like refused for some minutes
    the work goes well --> the suspect was a bystander

Knows requests by a keyed hash of what they ask for (ADR 0027, ADR 0066).
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import secrets
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from baton.api.errors import NotFoundError, PoisonRequestError
from router.calls.call import Call
from router.calls.recovery.trial_rooms import TrialRooms
from router.fleet.lost_nodes import Fate, Loss
from router.fleet.node_pool import NodePool

logger = logging.getLogger(__name__)

QUARANTINE_S = 300.0
MAX_QUARANTINED = 1024
MAX_HISTORIES = 4096
# Of what one lost node had begun, so many are tried alone; it began the oldest first.
MAX_SUSPECTS_PER_LOSS = 16
# Losses of so long ago say nothing of those of now.
WINDOW_S = 10.0
# If a node that a suspect had no part in died so recently, one trial proves nothing: two do. A
# suspect may wait and be tried for so long, so such a death may meet the trial by chance.
BACKGROUND_S = 12.0
MAX_OPEN_VERDICTS = 256


@dataclass(frozen=True, slots=True)
class Quarantined:
    """A request that was ended, and whose like is refused.

    Attributes:
        fingerprint: names it; no other router has the same one.
        request_id: of the one that was ended.
        principal: who had sent it.
        engine_ids: nodes that were lost with it.
        expires_at: by the clock of `Suspects`.
        loss: loss of the trial's node; nothing is refused any more once that node is back.
        num_refused: since then.
    """

    fingerprint: str
    request_id: str
    principal: str
    num_prompt_tokens: int
    engine_ids: tuple[str, ...]
    expires_at: float
    loss: Loss
    num_refused: int = 0


@dataclass(slots=True, eq=False)
class Verdict:
    """A node was lost while a request was on trial alone there.

    Attributes:
        num_trials: trials that ended with a loss, this one included.
    """

    call: Call
    fingerprint: str
    loss: Loss
    num_trials: int


class Suspects:
    """Track which requests of one router may be why nodes die.

    Args:
        pool: knows the lost nodes and the nodes for trials; its clock is used.
        quarantine_s: how long the like of a request that was ended is refused.

    Attributes:
        rooms: nodes that are kept for trials.
        num_ended_total: requests that were ended for this.
        num_refused_total: that were refused because one like them had been.
    """

    def __init__(self, pool: NodePool, *, quarantine_s: float = QUARANTINE_S) -> None:
        self.lost_nodes = pool.lost_nodes
        self.clock = pool.clock
        self.rooms = TrialRooms(pool)
        self.num_ended_total = self.num_refused_total = 0
        self._quarantine_s = quarantine_s
        self._key = secrets.token_bytes(32)
        self._quarantined: OrderedDict[str, Quarantined] = OrderedDict()  # oldest first
        self._lost_with: OrderedDict[str, set[Loss]] = OrderedDict()  # by fingerprint
        self._num_suspects: Counter[Loss] = Counter()
        self._tried: Counter[str] = Counter()  # fingerprint -> trials now
        self._open_verdicts: list[Verdict] = []  # of calls that ended before their verdict

    # ------------------------------------------------------------------ quarantine

    def check(self, call: Call) -> None:
        """Raise PoisonRequestError for what is like a request that was ended."""
        if self._open_verdicts:
            self._settle_verdicts()
        if self._quarantined:  # else there is nothing to be compared with
            self.check_fingerprint(self.fingerprint(call))

    def check_fingerprint(self, fingerprint: str) -> None:
        """Raise PoisonRequestError if requests with this fingerprint are refused."""
        found = self._quarantined.get(fingerprint)
        if found is None:
            return
        left_s = found.expires_at - self.clock()
        if left_s <= 0 or found.loss.fate is Fate.RETURNED:
            del self._quarantined[fingerprint]
            return
        self.num_refused_total += 1
        self._quarantined[fingerprint] = dataclasses.replace(
            found, num_refused=found.num_refused + 1
        )
        raise PoisonRequestError(
            f"a request like this one (quarantined as {fingerprint[:12]}) was being computed on "
            f"{len(found.engine_ids)} nodes when they died; it is refused for {left_s:.0f} s"
        )

    def quarantine(self, call: Call, fingerprint: str, loss: Loss) -> PoisonRequestError:
        """Refuse the like of a request from now on; returns what its client is told."""
        losses = self._lost_with.get(fingerprint, set()) | {loss}
        engine_ids = tuple(sorted({one.engine_id for one in losses}))
        self._quarantined.pop(fingerprint, None)
        self._quarantined[fingerprint] = Quarantined(
            fingerprint,
            call.request_id,
            call.terms.principal.name,
            len(call.prompt_token_ids),
            engine_ids,
            self.clock() + self._quarantine_s,
            loss,
        )
        if len(self._quarantined) > MAX_QUARANTINED:
            self._quarantined.popitem(last=False)
        self.num_ended_total += 1
        logger.error(
            "request %s of %s was ended and its like is refused for %g s (%s): %s died under it",
            call.request_id,
            call.terms.principal.name or "anybody",
            self._quarantine_s,
            fingerprint[:12],
            ", ".join(engine_ids),
        )
        return PoisonRequestError(
            f"the request was being computed on {len(engine_ids)} nodes when they died "
            f"({', '.join(engine_ids)}); it is refused for {self._quarantine_s:.0f} s"
        )

    @property
    def quarantined(self) -> list[Quarantined]:
        """What is refused now, oldest first."""
        self._settle_verdicts()
        now = self.clock()
        return [
            one
            for one in self._quarantined.values()
            if one.expires_at > now and one.loss.fate is not Fate.RETURNED
        ]

    def release(self, fingerprint: str) -> int:
        """Refuse no longer what begins so; all if empty. Raises NotFoundError if there is none."""
        found = [name for name in self._quarantined if name.startswith(fingerprint)]
        if fingerprint and not found:
            raise NotFoundError(f"nothing is quarantined as {fingerprint!r}")
        for name in found:
            del self._quarantined[name]
            self._lost_with.pop(name, None)
        return len(found)

    def fingerprint(self, call: Call) -> str:
        """What a request is, whatever it is called: who sent it, its prompt and its parameters."""
        params = dataclasses.replace(call.sampling_params, seed=0)
        digest = hashlib.blake2b(key=self._key, digest_size=16)
        sender = call.terms.principal.tenant or call.terms.principal.name
        for part in (sender.encode(errors="replace"), repr(params).encode(errors="replace")):
            digest.update(len(part).to_bytes(8, "little") + part)
        digest.update(array("Q", call.prompt_token_ids).tobytes())
        return digest.hexdigest()

    # ------------------------------------------------------------------ losses

    def note_lost_with(self, fingerprint: str, losses: Iterable[Loss]) -> None:
        """Remember nodes that were lost while they computed a request with this fingerprint."""
        known = self._lost_with.pop(fingerprint, set())
        self._lost_with[fingerprint] = known.union(losses)
        if len(self._lost_with) > MAX_HISTORIES:
            self._lost_with.popitem(last=False)

    def forget_losses(self, fingerprint: str, losses: Iterable[Loss]) -> None:
        """Forget losses that requests with this fingerprint did not cause: one was computed."""
        if fingerprint in self._lost_with:
            self._lost_with[fingerprint].difference_update(losses)
            if not self._lost_with[fingerprint]:
                del self._lost_with[fingerprint]

    def others_lost(self, fingerprint: str, since: float) -> set[Loss]:
        """Return the losses since then in which requests with this fingerprint had no part."""
        known = self._lost_with.get(fingerprint, set())
        return set(self.lost_nodes.lost_since(since)) - known

    def admit(self, loss: Loss) -> bool:
        """Count one more suspect of a loss; return False if the loss has too many."""
        if self._num_suspects[loss] >= MAX_SUSPECTS_PER_LOSS:
            return False
        if len(self._num_suspects) > MAX_HISTORIES:
            self._num_suspects.clear()
        self._num_suspects[loss] += 1
        return True

    # ------------------------------------------------------------------ trials

    def is_tried(self, fingerprint: str) -> bool:
        """Return whether a request with this fingerprint is on trial."""
        return self._tried[fingerprint] > 0

    def begin_trial(self, fingerprint: str) -> None:
        self._tried[fingerprint] += 1

    def end_trial(self, fingerprint: str) -> None:
        self._tried[fingerprint] -= 1
        if not self._tried[fingerprint]:
            del self._tried[fingerprint]

    def judge(self, verdict: Verdict) -> PoisonRequestError | None:
        """Quarantine a request whose trial killed a node; returns the error for its client.

        Returns None if the death proves nothing yet, as other nodes died meanwhile.
        """
        since = verdict.loss.at - BACKGROUND_S
        if verdict.num_trials < 2 and self.others_lost(verdict.fingerprint, since):
            return None
        return self.quarantine(verdict.call, verdict.fingerprint, verdict.loss)

    def keep_open(self, verdict: Verdict) -> None:
        """Judge a request later, as its call ended before the fate of the node was known."""
        self._open_verdicts.append(verdict)
        del self._open_verdicts[:-MAX_OPEN_VERDICTS]

    def _settle_verdicts(self) -> None:
        for verdict in self._open_verdicts:
            if self.lost_nodes.fate(verdict.loss) is Fate.DEAD:
                self.judge(verdict)
        self._open_verdicts = [
            one for one in self._open_verdicts if self.lost_nodes.fate(one.loss) is Fate.OPEN
        ]
