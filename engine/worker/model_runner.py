"""ModelRunner: computes a step's plan with one forward and returns the sampled tokens."""

from __future__ import annotations

import functools
import time
from collections import deque
from dataclasses import replace

import torch
from torch import Tensor

from engine.core.images.image_plan import StepImages
from engine.core.outputs import ModelRunnerOutput, PromptLogprobs
from engine.core.step_plan import StepHooks, StepPlan
from engine.sampling.step_sampler import LaunchedStep, Proposed, StepSampler
from engine.worker.drafting.base import Drafting, DraftingStep
from engine.worker.forward import Forward
from engine.worker.input_batch import InputBatch
from engine.worker.inputs.encodings import Encodings
from engine.worker.inputs.prepared_step import ModelInput, PreparedStep, ReplayStep
from engine.worker.pooler import Pooler
from models.parallel.group import ALONE, Ranks

NO_HOOKS = StepHooks()
AnyPreparedStep = PreparedStep | ReplayStep


class ModelRunner:
    """Runs a model over the paged cache.

    `prepare` takes plans in the order of the steps; `launch` may run on another thread meanwhile.
    There are two sets of buffers: a step may be prepared and launched while the previous step runs,
    once the step before the previous one has ended. Steps are launched in order, and read the
    previous step's tokens on the device.

    If the host samples, `launch` also waits until the step has ended.

    Args:
        forward: runs the model, eagerly or by captured graphs.
        input_batch: persistent input buffers on the model's device.
        sampler: draws tokens.
        ranks: the ranks that share the model; the leader samples for all ranks.
        sends_tokens: whether the leader sends its sampled tokens to the other ranks: needed if a
            step may be launched before the planner knows these tokens.
        drafting: makes drafts after each step, once its tokens are known; None: no drafts.

    Attributes:
        decode_graphs, chunk_graphs: captured graphs of decode steps, and of steps with prompts.
        encodings: encodings of images.
    """

    def __init__(
        self,
        forward: Forward,
        input_batch: InputBatch,
        sampler: StepSampler,
        *,
        ranks: Ranks = ALONE,
        sends_tokens: bool = False,
        drafting: Drafting | None = None,
    ) -> None:
        self._forward, self._context = forward, forward.context
        self._drafting, self._sampler = drafting, sampler
        self._drafting_steps: deque[DraftingStep] = deque()  # prepared, not launched yet
        self._model = forward.context.model
        self._pooler = Pooler(self._model, is_last_stage=ranks.is_last_stage)
        self._input_batch = input_batch
        self.decode_graphs, self.chunk_graphs = forward.decode_graphs, forward.chunk_graphs
        self._ranks = ranks
        self._sends_tokens = sends_tokens and ranks.everyone.size > 1
        self._rows_to_receive: Tensor | None = None  # rows whose sampled tokens only the leader has
        self._device = device = input_batch.device
        self.encodings = Encodings(self._model, device)
        self._sampled, self._spare = (  # host buffers for the tokens of this and the previous step
            torch.zeros(
                input_batch.max_num_tokens, dtype=torch.int64, pin_memory=device.type == "cuda"
            )
            for _ in range(2)
        )

    def execute(self, plan: StepPlan, hooks: StepHooks = NO_HOOKS) -> ModelRunnerOutput:
        """Compute the planned tokens; return once their KV is in the cache."""
        return self.launch(self.prepare(plan), hooks).wait()

    def prepare(self, plan: StepPlan, *, eager: bool = False) -> AnyPreparedStep:
        """Write a step's inputs into the rows and buffers.

        Args:
            eager: whether `launch` will get an ``after_layer`` callback, so that no graph can be
                replayed.
        """
        batch = self._input_batch
        eager = eager or plan.images is not None or self.decode_graphs.graphs is None
        prepared = batch.fill(plan) if eager else batch.fill_or_stage(plan)
        if plan.images is not None:
            assert isinstance(prepared, PreparedStep)
            prepared = replace(prepared, images=plan.images)
        if self._drafting is not None:
            self._drafting_steps.append(batch.drafting_step(plan))
        return prepared

    @torch.inference_mode()
    def close(self) -> None:
        """Receive tensors still sent to this runner, which the next runner would read otherwise."""
        self._receive_tokens()

    @torch.inference_mode()
    def launch(self, prepared: AnyPreparedStep, hooks: StepHooks = NO_HOOKS) -> LaunchedStep:
        """Launch a prepared step; on a CPU, also wait until it is computed."""
        started_at = time.monotonic()
        if isinstance(prepared, ReplayStep):
            graphs = self.decode_graphs.graphs
            assert graphs is not None
            assert hooks.after_layer is None, "the step was prepared for a replay"
            hidden, token_ids = graphs.replay(prepared)
            if not self._sampler.needs_host(prepared.sampling):
                launched = self._launched_step(prepared, token_ids, {}, started_at)
                return self._add_drafts(launched, hidden, hooks)
            # Recompute all logits for prompt logprobs, which are rare: keeping logits would cost
            # memory in every step.
            logits = self._model.compute_logits(hidden)
            launched, token_ids = self._sample_on_host(prepared, logits, {}, hooks, started_at)
            graphs.correct(prepared, token_ids)
            return self._add_drafts(launched, hidden, hooks)
        if prepared.images is not None:
            return self._launch_with_images(prepared, prepared.images, hooks, started_at)
        return self._launch_eagerly(prepared, hooks, started_at)

    def _launch_with_images(
        self, prepared: PreparedStep, images: StepImages, hooks: StepHooks, started_at: float
    ) -> LaunchedStep:
        """Encode a step's new images, then launch the step, which reads encodings."""
        read = self.encodings.read(images)
        prepared = replace(prepared, model=replace(prepared.model, images=read.rows))
        launched = self._launch_eagerly(prepared, hooks, started_at)
        launched.output = replace(
            launched.output, failed_images=read.failed, encoding_s=read.seconds
        )
        return launched

    def _launch_eagerly(
        self, prepared: PreparedStep, hooks: StepHooks, started_at: float
    ) -> LaunchedStep:
        inputs = prepared.model
        last_tokens = self._input_batch.last_tokens
        if prepared.pending_tokens is not None:
            self._receive_tokens()
            places, rows = prepared.pending_tokens
            inputs.input_ids.index_copy_(0, places, last_tokens.index_select(0, rows))
        hidden_states = self._forward.run(inputs, hooks.after_layer)  # [num_tokens, hidden_size]
        pooled = self._pooler.pool(hidden_states, prepared) if prepared.pooled else {}
        launched = self._sample(prepared, hidden_states, hooks, started_at)
        launched.pooled = pooled
        return launched

    def _sample(
        self, prepared: PreparedStep, hidden_states: Tensor, hooks: StepHooks, started_at: float
    ) -> LaunchedStep:
        """Sample from an eager step's hidden states, `[num_tokens, hidden_size]`."""
        inputs, last_tokens = prepared.model, self._input_batch.last_tokens
        sampling = prepared.sampling
        if not self._ranks.leads and sampling.request_ids and self._sends_tokens:
            self._receive_tokens()
            self._rows_to_receive = prepared.sampling_rows
        if not self._ranks.is_last_stage:
            return self._launched_step(prepared, None, {}, started_at)
        prompt_logprobs = self._sampler.prompt_logprobs(
            functools.partial(self._logits_of, hidden_states, inputs), prepared.prompt_rows
        )
        if not sampling.request_ids:
            launched = self._launched_step(prepared, None, prompt_logprobs, started_at)
            return self._add_drafts(launched, hidden_states, hooks)
        last, spans = hidden_states, inputs.adapters
        if prepared.has_prompts:
            last = hidden_states[inputs.last_token_rows]
            spans = inputs.adapters_of(inputs.last_token_rows.tolist()) if spans else ()
        logits = self._model.compute_logits(last, spans)
        if not self._ranks.leads:
            return self._launched_step(prepared, None, prompt_logprobs, started_at)
        if self._sampler.samples_on_device and not self._sampler.needs_host(sampling):
            token_ids = self._sampler.draw_on_device(logits, sampling, self._device)
            launched = self._launched_step(prepared, token_ids, prompt_logprobs, started_at)
            token_ids = token_ids.clamp(min=0)  # valid ids, because the next step embeds them
        else:
            launched, token_ids = self._sample_on_host(
                prepared, logits, prompt_logprobs, hooks, started_at
            )
        if self._sends_tokens:
            for rank in range(self._ranks.everyone.size):
                if rank != self._ranks.leader:
                    self._ranks.everyone.send(token_ids, rank)
        last_tokens.index_copy_(0, prepared.sampling_rows, token_ids)
        return self._add_drafts(launched, hidden_states, hooks)

    def _logits_of(self, hidden: Tensor, inputs: ModelInput, rows: range) -> Tensor:
        """Return the logits of some rows of the hidden states, `[n, vocab_size]`."""
        return self._model.compute_logits(hidden[rows.start : rows.stop], inputs.adapters_of(rows))

    def _add_drafts(self, launched: LaunchedStep, hidden: Tensor, hooks: StepHooks) -> LaunchedStep:
        """Wait for a launched step and add drafts; without a drafter, return the step unchanged.

        Args:
            hidden: `[num_tokens, hidden_size]`, the step's hidden states.
        """
        if self._drafting is None:
            return launched
        step, layers = self._drafting_steps.popleft(), hooks.after_layer
        is_known = launched.ended_at is not None and launched.token_ids is None
        if not step.rows or (step.is_silent and is_known):
            # No drafts are made now; the drafter only stores the result.
            self._drafting.after_step(step, hidden, launched.output.sampled_token_ids, layers)
            return launched
        output = launched.wait()
        started_at = time.monotonic()
        # The next replay of a graph overwrites the hidden states.
        replays = self.decode_graphs.graphs or self.chunk_graphs.graphs
        states = hidden.clone() if replays else hidden
        drafts = self._drafting.after_step(step, states, output.sampled_token_ids, layers)
        ended_at = time.monotonic()
        output = replace(output, draft_token_ids=drafts, drafting_s=ended_at - started_at)
        return LaunchedStep(launched.sampling, output, None, None, launched.started_at, ended_at)

    def _receive_tokens(self) -> None:
        """Receive the tokens that the leader sampled last, unless they were received already."""
        rows, self._rows_to_receive = self._rows_to_receive, None
        if rows is not None:
            token_ids = torch.empty(len(rows), dtype=torch.int64, device=self._device)
            self._ranks.everyone.receive(token_ids, self._ranks.leader)
            self._input_batch.last_tokens.index_copy_(0, rows, token_ids)

    def _launched_step(
        self,
        prepared: AnyPreparedStep,
        token_ids: Tensor | None,
        prompt_logprobs: dict[str, PromptLogprobs],
        started_at: float,
    ) -> LaunchedStep:
        """Queue the copy of the sampled tokens to the host; return the launched step."""
        on_host = None
        if token_ids is not None:
            self._sampled, self._spare = self._spare, self._sampled
            on_host = self._sampled[: len(token_ids)]
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
        """Sample on the host; return the finished step, and the tokens on the device."""
        sampling = prepared.sampling
        output, token_ids = self._sampler.draw_on_host(
            logits, sampling, hooks, prompt_logprobs, self._draft_distributions
        )
        launched = LaunchedStep(sampling, output, None, None, started_at, time.monotonic())
        return launched, torch.tensor(token_ids, dtype=torch.int64, device=self._device)

    def _draft_distributions(self) -> Proposed | None:
        """Return, by row, the distributions that this step's drafts were drawn from."""
        if self._drafting is None:
            return None
        return self._drafting.chooser.pop_distributions(self._drafting_steps[0])
