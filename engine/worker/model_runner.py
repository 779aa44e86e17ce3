"""ModelRunner: one forward. A step's plan in, sampled tokens out; owns the tensors."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from baton_kernels.attention.base import AttentionBackend, AttentionMetadata
from baton_kernels.state_metadata import StateMetadata
from engine.core.outputs import ModelRunnerOutput, PromptLogprobs
from engine.core.step_plan import StepHooks, StepPlan
from engine.sampling.device_sampling import sample_on_device, upload_parameters
from engine.sampling.gumbel import NO_TOKEN
from engine.sampling.logprobs import compute_logprobs, compute_prompt_logprobs
from engine.sampling.rejection import sample_with_rejection
from engine.sampling.sampler import rows_without_numbers, sample
from engine.sampling.sampling_input import SamplingInput
from engine.worker.chunks.chunk_graphs import ChunkGraphs
from engine.worker.cuda_graphs import GraphContext, Replays, StepGraphs
from engine.worker.drafting.base import Drafting
from engine.worker.drafting.drafting_step import DraftingStep
from engine.worker.graph_inputs import StagedStep
from engine.worker.input_batch import InputBatch, ModelInput, PreparedStep
from models.base import ForwardContext, GroupStep
from models.parallel.group import ALONE, Ranks

NO_HOOKS = StepHooks()
AnyPreparedStep = PreparedStep | StagedStep


@dataclass(slots=True)
class LaunchedStep:
    """A step that the device computes, or has computed.

    Attributes:
        output: all but the tokens where these are still to come.
        token_ids: `[num_sampling]` int64 on the host, there when ``done`` is; None: in ``output``.
        done: when the device has computed the step; None: it has.
        started_at: by the monotonic clock.
        ended_at: likewise; None: unknown before `wait`.
    """

    sampling: SamplingInput
    output: ModelRunnerOutput
    token_ids: Tensor | None
    done: torch.Event | None
    started_at: float
    ended_at: float | None = None

    def wait(self) -> ModelRunnerOutput:
        """What came of it, when its KV is in the cache and its tokens are here."""
        if self.done is not None:
            self.done.synchronize()
        output, sampled = self.output, self.output.sampled_token_ids
        without_numbers = output.without_numbers
        if self.token_ids is not None:
            drawn = self.token_ids.tolist()
            if NO_TOKEN in drawn:
                wrong = {row for row, token_id in enumerate(drawn) if token_id == NO_TOKEN}
                without_numbers = frozenset(self.sampling.request_ids[row] for row in wrong)
                drawn = self.token_ids.clamp(min=0).tolist()  # later code needs a valid token
            sampled = self.sampling.accept(drawn)
        return ModelRunnerOutput(
            sampled,
            output.logprobs,
            output.prompt_logprobs,
            output.draft_token_ids,
            without_numbers,
            drafting_s=output.drafting_s,
            started_at=self.started_at,
            ended_at=self.ended_at or time.monotonic(),
        )


class ModelRunner:
    """Runs a model over the paged cache.

    `prepare` takes plans in the order of the steps; `launch` may run on another thread meanwhile.
    There are two sets of buffers: a step may be prepared and launched while the one before it runs,
    when the one before that has been waited for. Launches are made in the order of the steps; what
    a step samples is then on the device for the next one.

    Tokens of requests whose choice depends on more than the logits (penalties, grammars), or which
    ask for logprobs, are chosen on the host: launching a step with any of them waits for it.

    Args:
        context: the model, its attention backends (one for each KV cache group that attends) and
            its cache.
        input_batch: persistent input buffers on the model's device.
        decode_graphs: of decode steps, if they are captured.
        chunk_graphs: of steps with prompts, likewise.
        samples_on_device: whether the sampling kernel runs there.
        ranks: that share the model; the leader samples for all.
        tells_tokens: whether it tells the others what it sampled: a step may be launched before
            that is known to whoever plans it.
        drafting: guesses what comes behind each step, when its tokens are known; None: nobody here.
        rejects: drafts are kept by rejection sampling, and not where they are what is sampled.

    Attributes:
        decode_graphs, chunk_graphs: as given; empty until somebody captures them.
    """

    def __init__(
        self,
        context: GraphContext,
        input_batch: InputBatch,
        decode_graphs: Replays[StepGraphs],
        chunk_graphs: Replays[ChunkGraphs],
        *,
        samples_on_device: bool = False,
        ranks: Ranks = ALONE,
        tells_tokens: bool = False,
        drafting: Drafting | None = None,
        rejects: bool = False,
    ) -> None:
        self._context = context
        self._drafting, self._rejects = drafting, rejects
        self._drafting_steps: deque[DraftingStep] = deque()  # prepared, and not launched
        self._model = context.model
        self._input_batch = input_batch
        self.decode_graphs, self.chunk_graphs = decode_graphs, chunk_graphs
        self._samples_on_device = samples_on_device
        self._ranks = ranks
        self._tells_tokens = tells_tokens and ranks.everyone.size > 1
        self._untold: Tensor | None = None  # rows of the newest step that sampled
        self._device = device = input_batch.device
        self._sampled, self._spare = (  # on the host, of this step and of the one before
            torch.zeros(
                input_batch.max_num_tokens, dtype=torch.int64, pin_memory=device.type == "cuda"
            )
            for _ in range(2)
        )

    def execute(self, plan: StepPlan, hooks: StepHooks = NO_HOOKS) -> ModelRunnerOutput:
        """Compute the planned tokens; returns when their KV is in the cache."""
        return self.launch(self.prepare(plan), hooks).wait()

    def prepare(self, plan: StepPlan, *, eager: bool = False) -> AnyPreparedStep:
        """Write what the step needs into the rows and buffers.

        Args:
            eager: it will be launched with a callback, and cannot be replayed.
        """
        batch = self._input_batch
        prepare = batch.fill if eager or self.decode_graphs.graphs is None else batch.fill_or_stage
        prepared = prepare(plan)
        if self._drafting is not None:
            self._drafting_steps.append(batch.drafting_step(plan))
        return prepared

    @torch.inference_mode()
    def launch(self, prepared: AnyPreparedStep, hooks: StepHooks = NO_HOOKS) -> LaunchedStep:
        """Begin to compute a prepared step, and on a CPU compute it."""
        started_at = time.monotonic()
        if isinstance(prepared, StagedStep):
            graphs = self.decode_graphs.graphs
            assert graphs is not None
            assert hooks.after_layer is None, "the step was prepared for a replay"
            hidden, token_ids = graphs.replay(prepared)
            if not self._needs_host(prepared.sampling):
                launched = self._launched(prepared.sampling, token_ids, {}, started_at)
                return self._drafted(launched, hidden, hooks)
            # Rather once more than room for all rows' logits in every step.
            logits = self._model.compute_logits(hidden)
            launched, token_ids = self._sampled_on_host(
                prepared.sampling, logits, {}, hooks, started_at
            )
            graphs.correct(prepared, token_ids)
            return self._drafted(launched, hidden, hooks)
        return self._launch_eagerly(prepared, hooks, started_at)

    def _launch_eagerly(
        self, prepared: PreparedStep, hooks: StepHooks, started_at: float
    ) -> LaunchedStep:
        inputs = prepared.model
        last_tokens = self._input_batch.last_tokens
        if prepared.unknown is not None:
            self._hear_tokens()
            places, rows = prepared.unknown
            inputs.input_ids.index_copy_(0, places, last_tokens.index_select(0, rows))
        hidden_states = self._forward(inputs, hooks.after_layer)  # [num_tokens, hidden_size]
        sampling = prepared.sampling
        if not self._ranks.leads and sampling.request_ids and self._tells_tokens:
            self._hear_tokens()
            self._untold = prepared.sampling_rows
        if not self._ranks.is_last_stage:
            return self._launched(sampling, None, {}, started_at)
        prompt_logprobs = compute_prompt_logprobs(
            hidden_states, self._model.compute_logits, prepared.prompt_rows
        )
        if not sampling.request_ids:
            launched = self._launched(sampling, None, prompt_logprobs, started_at)
            return self._drafted(launched, hidden_states, hooks)
        last = hidden_states[inputs.last_token_rows] if prepared.has_prompts else hidden_states
        logits = self._model.compute_logits(last)
        if not self._ranks.leads:
            return self._launched(sampling, None, prompt_logprobs, started_at)
        if self._samples_on_device and not self._needs_host(sampling):
            tensors = upload_parameters(sampling.parameters, sampling.keys, self._device)
            token_ids = sample_on_device(logits, tensors)
            launched = self._launched(sampling, token_ids, prompt_logprobs, started_at)
            token_ids = token_ids.clamp(min=0)  # the next step embeds them
        else:
            launched, token_ids = self._sampled_on_host(
                sampling, logits, prompt_logprobs, hooks, started_at
            )
        if self._tells_tokens:
            for rank in range(self._ranks.everyone.size):
                if rank != self._ranks.leader:
                    self._ranks.everyone.send(token_ids, rank)
        last_tokens.index_copy_(0, prepared.sampling_rows, token_ids)
        return self._drafted(launched, hidden_states, hooks)

    def _needs_host(self, sampling: SamplingInput) -> bool:
        return sampling.needs_host or (self._rejects and bool(sampling.draft_token_ids))

    def _drafted(self, launched: LaunchedStep, hidden: Tensor, hooks: StepHooks) -> LaunchedStep:
        """Guess what comes behind a launched step, which waits for it; nothing if nobody guesses.

        Args:
            hidden: `[num_tokens, hidden_size]`, of the step.
        """
        if self._drafting is None:
            return launched
        step, layers = self._drafting_steps.popleft(), hooks.after_layer
        is_known = launched.ended_at is not None and launched.token_ids is None
        if not step.rows or (step.is_silent and is_known):
            # Nothing is guessed, and all that matters is known: it takes no longer for it.
            self._drafting.after_step(step, hidden, launched.output.sampled_token_ids, layers)
            return launched
        output = launched.wait()
        started_at = time.monotonic()
        # What a graph has left is written over by its next replay.
        replays = self.decode_graphs.graphs or self.chunk_graphs.graphs
        states = hidden.clone() if replays else hidden
        drafts = self._drafting.after_step(step, states, output.sampled_token_ids, layers)
        ended_at = time.monotonic()
        output = replace(output, draft_token_ids=drafts, drafting_s=ended_at - started_at)
        return LaunchedStep(launched.sampling, output, None, None, launched.started_at, ended_at)

    def _forward(self, inputs: ModelInput, after_layer: Callable[[int], None] | None) -> Tensor:
        context, chunks = self._context, self.chunk_graphs.graphs
        if chunks is not None and chunks.takes(inputs):
            return chunks.replay(inputs, after_layer)
        forward_context = ForwardContext(
            positions=inputs.positions,
            groups=plan_groups(inputs.groups, context.backends),
            layer_groups=context.layer_groups,
            layer_caches=context.layer_caches,
            after_layer=after_layer,
        )
        return self._model.forward(inputs.input_ids, forward_context)

    def _hear_tokens(self) -> None:
        """Take what the leader sampled last, if it has not been; a stage does so when it has to."""
        rows, self._untold = self._untold, None
        if rows is not None:
            told = torch.empty(len(rows), dtype=torch.int64, device=self._device)
            self._ranks.everyone.receive(told, self._ranks.leader)
            self._input_batch.last_tokens.index_copy_(0, rows, told)

    def _launched(
        self,
        sampling: SamplingInput,
        token_ids: Tensor | None,
        prompt_logprobs: dict[str, PromptLogprobs],
        started_at: float,
    ) -> LaunchedStep:
        """A step whose tokens, if it samples, are copied to the host behind it."""
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
        return LaunchedStep(sampling, output, on_host, done, started_at, ended_at)

    def _sampled_on_host(
        self,
        sampling: SamplingInput,
        logits: Tensor,
        prompt_logprobs: dict[str, PromptLogprobs],
        hooks: StepHooks,
        started_at: float,
    ) -> tuple[LaunchedStep, Tensor]:
        """A step that has been waited for, and its tokens on the device."""
        if self._rejects and sampling.draft_token_ids:
            proposed = None
            if self._drafting is not None:
                proposed = self._drafting.chooser.take(self._drafting_steps[0])
            token_ids = sample_with_rejection(
                logits.float(), sampling, hooks.allowed_bits, proposed
            )
        else:
            token_ids = sample(logits, sampling, hooks.allowed_bits)
        wrong = rows_without_numbers(logits, token_ids)
        for row in wrong:  # later code needs a valid token
            token_ids[row] = 0
        output = ModelRunnerOutput(
            sampling.accept(token_ids),
            compute_logprobs(logits, sampling, token_ids),
            prompt_logprobs,
            without_numbers=frozenset(sampling.request_ids[row] for row in wrong),
        )
        launched = LaunchedStep(sampling, output, None, None, started_at, time.monotonic())
        return launched, torch.tensor(token_ids, dtype=torch.int64, device=self._device)


def plan_groups(
    groups: Sequence[AttentionMetadata | StateMetadata],
    backends: Sequence[AttentionBackend | None],
) -> tuple[GroupStep, ...]:
    """Have each backend plan its group's step, and pair them."""
    steps: list[GroupStep] = []
    for metadata, backend in zip(groups, backends, strict=True):
        if isinstance(metadata, StateMetadata):
            steps.append((metadata, None))
        else:
            assert backend is not None
            backend.plan(metadata)
            steps.append((metadata, backend))
    return tuple(steps)
