"""MeasuredLine: predicts the seconds of a prompt or a step by a line fitted to measurements.

    prior    the node's own step times, or the line measured by other nodes, or a default
    level    median of measured / prior, which one odd measurement does not move. It starts at
             the level of all nodes, so that an unmeasured node does not look faster than equal
             nodes that were measured
    slope    least squares of relative errors around prior * level; outliers weigh less

Only the latest measurements count, and the newest have the largest weight.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

Point = tuple[float, float]  # (units, seconds)
_Weighted = tuple[float, float, float]  # (units, seconds, weight)

NUM_KEPT = 16
# Once there are many measurements, the line is fitted again after this many new ones: a fit takes
# as long as placing a request.
DRAWN_EVERY = 8
_OLDEST_WEIGHT = 0.2  # weight of the oldest measurement kept, relative to the newest
_COLD_WEIGHT = 0.25  # weight of the first measurement, which may include warm-up or compilation
# The prior (a profile, or other nodes' line) weighs as much as this many measurements.
PROFILE_WEIGHT, SHARED_WEIGHT = 1.5, 0.5
_LARGEST_ERROR = 0.5  # a larger relative error counts as this error
# Bounds of all times, so that sums of squares stay finite whatever a node reports.
_LEAST_S, _MOST_S = 1e-6, 1e6
_SHARED_UNITS = (1.0, 256.0, 2048.0)


class FleetLevel:
    """Tracks how much slower nodes are than their profiles: the median of measured / profile.

    A node measures its profile without load, so a node that serves requests is slower.

    Attributes:
        value: the median over the latest measurements of all nodes; 1 before any measurement.
        num_changes: how often the median was computed.
    """

    def __init__(self) -> None:
        self.value, self.num_changes = 1.0, 0
        self._ratios: deque[Point] = deque(maxlen=NUM_KEPT)
        self._num_noted = 0

    def note(self, ratio: float) -> None:
        """Add a measurement: measured seconds divided by the profile's, for one prompt or step."""
        self._ratios.append((ratio, 1.0))
        self._num_noted += 1
        if self._num_noted <= NUM_KEPT or self._num_noted % DRAWN_EVERY == 0:
            self.value = _median([*self._ratios, (1.0, PROFILE_WEIGHT)])
            self.num_changes += 1


