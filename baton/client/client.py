"""Client and AsyncClient: call a router from Python. This module does not import torch."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from types import TracebackType
from typing import Any, Unpack

import grpc
import grpc.aio

from baton.access.tls_options import TlsOptions
from baton.addresses import DEFAULT_ADDRESS
from baton.api.beam_search import BeamCompletion, EarlyStopping
from baton.api.outputs import Completion, TextDelta
from baton.api.pooling import Classification, Embedding, Score
from baton.api.sampling_params import SamplingParams
from baton.client.beams import BeamCall
from baton.client.channel import AsyncChannel, SyncChannel
from baton.client.messages import (
    GenerateOptions,
    ModelDescription,
    Progress,
    Prompt,
    RequestOptions,
    credentials,
    join,
    join_batch,
    make_batch_request,
    make_prompt,
    make_request,
    models_from_proto,
)
from baton.client.pooled import (
    classifications_from_proto,
    classify_request,
    embed_request,
    embeddings_from_proto,
    ranks_from_proto,
    rerank_request,
    score_request,
    scores_from_proto,
)
from baton.link import wire
from baton.v1 import inference_pb2

__all__ = [
    "DEFAULT_ADDRESS",
    "AsyncClient",
    "Client",
    "GenerateOptions",
    "ModelDescription",
    "Prompt",
    "RequestOptions",
    "make_request",
]


class Client:
    """Blocking client of a router.

    Args:
        address: ``host:port`` of the router.
        api_key: key for routers that need one; None: ``BATON_API_KEY`` of the environment.
        tls: certificates, read again when they change; None: ``BATON_TLS_CA``, ``BATON_TLS_CERT``
            and ``BATON_TLS_KEY`` of the environment.

    Raises:
        ConfigError: a certificate cannot be used.
    """

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        api_key: str | None = None,
        tls: TlsOptions | None = None,
    ) -> None:
        self._metadata = credentials(api_key)
        self._address = address
        self._channel = SyncChannel(address, tls)

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        timeout_s: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Completion:
        """Return the whole completion of one prompt; raises a BatonError."""
        deltas = self.stream(prompt, sampling_params, timeout_s=timeout_s, **options)
        return join(list(deltas))

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        timeout_s: float | None = None,
        request_id: str = "",
        resumable: bool = False,
        **options: Unpack[GenerateOptions],
    ) -> Iterator[TextDelta]:
        """Yield the completion in pieces as they arrive; leaving the loop cancels the request.

        Args:
            resumable: whether to reconnect and continue if the connection breaks for some seconds.
            options: see `GenerateOptions`.
        """
        request = make_request(prompt, sampling_params, request_id, resumable=resumable, **options)
        progress = Progress(request, timeout_s, self._metadata)
        while True:
            call = progress.next_call(self._channel.stub())
            try:
                for response in call:
                    yield progress.take(response)
                return
            except grpc.RpcError as error:
                time.sleep(progress.pause_after(self._channel.error_of(error), error))
            finally:
                call.cancel()

    def resume(
        self, request_id: str, next_output_index: int = 0, *, timeout_s: float | None = None
    ) -> Iterator[TextDelta]:
        """Yield the rest of a resumable request, from token ``next_output_index`` on."""
        request = inference_pb2.ResumeRequest(
            request_id=request_id, next_output_index=next_output_index
        )
        yield from self._read(self._channel.stub().Resume, request, timeout_s)

    def generate_batch(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | None = None,
        *,
        timeout_s: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> list[list[Completion]]:
        """Return the ``n`` completions of each prompt, in order; raises a BatonError."""
        deltas = self.stream_batch(prompts, sampling_params, timeout_s=timeout_s, **options)
        return join_batch(list(deltas))

    def stream_batch(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | None = None,
        *,
        timeout_s: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Iterator[TextDelta]:
        """Yield pieces of all completions as they arrive, each with prompt and choice index."""
        request = make_batch_request(prompts, sampling_params, **options)
        yield from self._read(self._channel.stub().GenerateBatch, request, timeout_s)

    def beam_search(
        self,
        prompts: Sequence[Prompt],
        *,
        beam_width: int = 4,
        max_tokens: int = 128,
        length_penalty: float = 1.0,
        early_stopping: EarlyStopping = False,
        timeout_s: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> list[list[BeamCompletion]]:
        """Return each prompt's ``beam_width`` best outputs, best first; raises a BatonError.

        The tokens equal those of `LLM.beam_search`; see `BeamSearchParams` for the parameters.
        """
        call = BeamCall(prompts, beam_width, max_tokens, length_penalty, early_stopping, **options)
        deltas = self._read(self._channel.stub().GenerateBatch, call.request, timeout_s)
        return call.join(list(deltas))

    def tokenize(self, prompt: Prompt, *, model: str = "") -> list[int]:
        """Return the token ids that the model gets for a prompt."""
        request = inference_pb2.TokenizeRequest(prompt=make_prompt(prompt), model=model)
        return list(self._call(self._channel.stub().Tokenize, request).token_ids)

    def count_tokens(self, prompt: Prompt, *, model: str = "") -> int:
        """Return the number of a prompt's tokens."""
        request = inference_pb2.CountTokensRequest(prompt=make_prompt(prompt), model=model)
        return int(self._call(self._channel.stub().CountTokens, request).num_tokens)

    def embed(
        self,
        inputs: Sequence[str | Sequence[int]],
        *,
        prompt_name: str | None = None,
        dimensions: int | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[Embedding]:
        """Return the embedding of each text or list of token ids; raises a BatonError.

        Args:
            prompt_name: name of the checkpoint's prompt to put before each text; None: the default
                prompt; empty: no prompt.
            dimensions: number of first values to keep of each embedding; None: all values.
        """
        request = embed_request(inputs, prompt_name, dimensions, options)
        return embeddings_from_proto(self._call(self._channel.stub().Embed, request))

    def score(
        self,
        queries: Sequence[str],
        documents: Sequence[str],
        *,
        instruction: str = "",
        **options: Unpack[RequestOptions],
    ) -> list[Score]:
        """Return how well each document fits its query (one query, or one per document)."""
        request = score_request(queries, documents, instruction, options)
        return scores_from_proto(self._call(self._channel.stub().Score, request))

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int = 0,
        instruction: str = "",
        **options: Unpack[RequestOptions],
    ) -> list[tuple[int, Score]]:
        """Return indexes and scores of the documents that fit a query best, best first.

        Args:
            top_n: maximum number of results; 0: all.
        """
        request = rerank_request(query, documents, top_n, instruction, options)
        return ranks_from_proto(self._call(self._channel.stub().Rerank, request))

    def classify(
        self, inputs: Sequence[str | Sequence[int]], **options: Unpack[RequestOptions]
    ) -> list[Classification]:
        """Return the labels of each text or list of token ids; raises a BatonError."""
        request = classify_request(inputs, options)
        return classifications_from_proto(self._call(self._channel.stub().Classify, request))

    def drop_pins(self, session_id: str = "", *, cache_key: str = "", model: str = "") -> None:
        """End the pins of a session that will have no more requests; raises a BatonError.

        Args:
            session_id: id of the session, as in the requests that made the pins.
            cache_key: the ``prompt_cache_key`` of requests over HTTP; give either this or
                ``session_id``.
            model: served name of a model; empty: the first name that the caller may use.
        """
        request = inference_pb2.DropPinsRequest(
            session_id=session_id, prompt_cache_key=cache_key, model=model
        )
        self._call(self._channel.stub().DropPins, request)

    def prefetch(
        self, session_id: str = "", *, ttl_s: float, cache_key: str = "", model: str = ""
    ) -> None:
        """Let the nodes keep a session's cached prefix, because its next turn comes soon.

        Nodes with KV files read the prefix's blocks that are no longer cached. Raises a BatonError.

        Args:
            session_id, cache_key, model: as in `drop_pins`.
            ttl_s: seconds for which nodes keep the prefix.
        """
        request = inference_pb2.PrefetchRequest(
            session_id=session_id, prompt_cache_key=cache_key, ttl_s=ttl_s, model=model
        )
        self._call(self._channel.stub().Prefetch, request)

    def models(self) -> list[ModelDescription]:
        """List the models that the router serves."""
        return models_from_proto(
            self._call(self._channel.stub().ListModels, inference_pb2.ListModelsRequest())
        )

    def _read(self, method: Any, request: object, timeout_s: float | None) -> Iterator[TextDelta]:
        call = method(request, timeout=timeout_s, metadata=self._metadata)
        try:
            for response in call:
                yield wire.text_delta_from_proto(response)
        except grpc.RpcError as error:
            raise self._channel.error_of(error) from None
        finally:
            call.cancel()

    def _call(self, method: Any, request: object) -> Any:
        try:
            return method(request, metadata=self._metadata)
        except grpc.RpcError as error:
            raise self._channel.error_of(error) from None

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class AsyncClient:
    """asyncio client of a router.

    Args:
        address: ``host:port`` of the router.
        api_key: key for routers that need one; None: ``BATON_API_KEY`` of the environment.
        tls: certificates, read again when they change; None: ``BATON_TLS_CA``, ``BATON_TLS_CERT``
            and ``BATON_TLS_KEY`` of the environment.

    Raises:
        ConfigError: a certificate cannot be used.
    """

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        api_key: str | None = None,
        tls: TlsOptions | None = None,
    ) -> None:
        self._metadata = credentials(api_key)
        self._address = address
        self._channel = AsyncChannel(address, tls)

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        timeout_s: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Completion:
        """Return the whole completion of one prompt; raises a BatonError."""
        deltas = self.stream(prompt, sampling_params, timeout_s=timeout_s, **options)
        return join([delta async for delta in deltas])

    async def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        timeout_s: float | None = None,
        request_id: str = "",
        resumable: bool = False,
        **options: Unpack[GenerateOptions],
    ) -> AsyncGenerator[TextDelta, None]:
        """Yield the completion in pieces as they arrive; closing the iterator cancels the request.

        Args:
            resumable: whether to reconnect and continue if the connection breaks for some seconds.
            options: see `GenerateOptions`.
        """
        request = make_request(prompt, sampling_params, request_id, resumable=resumable, **options)
        progress = Progress(request, timeout_s, self._metadata)
        while True:
            call = progress.next_call(self._channel.stub())
            try:
                async for response in call:
                    yield progress.take(response)
                return
            except grpc.RpcError as error:
                pause_s = progress.pause_after(await self._channel.error_of(error), error)
                await asyncio.sleep(pause_s)
            finally:
                call.cancel()

    async def resume(
        self, request_id: str, next_output_index: int = 0, *, timeout_s: float | None = None
    ) -> AsyncGenerator[TextDelta, None]:
        """Yield the rest of a resumable request, from token ``next_output_index`` on."""
        request = inference_pb2.ResumeRequest(
            request_id=request_id, next_output_index=next_output_index
        )
        async for delta in self._read(self._channel.stub().Resume, request, timeout_s):
            yield delta

    async def generate_batch(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | None = None,
        *,
        timeout_s: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> list[list[Completion]]:
        """Return the ``n`` completions of each prompt, in order; raises a BatonError."""
        deltas = self.stream_batch(prompts, sampling_params, timeout_s=timeout_s, **options)
        return join_batch([delta async for delta in deltas])

    async def stream_batch(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | None = None,
        *,
        timeout_s: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> AsyncGenerator[TextDelta, None]:
        """Yield pieces of all completions as they arrive, each with prompt and choice index."""
        request = make_batch_request(prompts, sampling_params, **options)
        async for delta in self._read(self._channel.stub().GenerateBatch, request, timeout_s):
            yield delta

    async def beam_search(
        self,
        prompts: Sequence[Prompt],
        *,
        beam_width: int = 4,
        max_tokens: int = 128,
        length_penalty: float = 1.0,
        early_stopping: EarlyStopping = False,
        timeout_s: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> list[list[BeamCompletion]]:
        """Return each prompt's ``beam_width`` best outputs, best first; raises a BatonError.

        The tokens equal those of `LLM.beam_search`; see `BeamSearchParams` for the parameters.
        """
        call = BeamCall(prompts, beam_width, max_tokens, length_penalty, early_stopping, **options)
        deltas = self._read(self._channel.stub().GenerateBatch, call.request, timeout_s)
        return call.join([delta async for delta in deltas])

    async def tokenize(self, prompt: Prompt, *, model: str = "") -> list[int]:
        """Return the token ids that the model gets for a prompt."""
        request = inference_pb2.TokenizeRequest(prompt=make_prompt(prompt), model=model)
        return list((await self._call(self._channel.stub().Tokenize, request)).token_ids)

    async def count_tokens(self, prompt: Prompt, *, model: str = "") -> int:
        """Return the number of a prompt's tokens."""
        request = inference_pb2.CountTokensRequest(prompt=make_prompt(prompt), model=model)
        return int((await self._call(self._channel.stub().CountTokens, request)).num_tokens)

    async def embed(
        self,
        inputs: Sequence[str | Sequence[int]],
        *,
        prompt_name: str | None = None,
        dimensions: int | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[Embedding]:
        """Return the embedding of each text or list of token ids; raises a BatonError.

        Args:
            prompt_name: name of the checkpoint's prompt to put before each text; None: the default
                prompt; empty: no prompt.
            dimensions: number of first values to keep of each embedding; None: all values.
        """
        request = embed_request(inputs, prompt_name, dimensions, options)
        return embeddings_from_proto(await self._call(self._channel.stub().Embed, request))

    async def score(
        self,
        queries: Sequence[str],
        documents: Sequence[str],
        *,
        instruction: str = "",
        **options: Unpack[RequestOptions],
    ) -> list[Score]:
        """Return how well each document fits its query (one query, or one per document)."""
        request = score_request(queries, documents, instruction, options)
        return scores_from_proto(await self._call(self._channel.stub().Score, request))

    async def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int = 0,
        instruction: str = "",
        **options: Unpack[RequestOptions],
    ) -> list[tuple[int, Score]]:
        """Return indexes and scores of the documents that fit a query best, best first.

        Args:
            top_n: maximum number of results; 0: all.
        """
        request = rerank_request(query, documents, top_n, instruction, options)
        return ranks_from_proto(await self._call(self._channel.stub().Rerank, request))

    async def classify(
        self, inputs: Sequence[str | Sequence[int]], **options: Unpack[RequestOptions]
    ) -> list[Classification]:
        """Return the labels of each text or list of token ids; raises a BatonError."""
        request = classify_request(inputs, options)
        return classifications_from_proto(await self._call(self._channel.stub().Classify, request))

    async def drop_pins(
        self, session_id: str = "", *, cache_key: str = "", model: str = ""
    ) -> None:
        """End the pins of a session that does not come back; see `Client.drop_pins`."""
        request = inference_pb2.DropPinsRequest(
            session_id=session_id, prompt_cache_key=cache_key, model=model
        )
        await self._call(self._channel.stub().DropPins, request)

    async def prefetch(
        self, session_id: str = "", *, ttl_s: float, cache_key: str = "", model: str = ""
    ) -> None:
        """Let the nodes keep a session's cached prefix; see `Client.prefetch`."""
        request = inference_pb2.PrefetchRequest(
            session_id=session_id, prompt_cache_key=cache_key, ttl_s=ttl_s, model=model
        )
        await self._call(self._channel.stub().Prefetch, request)

    async def models(self) -> list[ModelDescription]:
        """List the models that the router serves."""
        return models_from_proto(
            await self._call(self._channel.stub().ListModels, inference_pb2.ListModelsRequest())
        )

    async def _read(
        self, method: Any, request: object, timeout_s: float | None
    ) -> AsyncGenerator[TextDelta, None]:
        call = method(request, timeout=timeout_s, metadata=self._metadata)
        try:
            async for response in call:
                yield wire.text_delta_from_proto(response)
        except grpc.RpcError as error:
            raise await self._channel.error_of(error) from None
        finally:
            call.cancel()

    async def _call(self, method: Any, request: object) -> Any:
        try:
            return await method(request, metadata=self._metadata)
        except grpc.RpcError as error:
            raise await self._channel.error_of(error) from None

    async def close(self) -> None:
        await self._channel.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()
