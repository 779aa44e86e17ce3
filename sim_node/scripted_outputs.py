"""ScriptedOutputs: a simulated model that gives the answers of a script file.

    otherwise = "I have nothing to say."        # for prompts that match no rule

    [[rule]]
    after = "Write the file."                   # text in the prompt
    with = '"name": "write"'                    # other text that must be in the prompt
    say = '<tool_call>\\n{"name": "write", "arguments": {"path": "a.txt"}}\\n</tool_call>'

Among the rules that match a prompt, the rule whose `after` occurs last in the prompt gives the
answer; if several rules share this place, the first of them does. So the result of a tool, or the
next message of a user, leads to the next answer. `say` is raw model output, which the router
parses: tool calls have the format of the model's family.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from baton.api.bounded_files import parse_toml, read_text
from baton.api.errors import ConfigError, reason_of
from baton.checkpoint.model_folder import find_model_folder
from baton.text.tokenizer import Tokenizer
from models.config import ModelConfig
from sim_node.sim_model import TokenAt


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"needed": "with"}):
    """One rule of a script: an answer, and the prompts that it answers.

    Attributes:
        after: text of the prompts that the rule answers.
        say: the answer.
        needed: another text that the prompt must contain (`with` in the file); empty: none.
    """

    after: str
    say: str
    needed: str = ""


class Script(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The rules of a script file, which give the answers of a simulated model.

    Attributes:
        rule: rules, at least one.
        otherwise: answer to prompts that match no rule.
    """

    rule: tuple[Rule, ...]
    otherwise: str = "I have nothing to say."

    def answer(self, prompt: str) -> str:
        """Return the answer that the rules give to a prompt."""
        places = [prompt.rfind(rule.after) if rule.needed in prompt else -1 for rule in self.rule]
        latest = max(places)
        return self.otherwise if latest < 0 else self.rule[places.index(latest)].say


@dataclass(frozen=True, slots=True)
class ScriptedOutputs:
    """The answers of a script as tokens, each followed by an end-of-sequence token.

    Attributes:
        script: rules and answers.
        tokenizer: the model's tokenizer, which decodes prompts and encodes answers.
        eos_token_ids: end-of-sequence tokens of the model; at least one.
    """

    script: Script
    tokenizer: Tokenizer
    eos_token_ids: frozenset[int]

    def output_of(self, prompt_token_ids: Sequence[int]) -> TokenAt:
        answer = self.script.answer(self.tokenizer.decode(prompt_token_ids))
        tokens = array("I", self.tokenizer.encode(answer, add_special_tokens=False))
        end = min(self.eos_token_ids)
        return lambda index: tokens[index] if index < len(tokens) else end


def read_script(path: str, model: str) -> ScriptedOutputs:
    """Read a script file, and make outputs of it for a model.

    Args:
        path: the script, a TOML file.
        model: model folder, GGUF file, or hub id; weights are not read.

    Raises:
        ConfigError: the file is no valid script, or the model has no end-of-sequence token.
        ModelLoadError: the model's configuration or tokenizer cannot be read.
    """
    try:
        text = read_text(Path(path))
    except (OSError, ValueError) as error:
        raise ConfigError(f"script: cannot read {path} ({reason_of(error)})") from None
    try:
        script = parse_script(text)
    except ConfigError as error:
        raise ConfigError(f"script: {path}: {error}") from None
    return scripted_outputs(script, find_model_folder(model, weights=False))


def parse_script(text: str) -> Script:
    """Parse the text of a script file; raises ConfigError if it is no valid script."""
    try:
        script = msgspec.convert(parse_toml(text), Script)
    except (msgspec.ValidationError, ValueError) as error:
        raise ConfigError(str(error)) from None
    if not script.rule:
        raise ConfigError("rule: must have at least 1 entry, got 0")
    for number, rule in enumerate(script.rule, 1):
        if not rule.after:
            raise ConfigError(f"rule {number}: after: must not be empty")
    return script


def scripted_outputs(script: Script, folder: Path) -> ScriptedOutputs:
    """Make outputs of a script for the model in a folder; raises ConfigError, ModelLoadError."""
    eos_token_ids = ModelConfig.from_folder(folder).eos_token_ids
    if not eos_token_ids:
        raise ConfigError(f"script: {folder} names no eos_token_id, so no answer could end")
    return ScriptedOutputs(script, Tokenizer(folder), eos_token_ids)
