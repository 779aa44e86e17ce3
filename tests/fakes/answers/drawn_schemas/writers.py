"""Writers of drawn schemas: random JSON schemas of the kinds that libraries and people write."""

from __future__ import annotations

import random

from tests.fakes.answers.drawn_schemas import by_hand, by_pydantic, by_zod
from tests.fakes.answers.drawn_schemas.drawn import DrawnSchema

_WRITERS = (
    by_pydantic.draw,
    by_pydantic.draw,
    by_zod.draw,
    by_zod.draw,
    by_hand.of_guides,
    by_hand.of_openapi,
    by_hand.of_keywords,
)


def draw_schema(rng: random.Random) -> DrawnSchema:
    """Draw the schema of an object, by a writer that is drawn as well."""
    return rng.choice(_WRITERS)(rng)
