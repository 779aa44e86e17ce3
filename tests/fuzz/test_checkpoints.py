"""Read mutations of small checkpoints: each works, or fails with one line, within ten seconds.

The seconds are of CPU time, so that a busy machine makes no reading look slow.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz import checkpoints
from tests.fuzz.checkpoints import GGUF_KINDS, findings, make_original, outcome_of, read_whole

pytestmark = pytest.mark.large


def _spin() -> None:
    while True:
        pass


def test_a_reading_without_end_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "TIMEOUT_S", 1)
    assert outcome_of(_spin) == "FINDING: ended by SIGXCPU"


@pytest.mark.parametrize("kind", ["json", "safetensors", "gguf", *GGUF_KINDS])
def test_a_broken_checkpoint_works_or_is_refused_by_one_line(kind: str, tmp_path: Path) -> None:
    original = make_original(kind, tmp_path / "original")
    assert outcome_of(lambda: read_whole(original)) == "works"
    assert not findings(kind, original, range(20))
