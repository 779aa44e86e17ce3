"""Planned prompts: token ids drawn with a seed, or messages of a data set."""

from __future__ import annotations

import random
from dataclasses import dataclass

from loadtest.load.traces import BLOCK_TOKENS, TraceRequest, block_seed


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a chat. ``role`` is empty for a text that is sent without a chat template."""

    role: str
    content: str


Prompt = list[int] | tuple[Message, ...]
"""The form in which a target sends prompts: token ids, or messages (see `is_text`)."""


def is_text(messages: tuple[Message, ...]) -> bool:
    """Return whether the messages are one text, to send without a chat template."""
    return not messages[0].role


@dataclass(frozen=True, slots=True)
class DrawnTokens:
    """A part of a prompt: token ids drawn with the text ``seed``; equal seeds give equal tokens."""

    seed: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class DrawnPrompt:
    """A prompt of drawn parts; prompts that begin with equal parts begin with equal tokens."""

    parts: tuple[DrawnTokens, ...]

    @property
    def num_tokens(self) -> int:
        return sum(part.num_tokens for part in self.parts)

    @property
    def sizes(self) -> list[tuple[object, int]]:
        """The prompt's parts, each with its length in tokens."""
        return [(part, part.num_tokens) for part in self.parts]

    def make(self, vocab_size: int) -> list[int]:
        """Draw the token ids, all below ``vocab_size``."""
        token_ids: list[int] = []
        for part in self.parts:
            chance = random.Random(part.seed)
            token_ids += chance.choices(range(vocab_size), k=part.num_tokens)
        return token_ids


@dataclass(frozen=True, slots=True)
class WrittenPrompt:
    """A prompt of a data set's messages; only the server knows how many tokens they have."""

    messages: tuple[Message, ...]

    @property
    def num_tokens(self) -> None:
        return None

    @property
    def sizes(self) -> list[tuple[object, int]]:
        """The prompt's messages, each with its length in characters."""
        return [(message, len(message.content)) for message in self.messages]

    def make(self, vocab_size: int) -> tuple[Message, ...]:
        """Return the messages unchanged."""
        return self.messages


def prompt_of_trace(request: TraceRequest, seed: str) -> DrawnPrompt:
    """Plan a trace request's prompt, with the tokens that `traces.prompt_token_ids` would draw."""
    left = request.input_length
    parts = []
    for hash_id in request.hash_ids:
        parts.append(DrawnTokens(block_seed(hash_id, seed), min(left, BLOCK_TOKENS)))
        left -= BLOCK_TOKENS
    return DrawnPrompt(tuple(parts))


class SharedBeginnings:
    """Finds, in the order of sending, the beginnings that prompts of one load have in common."""

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def share_of(self, prompt: DrawnPrompt | WrittenPrompt) -> float:
        """Return which share of a prompt an earlier prompt also begins with; remember the prompt.

        Two parts with the same seed but different lengths also begin with equal tokens. Such tokens
        are not counted, because only the last blocks of a trace's prompts can differ in length.
        """
        sizes = prompt.sizes
        begins_alike = True
        chain = num_shared = 0
        for part, size in sizes:
            chain = hash((chain, part))
            begins_alike = begins_alike and chain in self._seen
            num_shared += size * begins_alike
            self._seen.add(chain)
        return num_shared / max(sum(size for _, size in sizes), 1)
