"""Makes the texts of a comparison of embeddings. Imports nothing from Baton."""

from __future__ import annotations

import random
from itertools import islice, product
from string import ascii_lowercase

# Case -> number of texts, and number of words of each; a word is a token.
CASES = {"64 tokens": (128, 64), "512 tokens": (16, 512)}
BATCH = 32  # number of texts of a request, or of a batch in one process
_NUM_WORDS = 10_000


def words() -> list[str]:
    """Return the words that the checkpoint's tokenizer reads as one token each."""
    found: list[str] = []
    for length in (1, 2, 3):
        found += map("".join, product(ascii_lowercase, repeat=length))
    return list(islice(found, _NUM_WORDS))


def texts_of(case: str, number: int) -> list[str]:
    """Return the texts of round ``number``; no two rounds have a text in common."""
    num_texts, length = CASES[case]
    draw, known = random.Random(f"{case} {number}"), words()
    return [" " + " ".join(draw.choices(known, k=length)) for _ in range(num_texts)]
