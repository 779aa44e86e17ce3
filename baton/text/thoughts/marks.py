"""Thought marks: how models mark thoughts, and what an engine must know about a thought.

prompt ... <|im_start|>assistant <think> | thought | </think> | answer     opened by the prompt
prompt ... <|im_start|>assistant | <think> thought | </think> | answer     the model may open it
prompt ... <|im_start|>assistant <think></think> | answer                  no thought
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.api.errors import InvalidRequestError
from baton.api.thinking import Thinking

if TYPE_CHECKING:  # `baton -h` imports this file, and must be fast
    from baton.text.tokenizer import Tokenizer

_PROMPT_END_TOKENS = 8
_MAX_PROMPT_END_TOKENS = 8_192  # reading so many tokens takes a millisecond


@dataclass(frozen=True, slots=True)
class ThoughtMarks:
    """The texts that a model family writes around thoughts.

    Attributes:
        open, close: opening and closing mark of a thought.
        always_thinks: whether the model thinks from the start, without an opening mark.
        may_reopen: whether an output may have several thoughts.
        role: text between the closing mark and a tool call.
        answer: text between the closing mark (or ``role``) and the answer.
        within: special tokens that may occur in thoughts and their marks.
    """

    open: str
    close: str
    always_thinks: bool = False
    may_reopen: bool = False
    role: str = ""
    answer: str = ""
    within: tuple[str, ...] = ()

    def place_of(self, prompt_end: str) -> tuple[bool, bool]:
        """Return whether a prompt's end is within a thought, and whether a thought ended there."""
        begun = prompt_end.rfind(self.open)
        ended = max(prompt_end.rfind(mark) for mark in (self.close, self.answer or self.close))
        is_open = begun > ended or (self.always_thinks and ended < 0)
        return is_open, ended > begun


THINK = ThoughtMarks("<think>", "</think>", within=("<think>", "</think>"))
SEED_THINK = ThoughtMarks(
    "<seed:think>",
    "</seed:think>",
    within=(
        "<seed:think>",
        "</seed:think>",
        "<seed:cot_budget_reflect>",
        "</seed:cot_budget_reflect>",
    ),
)
HARMONY = ThoughtMarks(
    "<|channel|>analysis<|message|>",
    "<|end|>",
    may_reopen=True,
    role="<|start|>assistant",
    answer="<|channel|>final<|message|>",
    within=("<|channel|>", "<|message|>", "<|constrain|>"),
)
# Marks, each with texts that tell the family by its chat template; the first match is used.
_BY_SIGNS = (
    (HARMONY, ("<|channel|>",)),
    (SEED_THINK, ("<seed:think>",)),
    (THINK, ("</think>", "<think>")),
)


def find_marks(tokenizer: Tokenizer) -> ThoughtMarks:
    """Return the thought marks of a checkpoint, found by its chat template or its tokens.

    Raises:
        InvalidRequestError: the checkpoint has no thought marks.
    """
    template = tokenizer.chat_template
    source = "" if template is None else template.source(with_tools=True)
    for marks, signs in _BY_SIGNS:
        if any(sign in source for sign in signs):
            return marks
    for marks in (SEED_THINK, THINK):
        if len(tokenizer.encode(marks.close, add_special_tokens=False)) == 1:
            return marks
    raise InvalidRequestError("thinking", "this checkpoint has no marks of a thought")


class ThoughtFinder:
    """Finds out from a prompt whether its output begins with a thought or within a thought.

    Args:
        tokenizer: the checkpoint's tokenizer.
        marks: the family's marks.
    """

    def __init__(self, tokenizer: Tokenizer, marks: ThoughtMarks) -> None:
        self._tokenizer = tokenizer
        self._marks = marks
        inner = map(tokenizer.special_token_id, marks.within)
        # Special tokens that cannot occur in a thought or its marks.
        self._outer_ids = tokenizer.special_token_ids.difference(inner)

    def prompt_end(self, prompt: list[int]) -> str:
        """Return the text at the end of a prompt that belongs to the model's own turn.

        This may be a mark or the beginning of a thought. The model's turn begins after the last
        special token that cannot occur in a thought or its marks. If only the first token of the
        prompt is such a token, or none is, the last few tokens are returned.
        """
        start, first = len(prompt), max(len(prompt) - _MAX_PROMPT_END_TOKENS, 1)
        while start > first and prompt[start - 1] not in self._outer_ids:
            start -= 1
        if start <= first:
            start = max(len(prompt) - _PROMPT_END_TOKENS, 0)
        return self._tokenizer.decode(prompt[start:], skip_special_tokens=False)

    def thinking(
        self,
        prompt: list[int],
        *,
        budget_tokens: int | None = None,
        must_open: bool = False,
        before_calls: bool = False,
    ) -> Thinking | None:
        """Return the engine's parameters for a thought; None if the prompt allows no thought.

        Args:
            budget_tokens: maximum number of tokens in the thought; None: no limit.
            must_open: whether the output must begin with a thought.
            before_calls: whether the grammar after the thought describes tool calls in the family's
                form.
        """
        marks = self._marks
        is_open, is_over = marks.place_of(self.prompt_end(prompt))
        if is_over:
            return None
        opens, gaps = [marks.open], list[str]()
        if not marks.answer:  # these models write newlines around their marks
            opens, gaps = [marks.open, "\n" + marks.open], ["\n", "\n\n"]
        gap_marks = map(self._encode, gaps)
        return Thinking(
            budget_tokens=budget_tokens,
            close_token_ids=self._encode(marks.close),
            open_marks=tuple(map(self._encode, opens)),
            is_open=is_open,
            must_open=must_open,
            may_reopen=marks.may_reopen,
            behind_token_ids=self._encode(marks.role + ("" if before_calls else marks.answer)),
            gap_token_ids=tuple(gap[0] for gap in gap_marks if len(gap) == 1),
        )

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False)) if text else ()
