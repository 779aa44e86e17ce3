"""StepStretch: how many prompt tokens a step may compute beside decodes.

    step that only decodes    |--------|
    step beside a prompt      |--------|----|      at most `limit` times as long

Both kinds of steps are measured as they come, because they depend on the machine, on the model and
on how much decodes now. Refuses to know: requests, clocks.
"""

from __future__ import annotations

# What steps take varies, and at most one gap in a hundred is to be longer than the limit allows.
_AIM = 0.8  # part of the allowed time that is used
_FADING = 0.2  # of averages, per step
_LARGEST_CHANGE = 2.0  # a step that is further off than this pulls no harder
_LARGEST_GROWTH = 2.0  # over the last step that was measured: times of few tokens say little
_LEAST_S = 1e-6


class StepStretch:
    """Bounds steps that compute prompts and decode.

    Args:
        limit: times that a step beside a prompt may take of one that only decodes; above 1.
        least: prompt tokens that a step may have at any rate, also while nothing is measured.
    """

    def __init__(self, limit: float, least: int) -> None:
        assert limit > 1, limit
        self._share = _AIM * (limit - 1.0)
        self._least = self._latest = least
        self._decode_s = self._token_s = 0.0  # 0: not measured

    def num_tokens(self) -> int:
        """Return the most prompt tokens of the next step in which a request decodes."""
        if not self._decode_s or not self._token_s:
            return self._least
        fits = self._share * self._decode_s / self._token_s
        return max(int(min(fits, _LARGEST_GROWTH * self._latest)), self._least)

    def note_step(self, num_prompt_tokens: int, seconds: float) -> None:
        """Measure a step in which a request decoded, and so many prompt tokens were computed."""
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
