"""DividedText: divides an output's text into reasoning, calls and answer, up to a stop string.

Stop strings count only in the answer, not in reasoning or in call arguments.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from baton.api.outputs import TextDelta
from baton.api.sampling_params import SamplingParams
from baton.text.stop_strings import DetokenizeOptions, OutputText, StopStrings
from baton.text.thoughts.state import Phase, ThoughtState
from baton.text.tokenizer import Tokenizer
from router.intake.parsers.base import CLOSE_SIGN, OutputParser, Part


class DividedDelta(TextDelta, frozen=True, gc=False):
    """One piece of a chat's output, with its parts.

    Attributes:
        parts: the parts of this piece, up to a stop string. The field ``text`` has the whole piece.
    """

    parts: tuple[Part, ...] = ()


class DividedText:
    """Divides the text of a growing output into parts; ends it at the answer's first stop string.

    Attributes:
        parts: the parts that the latest push added.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        options: DetokenizeOptions,
        parser: OutputParser,
    ) -> None:
        self.parts: list[Part] = []
        # None if only the text ends reasoning, or once the reasoning has ended
        self._thought: ThoughtState | None = None
        self._close_mark = ""
        thinking = params.thinking
        if thinking is not None and thinking.closes_by_token:
            is_guided = params.structured_output is not None
            self._thought = ThoughtState(thinking, guides_answer=is_guided)
            self._close_mark = tokenizer.decode(thinking.close_token_ids, skip_special_tokens=False)
        self._text = OutputText(tokenizer, dataclasses.replace(params, stop=()), options)
        self._parser = parser
        self._min_tokens = params.min_tokens
        self._stop = params.stop
        self._include_stop = options.include_stop
        self._stop_strings = StopStrings(params.stop, include=options.include_stop)

    @property
    def stopped(self) -> bool:
        """Return whether a stop string was found.

        The token that completed the stop string is the output's last token.
        """
        return self._stop_strings.stopped

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the answer, or None."""
        return self._stop_strings.found

    @property
    def num_tokens(self) -> int:
        """Number of tokens added so far."""
        return self._text.num_tokens

    def push(
        self, token_ids: Sequence[int], *, last: bool = False, ended_by_token: bool = False
    ) -> str:
        """Add tokens to the output; return the text that they add, and set `parts` to its parts.

        Args:
            last: whether the output ends with these tokens.
            ended_by_token: whether the last token is itself the end mark of the output.
        """
        self.parts = []
        # Tokens are added one at a time if a stop string may end the output, so that the output's
        # last token is known, or if a token may end the reasoning.
        is_apart = bool(self._stop) or self._thought is not None
        steps = [[one] for one in token_ids] if is_apart and token_ids else [token_ids]
        texts = []
        for index, step in enumerate(steps):
            ends = last and index == len(steps) - 1
            texts.append(self._text.push(step, last=ends, ended_by_token=ends and ended_by_token))
            self._take(self._parser.push(self._with_close(step, texts[-1])))
            if ends and not self.stopped:
                self._take(self._parser.flush())
            if self.stopped:
                break
        if last and not self.stopped:
            self._flush()
        return "".join(texts)

    def _with_close(self, token_ids: Sequence[int], text: str) -> str:
        """Return a token's text for the parser; `CLOSE_SIGN` for the token that ends reasoning."""
        if self._thought is None or not token_ids:
            return text
        was_open = self._thought.phase is Phase.OPEN
        self._thought.accept(token_ids[0])
        if self._thought.phase in (Phase.OPENING, Phase.OPEN):
            return text
        mark, self._thought = self._close_mark, None
        return text.removesuffix(mark) + CLOSE_SIGN if was_open else text

    def _take(self, parts: Iterable[Part]) -> None:
        if not self._stop:
            self.parts += parts
            return
        for part in parts:
            if not isinstance(part, str):
                self._flush()
                self.parts.append(part)
            elif self._text.num_tokens < self._min_tokens:
                self.parts.append(part)
            elif shown := self._stop_strings.push(part):
                self.parts.append(shown)
            if self.stopped:
                return

    def _flush(self) -> None:
        """Add held-back answer text to `parts`, because it cannot become a stop string any more."""
        if held := self._stop_strings.flush():
            self.parts.append(held)
            self._stop_strings = StopStrings(self._stop, include=self._include_stop)
