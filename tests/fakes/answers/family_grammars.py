"""A family's grammars of calls over the demo model's tokens, and what its parser reads."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from baton.api.structured_output import StructuredOutput
from baton.text.grammars import compile_grammar, load_grammar_tokenizer, make_grammar
from baton.text.tokenizer import Tokenizer
from router.intake.parsers import TOOL_CALL_PARSERS
from router.intake.parsers.base import ParserContext
from router.intake.parsers.choice import OutputParsers
from tests.fakes.answers.parsed_outputs import Found, parse
from tests.fakes.checkpoints.demo_model import DEMO_MODEL

EOS = 4095


def marks_of(form: str) -> list[str]:
    return list(TOOL_CALL_PARSERS.load(form).special_tokens)


class FamilyTokens:
    """The demo model's tokens, with special ones beside them, and the parsers of a family.

    Args:
        special: special tokens that the vocabulary has beside the model's own.
    """

    def __init__(self, folder: Path, form: str, special: list[str], thoughts: str = "none") -> None:
        described = json.loads((DEMO_MODEL / "tokenizer.json").read_text(encoding="utf-8"))
        described["added_tokens"] += [
            {**described["added_tokens"][0], "id": 4096 + index, "content": name}
            for index, name in enumerate(special)
        ]
        (folder / "tokenizer.json").write_text(json.dumps(described), encoding="utf-8")
        self.tokenizer = Tokenizer(folder)
        self.parsers = OutputParsers(self.tokenizer, form, thoughts)
        self.library: LLTokenizer = load_grammar_tokenizer(folder / "tokenizer.json", [EOS])

    def matcher(self, grammar: str) -> LLMatcher:
        output = StructuredOutput(grammar=grammar)
        return compile_grammar(output, make_grammar(output), self.library)

    def fits(self, grammar: str, text: str) -> bool:
        matcher, token_ids = self.matcher(grammar), self.tokenizer.encode(text)
        return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()

    def parse(self, text: str, tools: dict[str, Any], **options: Any) -> Found:
        return parse(self.parsers.make(ParserContext(tools), **options), [text])

    def draw(
        self, grammar: str, rng: random.Random, max_tokens: int = 400, likely: str = '"'
    ) -> str | None:
        """Draw a text of random tokens that the grammar allows; None if it does not end.

        Args:
            likely: characters that are tokens, and that come often where they may.
        """
        often = self.tokenizer.encode(likely)
        matcher, token_ids = self.matcher(grammar), list[int]()
        while not matcher.is_stopped():
            if len(token_ids) == max_tokens:
                return None
            mask = matcher.compute_bitmask()
            allowed = [i for i in range(len(mask) * 8) if mask[i // 8] >> (i % 8) & 1]
            assert allowed, (grammar, self.tokenizer.decode(token_ids), matcher.get_error())
            token_id = EOS if EOS in allowed and rng.random() < 0.7 else rng.choice(allowed)
            if rng.random() < 0.5 and (found := [one for one in often if one in allowed]):
                token_id = rng.choice(found)
            assert matcher.consume_token(token_id)
            token_ids.append(token_id)
        shown = self.parsers.shown_token_ids(with_tools=True) | self.tokenizer.special_token_ids
        kept = [one for one in token_ids if one != EOS or one not in shown]
        return self.tokenizer.decode(kept, skip_special_tokens=False)
