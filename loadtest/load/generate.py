"""Generated traces: sessions whose prompts grow turn by turn, and arrival times of sessions.

    prompt of turn n = prefix of the session's group | turn 1 | output 1 | turn 2 | ... | turn n

This one rule makes the usual kinds of load: single turns over popular prefixes, conversations with
growing history, and agents that call tools in quick succession. The seeds alone decide all that is
drawn.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from baton.api.errors import ConfigError
from loadtest.load.traces import BLOCK_TOKENS, TraceRequest, num_blocks


@dataclass(frozen=True, slots=True)
class Lengths:
    """A log-normal distribution of numbers of tokens: many small numbers and a long tail.

    Attributes:
        mean: mean number of tokens.
        sigma: standard deviation of the logarithm; 0: all values are equal.
    """

    mean: float
    sigma: float = 0.0

    def draw(self, chance: random.Random) -> int:
        """Draw a number of tokens, which is at least 1."""
        mu = math.log(self.mean) - self.sigma**2 / 2
        return max(1, round(chance.lognormvariate(mu, self.sigma)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The distributions from which sessions are drawn; the constructor checks its arguments.

    Attributes:
        num_groups: number of groups; all prompts of a group's sessions begin with the same prefix.
            0: no prefixes.
        zipf_exponent: the exponent s: group k is drawn with a probability proportional to 1 / k **
            s.
        prefix_tokens: length of a group's common prefix in tokens, drawn once per group.
        turn_tokens: tokens that a turn adds to the prompt: a question, or a tool's result.
        output_tokens: tokens of a turn's output, which the next turn's prompt repeats.
        mean_turns: mean number of a session's turns (a geometric distribution); 1: all sessions
            have one turn.
        mean_pause_s: mean time from the arrival of one turn to the arrival of the next (an
            exponential distribution). Answers do not delay the next turn, because a trace does not
            know how long they take.
        max_input_length: maximum length of a prompt in tokens; a session ends before a longer
            prompt.
    """

    num_groups: int = 0
    zipf_exponent: float = 1.0
    prefix_tokens: Lengths = Lengths(1)
    turn_tokens: Lengths
    output_tokens: Lengths
    mean_turns: float = 1.0
    mean_pause_s: float = 30.0
    max_input_length: int = 128_000

    def __post_init__(self) -> None:
        for name, least in (
            ("num_groups", 0),
            ("zipf_exponent", 0),
            ("mean_turns", 1),
            ("mean_pause_s", 0),
            ("max_input_length", 1),
        ):
            if not getattr(self, name) >= least:
                raise ConfigError(f"{name}: must be {least} or more, got {getattr(self, name)!r}")


# The mean lengths of `conversation` and `tool-agent` are about those of Mooncake's public traces of
# these names (FAST '25: 12,035 tokens in and 343 out; 8,596 in and 182 out).
WORKLOADS: dict[str, Workload] = {
    "shared-prefix": Workload(
        num_groups=64,
        prefix_tokens=Lengths(2048, 0.5),
        turn_tokens=Lengths(256, 0.8),
        output_tokens=Lengths(128, 0.7),
    ),
    "conversation": Workload(
        turn_tokens=Lengths(3600, 1.2),
        output_tokens=Lengths(343, 0.8),
        mean_turns=3.0,
        mean_pause_s=60.0,
    ),
    "tool-agent": Workload(
        num_groups=12,
        prefix_tokens=Lengths(5000, 0.4),
        turn_tokens=Lengths(900, 1.0),
        output_tokens=Lengths(182, 0.9),
        mean_turns=4.0,
        mean_pause_s=5.0,
    ),
}


def gamma_arrivals(
    chance: random.Random, *, rate_per_s: float, variation: float
) -> Iterator[float]:
    """Yield arrival times in seconds with gamma-distributed gaps; raises ConfigError.

    Args:
        variation: standard deviation of the gaps divided by their mean: 1 makes a Poisson process,
            larger values make bursts, values near 0 make even arrivals.
    """
    if not (rate_per_s > 0 and variation > 0):
        raise ConfigError(
            f"rate_per_s, variation: must be above 0, got {rate_per_s!r}, {variation!r}"
        )
    shape = 1 / variation**2
    now_s = 0.0
    while True:
        now_s += chance.gammavariate(shape, 1 / (rate_per_s * shape))
        yield now_s


