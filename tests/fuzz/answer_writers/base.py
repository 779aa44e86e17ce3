"""AnswerWriter: draws the tokens of answers. Refuses to know: what an answer must look like."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from baton.api.outputs import FinishReason
from baton.api.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Written:
    """The tokens of one answer, and how the answer ended."""

    token_ids: tuple[int, ...]
    finish_reason: FinishReason


class AnswerWriter(Protocol):
    """Writes answers with a model that was never trained.

    Attributes:
        end_token_ids: tokens that end an answer.
    """

    @property
    def end_token_ids(self) -> frozenset[int]: ...

    def check(self, params: SamplingParams) -> None:
        """Raise InvalidRequestError if the structured output of a request is refused."""

    def write(self, asked: Sequence[tuple[list[int], SamplingParams]]) -> list[Written]:
        """Write an answer to each prompt."""
        ...
