"""Speculation: gets drafts from a proposer, and decides how many of them to verify.

Drafts that no step verified are still compared with the tokens sampled later, to notice when drafts
would pay off again. Refuses to know: scheduling and computation of drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from baton.api.outputs import RequestDelta
from baton.checkpoint.model_folder import config_digest, find_model_folder, weights_digest
from baton.engine_config import EngineConfig
from engine.core.drafts import ALL, is_drafted_for
from engine.core.outputs import ScheduledRequest, SchedulerOutput, StepResult
from engine.core.request import Request
from engine.speculation import PROPOSERS
from engine.speculation.base import Proposer
from engine.speculation.draft_lengths import (
    TRIED,
    YES,
    Acceptance,
    Choice,
    DraftingCosts,
    StepCosts,
    Trials,
    choose_lengths,
    choose_num_drafts,
)

# Maximum number of steps before the number of drafts is chosen anew, even if the number of requests
# stays: after a choice of some drafts, and after a choice of none.
_CHOICE_LASTS, _CHOICE_OF_NONE_LASTS = 4, 32
# If drafts have not paid off for this many steps, the drafter no longer reads new requests.
_NONE_FOR_LONG = 64
_LOOK_RARELY = 4  # once drafts have not paid off for long, one step in this many is measured
_ONE_MORE_AFTER = 128  # steps with fewer drafts than allowed before one more is tried
_NOTHING: Mapping[str, tuple[int, ...]] = MappingProxyType({})
_SPARE = 16  # number of ended requests whose data may be kept


class Speculation:
    """Gets drafts for an engine's requests, and selects those to verify; a `DraftPolicy`.

    Attributes:
        choice: the latest step's number of drafts, with reasons; None: all drafts are verified.
        in_steps, drafter_reads: the arguments of the same names; part of `DraftPolicy`.

    Args:
        proposer: makes drafts.
        num_drafts: maximum number of drafts of a request.
        vocab_size: size of the model's vocabulary.
        adaptive: whether to leave out drafts that do not pay off.
        in_steps: whether workers make drafts as a part of each step, which takes time.
        drafter_reads: whether the drafter has KV of its own, and so must read all tokens of a
            request.
    """

    def __init__(
        self,
        proposer: Proposer,
        num_drafts: int,
        vocab_size: int,
        *,
        adaptive: bool = False,
        in_steps: bool = False,
        drafter_reads: bool = False,
    ) -> None:
        self._proposer = proposer
        self._num_drafts, self._vocab_size = num_drafts, vocab_size
        self._adaptive, self.in_steps = adaptive, in_steps
        self.drafter_reads = drafter_reads
        self._num_steps_of_none = 0  # steps since drafts last paid off
        self._num_steps_of_some = 0  # steps with fewer drafts than allowed
        self._tries_one_more = False
        self._trials = Trials()
        self._to_draft = (0, 0, 0)  # drafts per request, requests, steps left
        self._known: dict[str, Request] = {}  # requests that the proposer may know
        self._proposed: dict[str, tuple[int, ...]] = {}  # all drafts, verified or not, by request
        self._acceptance: dict[str, Acceptance] = {}
        self._acceptance_of_all = Acceptance.of_all()
        self._costs = StepCosts()
        self._drafting_costs = DraftingCosts()
        self.choice: Choice | None = None
        self._gain = 1.0  # gain by drafts, see `Choice.gain`
        self._num_rows = 0  # number of requests that continue after the latest step

    def num_to_draft(self, num_rows: int, can_draft: Callable[[], bool] = YES) -> int:
        """Return how many drafts the next step is to make after each sampled token.

        If drafts do not pay off, some are still made as trials, at growing intervals.

        Args:
            num_rows: maximum number of requests in the next step.
            can_draft: returns whether any running request can get drafts.
        """
        if not self.in_steps or not self._adaptive:
            return self._num_drafts if self.in_steps else 0
        best, of_rows, num_steps = self._to_draft
        if not num_steps or of_rows != num_rows:
            best, self.choice = choose_num_drafts(
                self._costs,
                self._drafting_costs,
                max(num_rows, 1),
                self._num_drafts,
                self._acceptance_of_all.rate(),
            )
            num_steps = _CHOICE_LASTS if best else _CHOICE_OF_NONE_LASTS
            if self._none_for_long and not best:
                num_steps *= _LOOK_RARELY
        self._to_draft = best, num_rows, num_steps - 1
        self._num_steps_of_none = 0 if best else self._num_steps_of_none + 1
        self._tries_one_more = False
        if best:
            self._trials.note_paid()
            return best + self._one_more(best)
        if self._trials.is_due(can_draft):
            return self._num_drafts
        return best

    def _one_more(self, best: int) -> bool:
        """Return whether to try one draft more than the number that seems best.

        The time with one more draft may have been measured in a slow moment, so it is measured
        again.
        """
        if best == self._num_drafts or self._num_steps_of_some == _ONE_MORE_AFTER + TRIED:
            self._num_steps_of_some = 0
            return False
        self._num_steps_of_some += 1
        self._tries_one_more = self._num_steps_of_some > _ONE_MORE_AFTER
        return self._tries_one_more

    @property
    def _none_for_long(self) -> bool:
        return self._num_steps_of_none > _NONE_FOR_LONG

    def num_to_read(self) -> int:
        """Return how many of the newly started requests the drafter must read.

        The drafter reads all of them, unless drafts have not paid off for a long time. Then the
        drafter reads one request if a trial is due, and otherwise none. A request that the drafter
        does not read at its start gets no drafts.
        """
        if not self.drafter_reads or not self._none_for_long:
            return ALL
        return int(self._trials.is_overdue)

    def after_step(
        self,
        result: StepResult,
        requests: Mapping[str, Request],
        drafted: Mapping[str, tuple[int, ...]] = _NOTHING,
    ) -> dict[str, tuple[int, ...]]:
        """Return, by request id, the drafts that the next step should verify.

        Args:
            requests: requests that have not ended.
            drafted: drafts that a worker made in the step.
        """
        if self.in_steps:
            self._proposer.store_drafts(drafted)
            if not drafted and not self._proposed:
                self._num_rows = len(result.outputs) - len(result.finished)
                return {}
        self._forget_ended(requests)
        for output in result.outputs:
            self._look_at(output)
        going_on = [
            request
            for output in result.outputs
            if (request := requests.get(output.request_id)) is not None
            and request.max_num_tokens - request.num_tokens > 1
        ]
        self._num_rows = len(result.outputs) - len(result.finished)
        if not going_on:
            return {}
        self._proposed |= (drafts := self._propose(going_on))
        return self._what_pays(drafts, self._num_rows)

    def note_step(
        self, scheduled: SchedulerOutput, seconds: float, drafting_s: float = 0.0
    ) -> None:
        """Record the seconds that a step took; call before `after_step`.

        Args:
            drafting_s: the part of ``seconds`` that making drafts took.
        """
        is_rare = self._none_for_long and not scheduled.num_drafts
        if is_rare and self._num_steps_of_none % _LOOK_RARELY:
            return
        num_tokens, items = scheduled.num_scheduled_tokens, scheduled.scheduled
        if self._num_rows and (num_tokens == len(items) or all(map(_only_decodes, items))):
            self._costs.note(num_tokens, seconds - drafting_s)
            if scheduled.num_drafts:
                num_rows = sum(is_drafted_for(item.request) for item in items)
                self._drafting_costs.note(num_rows, scheduled.num_drafts, drafting_s)
                if not self._to_draft[0]:
                    self._trials.note_cost(drafting_s / max(seconds - drafting_s, 1e-6))

    def first_drafts(self, request: Request) -> tuple[int, ...]:
        """Return drafts of a request's next tokens, for the node that continues the request."""
        drafts = self._propose([request]).get(request.request_id, ())
        self._proposer.forget(request)
        del self._known[request.request_id]
        return drafts

    def received(self, request_id: str, drafts: Sequence[int]) -> tuple[int, ...]:
        """Return those of another node's drafts that the request's first step should verify."""
        taken = tuple(drafts[: self._num_drafts])
        if not taken or not all(0 <= token_id < self._vocab_size for token_id in taken):
            return ()
        self._proposed[request_id] = taken
        return self._what_pays({request_id: taken}, self._num_rows + 1).get(request_id, ())

    def _look_at(self, output: RequestDelta) -> None:
        """Compare a request's drafts with its sampled tokens, up to the first wrong draft."""
        drafts = self._proposed.pop(output.request_id, None)
        if not drafts or not self._adaptive:
            return
        acceptance = self._acceptance.setdefault(output.request_id, Acceptance())
        for draft, token_id in zip(drafts, output.token_ids, strict=False):
            acceptance.note(draft == token_id)
            self._acceptance_of_all.note(draft == token_id)
            if draft != token_id:
                break

    def _what_pays(
        self, drafts: dict[str, tuple[int, ...]], num_rows: int
    ) -> dict[str, tuple[int, ...]]:
        if not self._adaptive or not drafts or self._tries_one_more:
            return drafts
        if not self._costs.is_fresh(num_rows, self._gain):
            return {}  # first measure steps without drafts
        prior = self._acceptance_of_all.rate()
        unknown = Acceptance()
        rates = [self._acceptance.get(name, unknown).rate(prior) for name in drafts]
        numbers = [*map(len, drafts.values())]
        lengths, choice = choose_lengths(self._costs, num_rows, numbers, rates)
        self._gain = choice.gain
        if not self.in_steps:  # with `in_steps`, the number was chosen before making drafts
            self.choice = choice
        return {
            name: own[:length]
            for (name, own), length in zip(drafts.items(), lengths, strict=True)
            if length
        }

    def _propose(self, requests: Sequence[Request]) -> dict[str, tuple[int, ...]]:
        for request in requests:
            before = self._known.get(request.request_id)
            if before is not request:
                if before is not None:  # drop data of an earlier attempt
                    self._proposer.forget(before)
                self._known[request.request_id] = request
        proposed = self._proposer.propose(requests, self._num_drafts)
        return {
            request.request_id: drafts
            for request, drafts in zip(requests, proposed, strict=True)
            if drafts
        }

    def _forget_ended(self, requests: Mapping[str, Request]) -> None:
        """Drop data of ended requests once they are many: no call tells when a request ends."""
        if max(len(self._known), len(self._proposed)) <= 2 * len(requests) + _SPARE:
            return
        for request_id, request in list(self._known.items()):
            if requests.get(request_id) is not request:
                self._proposer.forget(request)
                del self._known[request_id]
        for kept in (self._proposed, self._acceptance):
            for request_id in kept.keys() - requests.keys():
                del kept[request_id]


