"""Unit tests of the names that a router's options give."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from baton.api.errors import ConfigError
from router.names.base_model import BaseModel
from router.names.given import names_given
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
