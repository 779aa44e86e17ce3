"""RequestRecord: the times, tokens and outcome of one request of a run.

Times are seconds since the run began. Only the player writes a record, while the request runs.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from enum import Enum

from baton.api.outputs import Receipt
from loadtest.load.workload import PlannedRequest
from loadtest.targets.base import Frame, Usage


class Outcome(Enum):
    """The ways in which a request can end."""

    OK = "ok"
    CANCELLED = "cancelled"  # cancelled by the client as planned
    ERROR = "error"


class RequestRecord:
    """The record of one request.

    Attributes:
        scheduled_s: when the request should have been sent. Latencies are measured from this time,
            so they include delays by a slow server or a slow generator.
        sent_s: when the request was sent.
        frame_times_s: arrival time of each frame that had tokens.
        frame_tokens: number of tokens of each frame in ``frame_times_s``.
        counted: whether the server reports each frame's number of tokens; if not, the request's
            tokens are spread over the frames by the lengths of their texts.
        ended_s: when the answer ended, or the request failed.
    """

    __slots__ = (
        "_frame_chars",
        "counted",
        "ended_s",
        "error",
        "error_kind",
        "finish_reason",
        "frame_times_s",
        "frame_tokens",
        "num_tokens",
        "outcome",
        "planned",
        "receipt",
        "scheduled_s",
        "sent_s",
        "usage",
    )

    def __init__(self, planned: PlannedRequest, scheduled_s: float, sent_s: float) -> None:
        self.planned = planned
        self.scheduled_s = scheduled_s
        self.sent_s = sent_s
        self.ended_s = sent_s
        self.frame_times_s = array("d")
        self.frame_tokens = array("l")
        self.num_tokens = 0
        self.counted = True
        self.outcome: Outcome | None = None
        self.error_kind = ""
        self.error = ""
        self.finish_reason: str | None = None
        self.usage: Usage | None = None
        self.receipt: Receipt | None = None
        self._frame_chars = array("l")

    def on_frame(self, frame: Frame, now_s: float) -> None:
        """Record the arrival of a frame."""
        num_tokens = frame.num_tokens
        if num_tokens is None:
            self.counted = False
            num_tokens = 1  # an estimate, until the usage at the end tells the total
        if num_tokens:
            self.frame_times_s.append(now_s)
            self.frame_tokens.append(num_tokens)
            self._frame_chars.append(frame.num_chars)
            self.num_tokens += num_tokens
        if frame.finish_reason is not None:
            self.finish_reason = frame.finish_reason
        if frame.usage is not None:
            self.usage = frame.usage
        if frame.receipt is not None:
            self.receipt = frame.receipt

    @property
    def num_prompt_tokens(self) -> int | None:
        """Number of prompt tokens: the server's count, else as planned; None: unknown."""
        return self.usage.num_prompt_tokens if self.usage else self.planned.prompt.num_tokens

    def set_outcome(
        self, outcome: Outcome, now_s: float, kind: str = "", problem: str = ""
    ) -> None:
        """Record how the request ended; the record does not change afterwards."""
        self.outcome = outcome
        self.error_kind, self.error = kind, problem
        self.ended_s = now_s
        if not self.counted and self.usage is not None and self.frame_times_s:
            spread = spread_tokens(self.usage.num_output_tokens, self._frame_chars)
            self.frame_tokens = array("l", spread)
            self.num_tokens = sum(spread)

    @property
    def is_miscounted(self) -> bool:
        """Return whether the number of received tokens differs from the server's count.

        False if the request was given up, or if one of the counts is unknown.
        """
        return (
            self.outcome is Outcome.OK
            and self.counted
            and self.usage is not None
            and self.usage.num_output_tokens != self.num_tokens
        )

    @property
    def is_checked(self) -> bool:
        """Return whether `is_miscounted` knows both counts."""
        return self.outcome is Outcome.OK and self.counted and self.usage is not None


def spread_tokens(num_tokens: int, weights: Sequence[int]) -> list[int]:
    """Spread tokens over frames by weight; return each frame's tokens.

    Each frame gets at least one token if there are enough.
    """
    least = 1 if num_tokens >= len(weights) else 0
    total = sum(max(weight, 1) for weight in weights)
    spread: list[int] = []
    given = seen = 0
    for num_after, weight in zip(reversed(range(len(weights))), weights, strict=True):
        seen += max(weight, 1)
        wanted = round(num_tokens * seen / total) - given
        spread.append(max(least, min(wanted, num_tokens - given - least * num_after)))
        given += spread[-1]
    return spread