def on_off_arrivals(
    chance: random.Random, *, rate_per_s: float, mean_on_s: float, mean_off_s: float
) -> Iterator[float]:
    """Yield arrival times in seconds: Poisson in on phases, none in off phases.

    Raises ConfigError.

    Args:
        rate_per_s: arrivals per second during on phases.
        mean_on_s: mean length of an on phase (an exponential distribution).
        mean_off_s: mean length of an off phase (an exponential distribution).
    """
    if not (rate_per_s > 0 and mean_on_s > 0 and mean_off_s > 0):
        raise ConfigError(
            "rate_per_s, mean_on_s, mean_off_s: must be above 0, "
            f"got {rate_per_s!r}, {mean_on_s!r}, {mean_off_s!r}"
        )
    began_s = 0.0
    while True:
        ends_s = began_s + chance.expovariate(1 / mean_on_s)
        now_s = began_s + chance.expovariate(rate_per_s)
        while now_s < ends_s:
            yield now_s
            now_s += chance.expovariate(rate_per_s)
        began_s = ends_s + chance.expovariate(1 / mean_off_s)


def generate(
    workload: Workload, starts_s: Iterator[float], *, num_sessions: int, seed: int
) -> list[TraceRequest]:
    """Generate the requests of ``num_sessions`` sessions, sorted by arrival.

    Args:
        starts_s: times at which sessions begin, from `gamma_arrivals` or `on_off_arrivals`.
        seed: seed of the sessions' contents; the arrival times have another seed.
    """
    chance = random.Random(seed)
    new_ids = itertools.count()
    prefixes = [
        _new_ids(new_ids, workload.prefix_tokens.draw(chance)) for _ in range(workload.num_groups)
    ]
    weights = [1 / (rank + 1) ** workload.zipf_exponent for rank in range(workload.num_groups)]
    requests: list[TraceRequest] = []
    for session, start_s in enumerate(itertools.islice(starts_s, num_sessions)):
        num_tokens, hash_ids = (
            chance.choices(prefixes, weights)[0] if prefixes else _new_ids(new_ids, 0)
        )
        requests += _session(workload, chance, new_ids, start_s, num_tokens, hash_ids, session)
    return sorted(requests, key=lambda request: request.timestamp_ms)


def _new_ids(new_ids: Iterator[int], num_tokens: int) -> tuple[int, tuple[int, ...]]:
    """Return ``num_tokens`` and new ids for the full blocks of a prefix of this length."""
    return num_tokens, tuple(itertools.islice(new_ids, num_tokens // BLOCK_TOKENS))


def _session(
    workload: Workload,
    chance: random.Random,
    new_ids: Iterator[int],
    start_s: float,
    num_tokens: int,
    full_ids: tuple[int, ...],
    session: int,
) -> Iterator[TraceRequest]:
    """Yield a session's requests; ``full_ids``: ids of the full blocks of the session's prefix."""
    now_s = start_s
    while True:
        num_tokens += workload.turn_tokens.draw(chance)
        if num_tokens > workload.max_input_length:
            return
        num_new = num_blocks(num_tokens) - len(full_ids)
        hash_ids = (*full_ids, *itertools.islice(new_ids, num_new))
        output_length = workload.output_tokens.draw(chance)
        yield TraceRequest(
            timestamp_ms=round(now_s * 1000),
            input_length=num_tokens,
            output_length=output_length,
            hash_ids=hash_ids,
            session=session,
        )
        if chance.random() * workload.mean_turns < 1:
            return
        # The next prompt has the same full blocks, and the output continues the partial last block.
        full_ids = hash_ids[: num_tokens // BLOCK_TOKENS]
        num_tokens += output_length
        if workload.mean_pause_s:
            now_s += chance.expovariate(1 / workload.mean_pause_s)
