"""Decodes that begin with the same blocks read them once, and have the bits of decodes alone.

Refuses to know: engines and requests.
"""

from __future__ import annotations

import pytest
import torch

from baton_kernels import dispatch
from tests.covering import covering
from tests.numerics.test_rows_in_any_company import BLOCK_SIZE, KINDS, SHAPES, SPAN, Texts

pytestmark = pytest.mark.skipif(dispatch.native_ops() is None, reason="no native kernels here")

# Tokens of each text, and how many of its first tokens are those of which text.
TEXTS = (
    *((2 * SPAN + 3 + 17 * number, 2 * SPAN, 0) for number in range(16)),
    (2 * SPAN + 5, SPAN + 40, 0),  # shares one span and a part
    (SPAN + 9, SPAN + 8, 0),
    (SPAN, SPAN - BLOCK_SIZE, 0),  # too short to share
    (3 * SPAN, BLOCK_SIZE, 0),  # shares less than a span
    *((SPAN + 20 + number, SPAN, 20) for number in range(4)),
    (2 * SPAN, 0, 24),
)


def shared_texts(kind: str, head_dim: int, ratio: int) -> Texts:
    texts = Texts([length for length, _, _ in TEXTS], kind, head_dim, ratio)
    for text, (_, num_shared, first) in enumerate(TEXTS):
        num_blocks = num_shared // BLOCK_SIZE
        texts.table[text, :num_blocks] = texts.table[first, :num_blocks]
    return texts


@pytest.mark.parametrize(
    ("kind", "shape", "options"),
    covering(KINDS, SHAPES, [{}, {"sliding_window": 700}, {"soft_cap": 3.0}]),
    ids=str,
)
def test_decodes(kind: str, shape: tuple[int, int], options: dict[str, float]) -> None:
    texts = shared_texts(kind, *shape)
    chunks = [(text, length - 1, length) for text, (length, _, _) in enumerate(TEXTS)]
    torch.set_num_threads(1)
    alone = [texts.attend([chunk], **options)[0] for chunk in chunks]
    for num_threads, order in ((1, chunks), (2, chunks[::-1]), (2, chunks[3:] + chunks[:3])):
        torch.set_num_threads(num_threads)
        for (text, _, _), found in zip(order, texts.attend(order, **options), strict=True):
            assert torch.equal(found, alone[text]), text
    prompt = (0, 0, TEXTS[0][0])
    *beside, whole = texts.attend([*chunks, prompt], **options)
    assert all(map(torch.equal, beside, alone))
    assert torch.equal(whole[-1:], alone[0])
    torch.set_num_threads(1)
