"""Ten plain questions: asks a model and judges the answers; a program that prints them as JSON.

A process loads one kernel library: run the program once for each kind of kernels.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import dataclass

MAX_TOKENS = 32
SYSTEM = "Answer in one short sentence."  # as `make demo` says
_REPEATED_WORDS, _MOST_REPEATS = 3, 2


@dataclass(frozen=True, slots=True)
class Question:
    """A question, and words in lower case; a right answer has one of them."""

    text: str
    right: tuple[str, ...]


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


def ask(model: str, weights: str = "auto") -> list[str]:
    """Return a model's ten answers, each the most probable one.

    A model without a chat template completes a list of questions and answers.
    """
    from baton import LLM, SamplingParams
    from baton.api.errors import InvalidRequestError

    llm = LLM(model, weights=weights, max_model_len=512, kv_cache_bytes=2**27)
    greedy = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0)
    chats = [
        [{"role": "system", "content": SYSTEM}, {"role": "user", "content": one.text}]
        for one in QUESTIONS
    ]
    try:
        return [llm.chat([chat], greedy)[0].text.strip() for chat in chats]
    except InvalidRequestError:
        shown = "Q: Which metal is liquid at room temperature?\nA: Mercury.\n"
        line = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, stop=("\n",))
        prompts = [f"{shown}Q: {one.text}\nA:" for one in QUESTIONS]
        return [llm.generate([prompt], line)[0].text.strip() for prompt in prompts]


if __name__ == "__main__":
    sys.stdout.write(json.dumps(ask(sys.argv[1], *sys.argv[2:3])) + "\n")
