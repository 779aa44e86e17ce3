"""Intakes with defaults for all arguments that a test does not give."""

from __future__ import annotations

from typing import Any

from baton.checkpoint.pooling.setup import GENERATES_ONLY, PoolingSetup
from baton.text.tokenizer import Tokenizer
from router.calls.dispatcher import Dispatcher
from router.intake.abilities import Abilities
from router.intake.answers.answers import Answers
from router.intake.cache_salts import CacheSalts
from router.intake.images.image_reader import ImageReader
from router.intake.intake import Intake
from router.intake.parsers.choice import OutputParsers
from router.intake.prompt_reader import PromptReader


def make_intake(
    dispatcher: Dispatcher,
    tokenizer: Tokenizer | None = None,
    *,
    vocab_size: int,
    default_timeout_s: float = 60.0,
    trusts_templates: bool = False,
    images: ImageReader | None = None,
    setup: PoolingSetup = GENERATES_ONLY,
    parsers: OutputParsers | None = None,
    cache_salts: CacheSalts | None = None,
    **options: Any,
) -> Intake:
    """Return an intake whose reader starts new processes; other options are those of `Intake`."""
    abilities = Abilities(dispatcher, vocab_size, parsers or OutputParsers(tokenizer), setup)
    reader = PromptReader(
        tokenizer,
        dispatcher.admission,
        lambda: abilities.max_model_len,
        vocab_size=vocab_size,
        trusts_templates=trusts_templates,
        images=images,
        may_encode=lambda: dispatcher.pool.may_encode_images,
    )
    return Intake(
        dispatcher,
        reader,
        abilities,
        Answers(tokenizer, cache_salts or CacheSalts()),
        vocab_size=vocab_size,
        default_timeout_s=default_timeout_s,
        **options,
    )
