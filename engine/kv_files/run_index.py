"""RunIndex: which files have which blocks, how large they are, and which are removed first.

    chain    h0 h1 h2 h3 h4 h5 h6 h7        hashes of a prompt's blocks
    files    [------A-----] [--B--]         first missing block h1: h1 to h4 from A, h5 to h7 from B
                   [--C--]

A file's name has the hash of its first block, and only the header has all hashes. As hashes are
chained, two runs with the same first block are equal up to some block. Safe from any thread.
Refuses to know: files' contents, memory, the engine.
"""

from __future__ import annotations

import bisect
import itertools
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from baton.kv.block_hash import BlockHash
from engine.kv_files.run_file import LAST_BYTES, RunName

# Maximum number of runs with the same first block that a look-up considers, without runs that fit
# by name. Look-ups run on the engine's thread, and thousands of conversations may begin alike.
MAX_ALIKE = 256
FOLDER_CHARS = 2  # hexadecimal digits of the first hash that name a file's folder


@dataclass(slots=True, eq=False)
class Run:
    """A file with a run of blocks.

    Attributes:
        identity: name of the folder of its KV's identity.
        used_at: when the file was written or read last, in seconds since 1970.
        hashes: hashes of all blocks; empty: the header was not read yet.
        num_errors: number of reads in a row that ended with an error of this file.
        folder: the file's folder below the tier's folder.
        path: the file's path below the tier's folder.
    """

    identity: str
    name: RunName
    num_bytes: int
    used_at: float
    hashes: tuple[BlockHash, ...] = ()
    num_errors: int = 0
    folder: str = field(init=False)
    path: str = field(init=False)

    def __post_init__(self) -> None:
        text = str(self.name)
        self.folder = f"{self.identity}/{text[:FOLDER_CHARS]}"
        self.path = f"{self.folder}/{text}"

    def num_equal(self, chain: Sequence[BlockHash], at: int) -> int | None:
        """Return how many blocks the run shares with ``chain[at:]``; None: only the header tells.

        Args:
            at: place in the chain of the run's first block.
        """
        size = self.name.num_blocks
        if at + size <= len(chain) and chain[at + size - 1][:LAST_BYTES] == self.name.last:
            return size
        if not self.hashes:
            return None
        places = range(min(size, len(chain) - at))
        return bisect.bisect_left(places, True, key=lambda i: self.hashes[i] != chain[at + i])


@dataclass(frozen=True, slots=True)
class Piece:
    """Blocks of a chain that one file has.

    Attributes:
        at: place in the chain of the run's first block.
        begin, end: places in the chain of the first block to read, and behind the last one.
    """

    run: Run
    at: int
    begin: int
    end: int


class _Alike:
    """The runs that begin with the same block; the run that was added or used last comes last."""

    def __init__(self) -> None:
        self._by_path: dict[str, Run] = {}
        # By number of blocks, and by the last block's hash as in `RunName.last`
        self._by_end: dict[int, dict[bytes, dict[str, Run]]] = {}

    def __len__(self) -> int:
        return len(self._by_path)

    def add(self, run: Run) -> None:
        """Add a run whose path is unknown."""
        self._by_path[run.path] = run
        by_last = self._by_end.setdefault(run.name.num_blocks, {})
        by_last.setdefault(run.name.last, {})[run.path] = run

    def remove(self, run: Run) -> None:
        """Remove a known run."""
        del self._by_path[run.path]
        by_last = self._by_end[run.name.num_blocks]
        del by_last[run.name.last][run.path]
        if not by_last[run.name.last]:
            del by_last[run.name.last]
        if not by_last:
            del self._by_end[run.name.num_blocks]

    def note_use(self, run: Run) -> None:
        """Move a known run to the end."""
        self._by_path[run.path] = self._by_path.pop(run.path)

    def find(self, chain: Sequence[BlockHash], at: int) -> Iterable[Run]:
        """Return the runs that fit ``chain[at:]`` by their names, and `MAX_ALIKE` other runs."""
        if len(self._by_path) <= MAX_ALIKE:
            return self._by_path.values()
        found = {
            path: run
            for size, by_last in self._by_end.items()
            if at + size <= len(chain)
            for path, run in by_last.get(chain[at + size - 1][:LAST_BYTES], {}).items()
        }
        for path in itertools.islice(reversed(self._by_path), MAX_ALIKE):
            found[path] = self._by_path[path]
        return found.values()


