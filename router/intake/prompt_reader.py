"""PromptReader: turns clients' prompts into token ids, and token ids back into text.

Worker processes read long texts, conversations and grammars; `PromptReader` starts and ends them.
`EarlyReaders` has what a router loads and forks before it starts threads, so that worker processes
share the memory of the router's modules and tokenizer.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from baton.access.identity import ANYBODY, Principal
from baton.api.errors import InvalidRequestError, PromptTooLongError
from baton.api.images import ImageLayout, PromptImage
from baton.api.prompt import check_token_ids
from baton.api.structured_output import StructuredOutput
from baton.media.expand import as_written
from baton.processes.early_template import EarlyTemplate, may_fork
from baton.text.detokenizer import Detokenizer
from baton.text.grammar_trials import GrammarTrials, fork_trials
from baton.text.tokenizer import Tokenizer
from router.gate.admission import Admission
from router.intake.changing_lines import without_changing_lines
from router.intake.grammar_checks import GrammarChecks
from router.intake.images.image_reader import ImageFile, ImageReader, check_markers
from router.intake.text_options import TextOptions
from router.intake.texts import ChatPrompt, Texts, fork_texts

# Number of tokens per piece: decoding a piece takes some milliseconds, with any vocabulary.
_DECODED_AT_ONCE = 1024


@dataclass(frozen=True, slots=True)
class IllustratedPrompt:
    """A prompt as text or token ids, which has a marker in the place of each image."""

    prompt: str | Sequence[int]
    images: Sequence[ImageFile]


@dataclass(frozen=True, slots=True)
class ReadPrompt:
    """A prompt as nodes get it.

    Attributes:
        token_ids: the prompt, with the tokens of its images.
        images: the images with their files, in order.
    """

    token_ids: list[int]
    images: tuple[PromptImage, ...] = field(default=(), repr=False)


Prompt = str | Sequence[int] | ChatPrompt | IllustratedPrompt | ReadPrompt


@dataclass(frozen=True, slots=True)
class PairPrompt:
    """Two texts that the tokenizer encodes as a pair, such as a query and a document."""

    first: str
    second: str


def is_chat(prompt: Prompt) -> bool:
    """Return whether a prompt is a conversation."""
    return isinstance(prompt, ChatPrompt)


@dataclass(frozen=True, slots=True)
class EarlyReaders:
    """A model's tokenizer, and template processes from which worker processes are forked.

    Attributes:
        tokenizer: the checkpoint's tokenizer, or None.
        texts, grammars: template processes of `Texts` and `GrammarTrials`; None if forking was not
            possible.
    """

    tokenizer: Tokenizer | None
    texts: EarlyTemplate | None = None
    grammars: EarlyTemplate | None = None


def fork_readers(options: TextOptions, folder: Path) -> EarlyReaders:
    """Load a checkpoint's tokenizer and fork the template processes; call before threads start.

    Raises:
        ModelLoadError: the tokenizer is broken.
        ConfigError: the given chat template is invalid.
    """
    tokenizer = options.make_tokenizer(folder)
    if tokenizer is None or not may_fork():
        return EarlyReaders(tokenizer)
    texts = grammars = None
    # If the machine lacks resources to fork, `PromptReader.start` reports the error.
    with contextlib.suppress(OSError):
        texts = fork_texts(tokenizer)
        grammars = fork_trials(folder)
    return EarlyReaders(tokenizer, texts, grammars)


class PromptReader:
    """Reads prompts with one checkpoint's tokenizer.

    Args:
        tokenizer: the checkpoint's tokenizer; None: the checkpoint has none, and only token ids are
            served.
        admission: the gate, which knows callers' limits.
        max_model_len: returns the maximum number of tokens that a request may have now.
        vocab_size: size of the model's vocabulary.
        readers: template processes of the workers; None: start new processes.
        trusts_templates: whether a request may bring a chat template of its own.
        cuts_changing_lines: whether lines that clients change in every prompt are removed.
        images: reads image files; None: the model takes no images.
        may_encode: returns whether nodes can encode images, as far as the router knows.

    Attributes:
        is_starting: whether worker processes were started, but are not ready yet.
        tokenizer, images: see the arguments.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        admission: Admission,
        max_model_len: Callable[[], int],
        *,
        vocab_size: int,
        readers: EarlyReaders | None = None,
        trusts_templates: bool = False,
        cuts_changing_lines: bool = True,
        images: ImageReader | None = None,
        may_encode: Callable[[], bool] = lambda: True,
    ) -> None:
        self.images = images
        self._may_encode = may_encode
        self.is_starting = False
        self.tokenizer = tokenizer
        self._admission = admission
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._trusts_templates = trusts_templates
        self._cuts_changing_lines = cuts_changing_lines
        self._texts: Texts | None = None
        self._grammar_checks: GrammarChecks | None = None
        if tokenizer is not None:
            early = readers or EarlyReaders(tokenizer)
            self._texts = Texts(tokenizer, max_model_len(), early.texts)
            trials = GrammarTrials(tokenizer.folder, early=early.grammars)
            self._grammar_checks = GrammarChecks(trials)

    def start(self) -> None:
        """Start the worker processes for texts and grammars; `prepare` waits for them.

        Raises:
            NodeUnavailableError: a process cannot be started.
        """
        self.is_starting = True
        for part in (self._texts, self._grammar_checks, self.images):
            if part is not None:
                part.start()

    async def prepare(self) -> None:
        """Wait until the worker processes are ready, and let each read a short text or grammar.

        Raises:
            NodeUnavailableError: the processes cannot be started.
        """
        if self._texts is not None:
            await self._texts.prepare()
        if self._grammar_checks is not None:
            await self._grammar_checks.prepare()
        self.is_starting = False

    def close(self) -> None:
        """End the worker processes that read texts and grammars."""
        for part in (self._texts, self._grammar_checks, self.images):
            if part is not None:
                part.close()

    @property
    def image_marker(self) -> str:
        """Text that stands for an image in prompts; empty: the model takes no images."""
        return self.images.layout.marker if self.images is not None else ""

    def image_reader(self, field: str) -> ImageReader:
        """Return the reader of image files; raises InvalidRequestError if there can be no images.

        Args:
            field: the client's field that has an image, for the error.
        """
        if self.images is None:
            raise InvalidRequestError(field, "has an image, but this model reads text only")
        if not self._may_encode():
            raise InvalidRequestError(
                field, "has an image, but the nodes of this model compute text only"
            )
        return self.images

    async def read(
        self,
        prompt: Prompt | PairPrompt,
        principal: Principal = ANYBODY,
        cache_word: str = "",
        *,
        add_special_tokens: bool = True,
    ) -> ReadPrompt:
        """Return a prompt's token ids and images.

        This method does not check token ids against the model's vocabulary and length.

        Args:
            principal: the client of the prompt.
            cache_word: the client's ``cache_salt``, on which the digests of images depend.
            add_special_tokens: whether a text gets the checkpoint's special tokens.

        Raises the errors of `Texts.encode`, `OpenImages.reading` and `ImageReader.read_sizes`.
        """
        if isinstance(prompt, ReadPrompt):
            return prompt
        images: Sequence[ImageFile] = ()
        if isinstance(prompt, ChatPrompt | IllustratedPrompt):
            images = prompt.images
        text = prompt.prompt if isinstance(prompt, IllustratedPrompt) else prompt
        if not images:
            return ReadPrompt(await self._encode(text, principal, add_special_tokens))
        reader = self.image_reader(images[0].field)
        if isinstance(prompt, ChatPrompt):
            check_markers(prompt.messages, reader.layout)
        caller = principal.tenant
        with reader.open.reading(sum(len(image.data) for image in images), caller):
            sized = await reader.read_sizes(images, caller=caller)
            token_ids = await self._encode(text, principal, add_special_tokens, reader.layout)
            token_ids, placed = await reader.expand(token_ids, sized, principal, cache_word)
        reader.open.hold(placed, caller)
        return ReadPrompt(token_ids, placed)

    async def tokenize(
        self,
        prompt: Prompt | PairPrompt,
        principal: Principal = ANYBODY,
        *,
        add_special_tokens: bool = True,
    ) -> list[int]:
        """Return a prompt's token ids, with those of its images; see `read`."""
        read = await self.read(prompt, principal, add_special_tokens=add_special_tokens)
        return read.token_ids

    async def _encode(
        self,
        prompt: str | Sequence[int] | ChatPrompt | PairPrompt,
        principal: Principal,
        add_special_tokens: bool,
        layout: ImageLayout | None = None,
    ) -> list[int]:
        """Return a prompt's token ids, with markers in the places of images.

        Args:
            layout: how images are written in prompts; None: the prompt has no images.
        """
        max_model_len = self._max_model_len()
        if not isinstance(prompt, str | ChatPrompt | PairPrompt):
            limit = max_model_len - 1
            if len(prompt) > limit:
                raise PromptTooLongError("prompt", len(prompt), limit)
            return list(prompt)
        if self._texts is None:
            raise InvalidRequestError(
                "prompt", "this checkpoint has no tokenizer.json: give token ids"
            )
        caller = principal.tenant
        if isinstance(prompt, str):
            return await self._texts.encode(
                prompt if layout is None else as_written(prompt, layout),
                max_model_len=max_model_len,
                caller=caller,
                add_special_tokens=add_special_tokens,
            )
        if isinstance(prompt, PairPrompt):
            return await self._texts.encode_pair(
                prompt.first, prompt.second, max_model_len=max_model_len, caller=caller
            )
        if not prompt.messages:
            raise InvalidRequestError("chat", "must have at least 1 message, got 0")
        if prompt.template is not None and not self._trusts_templates:
            raise InvalidRequestError(
                "chat_template",
                "is the operator's choice here, not a request's (--trust-request-chat-template)",
            )
        if self._cuts_changing_lines:
            messages = without_changing_lines(list(prompt.messages))
            prompt = dataclasses.replace(prompt, messages=messages)
        replaced = None if layout is None else (layout.marker, layout.written)
        return await self._texts.encode_chat(
            prompt, max_model_len=max_model_len, caller=caller, replaced=replaced
        )

    async def tokenize_only(
        self, prompt: Prompt, principal: Principal, *, add_special_tokens: bool = True
    ) -> list[int]:
        """Return a prompt's token ids for a request that only tokenizes.

        Charges the tokens against the caller's limits. Raises OverloadedError, and the errors of
        `tokenize`.
        """
        self._admission.charge(principal)
        token_ids = await self.tokenize(prompt, principal, add_special_tokens=add_special_tokens)
        self._admission.charge_tokens(principal, len(token_ids) - 1)
        return token_ids

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids; let other tasks run in between.

        Raises InvalidRequestError for unknown ids, too many ids, or a checkpoint without tokenizer.
        """
        if self.tokenizer is None:
            raise InvalidRequestError("tokens", "this checkpoint has no tokenizer.json")
        max_model_len = self._max_model_len()
        if len(token_ids) > max_model_len:
            raise InvalidRequestError(
                "tokens", f"must have at most {max_model_len}, got {len(token_ids)}"
            )
        check_token_ids("tokens", token_ids, self._vocab_size)
        detokenizer = Detokenizer(self.tokenizer, skip_special_tokens=skip_special_tokens)
        texts = []
        for start in range(0, len(token_ids), _DECODED_AT_ONCE):
            texts.append(detokenizer.push(token_ids[start : start + _DECODED_AT_ONCE]))
            await asyncio.sleep(0)
        return "".join([*texts, detokenizer.push((), last=True)])

    async def check_structured_output(
        self, structured_output: StructuredOutput, principal: Principal
    ) -> None:
        """Check that a grammar can be compiled within limits; raises InvalidRequestError if not."""
        if self._grammar_checks is None:
            raise InvalidRequestError("structured_output", "this checkpoint has no tokenizer.json")
        await self._grammar_checks.check(structured_output, caller=principal.tenant)
