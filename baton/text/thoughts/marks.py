"""Thought marks: how models mark thoughts, and the part of this that an engine must know.

prompt ... <|im_start|>assistant <think> | thought | </think> | answer     opened by the prompt
prompt ... <|im_start|>assistant | <think> thought | </think> | answer     the model may open it
prompt ... <|im_start|>assistant <think></think> | answer                  no thought
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.api.errors import InvalidRequestError
from baton.api.thinking import Thinking

if TYPE_CHECKING:  # `baton -h` reads this file, and must not wait for the library
    from baton.text.tokenizer import Tokenizer

_PROMPT_END_TOKENS = 8
_MAX_PROMPT_END_TOKENS = 8_192  # maximum number of tokens to read, which takes a millisecond


@dataclass(frozen=True, slots=True)
class ThoughtMarks:
    """The texts around a model family's thoughts.

    Attributes:
        open, close: enclose a thought.
        always_thinks: whether the model thinks from the start, without an opening mark.
        may_reopen: whether an output may have several thoughts.
        role: text between the closing mark and a call.
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
        """Return whether a prompt's end leaves a thought open, and whether it has closed one."""
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
# Marks, each with signs in the family's chat templates; the first match counts.
_BY_SIGNS = (
    (HARMONY, ("<|channel|>",)),
    (SEED_THINK, ("<seed:think>",)),
    (THINK, ("</think>", "<think>")),
)


def find_marks(tokenizer: Tokenizer) -> ThoughtMarks:
    """Return a checkpoint's thought marks, found by its chat template or its tokens.

    Raises InvalidRequestError if the checkpoint has no thought marks.
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
    """Finds an output's position in its thought from its prompt.

    Args:
        tokenizer: the checkpoint's tokenizer.
        marks: the family's marks.
    """

    def __init__(self, tokenizer: Tokenizer, marks: ThoughtMarks) -> None:
        self._tokenizer = tokenizer
        self._marks = marks
        inner = map(tokenizer.special_token_id, marks.within)
        # Tokens that cannot occur in an answer.
        self._outer_ids = tokenizer.special_token_ids.difference(inner)

    def prompt_end(self, prompt: list[int]) -> str:
        """Return the end of a prompt that belongs to the answer: a mark, or a thought's beginning.

        The answer begins after the last special token that is no mark. In a prompt without such a
        token, except as its first one, the last few tokens count as the answer's.
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
        """Return the engine's parameters for the thought; None if the prompt allows no thought.

        Args:
            must_open: whether the output must begin with a thought (`Thinking`).
            before_calls: whether the grammar after the thought describes tool calls in the family's
                form.
        """
        marks = self._marks
        is_open, is_over = marks.place_of(self.prompt_end(prompt))
        if is_over:
            return None
        opens, gaps = [marks.open], list[str]()
        if not marks.answer:  # models write newlines around their marks
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
