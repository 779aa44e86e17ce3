"""Options of `baton loadtest run`, `compare` and `tune`, checked and turned into plans."""

from __future__ import annotations

import dataclasses
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.api.errors import ConfigError
from baton.engine_config import parse_cpu_list
from baton.options import check_limits, group, option, same_option
from baton.processes.cores import usable_cores
from baton.version import __version__
from loadtest.drills.faults import NOTATION as FAULT_NOTATION
from loadtest.exit_codes import EXIT_LAGGED
from loadtest.load.images import (
    MAX_IMAGES,
    SIZE_NOTATION,
    ImageLoad,
    parse_image_counts,
    parse_image_sizes,
)
from loadtest.load.lengths import NOTATION, parse_lengths
from loadtest.load.shapes import NOTATION as DEPLOYMENT_NOTATION
from loadtest.plan import (
    MAX_RATE_PER_S,
    MAX_USERS,
    ClosedLoop,
    Load,
    LoadPlan,
    OpenLoop,
    Search,
    TraceReplay,
)
from loadtest.report.confidence import MAX_REPEATS
from loadtest.slo import Slo
from loadtest.targets.base import TargetOptions

_MAX_FRESH_SEED = 2**31
_IMAGE_SIZE = "512x512"
_SLO_HELP = "Limits that a good request keeps, seconds: ttft=0.5,tpot=0.05,gap=0.2,e2e=10."


