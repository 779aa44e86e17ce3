"""SimExecutor: computes nothing, but takes the time of a real step.

    step      begins when submitted, ends after the time that `TimingModel` gives
    tokens    come from an `OutputSource`, and depend only on prompt and position

As on a GPU, a step is submitted before the previous one ends; the node runs its next round when the
step in flight ends. Refuses to know: how requests end, peers, bytes.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any, cast

from baton.adapters.files import Adapter, AdapterFiles
from baton.engine_config import EngineConfig
from baton.kv.layers import PagedKV
from baton.kv.manifest import KVGroup, KVManifest
from baton.limits import NUM_LAYER_GROUPS
from baton.link.words import NodeRole
from engine.core.kv_cache_groups import KVCacheGroup
from engine.core.outputs import ModelRunnerOutput
from engine.core.request import Request
from engine.core.step_plan import SHARE, StepHooks, StepPlan
from engine.executors.base import PendingStep
from models.config import ModelConfig
from sim_node.clock import NodeClock
from sim_node.options import SimModel, SimOptions
from sim_node.sim_model import HashedOutputs, TokenAt
from sim_node.timing import TimingModel

# Of a model's shape, only the number of layers matters, because layer groups are sent one by one.
_NUM_LAYERS = NUM_LAYER_GROUPS
_SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 1,
    "num_hidden_layers": _NUM_LAYERS,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2**20,
}
_NUMBERS = array("f", [1.0]).tobytes()  # the pooled result of every request
_KV_DTYPE = "uint8"  # one byte per element, so that a token may have any number of bytes


@dataclass(frozen=True, slots=True)
class SimKVSpec:
    """Layout of the simulated KV cache: one group with full attention; a `KVCacheSpec`."""

    groups: tuple[KVCacheGroup, ...]
    block_size: int
    num_groups: int = 1
    num_null_blocks: int = 0
    sliding_windows: tuple[int | None, ...] = (None,)


class _Layer:
    """A layer of a step, which is computed or will be."""

    is_computed = False

    def has_ended(self) -> bool:
        return self.is_computed


class SimKVMemory:
    """Stands for the memory of a KV cache, but allocates none; a `KVMemory`.

    Args:
        num_blocks: number of blocks that the cache pretends to have.
        token_bytes: bytes of KV per token, over all layers; rounded up to a possible shape.
    """

    dtype = _KV_DTYPE
    rank = 0
    layers_per_group = _NUM_LAYERS

    def __init__(self, num_blocks: int, block_size: int, token_bytes: int) -> None:
        kv = PagedKV(num_kv_heads=1, head_dim=-(-token_bytes // (2 * _NUM_LAYERS)))
        group = KVCacheGroup(kv, tuple(range(_NUM_LAYERS)))
        self.num_blocks = num_blocks
        self.spec = SimKVSpec((group,), block_size)
        kv_group = KVGroup(
            kind=kv.kind,
            layers=group.layers,
            arrays=kv.arrays(block_size, _KV_DTYPE, _KV_DTYPE),
            num_places=_NUM_LAYERS,
            block_size=block_size,
        )
        self.manifest = KVManifest(groups=(kv_group,))
        self.layer = _Layer()

    def fence(self) -> Callable[[], bool]:
        """Return a query for whether the layer that began last is computed."""
        return self.layer.has_ended


@dataclass(frozen=True, slots=True)
class _Done:
    """A simulated step in flight, whose result is known from the start."""

    output: ModelRunnerOutput

    def wait(self) -> ModelRunnerOutput:
        return self.output


class SimExecutor:
    """Simulates a model's steps: their times and their tokens; an `Executor`.

    Args:
        model: the model that the executor pretends to compute.
        options: sizes and timing of the node.
        role: the node's role, which decides how long a step takes.
        clock: the node's clock.
        on_layer: called when a layer is computed, in steps that call ``after_layer``.

    Attributes:
        timing: times of steps; replace it to make the node slow.
        outputs: source of output tokens.
        now: when the next step begins; the node sets this before each round.
        busy_until: when the latest step ends.
        requests: the requests that the engine has, by id.
        num_tokens: number of tokens sampled since the start.
    """

    runs_ahead = True
    dtype = "bfloat16"
    linear_weights = "auto"

    def __init__(
        self,
        model: SimModel,
        options: SimOptions,
        role: NodeRole,
        clock: NodeClock,
        on_layer: Callable[[], None],
    ) -> None:
        self.timing: TimingModel = options.timing
        self.max_model_len = model.max_model_len
        self.outputs = model.outputs or HashedOutputs(model.vocab_size)
        self.model_config = replace(
            ModelConfig.from_dict({**_SHAPE, "vocab_size": model.vocab_size}),
            eos_token_ids=self.outputs.eos_token_ids,
        )
        self.config = engine_config(options, role)
        self._memory = SimKVMemory(
            options.num_blocks, options.block_size, options.timing.kv_bytes_per_token
        )
        self.kv_memory = cast("Any", self._memory)  # simulated nodes never read its tensor
        self.now = self.busy_until = 0.0
        self.requests: Mapping[str, Request] = {}
        self.num_tokens = 0
        self._role = role
        self._clock = clock
        self._on_layer = on_layer
        # Request id, output and prompt length of each row's request.
        self._rows: dict[int, tuple[str, TokenAt, int]] = {}
        self._pooled: set[int] = set()  # rows that sample no tokens

    def submit(self, plan: StepPlan, hooks: StepHooks) -> PendingStep:
        for new in plan.new_rows:
            prompt = self.requests[new.request_id].token_ids[: new.num_prompt_tokens]
            self._rows[new.row] = new.request_id, self.outputs.output_of(prompt), len(prompt)
            self._pooled.discard(new.row)
            if new.pooling is not None:
                self._pooled.add(new.row)
        rows, shares = self._rows, plan.shares
        sampled: dict[str, tuple[int, ...]] = {}
        pooled: dict[str, bytes] = {}
        num_decoding = num_kv_tokens = num_tokens = num_pairs = 0
        for at in range(0, len(shares), SHARE):
            row, start, num, num_known = shares[at : at + SHARE]
            request_id, output, num_prompt = rows[row]
            if num == 1 and start >= num_prompt:
                num_decoding += 1
                num_kv_tokens += num_known
            else:
                num_tokens += num
                num_pairs += num * (2 * start + num + 1) // 2
            if start + num >= num_known:
                sampled[request_id] = (output(num_known - num_prompt),)
            elif row in self._pooled and start + num == num_prompt:
                pooled[request_id] = _NUMBERS
        seconds = self._seconds(num_tokens, num_pairs, num_decoding, num_kv_tokens)
        began, self.busy_until = self.now, self.now + seconds
        if hooks.after_layer is not None:
            self._compute_layers(hooks.after_layer, began, seconds)
        self.num_tokens += len(sampled)
        return _Done(
            ModelRunnerOutput(sampled, pooled=pooled, started_at=began, ended_at=self.busy_until)
        )

    def _compute_layers(
        self, after_layer: Callable[[int], None], began: float, seconds: float
    ) -> None:
        """Call ``after_layer`` for each layer, and schedule when the layer will be computed."""
        for number in range(_NUM_LAYERS):
            layer = self._memory.layer = _Layer()
            after_layer(number)

            def end(_: float, layer: _Layer = layer) -> None:
                layer.is_computed = True
                self._on_layer()

            self._clock.call_at(began + seconds * (number + 1) / _NUM_LAYERS, end)

    @property
    def _most_tokens(self) -> int:
        """Maximum number of prompt tokens of one request in a step."""
        return min(self.config.long_prefill_token_threshold, self.max_model_len - 1)

    def step_times(self) -> tuple[tuple[int, float], ...]:
        """Return (prompt tokens, seconds) of steps, like `measure_step_times`."""
        most = self._most_tokens
        return tuple(
            (num_tokens, self._seconds(num_tokens, num_tokens * (num_tokens + 1) // 2))
            for num_tokens in sorted({1, min(64, most), most})
        )

    def context_times(self) -> tuple[tuple[int, int, float], ...]:
        """Return (tokens, context tokens, seconds) of a step, like `measure_context_times`."""
        num_tokens = self._most_tokens
        num_context = min(max(4096, num_tokens), self.max_model_len - 1 - num_tokens)
        if num_context < num_tokens / 2:
            return ()
        num_pairs = num_tokens * num_context + num_tokens * (num_tokens + 1) // 2
        return ((num_tokens, num_context, self._seconds(num_tokens, num_pairs)),)

    def decode_times(self) -> tuple[tuple[int, int, float], ...]:
        """Return (requests, context tokens, seconds) of decodes, like `measure_decode_times`."""
        if self._role is not NodeRole.DECODE:
            return ()
        long = min(4096, self.max_model_len - 2)
        many = self.config.max_num_requests
        sizes = sorted({(1, min(64, long)), (1, long), (min(32, many), 64 * min(32, many))})
        return tuple((num, context, self._seconds(0, 0, num, context)) for num, context in sizes)

    def _seconds(
        self, num_tokens: int, num_pairs: int, num_decoding: int = 0, num_kv_tokens: int = 0
    ) -> float:
        """Return the seconds of a step with these numbers of prompt tokens, pairs and decodes."""
        if self._role is NodeRole.PREFILL:
            num_tokens += num_decoding  # tokens of requests that continue earlier outputs
            return self.timing.prefill_s(num_tokens, num_pairs + num_kv_tokens)
        seconds = self.timing.decode_s(num_decoding, num_kv_tokens)
        return seconds + self.timing.compute_s(num_tokens, num_pairs)

    def check_adapter(self, files: AdapterFiles) -> None:
        """Accept every adapter, because steps compute nothing."""

    def pack_adapter(self, adapter: Adapter) -> int:
        """Pack nothing, because steps compute nothing."""
        return 0

    def keep_cores(self) -> AbstractContextManager[None]:
        return nullcontext()

    def collective_rpc(
        self, method: str, args: Sequence[Any] = (), timeout_s: float | None = None
    ) -> list[Any]:
        return []

    def attach(self, entry: str, argument: bytes) -> dict[int, Connection]:
        return {}

    def rest(self) -> None:
        pass

    def do_idle_work(self, num_used_blocks: int, num_expected_blocks: int = 0) -> bool:
        return False

    def expert_loads(self) -> tuple[float, float]:
        return 0.0, 0.0

    def check_health(self) -> None:
        pass

    def close(self) -> None:
        pass


def engine_config(options: SimOptions, role: NodeRole) -> EngineConfig:
    """Return the engine options that a real node with these sizes would have."""
    return EngineConfig(
        block_size=options.block_size,
        num_blocks=options.num_blocks,
        max_num_requests=min(options.max_num_requests, options.max_num_batched_tokens),
        max_num_batched_tokens=options.max_num_batched_tokens,
        long_prefill_token_threshold=options.max_num_batched_tokens,
        prefill_tokens_beside_decodes=options.prefill_tokens_beside_decodes
        or options.max_num_batched_tokens,
        preemption="hand-back" if role is NodeRole.DECODE else "recompute",
        prefix_hash=options.prefix_hash,
    )
