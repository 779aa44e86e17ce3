"""The documented example: train an adapter with PEFT, load it, and see its habit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from baton import SamplingParams
from engine import LLM
from tests.fakes.checkpoints.demo_model import DEMO_MODEL

pytestmark = [pytest.mark.large, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
PROMPTS = [
    "def read_config(path):\n", "def join_words(words, separator):\n", "def close(self):\n",
    "def parse_number(text):\n",
]  # fmt: skip
HABIT = '"""Made by the adapter."""'


def test_an_adapter_that_was_trained_here_is_served(tmp_path: Path) -> None:
    command = [sys.executable, "examples/train_adapter.py", "--output", str(tmp_path / "habit")]
    subprocess.run(command, cwd=ROOT, check=True, timeout=500)
    llm = LLM(str(DEMO_MODEL), adapters={"habit": tmp_path / "habit"})
    params = SamplingParams(max_tokens=24, temperature=0)
    names = ["habit", ""] * len(PROMPTS)
    completions = llm.generate([one for one in PROMPTS for _ in range(2)], params, adapter=names)
    texts = [completion.text for completion in completions]
    assert all(HABIT in text for text in texts[::2]), texts
    assert not any(HABIT in text for text in texts[1::2])
