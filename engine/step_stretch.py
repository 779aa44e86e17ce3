"""StepStretch: limits the prompt tokens of a step that also decodes."""

from __future__ import annotations

# Aim below the limit, because step times vary, and at most one in a hundred gaps between tokens may
# exceed the limit.
_AIM = 0.8  # target for the prompt's part of a step, as a fraction of the allowed time
_FADING = 0.2  # weight of the newest step in moving averages
_LARGEST_CHANGE = 2.0  # a time above this multiple of the average counts as this multiple
_LARGEST_GROWTH = 2.0  # maximum ratio of the prompt tokens of two successive steps
_LEAST_S = 1e-6


class StepStretch:
    """Limits steps that compute prompts and decode.

    Args:
        limit: longest time of a step with prompt tokens, as a multiple of the time of a decode-only
            step; above 1.
        least: number of prompt tokens that a step may always compute, even before anything is
            measured.
    """

    def __init__(self, limit: float, least: int) -> None:
        assert limit > 1, limit
        self._share = _AIM * (limit - 1.0)
        self._least = self._latest = least
        # Average seconds of a decode-only step, and additional seconds per prompt token; 0: not
        # measured.
        self._decode_s = self._token_s = 0.0

    def num_tokens(self) -> int:
        """Return the maximum number of prompt tokens of the next step that also decodes."""
        if not self._decode_s or not self._token_s:
            return self._least
        fits = self._share * self._decode_s / self._token_s
        return max(int(min(fits, _LARGEST_GROWTH * self._latest)), self._least)

    def note_step(self, num_prompt_tokens: int, seconds: float) -> None:
        """Add the time of a step that decoded and computed ``num_prompt_tokens`` prompt tokens."""
        if not num_prompt_tokens:
            self._decode_s = _faded(self._decode_s, seconds)
        elif self._decode_s:
            self._latest = num_prompt_tokens
            more_s = (seconds - self._decode_s) / num_prompt_tokens
            self._token_s = _faded(self._token_s, max(more_s, _LEAST_S))


def _faded(average: float, latest: float) -> float:
    if not average:
        return latest
    bounded = min(max(latest, average / _LARGEST_CHANGE), average * _LARGEST_CHANGE)
    return average + _FADING * (bounded - average)
