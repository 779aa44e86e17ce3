"""Unit tests of tools.families: a family's name occurs only in its file and the registry."""

from __future__ import annotations

import pytest

from baton.checkpoint.families import FAMILIES
from tools.families import ROOMS, files_naming, main, words, words_by_file

# A dense and hybrid family, one of Mamba 2 and experts without gates, one of experts with sinks.
UNLIKE = ("granite", "nemotron_h", "gpt_oss")


@pytest.mark.medium
def test_three_unlike_families_are_one_file_and_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(list(UNLIKE)) == 0
    printed = capsys.readouterr().out
    for name in UNLIKE:
        assert f"{name}: baton/checkpoint/families.py, models/families/{name}.py\n" in printed


def test_names_in_code_count_and_names_in_prose_do_not() -> None:
    prose = '"""Compute as GptOss does."""\n\n# gpt-oss\ndef f():\n    "gpt_oss"\n'
    assert not files_naming("gpt_oss", {"a.py": set(words(prose))})
    for code in ('f("gpt-oss")', "class GptOssMixer: ...", "def gptoss(): ...", "import x.gpt_oss"):
        assert files_naming("gpt_oss", {"a.py": set(words(code))}) == ["a.py"]


@pytest.mark.medium
def test_every_family_has_a_file_and_its_names_in_it() -> None:
    source = words_by_file(ROOMS)
    for name, names in FAMILIES.items():
        found = source[f"models/families/{name}.py"]
        assert {*names.models, *names.gguf} <= found


def test_an_unknown_family_is_answered_with_the_known_ones(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["spiral"]) == 2
    assert "granite" in capsys.readouterr().out