class RunIndex:
    """The files of one storage, as far as they are known.

    Attributes:
        num_bytes: bytes of all known files.
        most_blocks: by identity, number of blocks of the longest run that was known since the
            identity last had no run.
        longest_chain: by identity, number of blocks of the longest chain that was known in this
            time: the blocks of a run, and the blocks before the run.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_path: dict[str, Run] = {}
        self._by_folder: dict[str, dict[str, Run]] = {}
        self._by_first: dict[tuple[str, BlockHash], _Alike] = {}
        self.num_bytes = 0
        self._num_runs: Counter[str] = Counter()  # by identity
        self.most_blocks: dict[str, int] = {}
        self.longest_chain: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._by_path)

    def add(self, run: Run) -> None:
        """Add a file; replace a known file with the same path."""
        path = run.path
        with self._lock:
            self._remove(path)
            self._by_path[path] = run
            self._by_folder.setdefault(run.folder, {})[path] = run
            self._by_first.setdefault((run.identity, run.name.first), _Alike()).add(run)
            self.num_bytes += run.num_bytes
            self._num_runs[run.identity] += 1
            size, end = run.name.num_blocks, run.name.start + run.name.num_blocks
            self.most_blocks[run.identity] = max(self.most_blocks.get(run.identity, 0), size)
            self.longest_chain[run.identity] = max(self.longest_chain.get(run.identity, 0), end)

    def remove(self, path: str) -> None:
        """Remove a file; do nothing if it is unknown."""
        with self._lock:
            self._remove(path)

    def _remove(self, path: str) -> None:
        run = self._by_path.pop(path, None)
        if run is None:
            return
        self.num_bytes -= run.num_bytes
        self._by_folder[run.folder].pop(path)
        if not self._by_folder[run.folder]:
            del self._by_folder[run.folder]
        key = run.identity, run.name.first
        self._by_first[key].remove(run)
        if not self._by_first[key]:
            del self._by_first[key]
        self._num_runs[run.identity] -= 1
        if not self._num_runs[run.identity]:
            for by_identity in (self._num_runs, self.most_blocks, self.longest_chain):
                by_identity.pop(run.identity, None)

    def get(self, path: str) -> Run | None:
        """Return a known file, or None."""
        return self._by_path.get(path)

    def in_folder(self, folder: str) -> list[Run]:
        """Return the known files of a folder."""
        with self._lock:
            return list(self._by_folder.get(folder, {}).values())

    def runs_of(self, identity: str, chain: Sequence[BlockHash]) -> list[tuple[int, Run]]:
        """Return the runs that begin with a block of the chain, each with the block's place.

        If more than `MAX_ALIKE` runs begin with a block, the result has those that fit by their
        names, and the `MAX_ALIKE` that were added or used last.
        """
        with self._lock:
            return [
                (place, run)
                for place, block_hash in enumerate(chain)
                if (alike := self._by_first.get((identity, block_hash))) is not None
                for run in alike.find(chain, place)
            ]

    def note_use(self, run: Run, used_at: float) -> None:
        """Note that a run was used now; do nothing else if the run is unknown."""
        run.used_at = used_at
        with self._lock:
            if self._by_path.get(run.path) is run:
                self._by_first[run.identity, run.name.first].note_use(run)

    def oldest_first(self, now: float) -> Iterator[Run]:
        """Yield all files, the least valuable first.

        The value falls with the time since the last use, and rises with the tokens that would have
        to be computed again: a run with twice as many tokens may be unused for twice as long.
        """
        with self._lock:
            runs = list(self._by_path.values())
        yield from sorted(runs, key=lambda run: -max(now - run.used_at, 0.0) / run.name.num_tokens)


def plan_pieces(
    found: Sequence[tuple[int, Run]], chain: Sequence[BlockHash], first: int
) -> list[Piece]:
    """Choose files that together have the most blocks of a chain without a gap, from ``first`` on.

    If the hashes of a run are unknown, the function assumes that all of the run's blocks are in the
    chain.

    Args:
        found: result of `RunIndex.runs_of`.
        first: place of the first missing block.
    """
    ends = []
    for at, run in found:
        num_equal = run.num_equal(chain, at)
        size = run.name.num_blocks if num_equal is None else num_equal
        ends.append((min(at + size, len(chain)), at, run))
    pieces, place = [], first
    while place < len(chain):
        end, at, best = max(
            (one for one in ends if one[1] <= place < one[0]),
            key=lambda one: one[0],
            default=(0, 0, None),
        )
        if best is None:
            break
        pieces.append(Piece(best, at, place, end))
        place = end
    return pieces
