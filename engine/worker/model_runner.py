"""ModelRunner: computes a step's plan with one forward and returns the sampled tokens."""

from __future__ import annotations

import functools
import time
from collections import deque

import torch
from torch import Tensor

from engine.core.outputs import ModelRunnerOutput, PromptLogprobs
from engine.core.step_plan import StepHooks, StepPlan
from engine.sampling.step_sampler import LaunchedStep, StepSampler
from engine.worker.extras.step_extras import StepExtras
from engine.worker.forward import Forward
from engine.worker.input_batch import InputBatch
from engine.worker.inputs.prepared_step import ModelInput, PreparedStep, ReplayStep

NO_HOOKS = StepHooks()
AnyPreparedStep = PreparedStep | ReplayStep


class ModelRunner:
    """Runs a model over the paged cache.

    `prepare` takes plans in the order of the steps; `launch` may run on another thread meanwhile.
    There are ``num_steps`` sets of buffers: a step may be prepared and launched while previous
    steps run, once a caller has waited for the step ``num_steps`` earlier. Steps are launched in
    order, and read the previous step's tokens on the device.

    If the host samples, `launch` also waits until the step has ended.

    Args:
        forward: runs the model, eagerly or by captured graphs.
        input_batch: persistent input buffers on the model's device.
        sampler: draws tokens.
        extras: encodes images, pools prompts, makes drafts, and exchanges tokens with other ranks.
        num_steps: maximum number of steps in flight, equal to that of the input batch.

    Attributes:
        decode_graphs, chunk_graphs: captured graphs of decode steps, and of steps with prompts.
        extras: the argument, unchanged.
    """

    def __init__(
        self,
        forward: Forward,
        input_batch: InputBatch,
        sampler: StepSampler,
        extras: StepExtras,
        *,
        num_steps: int = 2,
    ) -> None:
        self._forward, self._context = forward, forward.context
        self._sampler, self.extras, self._exchange = sampler, extras, extras.tokens
        self._model = forward.context.model
        self._input_batch = input_batch
        self.decode_graphs, self.chunk_graphs = forward.decode_graphs, forward.chunk_graphs
        self._device = device = input_batch.device
        self._sampled = deque(  # host buffers, one per step in flight
            torch.zeros(
                input_batch.max_num_tokens, dtype=torch.int64, pin_memory=device.type == "cuda"
            )
            for _ in range(num_steps)
        )

    def execute(self, plan: StepPlan, hooks: StepHooks = NO_HOOKS) -> ModelRunnerOutput:
        """Compute a planned step; return its result once the KV is in the cache."""
        return self.launch(self.prepare(plan), hooks).wait()

    def prepare(self, plan: StepPlan, *, eager: bool = False) -> AnyPreparedStep:
        """Write the inputs of a step into rows and buffers; return the step for `launch`.

        Args:
            eager: whether `launch` gets an ``after_layer`` callback, which no graph supports.
        """
        batch = self._input_batch
        prepare = batch.fill if eager or self.decode_graphs.graphs is None else batch.fill_or_stage
        prepared = prepare(plan)
        self.extras.prepare(plan, batch)
        return prepared

    @torch.inference_mode()
    def close(self) -> None:
        """Receive tensors that were sent to this runner; else the next runner would get them."""
        self._exchange.receive(self._input_batch.last_tokens)

    @torch.inference_mode()
    def launch(self, prepared: AnyPreparedStep, hooks: StepHooks = NO_HOOKS) -> LaunchedStep:
        """Launch a prepared step; on a CPU, also wait until it is computed."""
        started_at = time.monotonic()
        if isinstance(prepared, ReplayStep):
            return self._replay(prepared, hooks, started_at)
        return self._launch_eagerly(prepared, hooks, started_at)

    def _replay(self, prepared: ReplayStep, hooks: StepHooks, started_at: float) -> LaunchedStep:
        """Replay a captured decode step, in which every rank samples the same tokens."""
        graphs = self.decode_graphs.graphs
        assert graphs is not None
        assert hooks.after_layer is None, "the step was prepared for a replay"
        self._exchange.receive(self._input_batch.last_tokens)  # tokens that the replay may read
        hidden, token_ids = graphs.replay(prepared)
        if not self._sampler.needs_host(prepared.sampling):
            launched = self._launched_step(prepared, token_ids, {}, started_at)
            return self.extras.draft(launched, hidden, hooks)
        # Compute all logits again: this is rare, and keeping them would take memory in every step.
        logits = self._model.compute_logits(hidden)
        if not self._exchange.leads:  # only the leader has the masks of grammars
            drawn = self._exchange.receive_instead(token_ids, prepared.num_requests)
            if drawn is not None:
                graphs.correct(prepared, drawn)
            return self._launched_step(prepared, None, {}, started_at)
        launched, token_ids = self._sample_on_host(prepared, logits, {}, hooks, started_at)
        self._exchange.send(token_ids)
        graphs.correct(prepared, token_ids)
        return self.extras.draft(launched, hidden, hooks)

    def _launch_eagerly(
        self, prepared: PreparedStep, hooks: StepHooks, started_at: float
    ) -> LaunchedStep:
        prepared = self.extras.begin(prepared)
        inputs, last_tokens = prepared.model, self._input_batch.last_tokens
        if prepared.pending_tokens is not None:
            self._exchange.receive(last_tokens)
            places, rows = prepared.pending_tokens
            inputs.input_ids.index_copy_(0, places, last_tokens.index_select(0, rows))
        hidden_states = self._forward.run(inputs, hooks.after_layer)  # [num_tokens, hidden_size]
        self.extras.pool(hidden_states, prepared)
        return self.extras.add_to(self._sample(prepared, hidden_states, hooks, started_at))

    def _sample(
        self, prepared: PreparedStep, hidden_states: Tensor, hooks: StepHooks, started_at: float
    ) -> LaunchedStep:
        """Sample from the hidden states of an eager step, `[num_tokens, hidden_size]`."""
        inputs, last_tokens = prepared.model, self._input_batch.last_tokens
        sampling = prepared.sampling
        if sampling.request_ids:
            self._exchange.expect(prepared.sampling_rows, last_tokens)
        if not self._exchange.is_last_stage:
            return self._launched_step(prepared, None, {}, started_at)
        prompt_logprobs = self._sampler.prompt_logprobs(
            functools.partial(self._logits_of, hidden_states, inputs), prepared.prompt_rows
        )
        if not sampling.request_ids:
            launched = self._launched_step(prepared, None, prompt_logprobs, started_at)
            return self.extras.draft(launched, hidden_states, hooks)
        last, spans = hidden_states, inputs.adapters
        if prepared.has_prompts:
            last = hidden_states[inputs.last_token_rows]
            spans = inputs.adapters_of(inputs.last_token_rows.tolist()) if spans else ()
        logits = self._model.compute_logits(last, spans)
        if not self._exchange.leads:
            if self._device.type == "cuda":
                # With NCCL, the first send waits for the receiver, so receive the tokens now.
                self._exchange.receive(last_tokens)
            return self._launched_step(prepared, None, prompt_logprobs, started_at)
        if self._sampler.samples_on_device and not self._sampler.needs_host(sampling):
            token_ids = self._sampler.draw_on_device(logits, sampling, self._device)
            launched = self._launched_step(prepared, token_ids, prompt_logprobs, started_at)
            token_ids = token_ids.clamp(min=0)  # the next step embeds valid ids only
        else:
            launched, token_ids = self._sample_on_host(
                prepared, logits, prompt_logprobs, hooks, started_at
            )
        self._exchange.send(token_ids)
        last_tokens.index_copy_(0, prepared.sampling_rows, token_ids)
        return self.extras.draft(launched, hidden_states, hooks)

    def _logits_of(self, hidden: Tensor, inputs: ModelInput, rows: range) -> Tensor:
        """Return the logits of the given rows of the hidden states, `[n, vocab_size]`."""
        return self._model.compute_logits(hidden[rows.start : rows.stop], inputs.adapters_of(rows))

    def _launched_step(
        self,
        prepared: AnyPreparedStep,
        token_ids: Tensor | None,
        prompt_logprobs: dict[str, PromptLogprobs],
        started_at: float,
    ) -> LaunchedStep:
        """Queue the copy of sampled tokens from device to host; return the launched step."""
        on_host = None
        if token_ids is not None:
            self._sampled.rotate(-1)
            on_host = self._sampled[-1][: len(token_ids)]
            on_host.copy_(token_ids, non_blocking=True)
        done = ended_at = None
        if self._device.type == "cuda":
            done = torch.cuda.current_stream(self._device).record_event()
        else:
            ended_at = time.monotonic()
        output = ModelRunnerOutput({}, prompt_logprobs=prompt_logprobs)
        return LaunchedStep(prepared.sampling, output, on_host, done, started_at, ended_at)

    def _sample_on_host(
        self,
        prepared: AnyPreparedStep,
        logits: Tensor,
        prompt_logprobs: dict[str, PromptLogprobs],
        hooks: StepHooks,
        started_at: float,
    ) -> tuple[LaunchedStep, Tensor]:
        """Sample on the host; return the finished step, and its tokens on the device."""
        sampling = prepared.sampling
        output, token_ids = self._sampler.draw_on_host(
            logits, sampling, hooks, prompt_logprobs, self.extras.draft_distributions
        )
        launched = LaunchedStep(sampling, output, None, None, started_at, time.monotonic())
        return launched, torch.tensor(token_ids, dtype=torch.int64, device=self._device)
