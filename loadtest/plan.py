"""LoadPlan and Search: checked descriptions of a run, and of a search for the highest rate.

Refuses to know: targets, clocks, results.

Requests can be timed in three ways:

    OpenLoop     at times that do not depend on answers
    ClosedLoop   by a number of users who each wait for an answer before asking again
    TraceReplay  at the times of a trace, perhaps slowed down
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from baton.api.errors import ConfigError
from baton.options import LONGEST_S, check_limits, option
from loadtest.load.generate import Lengths
from loadtest.load.images import ImageLoad
from loadtest.load.lengths import MAX_LENGTH, LengthDistribution
from loadtest.report.confidence import MAX_REPEATS
from loadtest.slo import NO_SLO, Slo

ARRIVALS = ("constant", "poisson", "gamma")
# Limits of this program: each user is a task, and each request's message is made in advance.
MAX_USERS, MAX_RATE_PER_S = 100_000, 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenLoop:
    """An open loop: requests are sent at a fixed mean rate, however slowly the server answers.

    Attributes:
        arrivals: distribution of the arrivals, one of `ARRIVALS`.
        burstiness: for gamma arrivals, the standard deviation of the gaps divided by their mean: 1
            is Poisson, larger values make bursts.
    """

    rate_per_s: float = option(
        name="rate",
        above=0,
        most=MAX_RATE_PER_S,
        help="Open loop: requests per second, sent whether or not answers come.",
    )
    arrivals: str = option(
        "poisson",
        choices=ARRIVALS,
        help=f"Open loop: distribution of arrivals: {', '.join(ARRIVALS)}.",
    )
    burstiness: float = option(
        1.0,
        above=0,
        most=100,
        help="Gamma arrivals: standard deviation of the gaps divided by their mean.",
    )

    def __post_init__(self) -> None:
        check_limits(self)
        if self.arrivals != "gamma" and self.burstiness != 1.0:
            raise ConfigError(f"burstiness: is for gamma arrivals, got {self.arrivals!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedLoop:
    """A closed loop: each user waits for its answer. Users start one by one during the warm-up.

    Attributes:
        think_s: mean pause of a user between an answer and the next request (an exponential
            distribution).
    """

    concurrency: int = option(
        least=1, most=MAX_USERS, help="Closed loop: number of users, each waiting for its answer."
    )
    think_s: float = option(
        0.0,
        least=0,
        help="Closed loop: mean pause before a user's next request, seconds, exponential.",
    )

    def __post_init__(self) -> None:
        check_limits(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceReplay:
    """A replay: the requests of a trace file are sent at the file's times * ``slowdown``."""

    path: Path
    slowdown: float = option(1.0, above=0, most=1e6, help="Replay: factor for all times.")

    def __post_init__(self) -> None:
        check_limits(self)


