"""Suspects: tracks requests that may have crashed nodes, and refuses those that did.

    a node is lost                  the requests that it had begun become suspects, unless cleared
    the same process joins again    its requests are no longer suspects
    no node is lost for a while     each suspect is tried alone on a node
    the trial's node dies           the suspect fails, and equal requests are refused for minutes
    the trial succeeds              the suspect is cleared

Two requests are equal if a keyed hash of their sender and content is equal (ADR 0027, ADR 0066).
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
# At most this many of a lost node's requests are tried alone; the oldest requests come first.
MAX_SUSPECTS_PER_LOSS = 16
# Losses that are more than this many seconds apart are judged separately.
WINDOW_S = 10.0
# If another node died within this many seconds before a trial's node, two failed trials are needed
# as proof. A trial with its wait may take this long, so an unrelated death may fall into it by
# chance.
BACKGROUND_S = 12.0
MAX_OPEN_VERDICTS = 256


@dataclass(frozen=True, slots=True)
class Quarantined:
    """A request that was found to crash nodes and ended; equal requests are refused.

    Attributes:
        fingerprint: keyed hash of the request; differs between routers.
        request_id: the id of the request that was ended.
        principal: name of the caller.
        engine_ids: nodes that were lost while they computed equal requests.
        expires_at: when equal requests are accepted again, by the clock of `Suspects`.
        loss: the node's death during the trial; if this node returns, equal requests are accepted
            again.
        num_refused: equal requests refused since this request was ended.
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
    """The loss of a node during a request's trial, which may prove that the request kills nodes.

    Attributes:
        num_trials: number of failed trials so far, this one included.
    """

    call: Call
    fingerprint: str
    loss: Loss
    num_trials: int


