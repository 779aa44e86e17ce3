"""Schemas that pydantic writes of random models; the model judges what is written for it."""

from __future__ import annotations

import random
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum, StrEnum
from typing import Annotated, Any, Literal, Union
from uuid import UUID

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from tests.fakes.answers.drawn_schemas.drawn import DrawnSchema

NAMES = (
    "name", "age", "tags", "kind_of", "started_at", "größe", "名前", "is_active", "price", "x",
    "parent_id", "émail", "items_", "note", "Status",
)  # fmt: skip
WORDS = ("low", "high", "in progress", "été", "日本", "a/b", 'say "hi"', "1", "true", "null", "")


class Color(StrEnum):
    """A color."""

    RED = "red"
    BLUE = "blue"


class Level(int, Enum):
    LOW = 1
    HIGH = 10


class Step(BaseModel):
    """One step of a list that is linked."""

    model_config = ConfigDict(extra="forbid")
    text: str = Field(max_length=6)
    then: Step | None


class Tree(BaseModel):
    model_config = ConfigDict(extra="forbid")
    label: Color = Color.RED
    children: list[Tree] = Field(default_factory=list, max_length=2)


class Cat(BaseModel):
    kind: Literal["cat"] = "cat"
    lives: Annotated[int, Field(ge=0, le=9)] = 9
    model_config = ConfigDict(extra="forbid")


class Dog(BaseModel):
    kind: Literal["dog"]
    loud: bool
    model_config = ConfigDict(extra="forbid")


class Empty(BaseModel):
    model_config = ConfigDict(extra="forbid")


# What pydantic asks of values and does not write in schemas: limits of durations, for example.
_NOT_SAID = ("decimal_parsing", "time_delta_parsing")


def draw(rng: random.Random) -> DrawnSchema:
    """Draw a model of a few fields, and return its schema."""
    model = draw_model(rng, rng.choice((1, 1, 2)))

    def judge(text: str) -> str:
        try:
            model.model_validate_json(text)
        except ValidationError as error:
            errors = error.errors()
            if not any(one["type"] in _NOT_SAID for one in errors):
                return f"pydantic: {errors[0]['msg']}"
        return ""

    return DrawnSchema(model.model_json_schema(), "pydantic", judge)


def draw_model(rng: random.Random, depth: int) -> type[BaseModel]:
    """Draw a model; models within it are nested less deeply."""
    fields: dict[str, Any] = {}
    for name in rng.sample(NAMES, rng.randint(1, 4)):
        kind = draw_type(rng, depth)
        description = rng.choice((None, None, "What it is."))
        if rng.random() < 0.3:
            fields[name] = (Union[kind, None], Field(default=None, description=description))  # noqa: UP007
        else:
            fields[name] = (kind, Field(description=description))
    extra: Any = rng.choice(["forbid"] * 9 + ["ignore"])
    name = rng.choice(("Model", "Order", "UserInfo"))
    made: type[BaseModel] = create_model(
        f"{name}{depth}", __config__=ConfigDict(extra=extra), **fields
    )
    return made


def draw_type(rng: random.Random, depth: int) -> Any:
    """Draw the type of a field."""
    makers = [*_SCALARS, *_SCALARS, *(_CONTAINERS if depth > 0 else ())]
    return rng.choice(makers)(rng, depth)


def _integer(rng: random.Random, depth: int) -> Any:
    low = rng.choice((None, 0, 1, -40, 3))
    high = rng.choice((None, 9, 100, 250))
    return Annotated[int, Field(ge=low, le=high)] if rng.random() < 0.8 else int


def _number(rng: random.Random, depth: int) -> Any:
    return rng.choice((float, Annotated[float, Field(gt=0, lt=rng.choice((1, 2.5, 1000)))]))


def _string(rng: random.Random, depth: int) -> Any:
    low = rng.choice((None, 0, 1, 3))
    return rng.choice(
        (
            str,
            Annotated[str, Field(min_length=low, max_length=rng.randint(3, 9))],
            Annotated[str, Field(max_length=5)],
            Annotated[str, Field(pattern=r"^[A-Z]{2}\d{2,3}$")],
            Annotated[str, Field(pattern=r"^\+?[0-9 ]{3,6}$", max_length=5)],
        )
    )


def _literal(rng: random.Random, depth: int) -> Any:
    values: Any = tuple(rng.sample((*WORDS, 3, True, None), rng.randint(1, 4)))
    return Literal[values]


def _plain(rng: random.Random, depth: int) -> Any:
    return rng.choice(
        (bool, date, datetime, time, UUID, timedelta, Color, Level, Decimal, None,
         Annotated[Decimal, Field(max_digits=5, decimal_places=2)], bytes)
    )  # fmt: skip


def _list(rng: random.Random, depth: int) -> Any:
    item, low = draw_type(rng, depth - 1), rng.choice((None, 0, 1))
    size = Field(min_length=low, max_length=rng.randint(1, 3))
    return Annotated[list[item], size]  # type: ignore[valid-type]


def _open_list(rng: random.Random, depth: int) -> Any:
    item = draw_type(rng, 0)
    return list[item]  # type: ignore[valid-type]


def _tuple(rng: random.Random, depth: int) -> Any:
    items = tuple(draw_type(rng, depth - 1) for _ in range(rng.randint(1, 3)))
    return tuple[items]  # type: ignore[valid-type]


def _set(rng: random.Random, depth: int) -> Any:
    return rng.choice((set[Color], set[Level], set[Literal["a", "b", "c"]], set[bool]))


def _dict(rng: random.Random, depth: int) -> Any:
    value = draw_type(rng, 0)
    return rng.choice((dict[str, value], dict[Color, value]))  # type: ignore[valid-type]


def _union(rng: random.Random, depth: int) -> Any:
    ways = tuple(draw_type(rng, depth - 1) for _ in range(rng.randint(2, 3)))
    return Union[ways]  # noqa: UP007


def _model(rng: random.Random, depth: int) -> Any:
    return draw_model(rng, depth - 1)


def _known(rng: random.Random, depth: int) -> Any:
    tagged = Annotated[Union[Cat, Dog], Field(discriminator="kind")]  # noqa: UP007
    return rng.choice((Step, Tree, Empty, tagged, Union[Cat, Dog]))  # noqa: UP007


_SCALARS = (_integer, _number, _string, _string, _literal, _plain)
_CONTAINERS = (_list, _list, _open_list, _tuple, _set, _dict, _union, _model, _model, _known)
