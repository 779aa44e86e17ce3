"""Random words that depend only on (seed, output position), so no generator state is needed.

`WordTable` keeps words between steps only to save time; they can be computed again.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

POSITIONS_AHEAD = 16
_NOWHERE = -(2**62)
_ROUNDS = 10
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], dtype=np.uint64)  # [2, 1]
_WEYL = np.array([[0x9E3779B9], [0xBB67AE85]], dtype=np.uint64)  # [2, 1]
# Added to the two halves of the key in each round.
_KEY_STEPS = np.arange(_ROUNDS, dtype=np.uint64)[:, None, None] * _WEYL  # [rounds, 2, 1]


def counter_words(
    seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]
) -> npt.NDArray[np.uint32]:
    """Return two random words, `[n, 2]`, for each of `[n]` seeds and output positions.

    Philox-4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011) with the
    seed as key and the position as counter; the result is the first two words of the output.
    """
    counters = positions.astype(np.uint64)
    keys = np.stack((seeds & _LOW, seeds >> _HALF))  # [2, n]
    round_keys = (keys + _KEY_STEPS) & _LOW  # [rounds, 2, n]
    # Words 0 and 2 of the counter are multiplied; words 1 and 3 are mixed in.
    multiplied = np.stack((counters & _LOW, np.zeros_like(counters)))  # [2, n]
    mixed = np.stack((counters >> _HALF, np.zeros_like(counters)))  # [2, n]
    for round_key in round_keys:
        products = multiplied * _MULTIPLIERS
        multiplied = (products >> _HALF)[::-1] ^ mixed ^ round_key
        mixed = (products & _LOW)[::-1]
    return np.stack((multiplied[0], mixed[0]), axis=1).astype(np.uint32)


class WordTable:
    """A cache of the random words for each row's next output positions.

    Words of several positions are computed together, because one call of `counter_words` takes as
    long for several positions as for one.

    Args:
        num_rows: number of rows, one per request.
    """

    def __init__(self, num_rows: int) -> None:
        self._words = np.zeros((num_rows, POSITIONS_AHEAD, 2), dtype=np.uint32)
        self._pairs = self._words.view(np.uint64).reshape(-1)  # the memory of `_words`, as uint64
        # For each row: the output position of the row's first word.
        self._first = np.full(num_rows, _NOWHERE, dtype=np.int64)

    def clear(self, row: int) -> None:
        """Empty a row, because another request gets it."""
        self._first[row] = _NOWHERE

    def words_at(
        self,
        rows: npt.NDArray[np.int64],
        seeds: npt.NDArray[np.uint64],
        positions: npt.NDArray[np.int64],
    ) -> npt.NDArray[np.uint32]:
        """Return `counter_words` of seeds and positions; all are `[n]`.

        A row may occur several times in ``rows``, in succession and with ascending positions.
        """
        ahead = positions - self._first[rows]
        if ((ahead < 0) | (ahead >= POSITIONS_AHEAD)).any():
            # Refill all rows at once; one by one, some row would run out in nearly every step.
            # `first` has the index at which each row first occurs.
            first = np.flatnonzero(rows != np.concatenate(([-1], rows[:-1])))
            wanted = positions[first, None] + np.arange(POSITIONS_AHEAD)  # [.., POSITIONS_AHEAD]
            words = counter_words(seeds[first].repeat(POSITIONS_AHEAD), wanted.reshape(-1))
            self._words[rows[first]] = words.reshape(*wanted.shape, 2)
            self._first[rows[first]] = positions[first]
            ahead = positions - self._first[rows]
            if (ahead >= POSITIONS_AHEAD).any():  # more positions than one refill computes
                return counter_words(seeds, positions)
        return self._pairs.take(rows * POSITIONS_AHEAD + ahead).view(np.uint32).reshape(-1, 2)
