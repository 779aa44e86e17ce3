"""Plain questions, and the demo's: asks a model and judges the answers; a program that prints JSON.

A process loads one kernel library: run the program once for each kind of kernels.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_TOKENS = 32
LICENCE = Path(__file__).parents[3] / "LICENSE"
_LICENCE_CHARACTERS = 6000  # the last ones, as in the demo
_REPEATED_WORDS, _MOST_REPEATS = 3, 2
# For models without a chat template, which complete a list of questions and answers.
EXAMPLES = """\
Q: Which metal is liquid at room temperature?
A: Mercury.
Q: How many legs does a spider have?
A: Eight.
Q: Who painted the Mona Lisa?
A: Leonardo da Vinci.
"""

Message = Mapping[str, str]
# The demo's system message, too.
SYSTEM: Message = {"role": "system", "content": "Answer in one short sentence."}


@dataclass(frozen=True, slots=True)
class Question:
    """A question, and words in lower case; a right answer has one of them.

    Attributes:
        before: messages before the question.
        fits: JSON schema that the answer must fit; empty: any text.
    """

    text: str
    right: tuple[str, ...]
    before: tuple[Message, ...] = (SYSTEM,)
    fits: Mapping[str, Any] | None = None

    @property
    def chat(self) -> list[Message]:
        return [*self.before, {"role": "user", "content": self.text}]


QUESTIONS = (
    Question("What is the capital of France?", ("paris",)),
    Question("What is the largest planet of the solar system?", ("jupiter",)),
    Question("Who wrote Romeo and Juliet?", ("shakespeare",)),
    Question("What is the opposite of hot?", ("cold", "cool")),
    Question("How many days are in a week?", ("seven", "7")),
    Question("What do bees make?", ("honey",)),
    Question("Which language do people speak in Germany?", ("german",)),
    Question("What is the boiling point of water in degrees Celsius?", ("100",)),
    Question("In which country are the pyramids of Giza?", ("egypt",)),
    Question("What color is the sky on a clear day?", ("blue",)),
)

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def demo_questions() -> tuple[Question, ...]:
    """Return the questions of `make demo` after its first, and the status page's question.

    They are a second turn, JSON, and a long prompt.
    """
    licence = LICENCE.read_text(encoding="utf-8")[-_LICENCE_CHARACTERS:]
    turn = (
        SYSTEM,
        {"role": "user", "content": "What is the capital of France?"},
        {"role": "assistant", "content": "The capital of France is Paris."},
    )
    return (
        Question(
            "Who are you?",
            ("smollm", "assistant", "ai ", "language model", "here to help"),
            before=(),
        ),
        Question(
            "What is it famous for? Answer in one sentence.", ("paris", "eiffel", "art"), turn
        ),
        Question(
            "Extract the person as JSON: Anna Schmidt is 34 years old and lives in Berlin.",
            ('"age":34', '"age": 34'),
            before=(),
            fits=PERSON,
        ),
        Question(
            f"{licence}\n\nWhich license is described above? Answer in one sentence.",
            ("apache",),
            before=(),
        ),
    )


def is_looping(text: str) -> bool:
    """Return whether three words in a row stand more than twice in a text."""
    words = text.lower().split()
    runs = Counter(
        tuple(words[start : start + _REPEATED_WORDS])
        for start in range(len(words) - _REPEATED_WORDS + 1)
    )
    return max(runs.values(), default=0) > _MOST_REPEATS


def is_right(question: Question, text: str) -> bool:
    """Return whether an answer has one of the right words."""
    return any(word in text.lower() for word in question.right)


def ask(llm: Any, questions: Sequence[Question]) -> list[str]:
    """Return a model's answers, each the most probable one.

    A model without a chat template completes `EXAMPLES` and a question.
    """
    from baton import SamplingParams
    from baton.api.errors import InvalidRequestError
    from baton.api.structured_output import StructuredOutput

    def params(question: Question, stop: tuple[str, ...] = ()) -> SamplingParams:
        fits = StructuredOutput(json_schema=question.fits) if question.fits else None
        return SamplingParams(
            max_tokens=MAX_TOKENS, temperature=0.0, stop=stop, structured_output=fits
        )

    try:
        return [llm.chat([one.chat], params(one))[0].text.strip() for one in questions]
    except InvalidRequestError:
        prompts = [f"{EXAMPLES}Q: {one.text}\nA:" for one in questions]
        return [
            llm.generate([prompt], params(one, ("\n",)))[0].text.strip()
            for prompt, one in zip(prompts, questions, strict=True)
        ]


def main(model: str, weights: str = "auto", *words: str) -> None:
    """Print the kernels that computed, and the answers; ``demo`` adds the demo's questions."""
    from baton import LLM
    from baton.kernel_library.state import find_kernels
    from baton_kernels.dispatch import native_ops

    llm = LLM(
        model, weights=weights, max_model_len=4096, kv_cache_bytes=2**28, weights_cache_bytes=0
    )
    found = find_kernels()
    report = {
        "kernels": (found.instruction_set or "built here") if native_ops() else "torch",
        "answers": ask(llm, QUESTIONS),
        "demo": ask(llm, demo_questions()) if words else [],
    }
    sys.stdout.write(json.dumps(report) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
