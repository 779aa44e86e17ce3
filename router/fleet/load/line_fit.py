"""LineFit: seconds as a base and so much per unit, learnt from what was measured lately.

Least squares with weights that fade. What few or no measurements of its own cannot say is taken
from a fit that others share, and at the very start from a guess.
"""

from __future__ import annotations

NUM_SHARED = 4.0  # what others measured counts as so many measurements of one's own


class LineFit:
    """``seconds = base + per_unit * units``, neither below 0.

    Args:
        fading: what a measurement keeps of its weight with each later one.
        shared: what is measured here is added there, too.
        guess: two (units, seconds) that count as measured when there is nothing else.

    Attributes:
        num_measured: here, ever.
    """

    def __init__(
        self,
        fading: float,
        *,
        shared: LineFit | None = None,
        guess: tuple[tuple[float, float], tuple[float, float]] | None = None,
    ) -> None:
        self._fading = fading
        self._shared = shared
        # Sums of weight, x, y, xx, xy.
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)
        for units, seconds in guess or ():
            self._add(units, seconds)
        self.num_measured = 0
        self.base = self.per_unit = 0.0
        self.refresh()

    def measure(self, units: float, seconds: float) -> None:
        """Something of so many units took so long; seen in the line after `refresh`."""
        self._add(units, seconds)
        self.num_measured += 1
        if self._shared is not None:
            self._shared.measure(units, seconds)

    def refresh(self) -> None:
        """Draw the line through what is known now."""
        weight, x, y, xx, xy = self._sums
        if self._shared is not None:
            shared = self._shared._sums
            factor = NUM_SHARED / shared[0]
            weight, x, y, xx, xy = (
                own + factor * other for own, other in zip(self._sums, shared, strict=True)
            )
        spread = weight * xx - x * x
        per_unit = (weight * xy - x * y) / spread if spread > 0 else 0.0
        per_unit = min(max(per_unit, 0.0), y / x if x > 0 else 0.0)
        self.per_unit = per_unit
        self.base = max(y - per_unit * x, 0.0) / weight if weight else 0.0

    def _add(self, units: float, seconds: float) -> None:
        fading = self._fading
        weight, x, y, xx, xy = self._sums
        self._sums = (
            weight * fading + 1,
            x * fading + units,
            y * fading + seconds,
            xx * fading + units * units,
            xy * fading + units * seconds,
        )
