"""Makes an engine's request from a router's command to a prefill node or a decode node."""

from __future__ import annotations

from baton.api.errors import InvalidRequestError
from baton.api.pooling import check_pooling_params
from baton.api.prompt import check_prompt, check_sampling_params
from baton.kv.block_hash import extra_keys_of
from baton.link.words import DecodeCommand, PrefillCommand
from engine.core.request import Request
from engine.engine import Engine


def new_request(
    engine: Engine, command: PrefillCommand | DecodeCommand, max_tokens: int | None = None
) -> Request:
    """Check a command, and make the engine's request for it.

    Args:
        max_tokens: maximum number of new tokens, if fewer than the command allows.

    Raises InvalidRequestError.
    """
    params, vocab_size = command.sampling_params, engine.model_config.vocab_size
    token_ids = [*command.prompt_token_ids, *command.output_token_ids]
    pooling = command.pooling if isinstance(command, PrefillCommand) else None
    config = engine.model_config
    if pooling is not None:
        check_pooling_params(pooling, vocab_size=vocab_size, num_labels=config.num_labels)
    elif not config.generates:
        raise InvalidRequestError("model", "generates no text")
    check_prompt(token_ids, vocab_size=vocab_size, max_model_len=engine.max_model_len)
    check_sampling_params(params, vocab_size=vocab_size)
    images = engine.features.images.of_prompt(
        command.images, command.prompt_token_ids, need_files=_computes_prompt(command)
    )
    return Request.create(
        command.request_id,
        command.prompt_token_ids,
        params,
        seed=params.seed or 0,
        eos_token_ids=engine.eos_token_ids,
        max_model_len=engine.max_model_len,
        max_tokens=max_tokens,
        output_token_ids=command.output_token_ids,
        extra_keys=extra_keys_of(command.cache_salt),
        adapter=command.adapter,
        epoch=command.epoch,
        priority=command.priority,
        images=images,
        pooling=pooling,
    )


def _computes_prompt(command: PrefillCommand | DecodeCommand) -> bool:
    return isinstance(command, PrefillCommand) or not command.prefill_engine_id
