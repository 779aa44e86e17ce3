"""Calls llama.cpp for a batch. Runs with the Python of llama.cpp's environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import llama_cpp as api
import numpy as np


def decode_batch(
    context: Any, tokens: Mapping[int, Sequence[int]], position: int, vocab_size: int
) -> dict[int, list[int]]:
    """Compute tokens of sequences; return the most likely next token of each sequence.

    Args:
        tokens: the tokens to compute, by number of the sequence.
        position: position of the first of these tokens in each sequence.
    """
    batch = api.llama_batch_init(sum(map(len, tokens.values())), 0, 1)
    index, last = 0, {}
    for sequence, own in tokens.items():
        for offset, token in enumerate(own):
            batch.token[index] = token
            batch.pos[index] = position + offset
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = sequence
            batch.logits[index] = offset == len(own) - 1
            index += 1
        last[sequence] = index - 1
    batch.n_tokens = index
    failed = api.llama_decode(context, batch)
    assert not failed, failed
    rows = {
        sequence: np.ctypeslib.as_array(api.llama_get_logits_ith(context, place), (vocab_size,))
        for sequence, place in last.items()
    }
    api.llama_batch_free(batch)
    return {sequence: [int(row.argmax())] for sequence, row in rows.items()}