class MeasuredLine:
    """A fitted line ``seconds = base + per_unit * units``; base and slope are at least 0.

    Args:
        profile: times that the node measured at its start, sorted by units.
        shared: line of all nodes, which gets all measurements of this node except the first. For a
            node without a profile, the shared line is the prior. A node with a profile starts at
            the shared line's ``fleet_level``.
        default: two points of the prior for a line without profile and ``shared``.
        num_kept: number of latest measurements that are kept.
        shared_units: numbers of units at which this line takes points from ``shared``.

    Attributes:
        num_measured: number of measurements added to this line since the start.
        fleet_level: on a shared line, how much slower nodes are than in their profiles.
    """

    def __init__(
        self,
        profile: Sequence[Point] = (),
        *,
        shared: MeasuredLine | None = None,
        default: Sequence[Point] = (),
        num_kept: int = NUM_KEPT,
        shared_units: Sequence[float] = _SHARED_UNITS,
    ) -> None:
        self._shared = shared
        self._follows = shared if not profile else None
        self.fleet_level = FleetLevel()
        self._level = self.fleet_level if shared is None else shared.fleet_level
        self._weight = PROFILE_WEIGHT if profile else SHARED_WEIGHT
        points = tuple(profile) or tuple(default)
        self._points = tuple((units, _bounded(seconds)) for units, seconds in points)
        self._has_profile = bool(profile)
        self._measured: deque[_Weighted] = deque(maxlen=num_kept)
        self._num_kept = num_kept
        self._faded = tuple(_OLDEST_WEIGHT ** (age / num_kept) for age in range(num_kept))
        self._shared_units = shared_units
        # Counts at the last fit: measurements of this line and of the shared line, and changes of
        # the level.
        self._num_fitted = self._num_shared = self._num_levels = -1
        self.num_measured = 0
        self._prior = _fit_prior(self._points, self._weight) if self._points else (0.0, 0.0)
        self.base = self.per_unit = 0.0
        self.refresh()

    @property
    def is_known(self) -> bool:
        """Return whether the node has a profile, or the router has measured it."""
        return self.num_measured > 0 or self._has_profile

    def seconds(self, units: float) -> float:
        """Return the seconds that the line predicts for this many units."""
        return self.base + self.per_unit * units

    def measure(self, units: float, seconds: float) -> None:
        """Add a measured time; the line changes only at the next `refresh`."""
        is_cold = self.num_measured == 0 and self._shared is not None
        units, seconds = max(units, 1.0), _bounded(seconds)
        self._measured.append((units, seconds, _COLD_WEIGHT if is_cold else 1.0))
        self.num_measured += 1
        if self._shared is not None and not is_cold:
            self._shared.measure(units, seconds)
            if self._has_profile:
                base, per_unit = self._prior
                self._level.note(seconds / (base + per_unit * units))

    def refresh(self) -> None:
        """Fit the line again if there are enough new measurements since the last fit."""
        num_new = self.num_measured - self._num_fitted
        is_due = num_new > 0 if self.num_measured <= self._num_kept else num_new >= DRAWN_EVERY
        shared = self._follows
        if shared is not None:
            shared.refresh()
            is_due |= shared._num_fitted != self._num_shared and self.num_measured <= self._num_kept
        elif self._has_profile and self.num_measured <= self._num_kept:
            is_due |= self._level.num_changes != self._num_levels
        if is_due:
            self._num_shared = shared._num_fitted if shared is not None else 0
            self._num_levels = self._level.num_changes
            self._num_fitted = self.num_measured
            self._fit_again()

    def _fit_again(self) -> None:
        points, shared = self._points, self._follows
        (base, per_unit), level = self._prior, 1.0
        if shared is not None:
            points = tuple((units, shared.seconds(units)) for units in self._shared_units)
            base, per_unit = _fit_prior(points, self._weight)
        elif self._has_profile:
            level = self._level.value
        if self._measured:
            newest_first = zip(reversed(self._measured), self._faded, strict=False)
            measured = [(units, s, weight * faded) for (units, s, weight), faded in newest_first]
            ratios = [(s / (base + per_unit * units), weight) for units, s, weight in measured]
            level = _median([*ratios, (level, self._weight)])
            each = self._weight / len(points)
            measured += [(units, level * seconds, each) for units, seconds in points]
            self.base, self.per_unit = _fit(measured, level * base, level * per_unit)
        else:
            self.base, self.per_unit = level * base, level * per_unit


def _bounded(seconds: float) -> float:
    return min(max(seconds, _LEAST_S), _MOST_S)


def _through(points: Sequence[Point]) -> Point:
    """Return base and slope, both at least 0, of the line through the first and the last point."""
    (least, first_s), (most, last_s) = points[0], points[-1]
    per_unit = max(last_s - first_s, 0.0) / (most - least) if most > least else last_s / most
    return max(first_s - per_unit * least, 0.0), per_unit


def _median(ratios: list[Point]) -> float:
    """Return the weighted median of (ratio, weight) pairs; sort the given list in place."""
    ratios.sort()
    left = 0.5 * sum([each for _, each in ratios])
    for ratio, each in ratios:
        left -= each
        if left <= 0:
            return ratio
    return 1.0


def _fit_prior(points: Sequence[Point], weight: float) -> Point:
    """Return base and slope of a line through points that together weigh ``weight``."""
    each = weight / len(points)
    known = [(units, seconds, each) for units, seconds in points]
    return _fit(known, *_through(points))


def _fit(points: Sequence[_Weighted], near_base: float, near_slope: float) -> Point:
    """Return base and slope of a line fitted by least squares of relative errors.

    Args:
        points: (units, seconds, weight).
        near_base, near_slope: line that the errors are relative to; a point far from this line
            weighs less.
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
    per_unit = min(max(per_unit, 0.0), y / x)  # a larger slope would make the base negative
    return max(y - per_unit * x, 0.0) / weight, per_unit
