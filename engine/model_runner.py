"""ModelRunner: one forward. Scheduled requests in, sampled tokens out; owns the tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from baton.engine_config import EngineConfig
from baton_kernels.attention import ATTENTION_BACKENDS
from baton_kernels.attention.base import AttentionBackend
from engine.input_batch import InputBatch, PreparedStep
from engine.kv_cache import KVCacheSpec
from engine.logprobs import compute_logprobs, compute_prompt_logprobs
from engine.outputs import ModelRunnerOutput, SchedulerOutput
from engine.sampler import sample
from models.base import CausalLM, ForwardContext


class ModelRunner:
    """Runs a model over the paged cache.

    `prepare` reads requests and must run where they are written; `run` touches none of them and
    may run on another thread meanwhile. Their buffers are the same in every step: a step is
    prepared when `run` of the one before has returned.

    Args:
        model: the network, on its device.
        kv_cache: `[num_blocks, layers_per_group, 2, num_kv_heads, block_size, head_dim]`.
        layer_places: of each layer, its KV cache group and its place in that group's blocks.
        backends: attention over that cache, one for each group.
        input_batch: persistent input buffers on the model's device.
    """

    def __init__(
        self,
        model: CausalLM,
        kv_cache: torch.Tensor,
        layer_places: Sequence[tuple[int, int]],
        backends: Sequence[AttentionBackend],
        input_batch: InputBatch,
    ) -> None:
        self._model = model
        self._kv_cache = kv_cache
        self._backends = backends
        self._layer_groups = tuple(group for group, _ in layer_places)
        self._layer_caches = tuple(kv_cache[:, place] for _, place in layer_places)
        self._input_batch = input_batch

    def execute(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        """Compute the scheduled tokens; returns when their KV is in the cache."""
        return self.run(self.prepare(scheduled))

    def prepare(self, scheduled: SchedulerOutput) -> PreparedStep:
        """Copy what the step needs of its requests."""
        return self._input_batch.fill(scheduled.scheduled)

    @torch.inference_mode()
    def run(
        self, prepared: PreparedStep, after_layer: Callable[[int], None] | None = None
    ) -> ModelRunnerOutput:
        """Compute a prepared step; returns when its KV is in the cache.

        Args:
            after_layer: called on this thread after each layer (on a GPU: when it is launched).
        """
        inputs = prepared.model
        for backend, attention in zip(self._backends, inputs.attention, strict=True):
            backend.plan(attention)
        context = ForwardContext(
            positions=inputs.positions,
            groups=tuple(zip(inputs.attention, self._backends, strict=True)),
            layer_groups=self._layer_groups,
            layer_caches=self._layer_caches,
            after_layer=after_layer,
        )
        hidden_states = self._model.forward(inputs.input_ids, context)  # [num_tokens, hidden_size]
        prompt_logprobs = compute_prompt_logprobs(
            hidden_states, self._model.compute_logits, prepared.prompt_rows
        )
        sampling = prepared.sampling
        if not sampling.request_ids:
            if self._kv_cache.is_cuda:  # nothing is read back that would wait for the device
                torch.cuda.current_stream().synchronize()
            return ModelRunnerOutput({}, prompt_logprobs=prompt_logprobs)
        logits = self._model.compute_logits(hidden_states[inputs.last_token_rows])
        token_ids = sample(logits, sampling)
        return ModelRunnerOutput(
            dict(zip(sampling.request_ids, token_ids, strict=True)),
            compute_logprobs(logits, sampling, token_ids),
            prompt_logprobs,
        )


def make_model_runner(
    model: CausalLM,
    kv_cache: torch.Tensor,
    spec: KVCacheSpec,
    config: EngineConfig,
    backend_name: str,
    max_model_len: int,
) -> ModelRunner:
    """A runner with its own attention backends and buffers, on the device of the cache."""
    return ModelRunner(
        model,
        kv_cache,
        spec.layer_places,
        [ATTENTION_BACKENDS.load(backend_name)() for _ in spec.groups],
        InputBatch(
            max_num_requests=config.max_num_requests,
            max_num_tokens=config.max_num_batched_tokens,
            sliding_windows=spec.sliding_windows,
            max_blocks=-(-max_model_len // config.block_size) + 1,
            block_size=config.block_size,
            device=kv_cache.device,
        ),
    )