class Suspects:
    """Tracks the requests of one base model that may have crashed nodes.

    Args:
        pool: knows the lost nodes and the nodes for trials; provides the clock.
        quarantine_s: seconds for which requests equal to a quarantined request are refused.

    Attributes:
        rooms: keeps nodes free for trials.
        num_ended_total: number of requests that were found to crash nodes and ended.
        num_refused_total: number of requests refused because an equal request was ended.
    """

    def __init__(self, pool: NodePool, *, quarantine_s: float = QUARANTINE_S) -> None:
        self.lost_nodes = pool.lost_nodes
        self.clock = pool.clock
        self.rooms = TrialRooms(pool)
        self.num_ended_total = self.num_refused_total = 0
        self._quarantine_s = quarantine_s
        self._key = secrets.token_bytes(32)
        # Quarantined requests by fingerprint, oldest first
        self._quarantined: OrderedDict[str, Quarantined] = OrderedDict()
        self._lost_with: OrderedDict[str, set[Loss]] = OrderedDict()  # by fingerprint
        self._num_suspects: Counter[Loss] = Counter()
        self._tried: Counter[str] = Counter()  # number of running trials, by fingerprint
        # Verdicts of calls that ended before it was known whether the trial's node had died.
        self._open_verdicts: list[Verdict] = []

    # ------------------------------------------------------------------ quarantine

    def check(self, call: Call) -> None:
        """Raise PoisonRequestError if an equal request was found to crash nodes."""
        if self._open_verdicts:
            self._settle_verdicts()
        if self._quarantined:  # hashing a prompt takes time, so it is done only if needed
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
        """Refuse requests equal to this call from now on; return the error for its client."""
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
            "request %s of %s is ended and equal ones refused for %g s (%s): %s died computing it",
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
        """Requests that are refused now, oldest first."""
        self._settle_verdicts()
        now = self.clock()
        return [
            one
            for one in self._quarantined.values()
            if one.expires_at > now and one.loss.fate is not Fate.RETURNED
        ]

    def release(self, fingerprint: str) -> int:
        """Accept requests again whose fingerprints begin with this prefix (empty: all).

        Raises NotFoundError.
        """
        found = [name for name in self._quarantined if name.startswith(fingerprint)]
        if fingerprint and not found:
            raise NotFoundError(f"nothing is quarantined as {fingerprint!r}")
        for name in found:
            del self._quarantined[name]
            self._lost_with.pop(name, None)
        return len(found)

    def fingerprint(self, call: Call) -> str:
        """Return a keyed hash of sender, adapter, prompt and parameters, without the seed."""
        params = dataclasses.replace(call.sampling_params, seed=0)
        digest = hashlib.blake2b(key=self._key, digest_size=16)
        sender = call.terms.principal.tenant or call.terms.principal.name
        for text in (sender, call.terms.adapter, repr(params)):
            part = text.encode(errors="replace")
            digest.update(len(part).to_bytes(8, "little") + part)
        digest.update(array("Q", call.prompt_token_ids).tobytes())
        for span in call.image_spans:
            digest.update(span.digest)
        return digest.hexdigest()

    # ------------------------------------------------------------------ losses

    def note_lost_with(self, fingerprint: str, losses: Iterable[Loss]) -> None:
        """Remember nodes that were lost while they computed requests with this fingerprint."""
        known = self._lost_with.pop(fingerprint, set())
        self._lost_with[fingerprint] = known.union(losses)
        if len(self._lost_with) > MAX_HISTORIES:
            self._lost_with.popitem(last=False)

    def forget_losses(self, fingerprint: str, losses: Iterable[Loss]) -> None:
        """Forget losses that requests with this fingerprint are known not to have caused."""
        if fingerprint in self._lost_with:
            self._lost_with[fingerprint].difference_update(losses)
            if not self._lost_with[fingerprint]:
                del self._lost_with[fingerprint]

    def others_lost(self, fingerprint: str, since: float) -> set[Loss]:
        """Return the losses since ``since`` of nodes that had no request with this fingerprint."""
        known = self._lost_with.get(fingerprint, set())
        return set(self.lost_nodes.lost_since(since)) - known

    def admit(self, loss: Loss) -> bool:
        """Count one more suspect of a loss; return False if the loss has too many already."""
        if self._num_suspects[loss] >= MAX_SUSPECTS_PER_LOSS:
            return False
        if len(self._num_suspects) > MAX_HISTORIES:
            self._num_suspects.clear()
        self._num_suspects[loss] += 1
        return True

    # ------------------------------------------------------------------ trials

    def is_tried(self, fingerprint: str) -> bool:
        """Return whether a request with this fingerprint is on trial now."""
        return self._tried[fingerprint] > 0

    def begin_trial(self, fingerprint: str) -> None:
        self._tried[fingerprint] += 1

    def end_trial(self, fingerprint: str) -> None:
        self._tried[fingerprint] -= 1
        if not self._tried[fingerprint]:
            del self._tried[fingerprint]

    def judge(self, verdict: Verdict) -> PoisonRequestError | None:
        """Quarantine a request during whose trial a node died; return the error for its client.

        Returns None if the death proves nothing, because other nodes died at about the same time.
        """
        since = verdict.loss.at - BACKGROUND_S
        if verdict.num_trials < 2 and self.others_lost(verdict.fingerprint, since):
            return None
        return self.quarantine(verdict.call, verdict.fingerprint, verdict.loss)

    def keep_open(self, verdict: Verdict) -> None:
        """Keep the verdict of a call that has ended before it is known whether its node died."""
        self._open_verdicts.append(verdict)
        del self._open_verdicts[:-MAX_OPEN_VERDICTS]

    def _settle_verdicts(self) -> None:
        for verdict in self._open_verdicts:
            if self.lost_nodes.fate(verdict.loss) is Fate.DEAD:
                self.judge(verdict)
        self._open_verdicts = [
            one for one in self._open_verdicts if self.lost_nodes.fate(one.loss) is Fate.OPEN
        ]