ONE_TURN = Lengths(1)
Load = OpenLoop | ClosedLoop | TraceReplay


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """A run's load and its limits; the constructor raises ConfigError naming the option.

    Attributes:
        input_lengths: prompt lengths in tokens, not counting a group's prefix; not used by traces.
        prefix_groups: number of groups of requests whose prompts begin with the same prefix; 0: no
            groups.
        prefix_tokens: length of a group's prefix in tokens.
        cancel_rate: share of requests that the client cancels before their end.
        seed: seed of all random numbers. Another seed makes other prompts, even for traces and data
            sets.
        round: number of this run among repetitions with the same seed. Each repetition has new
            prompts, because a server may have cached the earlier prompts.
        turns: number of turns per conversation; each prompt repeats all earlier messages. A turn is
            sent after the previous answer. In an open loop, the rate is that of new conversations.
        turn_pause_s: mean pause between an answer and the next turn (an exponential distribution).
        dataset: file of prompts or conversations to send in place of random token ids.
        images: images of the drawn prompts; None: none.
        tokenizer: folder with tokenizer.json, to count the tokens of the data set's answers; None:
            output lengths come from their option.
        warmup_s: requests that are scheduled in these first seconds are not measured.
        duration_s: no request is scheduled after this many seconds; None: no limit.
        num_requests: maximum number of requests of a run; None: no limit.
        vocab_size: number of token ids from which prompts are drawn.
        timeout_s: maximum number of seconds from sending a request to the end of its answer.
        drain_timeout_s: seconds after the last sending at which open requests are given up.
        max_lag_s: maximum lag (p99) of the load generator itself at which a run's figures are
            valid.
    """

    load: Load
    input_lengths: LengthDistribution
    output_lengths: LengthDistribution
    prefix_groups: int = option(
        0,
        least=0,
        most=10**6,
        help="Number of groups of prompts; the prompts of a group begin alike; 0: no groups.",
    )
    prefix_tokens: int = option(
        0,
        least=0,
        most=MAX_LENGTH,
        help="Tokens of a group's common beginning, before those of --input-tokens.",
    )
    cancel_rate: float = option(
        0.0, least=0, most=1, help="Share of requests that the client cancels before they end."
    )
    turns: LengthDistribution = ONE_TURN
    turn_pause_s: float = option(
        0.0,
        least=0,
        help="Mean pause between an answer and the next turn, seconds, exponential.",
    )
    dataset: Path | None = None
    images: ImageLoad | None = None
    tokenizer: Path | None = None
    seed: int = 0
    round: int = 0
    warmup_s: float = option(
        0.0,
        least=0,
        help="Time before measuring, seconds: requests scheduled in it are not measured.",
    )
    duration_s: float | None = option(
        None, above=0, help="Time after which nothing is sent, seconds; includes the warm-up."
    )
    num_requests: int | None = option(None, least=1, most=10**9, help="Most requests to send.")
    vocab_size: int = option(
        1000, least=1, most=2**31, help="Prompts are made of the token ids below this."
    )
    timeout_s: float = option(600.0, above=0, help="Time limit of one request, seconds.")
    drain_timeout_s: float = option(
        60.0,
        least=0,
        help="Time after the last sending at which open requests are given up, seconds.",
    )
    max_lag_s: float = 0.01
    slo: Slo = NO_SLO

    def __post_init__(self) -> None:
        check_limits(self)
        if not 0 < self.max_lag_s <= LONGEST_S:
            raise ConfigError(
                f"max_lag_ms: must be above 0 and at most {LONGEST_S * 1e3:g}, "
                f"got {self.max_lag_s * 1e3:g}"
            )
        if (self.prefix_groups > 0) != (self.prefix_tokens > 0):
            raise ConfigError(
                "prefix_groups, prefix_tokens: must both be 0 or both above 0, "
                f"got {self.prefix_groups}, {self.prefix_tokens}"
            )
        if self.duration_s is not None and not self.duration_s > self.warmup_s:
            raise ConfigError(
                f"duration_s: must be more than warmup_s ({self.warmup_s:g}), "
                f"got {self.duration_s!r}"
            )
        has_turns = self.turns != ONE_TURN
        if isinstance(self.load, TraceReplay) and (has_turns or self.dataset is not None):
            raise ConfigError("turns, dataset: cannot be given with trace, which has its own")
        if self.dataset is not None and (has_turns or self.prefix_groups):
            raise ConfigError(
                "turns, prefix_groups: cannot be given with dataset, which has its own"
            )
        if self.images is not None and (
            isinstance(self.load, TraceReplay) or self.dataset is not None
        ):
            raise ConfigError("images: are for drawn prompts, not for trace or dataset")
        if self.tokenizer is not None and self.dataset is None:
            raise ConfigError("tokenizer: is for the answers of --dataset")
        is_endless = self.duration_s is None and self.num_requests is None
        if is_endless and not isinstance(self.load, TraceReplay):
            raise ConfigError("duration_s, num_requests: one of them must be given")


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """The goal of a search for the highest rate; the constructor raises ConfigError.

    Attributes:
        attainment: share of the requests that must keep the SLO, so that a rate counts as held.
        precision: the search ends when the lowest rate that failed exceeds the highest rate that
            held by at most this fraction.
    """

    attainment: float = option(
        0.9, above=0, most=1, help="Search: share of requests that must keep the SLO."
    )
    repeats: int = option(
        3,
        least=1,
        most=MAX_REPEATS,
        help="Search: number of searches, for a confidence interval.",
    )
    precision: float = option(
        0.1,
        least=0.001,
        most=1,
        help="Search: ends when the lowest failing rate exceeds the highest passing rate by at "
        "most this share.",
    )

    def __post_init__(self) -> None:
        check_limits(self)
