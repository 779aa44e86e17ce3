"""ModelRunner: one forward. Scheduled requests in, sampled tokens out; owns the tensors."""

from __future__ import annotations

import torch

from baton_kernels.attention.base import AttentionBackend
from engine.input_batch import InputBatch, PreparedStep
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
        kv_cache: `[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]`.
        backend: attention over that cache.
        input_batch: persistent input buffers on the model's device.
    """

    def __init__(
        self,
        model: CausalLM,
        kv_cache: torch.Tensor,
        backend: AttentionBackend,
        input_batch: InputBatch,
    ) -> None:
        self._model = model
        self._kv_cache = kv_cache
        self._backend = backend
        self._input_batch = input_batch

    def execute(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        """Compute the scheduled tokens; returns when their KV is in the cache."""
        return self.run(self.prepare(scheduled))

    def prepare(self, scheduled: SchedulerOutput) -> PreparedStep:
        """Copy what the step needs of its requests."""
        return self._input_batch.fill(scheduled.scheduled)

    @torch.inference_mode()
    def run(self, prepared: PreparedStep) -> ModelRunnerOutput:
        """Compute a prepared step; returns when its KV is in the cache."""
        inputs = prepared.model
        self._backend.plan(inputs.attention)
        context = ForwardContext(
            positions=inputs.positions,
            attention=inputs.attention,
            backend=self._backend,
            kv_cache=self._kv_cache,
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
