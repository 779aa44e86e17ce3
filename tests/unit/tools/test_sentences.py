"""The check of sentences refuses riddles, and nothing that says plainly what a thing does."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import sentences

REFUSED = {
    'def find():\n    """Of the pool, the first block."""': "begin with a verb or a noun",
    'def find():\n    """The same, by hash."""': "begin with a verb or a noun",
    'class Pool:\n    """What is free."""': "begin with a verb or a noun",
    'def find():\n    """The first block."""': "begin with a verb",
    'async def find():\n    """Returns the first block."""': "begin with a verb",
    'def find():\n    """How many blocks are free."""': "begin with a verb",
    'class Pool:\n    """Blocks.\n\n    Attributes:\n        size: of the pool.\n    """': "noun",
    "# Whoever guesses reads them.": "say draft",
    'def _find():\n    """Return a block, or not at all."""': "say it plainly",
}
ALLOWED = [
    'def find():\n    """Return the first block."""',
    'def find():\n    """``[n, width]`` -> ``[n]``."""',
    'def _find():\n    """The first block."""',
    'class Pool:\n    """The blocks.\n\n    Attributes:\n        size: number of blocks.\n    """',
    'class End(Enum):\n    """Why an output ended."""',
    'class Pool:\n    @property\n    def size(self):\n        """The number of blocks."""',
    "# The first block is warm in the caches.",
]


@pytest.mark.parametrize(("source", "problem"), REFUSED.items())
def test_a_riddle_is_refused(source: str, problem: str) -> None:
    [(_, found)] = sentences.file_findings(source)
    assert problem in found


@pytest.mark.parametrize("source", ALLOWED)
def test_a_plain_sentence_is_allowed(source: str) -> None:
    assert list(sentences.file_findings(source)) == []


def test_a_room_keeps_its_old_sentences_and_gets_no_new_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "room").mkdir()
    (tmp_path / "room" / "a.py").write_text('def find():\n    """Of the pool."""\n')
    monkeypatch.setattr(sentences, "OLD", {"room": 1})
    assert sentences.main(tmp_path) == 0
    assert capsys.readouterr().out == ""
    (tmp_path / "room" / "b.py").write_text('\ndef give():\n    """It gives a block."""\n')
    assert sentences.main(tmp_path) == 1
    assert "room/b.py:3: begin with a verb or a noun: It gives" in capsys.readouterr().out
