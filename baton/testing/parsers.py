"""Contract of tool-call and reasoning parsers: cuts of an output do not change its parts."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence

from router.intake.parsers.base import (
    CallArguments,
    CallBegins,
    OutputParser,
    ParserContext,
    Part,
    Reasoning,
)

Joined = list[tuple[str, str]]  # (kind, text); neighbours of the same kind are joined


def join_parts(parts: Iterable[Part]) -> Joined:
    """Join neighbouring parts of the same kind, without the ids of calls, which are random."""
    joined: Joined = []
    for part in parts:
        match part:
            case Reasoning(text):
                kind = "reasoning"
            case CallBegins():
                joined.append(("call", part.name))
                continue
            case CallArguments(text):
                kind = "arguments"
            case _:
                kind, text = "text", part
        if joined and joined[-1][0] == kind:
            joined[-1] = (kind, joined[-1][1] + text)
        elif text:
            joined.append((kind, text))
    return joined


def parse(parser: OutputParser, pieces: Sequence[str]) -> Joined:
    """Return the joined parts of an output that comes in these pieces."""
    parts = [part for piece in pieces for part in parser.push(piece)]
    return join_parts([*parts, *parser.flush()])


class ParserContract:
    """Tests of an output parser.

    Attributes:
        outputs: example outputs of the models that the parser is for.
        num_cuts: number of random ways to cut each output, and each beginning of it, into pieces.
    """

    outputs: Sequence[str] = ()
    num_cuts = 20

    def make(self) -> Callable[[ParserContext], OutputParser]:
        """Return the entry to register: a function that makes a parser for a request."""
        raise NotImplementedError

    def test_there_are_outputs(self) -> None:
        assert self.outputs, "give `outputs`"

    def test_the_parts_do_not_depend_on_the_pieces(self) -> None:
        draw = random.Random(3)
        for output in self._and_beginnings(draw):
            whole = parse(self._parser(), [output])
            assert parse(self._parser(), list(output)) == whole
            for _ in range(self.num_cuts):
                ends = sorted(draw.choices(range(len(output) + 1), k=draw.randrange(5)))
                pieces = [output[a:b] for a, b in zip([0, *ends], [*ends, None], strict=True)]
                assert parse(self._parser(), pieces) == whole

    def test_plain_text_stays_text(self) -> None:
        text = "The answer is 42."
        assert "".join(said for _, said in parse(self._parser(), [text])) == text

    def test_each_request_has_a_parser_of_its_own(self) -> None:
        one, other = self._parser(), self._parser()
        list(one.push(self.outputs[0]))
        assert parse(other, self.outputs[:1]) == parse(self._parser(), self.outputs[:1])

    def _parser(self) -> OutputParser:
        return self.make()(ParserContext())

    def _and_beginnings(self, draw: random.Random) -> list[str]:
        cut = [output[: draw.randrange(len(output) + 1)] for output in self.outputs]
        return [*self.outputs, *cut]
