"""Worker: runs a model on one device, with its KV memory, input rows and graphs.

Refuses to know: requests, schedulers, the meaning of a plan.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

import torch

from baton.adapters.digest import AdapterDigest
from baton.adapters.files import Adapter, AdapterFiles
from baton.api.changes import SleepLevel
from baton.api.errors import ConfigError, ModelLoadError
from baton.checkpoint.weights_cache import WeightsCache
from baton.engine_config import BY_DECODES, EngineConfig
from baton_kernels.attention import wanted_block_size
from engine.core.step_plan import StepHooks, StepPlan
from engine.sampling.step_sampler import LaunchedStep
from engine.worker.device_choice import (
    check_batch_invariant,
    choose_backends,
    choose_dtype,
    choose_kv_cache_dtype,
    choose_ops,
    choose_packer,
    describe_weights,
    has_bfloat16,
    make_current,
    without_images_if_needed,
)
from engine.worker.drafting.make_drafting import (
    AnyDrafter,
    fit_num_drafts,
    layers_of,
    load_drafter,
    make_drafting,
)
from engine.worker.graph_capture import make_captured_runner
from engine.worker.host.allocator import keep_freed_memory
from engine.worker.host.cores import on_one_thread, use_cores
from engine.worker.host.host_memory import read_host_memory
from engine.worker.host.lent_cores import LentCores, lent_cores
from engine.worker.host.memory_check import check_memory
from engine.worker.host.pages_ahead import PagesAhead
from engine.worker.inputs.prepared_step import PreparedStep
from engine.worker.kv_cache import (
    KVCacheSpec,
    KVMemory,
    allocate_kv_cache,
    choose_max_model_len,
    choose_num_blocks,
    dtype_name,
    kv_cache_spec,
)
from engine.worker.make_runner import LoadedModel
from engine.worker.memory_profile import measure_kv_cache_bytes
from engine.worker.model_runner import AnyPreparedStep, ModelRunner
from engine.worker.warm_up import check_numbers, warm_up
from engine.worker.weights.staging import LoadedWeights
from engine.worker.weights.worker_weights import WorkerWeights
from models import load_model
from models.adapters.slots import AdapterSlots
from models.base import CausalLM
from models.config import ModelConfig
from models.decoder import DecoderForCausalLM
from models.layers.moe import loads_of
from models.loading.finite_weights import check_finite
from models.parallel.group import ALONE, Ranks
from models.parallel.shards import stage_layers
from models.work import layers_by_decodes

logger = logging.getLogger(__name__)


class Worker:
    """Computes the steps of a model, or of a part of a model, on one device.

    Attributes:
        config: the options; ``auto`` values are replaced by values for the device.
        linear_weights: description of the linear layers' weights; see `Executor`.
        max_model_len: maximum number of tokens of one request, limited by the model and the KV
            memory.
        runs_ahead: whether a step may be launched before the previous one has ended.
        runner: computes the steps.
    """

    def __init__(
        self,
        model_folder: Path,
        config: EngineConfig,
        device: torch.device,
        ranks: Ranks = ALONE,
    ) -> None:
        """Load the model, allocate its KV memory, and compile kernels and graphs.

        Args:
            model_folder: the model's folder, in Hugging Face layout.
            config: the options, equal on all ranks.
            device: this rank's device, the current device of the calling thread.
            ranks: the ranks that share the model, whose workers are all made at the same time.

        Raises:
            ModelLoadError: the folder is missing, incomplete or unsupported.
            ConfigError: an option does not fit the model or the machine.
        """
        self.device = device
        self.config = config = config.for_device(device.type)
        runs_ahead = config.async_scheduling
        # By default, a GPU runs ahead, and so do pipeline stages: each stage computes a step while
        # the stage before it computes the next step. A CPU does not run ahead, because the
        # scheduler would slow the forward pass.
        by_itself = device.type == "cuda" or ranks.num_stages > 1
        self.runs_ahead = by_itself if runs_ahead is None else runs_ahead
        use_cores(config, ranks.everyone.rank, ranks.everyone.size)
        described = ModelConfig.from_folder(model_folder)
        numbers = config.stage_layers
        if config.pipeline_layers == BY_DECODES:
            numbers = layers_by_decodes(described, ranks.num_stages)
        ranks = replace(ranks, stage_layers=numbers, expert_parallel=config.expert_parallel)
        self.dtype = choose_dtype(config.dtype, device, described, has_bfloat16(config))
        check_batch_invariant(config, device, described)
        self.config = config = without_images_if_needed(config, device, described)
        if device.type == "cpu":
            check_memory(model_folder, config, dtype_name(self.dtype), read_host_memory())
        self._packer = packer = choose_packer(config, device, self.dtype)
        self._ranks = ranks
        model = self._load_model(model_folder)
        if device.type == "cpu":
            keep_freed_memory()
        self.model_config = model.config
        self._adapters = self._make_adapter_slots(model, ranks)
        self.linear_weights = describe_weights(config.weights, packer, model)
        drafter = load_drafter(config, model_folder, model, self.dtype, device)
        config = fit_num_drafts(config, drafter)
        spec = self._kv_cache_spec(model, drafter, config, ranks)
        if not config.block_size:
            logger.info("KV blocks of %d tokens, %d groups", spec.block_size, spec.num_groups)
        self.config = config = replace(config, block_size=spec.block_size)
        if spec.state_groups and config.max_num_drafts:
            raise ConfigError("speculative_method: models with states support no drafts; use none")
        backends = choose_backends(spec, config, device, model.config)
        loaded = LoadedModel(model, spec, config, device, backends, ranks)
        num_blocks = choose_num_blocks(spec, config, lambda: measure_kv_cache_bytes(loaded))
        if ranks.everyone.size > 1:  # use the smallest number of all ranks
            rooms = ranks.everyone.all_gather(torch.tensor([num_blocks], device=device))
            num_blocks = int(rooms.min())
        self.max_model_len = choose_max_model_len(model.config, config, spec, num_blocks)
        if device.type == "cuda":
            # In captured steps, all ranks of a stage sample, so all of them compile the sampling
            # kernels.
            samples = ranks.num_stages == 1
            warm_up(replace(loaded, ranks=ALONE) if samples else loaded, self.max_model_len)
        if ranks.everyone.size == 1:
            check_numbers(loaded)
        self.kv_memory = KVMemory(spec, allocate_kv_cache(spec, num_blocks, device))
        self._pages_ahead = PagesAhead(self.kv_memory.tensor)
        self.runner = self._make_runner(loaded, drafter)
        self._frame = functools.partial(
            LoadedModel, spec=spec, config=config, device=device, backends=backends, ranks=ranks
        )
        self._weights = WorkerWeights(
            self.kv_memory, LoadedWeights(model, drafter), self._load_checked, self._use
        )
        self._expert_loads = loads_of(model)
        self._lent_cores: LentCores | None = lent_cores(config) if device.type == "cpu" else None

    def _kv_cache_spec(
        self, model: CausalLM, drafter: AnyDrafter | None, config: EngineConfig, ranks: Ranks
    ) -> KVCacheSpec:
        """Choose the layout of the KV of all layers; a drafter's layers come after the model's."""
        of_drafter = layers_of(drafter)
        scales = _scales_of_all_stages(model.kv_scales, ranks, self.device)
        return kv_cache_spec(
            (*model.kv_layers, *of_drafter),
            config.block_size or wanted_block_size(config.attention_backend),
            choose_kv_cache_dtype(config.kv_cache_dtype, self.dtype),
            (*scales, *[(1.0, 1.0)] * len(of_drafter)),
            self.dtype,
            (ranks.group.rank, ranks.group.size),
            (ranks.stage, ranks.num_stages),
            stage_layers=ranks.stage_layers,
            by_heads=config.kv_layout == "heads",
        )

    def _make_runner(self, loaded: LoadedModel, drafter: AnyDrafter | None) -> ModelRunner:
        memory, rejects = self.kv_memory, self.config.draft_acceptance == "rejection"
        if getattr(drafter, "state_layers", ()):  # the drafter needs states that no graph keeps
            loaded = replace(loaded, config=replace(loaded.config, cuda_graphs=False))
        model, backends = loaded.model, loaded.backends
        return make_captured_runner(
            *(loaded, memory.tensor, self.max_model_len),
            # With several stages, plans contain all token ids, so none are sent
            # (`engine/core/steps_in_flight.py`).
            sends_tokens=self.runs_ahead and self._ranks.num_stages == 1,
            drafting=make_drafting(
                *(drafter, model, memory, backends, self.max_model_len), rejects=rejects
            ),
            rejects=rejects,
        )

    def _make_adapter_slots(self, model: CausalLM, ranks: Ranks) -> AdapterSlots | None:
        """Allocate slots for adapters of a loaded model; None if adapters are disabled.

        Raises ConfigError on a GPU, where adapters are not supported.
        """
        if not self.config.max_adapters:
            return None
        if self.device.type != "cpu":
            problem = f"adapters are computed on a CPU, and the device is {self.device}"
            raise ConfigError(f"max_adapters: {problem}")
        assert isinstance(model, DecoderForCausalLM)
        model.adapted = slots = AdapterSlots(model, self.dtype, ranks)
        return slots

    def check_adapter(self, files: AdapterFiles) -> None:
        """Raise AdapterError unless an adapter fits the model; safe from any thread."""
        assert self._adapters is not None, "max_adapters is 0"
        self._adapters.check(files)

    def pack_adapter(self, adapter: Adapter) -> int:
        """Pack an adapter's weights for `load_adapter`; safe from any thread, during steps.

        Returns the packed size in bytes; raises AdapterError.
        """
        assert self._adapters is not None, "max_adapters is 0"
        with on_one_thread():  # on one thread, because all other threads compute steps
            return self._adapters.pack(adapter)

    def keep_cores(self) -> AbstractContextManager[None]:
        """Lend no core to other nodes inside this context, because the calling thread computes.

        Safe from any thread.
        """
        return nullcontext() if self._lent_cores is None else self._lent_cores.keep()

    def load_adapter(self, adapter: Adapter) -> int:
        """Load an adapter between steps; return its size in bytes; see `AdapterSlots.load`."""
        assert self._adapters is not None, "max_adapters is 0"
        return self._adapters.load(adapter)

    def unload_adapter(self, digest: AdapterDigest) -> None:
        """Unload an adapter from its slot; called between steps."""
        assert self._adapters is not None, "max_adapters is 0"
        self._adapters.unload(digest)

    # ------------------------------------------------------------------ other weights

    def begin_weights(self, folder: str, is_kept: bool) -> None:
        """Begin to load new weights while steps continue; `weights_problem` tells the outcome.

        Args:
            folder: folder of the new weights and of the same configuration as this worker's model.
            is_kept: whether the files will stay, so that their packed form is worth caching on
                disk.
        """
        self._weights.begin(Path(folder), is_kept=is_kept)

    def weights_problem(self) -> str | None:
        """Return why new weights cannot be used; empty: they can; None: they are still loading."""
        return self._weights.problem

    def use_weights(self) -> None:
        """Compute with the new weights from now on; call while no request is open."""
        self._weights.use()

    def drop_weights(self) -> None:
        """Drop the new weights without using them."""
        self._weights.drop()

    def sleep(self, level: str, keeps_kv_memory: bool) -> None:
        """Free memory as ``level`` says until `wake` or `use_weights`; see `SleepLevel`."""
        self._weights.sleep(SleepLevel(level), keeps_kv_memory=keeps_kv_memory)

    def wake(self) -> None:
        """Compute again after a sleep that kept the weights."""
        self._weights.wake()

    def _load_model(self, folder: Path, *, is_kept: bool = True) -> CausalLM:
        """Load a folder's model, with the dtype, packing and options of this worker's model."""
        config = self.config
        return load_model(
            folder,
            dtype=self.dtype,
            device=self.device,
            max_model_len=config.max_model_len,
            packer=self._packer,
            ops=choose_ops(config, self.device),
            ranks=self._ranks,
            cache=_weights_cache(config) if is_kept else None,
            images=config.images,
        )

    def _load_checked(self, folder: Path, is_kept: bool) -> LoadedWeights:
        """Load and check other weights for this worker's model; runs on a separate thread.

        Raises:
            ModelLoadError: a tensor is missing, unknown, of another shape or dtype, or not finite;
                or a layer would be computed or cached differently than with the old weights.
        """
        make_current(self.device)
        with on_one_thread():  # on one thread, because all other threads compute steps
            check_finite(folder, ModelConfig.from_folder(folder))
            model = self._load_model(folder, is_kept=is_kept)
            if describe_weights(self.config.weights, self._packer, model) != self.linear_weights:
                raise ModelLoadError("weights: are quantized otherwise than those that serve")
            drafter = load_drafter(self.config, folder, model, self.dtype, self.device)
            if self._ranks.everyone.size == 1:
                check_numbers(self._frame(model))
        return LoadedWeights(model, drafter)

    def _use(self, loaded: LoadedWeights | None) -> None:
        """Compute with the given weights from now on; None: free the model and compute nothing."""
        if loaded is None:
            self._adapters = None
            self._expert_loads = []
            self.runner.close()
            del self.runner
            return
        self._adapters = self._make_adapter_slots(loaded.model, self._ranks)
        self.runner = self._make_runner(self._frame(loaded.model), loaded.drafter)
        self._expert_loads = loads_of(loaded.model)

    def expert_loads(self) -> tuple[float, float]:
        """Return the experts' rows of the busiest rank and of a mean rank; see `Executor`."""
        loads = [one.tolist() for one in self._expert_loads]
        most, rows = sum(one[0] for one in loads), sum(one[1] for one in loads)
        return float(most), rows / self._ranks.group.size

    def num_blocks(self) -> int:
        """Return the number of KV blocks of this worker; the engine asks all workers."""
        return self.kv_memory.num_blocks

    def prepare(self, plan: StepPlan, hooks: StepHooks) -> AnyPreparedStep:
        """Write a step into rows and buffers; see `ModelRunner`."""
        return self.runner.prepare(plan, eager=hooks.after_layer is not None)

    def launch(self, step: AnyPreparedStep, hooks: StepHooks) -> LaunchedStep:
        """Launch a prepared step, on any thread."""
        # This thread's current device may differ from that of the thread that loaded the model.
        make_current(self.device)
        if self._lent_cores is not None:
            self._lent_cores.borrow()
            # Borrow before each layer, because the nodes that are idle may change.
            if isinstance(step, PreparedStep) and step.has_prompts:
                after_layer = self._lent_cores.between_layers(hooks.after_layer)
                hooks = replace(hooks, after_layer=after_layer)
        return self.runner.launch(step, hooks)

    def rest(self) -> None:
        """Lend this worker's cores to other nodes, because no step can be launched now."""
        if self._lent_cores is not None:
            self._lent_cores.rest()

    def do_idle_work(self, num_used_blocks: int, num_expected_blocks: int = 0) -> bool:
        """Populate memory of a few KV blocks ahead of use; return whether more is left to populate.

        Does nothing while another node computes on this node's cores, to not slow that node down.
        """
        if self._lent_cores is not None and self._lent_cores.are_taken():
            return False
        return self._pages_ahead.find(num_used_blocks, num_expected_blocks)

    def close(self) -> None:
        """Release all resources; afterwards nothing can be launched."""
        if self._lent_cores is not None:
            self._lent_cores.close()
            self._lent_cores = None


def _weights_cache(config: EngineConfig) -> WeightsCache:
    limit = config.weights_cache_bytes
    return WeightsCache() if limit is None else WeightsCache(limit)


def _scales_of_all_stages(
    scales: Sequence[tuple[float, float]], ranks: Ranks, device: torch.device
) -> list[tuple[float, float]]:
    """Gather the scales of all layers' keys and values from the stages that have the layers.

    All ranks need all scales, because the description of a block has a digest of them.

    Args:
        scales: scales of all layers, of which only this stage's are known here.
        device: device on which ranks exchange tensors.
    """
    if ranks.num_stages == 1:
        return list(scales)
    own = torch.tensor(list(scales), dtype=torch.float64, device=device)  # [num_layers, 2]
    by_rank = ranks.everyone.all_gather(own).tolist()
    found: list[tuple[float, float]] = []
    for stage in range(ranks.num_stages):
        first, end = stage_layers(len(scales), stage, ranks.num_stages, ranks.stage_layers)
        found += [(key, value) for key, value in by_rank[stage * ranks.group.size][first:end]]
    return found
