"""Planned prompts: token ids or words with images, drawn with a seed, or messages of a data set."""

from __future__ import annotations

import random
from dataclasses import dataclass

from loadtest.load.images import DrawnImage
from loadtest.load.traces import BLOCK_TOKENS, TraceRequest, block_seed


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a chat. ``role`` is empty for a text that is sent without a chat template."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class ImageMessage:
    """A user's message with images, to send with a chat template.

    Attributes:
        before: text before the images; empty: none.
        images: PNG files.
        after: text after the images.
    """

    before: str
    images: tuple[bytes, ...]
    after: str


Prompt = list[int] | tuple[Message, ...] | ImageMessage
"""The form in which a target sends prompts: token ids, messages (see `is_text`), or images."""

# Most tokenizers have a token for each of these words.
_WORDS = (
    "the of and to in is was for that on as with by he at from his it an are were which this be "
    "has also had one new first their not after who they two her she been other when time during "
    "there into all may more years over only some city up world where later then such"
)


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


@dataclass(frozen=True, slots=True)
class ImagePrompt:
    """Words drawn in parts, with images; only the server knows how many tokens they have.

    Attributes:
        parts: parts with as many words as they have tokens.
        num_before: number of parts before the images.
    """

    parts: tuple[DrawnTokens, ...]
    num_before: int
    images: tuple[DrawnImage, ...]

    @property
    def num_tokens(self) -> None:
        return None

    @property
    def sizes(self) -> list[tuple[object, int]]:
        """The parts before and after the images, each with its number of words."""
        words = [(("words", part), part.num_tokens) for part in self.parts]
        return [*words[: self.num_before], (self.images, 0), *words[self.num_before :]]

    def make(self, vocab_size: int) -> ImageMessage:
        """Draw the words and make the files."""
        before, after = self.parts[: self.num_before], self.parts[self.num_before :]
        files = tuple(image.make() for image in self.images)
        return ImageMessage(_words_of(before), files, _words_of(after))


def _words_of(parts: tuple[DrawnTokens, ...]) -> str:
    known, words = _WORDS.split(), list[str]()
    for part in parts:
        words += random.Random(part.seed).choices(known, k=part.num_tokens)
    return " ".join(words)


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

    def share_of(self, prompt: DrawnPrompt | WrittenPrompt | ImagePrompt) -> float:
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
