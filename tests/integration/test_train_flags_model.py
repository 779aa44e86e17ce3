"""The documented example of images: train the model of flags, ask about the shown flag."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from baton import SamplingParams
from engine import LLM

pytestmark = [pytest.mark.large, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\| ((?:Which|What|Are) .*\?) \| (.*) \|$", re.MULTILINE)


def test_the_shown_flag_gets_the_shown_answers(tmp_path: Path) -> None:
    shown = ROW.findall((ROOT / "docs/images.md").read_text(encoding="utf-8"))
    assert len(shown) >= 3
    image = (ROOT / "docs/assets/flag.png").read_bytes()
    command = [sys.executable, "examples/train_flags_model.py", str(tmp_path / "flags")]
    subprocess.run(command, cwd=ROOT, check=True, timeout=800)
    llm = LLM(str(tmp_path / "flags"))
    params = SamplingParams(max_tokens=30, temperature=0)
    for question, answer in shown:
        content = [{"type": "image", "image": image}, {"type": "text", "text": question}]
        [completion] = llm.chat([[{"role": "user", "content": content}]], params)
        assert completion.text == answer, question
