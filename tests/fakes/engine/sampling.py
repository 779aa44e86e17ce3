"""The sampler and its random words, called with requests as tests have them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

import engine.sampling.sampler
from engine.core.request import Request
from engine.core.step_plan import NewRow
from engine.sampling.gumbel import Floats, gumbel, noise_hashes
from engine.sampling.logits import adjust_logits
from engine.sampling.philox import counter_words
from engine.sampling.sampling_input import (
    PARAMETERS,
    RequestSnapshot,
    SamplingInput,
    parameters_row,
)


def sampling_input(requests: Sequence[Request]) -> SamplingInput:
    """Make the sampler's input for requests, each row on its own."""
    rows = [
        NewRow(
            index,
            request.request_id,
            request.sampling_params,
            request.seed,
            request.num_prompt_tokens,
            request.stop_token_ids,
            [],
        )
        for index, request in enumerate(requests)
    ]
    parameters = np.array([parameters_row(row) for row in rows], dtype=PARAMETERS)
    positions = np.array([request.num_output_tokens for request in requests], dtype=np.int64)
    return SamplingInput(
        tuple(request.request_id for request in requests),
        parameters,
        counter_words(parameters["seed"], positions),
        {
            index: snapshot(request)
            for index, request in enumerate(requests)
            if request.changes_logits
        },
    )


def snapshot(request: Request) -> RequestSnapshot:
    """Copy all that a request's logits depend on now, except its grammar."""
    return RequestSnapshot(
        request.sampling_params,
        request.token_ids.copy(),
        request.num_prompt_tokens,
        request.stop_token_ids,
    )


def adjust(logits: Tensor, requests: Sequence[Request]) -> Tensor:
    """Apply penalties, biases and masks to logits `[num_requests, vocab_size]`, by request."""
    grammars = {row: r.grammar for row, r in enumerate(requests) if r.grammar is not None}
    bits = {row: grammar.allowed_bits()[0] for row, grammar in grammars.items()}
    return adjust_logits(logits, [snapshot(request) for request in requests], bits)


def sample(logits: Tensor, requests: Sequence[Request]) -> list[int]:
    """Sample one token per request from logits `[num_requests, vocab_size]`."""
    return engine.sampling.sampler.sample(logits, sampling_input(requests))


def random_words(seed: int, position: int) -> list[int]:
    """Return the two random words of a seed and an output position."""
    seeds = np.array([seed % 2**64], dtype=np.uint64)
    words: list[int] = counter_words(seeds, np.array([position]))[0].tolist()
    return words


def scores(logits: Tensor, temperature: float, seed: int, position: int = 0) -> Floats:
    """Compute the scores whose maximum is drawn, by definition; `[vocab_size]` like the logits."""
    keys = np.array([random_words(seed, position)], dtype=np.uint32)
    noise = gumbel(noise_hashes(keys, np.arange(len(logits))))
    values: Floats = logits.double().numpy()
    return values + temperature * noise
