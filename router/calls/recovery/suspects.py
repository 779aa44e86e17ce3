"""Suspects: which requests may be why nodes die, and those that are refused for it.

    a node is lost --> suspects: what it had begun to compute and had not computed well before
    a suspect is tried where no other suspect is, when no other node died for a while
    its node is lost, and no other --> it is ended, and its like refused for some minutes
    it goes on for some tokens     --> it was a bystander

Knows requests by a keyed hash of what they ask for, and nodes by their engine ids (ADR 0027).
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import secrets
import time
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from baton.api.errors import NotFoundError, PoisonRequestError
from router.calls.call import Call
from router.fleet.lost_nodes import LostNodes

logger = logging.getLogger(__name__)

QUARANTINE_S = 300.0
MAX_QUARANTINED = 1024
MAX_HISTORIES = 4096
# Of what one lost node had begun, so many are tried alone; it began the oldest first.
MAX_SUSPECTS_PER_LOSS = 8
# Losses of so long ago say nothing of those of now.
WINDOW_S = 10.0


@dataclass(frozen=True, slots=True)
class Quarantined:
    """A request that was ended, and whose like is refused.

    Attributes:
        fingerprint: names it; no other router has the same one.
        request_id: of the one that was ended.
        principal: who had sent it.
        engine_ids: nodes that were lost with it.
        expires_at: by the clock of `Suspects`.
        num_refused: since then.
    """

    fingerprint: str
    request_id: str
    principal: str
    num_prompt_tokens: int
    engine_ids: tuple[str, ...]
    expires_at: float
    num_refused: int = 0


@dataclass(slots=True, eq=False)
class Trial:
    """A suspect on its nodes.

    Attributes:
        engine_ids: where it has still to show that it does no harm.
        is_alone: no other suspect was on one of these, and no node had died for a while.
    """

    fingerprint: str
    engine_ids: set[str]
    begun_at: float
    is_alone: bool


class Suspects:
    """Of one router.

    Args:
        lost_nodes: which nodes went away by themselves.
        quarantine_s: how long the like of a request that was ended is refused.
        clock: the one of ``lost_nodes``.

    Attributes:
        num_ended_total: requests that were ended for this.
        num_refused_total: that were refused because one like them had been.
    """

    def __init__(
        self,
        lost_nodes: LostNodes,
        *,
        quarantine_s: float = QUARANTINE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.lost_nodes = lost_nodes
        self.clock = clock
        self.num_ended_total = self.num_refused_total = 0
        self._quarantine_s = quarantine_s
        self._key = secrets.token_bytes(32)
        self._quarantined: OrderedDict[str, Quarantined] = OrderedDict()  # oldest first
        self._lost_with: OrderedDict[str, set[str]] = OrderedDict()  # fingerprint -> engine ids
        self._num_suspects: Counter[str] = Counter()  # by lost node
        self._trials: dict[str, set[Trial]] = {}  # by engine id

    # ------------------------------------------------------------------ quarantine

    def check(self, call: Call) -> None:
        """Raise PoisonRequestError for what is like a request that was ended."""
        if self._quarantined:  # else there is nothing to be compared with
            self.check_fingerprint(self.fingerprint(call))

    def check_fingerprint(self, fingerprint: str) -> None:
        """The same for a fingerprint."""
        found = self._quarantined.get(fingerprint)
        if found is None:
            return
        left_s = found.expires_at - self.clock()
        if left_s <= 0:
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

    def quarantine(self, call: Call, fingerprint: str) -> PoisonRequestError:
        """Refuse the like of a request from now on; returns what its client is told."""
        engine_ids = tuple(sorted(self._lost_with.get(fingerprint, ())))
        self._quarantined.pop(fingerprint, None)
        self._quarantined[fingerprint] = Quarantined(
            fingerprint,
            call.request_id,
            call.terms.principal.name,
            len(call.prompt_token_ids),
            engine_ids,
            self.clock() + self._quarantine_s,
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
        now = self.clock()
        return [one for one in self._quarantined.values() if one.expires_at > now]

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

    def note_lost_with(self, fingerprint: str, engine_ids: set[str]) -> None:
        """Nodes were lost while they computed something of that kind."""
        known = self._lost_with.pop(fingerprint, set())
        self._lost_with[fingerprint] = known | engine_ids
        if len(self._lost_with) > MAX_HISTORIES:
            self._lost_with.popitem(last=False)

    def forget_losses(self, fingerprint: str) -> None:
        """Something of that kind was computed well."""
        self._lost_with.pop(fingerprint, None)

    def others_lost(self, fingerprint: str, since: float) -> set[str]:
        """Nodes that were lost since then without it."""
        return self.lost_nodes.lost_since(since) - self._lost_with.get(fingerprint, set())

    def admit(self, engine_ids: set[str]) -> bool:
        """Whether one more of what these lost nodes had begun is to be tried alone."""
        if max(self._num_suspects[name] for name in engine_ids) >= MAX_SUSPECTS_PER_LOSS:
            return False
        if len(self._num_suspects) > MAX_HISTORIES:
            self._num_suspects.clear()
        self._num_suspects.update(engine_ids)
        return True

    # ------------------------------------------------------------------ trials

    def has_trial(self, engine_id: str) -> bool:
        """Whether a suspect is on a node."""
        return engine_id in self._trials

    def is_tried(self, fingerprint: str) -> bool:
        """Whether something of that kind is on trial."""
        return any(
            trial.fingerprint == fingerprint for trials in self._trials.values() for trial in trials
        )

    def begin_trial(self, trial: Trial) -> None:
        """A suspect was placed; where others are, none of them is alone."""
        for engine_id in trial.engine_ids:
            there = self._trials.setdefault(engine_id, set())
            there.add(trial)
            if len(there) > 1:
                for one in there:
                    one.is_alone = False

    def end_trial(self, trial: Trial, engine_ids: set[str] | None = None) -> None:
        """It shows no harm any more on these nodes, or on any."""
        for engine_id in list(trial.engine_ids if engine_ids is None else engine_ids):
            trial.engine_ids.discard(engine_id)
            there = self._trials.get(engine_id, set())
            there.discard(trial)
            if not there:
                self._trials.pop(engine_id, None)