def _only_decodes(item: ScheduledRequest) -> bool:
    return item.num_scheduled_tokens == 1 + len(item.draft_token_ids)


def drafter_identity(config: EngineConfig, model_folder: Path) -> str:
    """Return a digest of the drafter's files, which determine its drafts and its KV.

    Raises ModelLoadError when a file cannot be read.
    """
    folder = Path(config.speculative_model) if config.speculative_model else model_folder
    pickled = [f"{path.name}:{path.stat().st_size}" for path in sorted(folder.glob("*.[pb][ti]*"))]
    digests = (config_digest(folder), weights_digest(folder), *pickled)
    return " ".join((config.speculative_method, *digests))


def find_drafter(config: EngineConfig) -> EngineConfig:
    """Replace the drafter's name in the options, such as a hub id, by the path of its folder.

    Raises ModelLoadError if there is no such model.
    """
    if not config.speculative_model:
        return config
    return replace(config, speculative_model=str(find_model_folder(config.speculative_model)))


def make_speculation(config: EngineConfig, vocab_size: int) -> Speculation | None:
    """Make the speculation that the options ask for; None: no drafts."""
    if not config.max_num_drafts:
        return None
    proposer = PROPOSERS.load(config.speculative_method)(config)
    return Speculation(
        proposer,
        config.max_num_drafts,
        vocab_size,
        adaptive=config.adaptive_speculation,
        in_steps=config.num_lookahead_drafts > 0,
        drafter_reads=config.drafter_reads,
    )
