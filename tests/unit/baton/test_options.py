"""Options as dataclasses declare them: defaults, limits, groups, what users' words become."""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from typing import Any

import pytest

from baton.api.errors import ConfigError
from baton.cli.config_file import PROGRAMS
from baton.engine_config import EngineConfig
from baton.options import (
    OF_ONE_PROCESS,
    check_limits,
    group,
    make,
    option,
    options_of,
    parse_bytes,
    same_option,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    size: int | None = option(None, least=1, unset=0, help="Size.")
    memory: int | None = option(
        None, name="cache_memory", unset="auto", parse=parse_bytes, help="Memory."
    )
    kind: str = option("a", choices=("a", "b"), help="Kind.")
    share: float = option(0.5, above=0, most=1, help="Share.")
    tokens: int = option(0, least=0, most=9, help="Tokens.")

    def __post_init__(self) -> None:
        check_limits(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outer:
    model: str = option(help="Model.")
    routers: tuple[str, ...] = option(("r:1",), name="router", help="Routers.")
    token: str = option("", is_secret=True, help="Token.")
    inner: Inner = group(lambda: Inner(kind="b"), without=("share", "tokens"))
    derived: int = 7  # no option


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    outer: Outer = group(lambda: Outer(model="m"))
    memory: str = same_option(Inner, "cache_memory")

    def __post_init__(self) -> None:
        check_limits(self)


def test_options_are_in_order_with_names_types_and_defaults_as_users_write_them() -> None:
    found = [(one.name, one.type, one.default, one.path) for one in options_of(Outer)]
    assert found == [
        ("model", str, MISSING, ("model",)),
        ("router", tuple[str, ...], ("r:1",), ("routers",)),
        ("token", str, "", ("token",)),
        ("size", int, 0, ("inner", "size")),
        ("cache_memory", str, "auto", ("inner", "memory")),
        ("kind", str, "b", ("inner", "kind")),
    ]


def test_what_users_write_becomes_the_owners_values() -> None:
    written = {"model": "m", "router": ["a:1", "b:2"], "size": 3, "cache_memory": "2K"}
    made = make(Outer, written)
    inner = Inner(size=3, memory=2048, kind="b")
    assert made == Outer(model="m", routers=("a:1", "b:2"), inner=inner)


def test_what_stands_for_none_is_none_and_what_is_not_given_is_the_default() -> None:
    made = make(Outer, {"model": "m", "size": 0, "cache_memory": "auto"})
    assert made == Outer(model="m")
    assert made.inner == Inner(kind="b")


def test_groups_of_groups_are_made_with_the_outermost_defaults() -> None:
    assert make(Whole, {}) == Whole()
    made = make(Whole, {"size": 4, "memory": "5M"})
    assert made.outer == Outer(model="m", inner=Inner(size=4, kind="b"))
    assert made.memory == "5M"


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"size": -1}, "size: must be 1 or more, got -1"),
        ({"kind": "c"}, "kind: must be one of a, b, got 'c'"),
        ({"share": 0.0}, r"share: must be in \(0, 1\], got 0"),
        ({"share": 1.5}, r"share: must be in \(0, 1\], got 1.5"),
        ({"share": float("nan")}, r"share: must be in \(0, 1\], got nan"),
        ({"tokens": -1}, "tokens: must be 0 or more, got -1"),
        ({"tokens": 10}, "tokens: must be 9 or less, got 10"),
        ({"cache_memory": "2T"}, "cache_memory: must be a number of bytes .*, got '2T'"),
    ],
)
def test_what_is_beyond_a_limit_is_refused_by_name(values: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=f"^{problem}$"):
        make(Inner, values)


def test_secrets_are_in_no_repr() -> None:
    assert "s3cret" not in repr(Outer(model="m", token="s3cret"))


def test_every_option_of_every_program_has_a_name_of_its_own_and_says_what_it_does() -> None:
    names = set()
    for program in PROGRAMS.names():
        options = options_of(PROGRAMS.load(program))
        assert len({one.name for one in options}) == len(options), program
        assert all(one.declaration.help.rstrip().endswith((".", "...", ")")) for one in options)
        names |= {one.name for one in options}
    assert names >= OF_ONE_PROCESS
    assert {"admin_token", "api_key", "node_token"} == {
        one.name
        for program in PROGRAMS.names()
        for one in options_of(PROGRAMS.load(program))
        if one.declaration.is_secret
    }


def test_a_node_takes_what_its_role_uses() -> None:
    prefill, decode = (
        {one.name: one for one in options_of(PROGRAMS.load(role))} for role in ("prefill", "decode")
    )
    assert prefill.keys() - decode.keys() == {
        "push",
        "encode_nodes",
        "encodings_listen",
        "encode_timeout_s",
    }
    assert decode.keys() - prefill.keys() == {
        "preemption", "adaptive_speculation", "max_receiving_requests", "max_receiving_tokens",
        "local_prefill_threshold",
        "max_step_stretch",
    }  # fmt: skip
    assert prefill["scheduling_policy"].default == decode["scheduling_policy"].default == "fcfs"
    graphs = ("cuda_graph_max_batch", "cuda_graph_max_chunk")  # of steps that the role has
    assert [prefill[name].default for name in graphs] == [0, 512]
    assert [decode[name].default for name in graphs] == [512, 0]
    assert decode["preemption"].default == "hand-back"
    assert EngineConfig().preemption == "recompute"
