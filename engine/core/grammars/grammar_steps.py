"""GrammarSteps: lets requests with grammars sample once their masks are ready.

A mask says which tokens a grammar allows next. The mask depends on the output's last token, so it
is computed between two steps; a request whose mask is not ready is left out of the next step.

Refuses to know: how masks are computed, which requests have room in a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from baton.api.errors import InvalidRequestError
from engine.core.grammars.grammar import MaskMaker, MasksAtOnce, allowed_bits
from engine.core.outputs import ScheduledRequest
from engine.core.request import Request
from engine.core.step_plan import StepHooks, StepPlan


class GrammarSteps:
    """The grammars of one scheduler's requests. Requests without a grammar pass unchanged.

    Args:
        masks: computes masks between steps; None: compute each mask at once.

    Attributes:
        masks: the argument ``masks``, or a `MasksAtOnce`.
        awaits_masks: whether the latest step is empty because the masks of all running requests
            were missing; other threads compute these masks, without waking the engine.
    """

    def __init__(self, masks: MaskMaker | None = None) -> None:
        self.masks = masks or MasksAtOnce()
        self.awaits_masks = False

    # ------------------------------------------------------------------ requests

    def begin_mask(self, request: Request) -> None:
        """Begin to compute the mask of a request's next token, unless the mask is ready."""
        if request.grammar is not None and not request.grammar.has_mask:
            self.masks.begin_mask(request.grammar)

    def accept(self, request: Request, token_ids: Sequence[int]) -> InvalidRequestError | None:
        """Advance a request's grammar by new output tokens, and begin to compute the next mask.

        Returns an error if the grammar refuses a token.
        """
        grammar = request.grammar
        if grammar is None:
            return None
        if not all(grammar.accept(token_id) for token_id in token_ids) or grammar.problem:
            return self.error_of(request)
        self.begin_mask(request)
        return None

    def error_of(self, request: Request) -> InvalidRequestError:
        """Return why a request's grammar allows no further token."""
        assert request.grammar is not None
        field, _, problem = request.grammar.problem.partition(": ")
        return InvalidRequestError(field, problem)

    # ------------------------------------------------------------------ a step

    def begin_step(self, *, may_wait: bool) -> None:
        """Wait for missing masks if allowed; call before a step's requests are chosen.

        Args:
            may_wait: whether the engine may wait some milliseconds for the masks begun so far.
        """
        self.awaits_masks = False
        if may_wait:
            self.masks.wait()

    def may_run(self, request: Request, num_tokens: int) -> bool:
        """Return whether a request may compute these tokens now; False if it needs a mask first."""
        grammar = request.grammar
        if grammar is None or grammar.has_mask or request.num_tokens_pending:
            return True  # `lacks_mask` checks again after the step in flight
        end = request.num_computed_tokens + request.num_tokens_in_flight + num_tokens
        return end < request.num_tokens

    def lacks_mask(self, item: ScheduledRequest) -> bool:
        """Return whether a request in a step would sample a token whose mask is not ready."""
        if self.may_run(item.request, item.num_scheduled_tokens):
            return False
        request = item.request
        assert request.num_computed_tokens >= request.num_initial_tokens, "leaves out a prompt"
        return True

    def wait_for_any(self) -> None:
        """Wait some milliseconds for any mask, as the masks of all running requests are missing."""
        self.awaits_masks = True
        self.masks.wait_for_any()

    def hooks(
        self,
        plan: StepPlan,
        scheduled: Sequence[ScheduledRequest],
        after_layer: Callable[[int], None] | None,
    ) -> StepHooks:
        """Return the hooks of a planned step, through which the worker gets grammar masks."""
        if not plan.constrained:
            return StepHooks(after_layer)
        items = {item.request.request_id: item for item in scheduled}
        grammars = {
            request_id: (grammar, len(items[request_id].draft_token_ids))
            for request_id in plan.constrained
            if (grammar := items[request_id].request.grammar) is not None
        }
        return StepHooks(after_layer, partial(allowed_bits, grammars))