def fresh_seed() -> int:
    """Return a random seed, which no earlier run has probably used."""
    return secrets.randbelow(_MAX_FRESH_SEED)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """Options that all commands have in common; raises ConfigError naming the option."""

    node_args: str = option(
        "", help="More options of every prefill and decode node, as one string."
    )
    router_args: str = option("", help="More options of the router, as one string.")
    rate: float | None = option(
        None,
        above=0,
        most=MAX_RATE_PER_S,
        help="Open loop: requests per second, sent whether or not answers come.",
    )
    arrivals: str = same_option(OpenLoop, "arrivals")
    burstiness: float = same_option(OpenLoop, "burstiness")
    input_tokens: str = option("512", help=f"Prompt tokens per request: {NOTATION}.")
    output_tokens: str = option("128", help=f"Output tokens per request: {NOTATION}.")
    prefix_groups: int = same_option(LoadPlan, "prefix_groups")
    prefix_tokens: int = same_option(LoadPlan, "prefix_tokens")
    images: str = option(
        "",
        help="Number of images in each request that has images: N or uniform:LEAST-MOST, at most "
        f"{MAX_IMAGES}; empty: no images. Such a request is a chat: the images, and a word for "
        "each of --input-tokens.",
    )
    image_size: str = option(
        _IMAGE_SIZE,
        help=f"Sizes of images in pixels: {SIZE_NOTATION}; each image has one of them.",
    )
    image_share: float = option(
        1.0, above=0, most=1, help="Share of requests with images (with --turns: conversations)."
    )
    image_repeats: float = option(
        0.25, least=0, most=1, help="Share of images that are one of the last 100 images again."
    )
    seed: int | None = option(
        None,
        least=0,
        help="Seed of the requests; equal seeds make equal requests, which a server may have "
        "cached. Without a seed, each run has fresh prompts, and its report tells their seed.",
    )
    warmup_s: float = same_option(LoadPlan, "warmup_s")
    duration_s: float | None = same_option(LoadPlan, "duration_s")
    vocab_size: int = same_option(LoadPlan, "vocab_size")
    timeout_s: float = same_option(LoadPlan, "timeout_s")
    drain_timeout_s: float = same_option(LoadPlan, "drain_timeout_s")
    slo: str = option("", help=_SLO_HELP)
    max_lag_ms: float = option(
        10.0,
        above=0,
        help="Most milliseconds of the generator's own lag (p99); above, the exit code is "
        f"{EXIT_LAGGED}.",
    )
    log_level: str = option("warning", help="debug, info, warning or error.")

    def __post_init__(self) -> None:
        check_limits(self)

    def plan(self, load: Load, **more: Any) -> LoadPlan:
        """Return the plan of a run with this load; raises ConfigError.

        Args:
            more: further fields of the plan, by name.
        """
        names = {one.name for one in dataclasses.fields(LoadPlan)}
        fields: dict[str, Any] = {
            one.name: getattr(self, one.name)
            for one in dataclasses.fields(self)
            if one.name in names
        }
        fields |= {
            "load": load,
            "input_lengths": parse_lengths("input_tokens", self.input_tokens),
            "output_lengths": parse_lengths("output_tokens", self.output_tokens),
            "images": self._image_load(),
            "seed": fresh_seed() if self.seed is None else self.seed,
            "max_lag_s": self.max_lag_ms / 1e3,
            "slo": Slo.parse(self.slo),
        }
        return LoadPlan(**fields | more)

    def _image_load(self) -> ImageLoad | None:
        """Return the images of the plan; raises ConfigError."""
        if not self.images:
            is_default = (self.image_size, self.image_share, self.image_repeats) == (
                _IMAGE_SIZE, 1.0, 0.25,
            )  # fmt: skip
            if not is_default:
                raise ConfigError("image_size, image_share, image_repeats: are for --images")
            return None
        return ImageLoad(
            counts=parse_image_counts(self.images),
            sizes=parse_image_sizes(self.image_size),
            share=self.image_share,
            repeats=self.image_repeats,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportOptions(LoadOptions):
    """Options of the commands that report a result; raises ConfigError naming the option."""

    encode_args: str = option("", help="More options of every encode node, as one string.")
    find_max_goodput: bool = option(
        False,
        help="Search for the highest rate at which --attainment of the requests keep --slo, "
        "beginning with --rate; each try has its own warm-up and duration.",
    )
    search: Search = group(Search)
    json: str = option("", help="Write the result to this file.")
    html: str = option(
        "", help="Write the result to this file as one page with plots (extra: report)."
    )
    png: str = option("", help="Write the page's plots to this folder (extra: report).")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions(ReportOptions):
    """Options of `baton loadtest run`; raises ConfigError naming the option."""

    target: TargetOptions = group(TargetOptions)
    up: str = option(
        "",
        help="Instead of --target: start a router and nodes for this model on this machine, as "
        "baton up does, and stop them at the end.",
    )
    prefill: int = option(1, least=0, help="With --up: number of prefill nodes.")
    decode: int = option(1, least=1, help="With --up: number of decode nodes.")
    encode: int = option(0, least=0, help="With --up: number of encode nodes.")
    concurrency: int | None = option(
        None,
        least=1,
        most=MAX_USERS,
        help="Closed loop: number of users, each waiting for its answer.",
    )
    think_s: float = same_option(ClosedLoop, "think_s")
    trace: str = option(
        "", help="Replay the requests of this file, which has the format of Mooncake's traces."
    )
    slowdown: float = same_option(TraceReplay, "slowdown")
    sweep: str = option(
        "",
        help="Several runs: rate=1,2,4 (open loop) or concurrency=1,8,64 (closed loop), each "
        "with its own warm-up and duration.",
    )
    fault: tuple[str, ...] = option((), help=f"Faults to inject in the run: {FAULT_NOTATION}.")
    pid: tuple[str, ...] = option((), help="NAME=PID of a process for kill and stop, without --up.")
    admin: str = option(
        "",
        help="host:port of Baton's router, asked after the run for KV blocks that are held but "
        "have no owner; with --up: that router.",
    )
    admin_token: str = option("", is_secret=True, help="Operator's token for --admin.")
    cancel_rate: float = same_option(LoadPlan, "cancel_rate")
    turns: str = option(
        "1",
        help=f"Turns per conversation, each continuing the one before: {NOTATION}.",
    )
    turn_pause_s: float = same_option(LoadPlan, "turn_pause_s")
    dataset: str = option(
        "",
        help="File of prompts and conversations to send instead of random tokens: ShareGPT, or "
        "JSONL with prompt, messages or turns.",
    )
    tokenizer: str = option(
        "",
        help="Folder with tokenizer.json: outputs are as long as the data set's answers, if it "
        "has them; else as --output-tokens says.",
    )
    num_requests: int | None = same_option(LoadPlan, "num_requests")
    save_requests: str = option("", help="Write a line of JSON per request to this file.")

    def run_plan(self, swept: tuple[str, float] | None) -> LoadPlan:
        """Return the run's plan; raises ConfigError.

        Args:
            swept: the variable of a sweep, and its first value; None: the run is no sweep.
        """
        return self.plan(
            self._load(swept),
            turns=parse_lengths("turns", self.turns),
            dataset=path_of(self.dataset),
            tokenizer=path_of(self.tokenizer),
        )

    def _load(self, swept: tuple[str, float] | None) -> Load:
        given = (self.rate is not None, self.concurrency is not None, self.trace, swept)
        if sum(map(bool, given)) != 1:
            raise ConfigError("rate, concurrency, trace, sweep: exactly one of them must be given")
        rate, concurrency = self.rate, self.concurrency
        if swept is not None and swept[0] == "rate":
            rate = swept[1]
        elif swept is not None:
            concurrency = int(swept[1])
        if rate is not None:
            return OpenLoop(rate_per_s=rate, arrivals=self.arrivals, burstiness=self.burstiness)
        if concurrency is not None:
            return ClosedLoop(concurrency=concurrency, think_s=self.think_s)
        return TraceReplay(path=Path(self.trace), slowdown=self.slowdown)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareOptions(ReportOptions):
    """Options of `baton loadtest compare`; raises ConfigError naming the option."""

    up: str = option(help="Model folder, GGUF file, or hub id, for all deployments.")
    rate: float = option(
        above=0, most=MAX_RATE_PER_S, help="Requests per second for each deployment."
    )
    duration_s: float = option(
        above=0,
        help="Time after which nothing is sent, seconds, in each run; includes the warm-up.",
    )
    slo: str = option(help=_SLO_HELP)
    deployments: str = option(
        "colocated:2,1:1",
        help=f"Deployments to compare, separated by commas: {DEPLOYMENT_NOTATION}.",
    )
    cores: str = option(
        "", help="Cores that each deployment's nodes divide, like 0-3; empty: all cores."
    )
    colocated_args: str = option(
        "", help="More options of nodes that both compute prompts and decode, as one string."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneOptions(LoadOptions):
    """Options of `baton loadtest tune`; raises ConfigError naming the option."""

    up: str = option(help="Model folder, GGUF file, or hub id.")
    rate: float = option(
        above=0,
        most=MAX_RATE_PER_S,
        help="Requests per second: more than the defaults serve within --slo, or nothing can be "
        "gained.",
    )
    duration_s: float = same_option(CompareOptions, "duration_s")
    slo: str = same_option(CompareOptions, "slo")
    repeats: int = option(
        3,
        least=2,
        most=MAX_REPEATS,
        help="Trials of the defaults at the beginning, and of the defaults and the best choice at "
        "the end.",
    )
    settings: str = option(
        "", help="Settings to search, separated by commas, in this order; empty: all."
    )
    budget_s: float = option(
        1800.0,
        above=0,
        help="Time of the search, seconds: no new value is tried after it. The best choice is then "
        "still repeated.",
    )
    state: str = option(
        "tune.jsonl", help="File of the trials: the same command goes on with those it has."
    )
    write: str = option(
        "tuned.toml", help="Configuration file to write if the found settings beat the defaults."
    )
    cores: str = option("", help="Cores that the nodes divide, like 0-3; empty: all cores.")

    def identity(self, num_cores: int) -> dict[str, object]:
        """Return what the trials of a search depend on, by name."""
        names = (
            *("up", "rate", "duration_s", "warmup_s", "slo", "arrivals", "burstiness"),
            *("input_tokens", "output_tokens", "prefix_groups", "prefix_tokens", "vocab_size"),
            *("images", "image_size", "image_share", "image_repeats"),
            *("node_args", "router_args", "timeout_s", "drain_timeout_s"),
        )
        found = {name: getattr(self, name) for name in names}
        return {
            **found,
            "cores": num_cores,
            "repeats": self.repeats,
            "version": __version__,
        }


def chosen_cores(text: str) -> tuple[int, ...]:
    """Parse cores such as ``0-3,6``; empty: all usable cores. Raises ConfigError."""
    allowed = usable_cores()
    try:
        cores = parse_cpu_list(text) if text else allowed
    except ConfigError:
        cores = frozenset()
    if not cores or not cores <= allowed:
        raise ConfigError(f"cores: must be like 0-3,6 and of {sorted(allowed)}, got {text!r:.100}")
    return tuple(sorted(cores))


def path_of(text: str) -> Path | None:
    """Return an option's text as a path; None if the text is empty."""
    return Path(text) if text else None
