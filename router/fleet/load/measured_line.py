"""MeasuredLine: seconds of a prompt or of a step, as a base and so much per unit of its size.

    known before     the node's own step times, or the line that other nodes measured, or a guess
    level            median of measured / known: one odd measurement does not move it
    shape            least squares of relative errors around that level; far points have no leverage

The last measurements count, newer ones more. Refuses to know: what is measured, nodes, clocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

Point = tuple[float, float]  # units, seconds
_Weighted = tuple[float, float, float]  # units, seconds, weight

NUM_KEPT = 16
# Drawing a line takes as long as placing a request: once there are many, not for each measurement.
DRAWN_EVERY = 8
_OLDEST_WEIGHT = 0.2  # of the oldest measurement that is kept, where the newest one has 1
_COLD_WEIGHT = 0.25  # of the first measurement: the node may still touch memory or compile
# What is known before counts as so many measurements.
PROFILE_WEIGHT, SHARED_WEIGHT = 1.5, 0.5
_LARGEST_ERROR = 0.5  # a measurement that is further off than this pulls no harder
_LEAST_S = 1e-6
_SHARED_UNITS = (1.0, 256.0, 2048.0)


class MeasuredLine:
    """``seconds = base + per_unit * units``, neither below 0.

    Args:
        profile: times that the node measured at its start, by rising units.
        shared: gets every measurement but the first; where there is no profile, its line is what
            is known before.
        guess: two points that hold while nothing is measured; needed without ``shared``.
        num_kept: measurements that count.
        shared_units: where the line of ``shared`` is looked at.

    Attributes:
        num_measured: measurements here, ever.
    """

    def __init__(
        self,
        profile: Sequence[Point] = (),
        *,
        shared: MeasuredLine | None = None,
        guess: Sequence[Point] = (),
        num_kept: int = NUM_KEPT,
        shared_units: Sequence[float] = _SHARED_UNITS,
    ) -> None:
        self._shared = shared
        self._follows = shared if not profile else None
        self._weight = PROFILE_WEIGHT if profile else SHARED_WEIGHT
        self._points = tuple(profile) or tuple(guess)
        self._has_profile = bool(profile)
        self._measured: deque[_Weighted] = deque(maxlen=num_kept)
        self._num_kept = num_kept
        self._faded = tuple(_OLDEST_WEIGHT ** (age / num_kept) for age in range(num_kept))
        self._shared_units = shared_units
        self._num_drawn = self._num_shared = -1  # measurements, at the time of the last drawing
        self.num_measured = 0
        self.base = self.per_unit = 0.0
        self.refresh()

    @property
    def is_known(self) -> bool:
        """Whether the node measured anything, at its start or since."""
        return self.num_measured > 0 or self._has_profile

    def seconds(self, units: float) -> float:
        """Return what so many units take by the line of now."""
        return self.base + self.per_unit * units

    def measure(self, units: float, seconds: float) -> None:
        """Add a measurement; seen in the line after `refresh`."""
        is_cold = self.num_measured == 0 and self._shared is not None
        units, seconds = max(units, 1.0), max(seconds, _LEAST_S)
        self._measured.append((units, seconds, _COLD_WEIGHT if is_cold else 1.0))
        self.num_measured += 1
        if self._shared is not None and not is_cold:
            self._shared.measure(units, seconds)

    def refresh(self) -> None:
        """Draw the line through what is known now, if much has been measured since it was drawn."""
        num_new = self.num_measured - self._num_drawn
        is_due = num_new > 0 if self.num_measured <= self._num_kept else num_new >= DRAWN_EVERY
        shared = self._follows
        if shared is not None:
            shared.refresh()
            is_due |= shared._num_drawn != self._num_shared and self.num_measured <= self._num_kept
        if is_due:
            self._num_shared = shared._num_drawn if shared is not None else 0
            self._num_drawn = self.num_measured
            self._draw()

    def _draw(self) -> None:
        points, shared = self._points, self._follows
        if shared is not None:
            points = tuple((units, shared.seconds(units)) for units in self._shared_units)
        each = self._weight / len(points)
        known = [(units, seconds, each) for units, seconds in points]
        base, per_unit = _fit(known, *_through(points))
        if self._measured:
            newest_first = zip(reversed(self._measured), self._faded, strict=False)
            measured = [(units, s, weight * faded) for (units, s, weight), faded in newest_first]
            level = _level(measured, base, per_unit, self._weight)
            measured += [(units, level * seconds, each) for units, seconds in points]
            base, per_unit = _fit(measured, level * base, level * per_unit)
        self.base, self.per_unit = base, per_unit


def _through(points: Sequence[Point]) -> Point:
    """Return base and slope of a line through the first and the last point, neither below 0."""
    (least, first_s), (most, last_s) = points[0], points[-1]
    per_unit = max(last_s - first_s, 0.0) / (most - least) if most > least else last_s / most
    return max(first_s - per_unit * least, 0.0), per_unit


def _level(measured: Sequence[_Weighted], base: float, per_unit: float, weight: float) -> float:
    """Return the weighted median of measured over known; ``weight`` is that of a ratio of 1."""
    ratios = [(seconds / (base + per_unit * units), each) for units, seconds, each in measured]
    ratios.append((1.0, weight))
    ratios.sort()
    left = 0.5 * sum([each for _, each in ratios])
    for ratio, each in ratios:
        left -= each
        if left <= 0:
            return ratio
    return 1.0


def _fit(points: Sequence[_Weighted], near_base: float, near_slope: float) -> Point:
    """Return base and slope by least squares of relative errors.

    Args:
        near_base, near_slope: a line; errors are relative to it, and those far from it are bounded.
    """
    weight = x = y = xx = xy = 0.0
    for units, seconds, each in points:
        expected = near_base + near_slope * units + _LEAST_S
        error = abs(seconds / expected - 1.0)
        if error > _LARGEST_ERROR:
            each *= _LARGEST_ERROR / error
        each /= expected * expected
        weight += each
        each_x = each * units
        x += each_x
        y += each * seconds
        xx += each_x * units
        xy += each_x * seconds
    spread = weight * xx - x * x
    per_unit = (weight * xy - x * y) / spread if spread > 1e-9 * weight * xx else near_slope
    per_unit = min(max(per_unit, 0.0), y / x)  # more would be a base below 0
    return max(y - per_unit * x, 0.0) / weight, per_unit
