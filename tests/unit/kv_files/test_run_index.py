"""Unit tests of RunIndex: look-ups stay short if very many runs begin with the same block."""

from __future__ import annotations

import os

from engine.kv_files.run_file import RunName
from engine.kv_files.run_index import MAX_ALIKE, Run, RunIndex, plan_pieces
from tests.fakes.engine.kv_file_stores import BLOCK_SIZE, IDENTITY, chain_of

CHAIN = chain_of(1, 8)


def add_other(index: RunIndex) -> Run:
    """Add a run that begins like `CHAIN`; its hashes are known."""
    hashes = (CHAIN[0], *(os.urandom(32) for _ in range(7)))
    run = Run(IDENTITY, RunName.of(hashes, 0, BLOCK_SIZE), 1, 0.0, hashes)
    index.add(run)
    return run


def test_a_run_that_fits_by_its_name_is_found_among_very_many() -> None:
    index, hashes = RunIndex(), tuple(CHAIN[:6])
    right = Run(IDENTITY, RunName.of(hashes, 0, BLOCK_SIZE), 1, 0.0)
    index.add(right)
    for _ in range(4 * MAX_ALIKE):
        add_other(index)
    found = index.runs_of(IDENTITY, CHAIN)
    assert len(found) == MAX_ALIKE + 1
    assert plan_pieces(found, CHAIN, 0)[0].run is right


def test_of_very_many_runs_the_last_used_ones_are_considered() -> None:
    index = RunIndex()
    runs = [add_other(index) for _ in range(4 * MAX_ALIKE)]
    index.note_use(runs[0], 1.0)
    found = {run.path for _, run in index.runs_of(IDENTITY, CHAIN)}
    assert found == {run.path for run in (runs[0], *runs[1 - MAX_ALIKE :])}


def test_removed_runs_are_not_found() -> None:
    index = RunIndex()
    runs = [add_other(index) for _ in range(MAX_ALIKE + 2)]
    for run in runs:
        index.remove(run.path)
        index.note_use(run, 1.0)
    assert index.runs_of(IDENTITY, CHAIN) == []
    assert (len(index), index._by_first) == (0, {})
