"""Unit tests of the names that a router's options give."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from baton.api.errors import ConfigError
from router.names.base_model import BaseModel
from router.names.given import adapters_given, names_given
from tests.fakes.adapter_files import pair, write_adapter
from tests.fakes.router.named_models import NamedModel
from tests.fakes.router.router_scene import asynchronous


def bases(*models: str) -> list[BaseModel]:
    return [NamedModel(model).base for model in models]


@pytest.mark.parametrize(
    ("models", "names", "aliases", "expected"),
    [
        (["m"], [""], "", {"m": "m"}),
        (["m"], ["x=m"], "", {"x=m": "m"}),
        (["m"], ["x", "y"], " z, x", {"x": "m", "y": "m", "z": "m"}),
        (["/a", "/b"], [""], "", {"/a": "/a", "/b": "/b"}),
        (["/a", "/b"], ["y=/b", "x=/a"], "z=/b", {"x": "/a", "y": "/b", "z": "/b"}),
        (["/a", "/b"], ["y=/b"], "", {"/a": "/a", "y": "/b"}),
        (["/a", "/b=c"], ["x=y=/b=c"], "", {"/a": "/a", "x=y": "/b=c"}),
    ],
)
def test_names_are_of_the_one_model_or_say_of_which(
    models: Sequence[str], names: Sequence[str], aliases: str, expected: dict[str, str]
) -> None:
    @asynchronous
    async def run() -> None:
        found = {
            one.name: one.base.model for one in names_given(bases(*models), names, aliases, "")
        }
        assert list(found.items()) == list(expected.items())

    run()


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        (["x"], r"with several models, must be NAME=MODEL with a MODEL of /a, /b, got 'x'"),
        (["x=/c"], r"with several models, must be NAME=MODEL .*, got 'x=/c'"),
        (["=/a"], r"with several models, must be NAME=MODEL .*, got '=/a'"),
        (["x=/a", "x=/b"], r"'x' must be of one model, got two"),
        (["/a=/b"], r"'/a' is a model, and must not name another"),
    ],
)
def test_a_name_of_no_model_or_of_two_is_refused(names: list[str], problem: str) -> None:
    @asynchronous
    async def run() -> None:
        with pytest.raises(ConfigError, match=f"^served_model_name: {problem}"):
            names_given(bases("/a", "/b"), names, "", "")

    run()


@asynchronous
async def test_defaults_are_of_names() -> None:
    found = names_given(bases("/a", "/b"), ["x=/b"], "", "max_tokens=9;x:temperature=0.5")
    assert [one.defaults.text for one in found] == ["max_tokens=9", "temperature=0.5,max_tokens=9"]


@pytest.mark.parametrize(
    ("models", "entry", "expected"),
    [
        (["/a"], "t=one", ("t", "/a", "one")),
        (["/a"], "t=one=/a", ("t", "/a", "one")),
        (["/a"], "t=two=halves", ("t", "/a", "two=halves")),
        (["/a", "/b"], "t=one=/b", ("t", "/b", "one")),
        (["/a", "/b"], "t=one=x", ("t", "/b", "one")),
        (["/a", "/b"], "t=two=halves=/a", ("t", "/a", "two=halves")),
    ],
)
def test_an_adapter_is_of_the_one_model_or_says_of_which(
    models: Sequence[str], entry: str, expected: tuple[str, str, str], tmp_path: Path
) -> None:
    for folder in ("one", "two=halves"):
        write_adapter(tmp_path / folder, pair())

    @asynchronous
    async def run() -> None:
        names = ["x=/b"] if len(models) > 1 else []
        served = names_given(bases(*models), names, "", "x:max_tokens=9" if names else "")
        (found,) = adapters_given(served, str(tmp_path), [entry])
        assert (found.name, found.base.model, found.adapter_source) == expected
        assert found.defaults.max_tokens == (9 if found.base.model == "/b" else None)

    run()


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ("t=one", r"with several models, must be NAME=SOURCE=MODEL with a MODEL of .*, got 't=o"),
        ("t=one=/c", r"with several models, must be NAME=SOURCE=MODEL .*, got 't=one=/c'"),
        ("t==/b", r"with several models, must be NAME=SOURCE=MODEL .*, got 't==/b'"),
        ("x=one=/a", r"'x' is the name of two things"),
    ],
)
def test_an_adapter_of_no_model_is_refused(entry: str, problem: str, tmp_path: Path) -> None:
    @asynchronous
    async def run() -> None:
        served = names_given(bases("/a", "/b"), ["x=/b"], "", "")
        with pytest.raises(ConfigError, match=f"^adapter: {problem}"):
            adapters_given(served, str(tmp_path), [entry])

    run()
