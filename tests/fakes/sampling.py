"""The sampler and its uniforms as tests call them: of requests as they are now, and one by one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

import engine.sampler
from engine.philox import counter_uniforms
from engine.request import Request
from engine.sampling_input import PARAMETERS, SamplingInput, parameters_row


def sampling_input(requests: Sequence[Request]) -> SamplingInput:
    """What the sampler reads of requests, each row made for itself."""
    parameters = np.array([parameters_row(request) for request in requests], dtype=PARAMETERS)
    positions = np.array([request.num_output_tokens for request in requests], dtype=np.int64)
    uniforms = counter_uniforms(parameters["seed"], positions)
    return SamplingInput.of(requests, parameters, uniforms)


def sample(logits: Tensor, requests: Sequence[Request]) -> list[int]:
    """One next token per request; logits are `[num_requests, vocab_size]`."""
    return engine.sampler.sample(logits, sampling_input(requests))


def counter_uniform(seed: int, position: int) -> float:
    """The uniform of one seed and output position."""
    seeds = np.array([seed % 2**64], dtype=np.uint64)
    return float(counter_uniforms(seeds, np.array([position]))[0])
