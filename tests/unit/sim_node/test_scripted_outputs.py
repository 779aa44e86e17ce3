"""Unit tests of scripted outputs: the rule for a prompt, and the node's answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.api.errors import ConfigError
from baton.api.outputs import FinishReason
from baton.checkpoint.model_folder import read_limits
from sim_node.scripted_outputs import ScriptedOutputs, parse_script, read_script
from tests.fakes.checkpoints.demo_model import DEMO_MODEL
from tests.fakes.system.sim_parts import SimPair

VOCAB_SIZE = read_limits(DEMO_MODEL).vocab_size
SCRIPT = """
otherwise = "What?"

[[rule]]
after = "read"
with = "tools"
say = "call read"

[[rule]]
after = "read"
say = "read what?"

[[rule]]
after = "result"
say = "done"
"""


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [
        ("hello", "What?"),
        ("tools; read", "call read"),
        ("read", "read what?"),
        ("tools; read; result", "done"),
        ("tools; read; result; read", "call read"),
        ("result; tools", "done"),
    ],
)
def test_the_rule_whose_text_comes_last_answers(prompt: str, answer: str) -> None:
    assert parse_script(SCRIPT).answer(prompt) == answer


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("rule = []", "rule: must have at least 1 entry, got 0"),
        ('[[rule]]\nafter = ""\nsay = "a"', "rule 1: after: must not be empty"),
        ('[[rule]]\nafter = "a"', r"missing required field `say` - at `\$.rule\[0\]`"),
        ('[[rule]]\nafter = "a"\nsay = "b"\nwhen = "c"', "unknown field `when`"),
        ("rule = 1", "Expected `array`"),
        ("[[rule", "at end of document"),
    ],
)
def test_a_wrong_script_is_one_line(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "script.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=problem) as caught:
        read_script(str(path), str(DEMO_MODEL))
    assert str(caught.value).startswith(f"script: {path}: ")
    assert "\n" not in str(caught.value)


def test_a_script_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"script: cannot read .*No such file"):
        read_script(str(tmp_path / "none.toml"), str(DEMO_MODEL))


@pytest.fixture
def outputs(tmp_path: Path) -> ScriptedOutputs:
    path = tmp_path / "script.toml"
    path.write_text(SCRIPT)
    return read_script(str(path), str(DEMO_MODEL))


def test_a_node_says_the_answer_and_ends(outputs: ScriptedOutputs) -> None:
    pair = SimPair(outputs=outputs, vocab_size=VOCAB_SIZE)
    pair.send("r", outputs.tokenizer.encode("tools; read; result"), max_tokens=50)
    pair.timers.run()
    *said, end = pair.tokens("r")
    assert outputs.tokenizer.decode(said) == "done"
    assert end in outputs.eos_token_ids
    assert pair.deltas("r")[-1][1].finish_reason is FinishReason.STOP
    pair.check_nothing_is_held()


def test_a_retry_goes_on_in_the_answer(outputs: ScriptedOutputs) -> None:
    pair = SimPair(outputs=outputs, vocab_size=VOCAB_SIZE)
    prompt = outputs.tokenizer.encode("tools; read")
    whole = tuple(outputs.tokenizer.encode("call read", add_special_tokens=False))
    pair.send("r", prompt, output=whole[:1], epoch=2, max_tokens=50)
    pair.send("other", prompt, output=(0, *whole[1:2]), epoch=2, max_tokens=50)
    pair.timers.run()
    assert pair.tokens("r")[: len(whole) - 1] == whole[1:]
    assert set(pair.errors("other")) == {"INVALID_ARGUMENT"}
