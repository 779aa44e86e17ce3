"""Every target on its seeds, its corpus, mutations and noise; `make fuzz` takes longer."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.seeds import seeds
from tests.fuzz.targets import TARGETS, corpus, run
from tests.property.num_examples import num_examples


@pytest.mark.parametrize("name", TARGETS)
def test_every_target_takes_its_seeds(name: str) -> None:
    assert seeds(name)
    assert all(run(name, seed) for seed in seeds(name))


@pytest.mark.parametrize("name", TARGETS)
def test_no_target_raises_anything_unforeseen_on_its_corpus(name: str) -> None:
    assert corpus(name)
    for data in corpus(name):
        run(name, data)


@pytest.mark.parametrize("name", TARGETS)
@settings(max_examples=num_examples(300), deadline=None)
@given(data=st.data())
def test_no_target_raises_anything_unforeseen(name: str, data: st.DataObject) -> None:
    if data.draw(st.booleans(), "noise"):
        run(name, data.draw(st.binary(max_size=512)))
        return
    seed = data.draw(st.sampled_from(seeds(name)), "seed")
    run(name, mutated(seed, data.draw(st.randoms(use_true_random=False))))


def mutated(seed: bytes, rng: random.Random) -> bytes:
    """Change, insert, drop, double or cut out some bytes."""
    data = bytearray(seed)
    for _ in range(rng.randint(1, 4)):
        start = rng.randrange(len(data) + 1)
        end = min(len(data), start + rng.choice((1, 2, 4, 16, 64)))
        match rng.randrange(5):
            case 0:
                data[start:end] = rng.randbytes(end - start)
            case 1:
                data[start:start] = rng.randbytes(rng.choice((1, 2, 8)))
            case 2:
                del data[start:end]
            case 3:
                data[start:start] = data[start:end]
            case _:
                data = data[start:] + data[:start]
    return bytes(data)
