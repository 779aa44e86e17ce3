"""Yields a data set's conversations in random order, with a mark that is new in each run."""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import tokenizers

from baton.api.errors import ConfigError
from loadtest.load.datasets import Conversation, read_dataset
from loadtest.load.prompts import Message, WrittenPrompt
from loadtest.plan import LoadPlan


@dataclass(frozen=True, slots=True)
class WrittenTurn:
    """A question with all earlier messages; a field is None if the data set does not give it."""

    prompt: WrittenPrompt
    output_length: int | None
    pause_s: float | None


def written_conversations(plan: LoadPlan, seed: str) -> Iterator[list[WrittenTurn]]:
    """Yield conversations without end; each pass through the data set has a new random order.

    Each conversation begins with a mark of the run and the pass, so that a server cannot use
    prompts that it has cached before. Conversations of one pass still share the beginnings that
    they share in the data set.

    Raises:
        ConfigError: the file, or the tokenizer, cannot be read.
    """
    assert plan.dataset is not None
    conversations = read_dataset(plan.dataset)
    count = _token_counter(plan.tokenizer)
    order = random.Random(f"{seed} order")
    for number in itertools.count():
        mark = hashlib.sha256(f"{seed} pass {number}".encode()).hexdigest()[:8]
        for conversation in order.sample(conversations, len(conversations)):
            yield list(_turns(conversation, f"[{mark}] ", count))


def _turns(
    conversation: Conversation, mark: str, count: Callable[[str], int | None]
) -> Iterator[WrittenTurn]:
    said: list[Message] = []
    for turn in conversation:
        new = list(turn.messages)
        if not said:
            new[0] = Message(new[0].role, mark + new[0].content)
        said += new
        length = turn.output_length
        if length is None and turn.answer:
            length = count(turn.answer)
        yield WrittenTurn(WrittenPrompt(tuple(said)), length, turn.pause_s)
        said.append(Message("assistant", turn.answer))


def _token_counter(folder: Path | None) -> Callable[[str], int | None]:
    """Make a function that counts a text's tokens; without a tokenizer, it returns None."""
    if folder is None:
        return lambda text: None
    path = folder / "tokenizer.json"
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # `tokenizers` raises only Exception itself
        raise ConfigError(f"tokenizer: {path} cannot be read: {error}") from error
    return lambda text: max(len(tokenizer.encode(text, add_special_tokens=False).ids), 1)
