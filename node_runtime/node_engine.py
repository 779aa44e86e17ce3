"""Loads the engine of a prefill node or a decode node, and describes it to routers."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from baton.adapters.digest import AdapterError
from baton.adapters.sources import find_named
from baton.api.errors import ConfigError
from baton.checkpoint.model_folder import find_model_folder, weights_digest
from baton.checkpoint.model_identity import NONE, folder_identity
from baton.engine_config import EngineConfig
from baton.link.words import REVISION, DecodeTime, NodeRegistration, NodeRole, StepTime
from baton.text.grammar_trials import EarlyGrammars
from baton.version import __version__
from engine.engine import Engine
from engine.make_engine import make_engine
from engine.rehearsal import rehearse
from engine.step_profile import measure_context_times, measure_decode_times, measure_step_times
from engine.weights import ServedWeights

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FirstSteps:
    """Measured times of the steps that a node computed before its first request.

    Attributes:
        step_times: prompt tokens and seconds of measured steps; see `StepTime`.
        decode_times: requests, context tokens and seconds of measured steps; see `DecodeTime`.
        context_times: prompt tokens, context tokens and seconds of measured steps; see `StepTime`.
    """

    step_times: tuple[tuple[int, float], ...] = ()
    decode_times: tuple[tuple[int, int, float], ...] = ()
    context_times: tuple[tuple[int, int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """A loaded engine, and what its node tells routers about it.

    Attributes:
        engine_id: unique id of this start of the process.
        compatibility: properties that must be equal on two nodes that exchange KV.
        prefix_hash: algorithm of the block hashes; empty: the engine has no prefix cache.
        loads_adapters: whether the node can load the adapters of its commands.
        weights: the engine's weights; None: there are none, as in simulated nodes.
    """

    engine: Engine
    engine_id: str
    compatibility: dict[str, str]
    prefix_hash: str
    loads_adapters: bool = False
    weights: ServedWeights | None = None

    def renamed(self) -> LoadedEngine:
        """Return a copy whose ``compatibility`` describes the weights that the engine has now."""
        return replace(self, compatibility={**self.compatibility, **self.engine.compatibility})

    def registration(
        self,
        node_name: str,
        role: NodeRole,
        address: str,
        peer_info: bytes,
        first_steps: FirstSteps,
    ) -> NodeRegistration:
        """Return what the node tells a router about itself."""
        spec, manifest = self.engine.kv_memory.spec, self.engine.kv_memory.manifest
        config = self.engine.executor.config
        bytes_of_all = sum(manifest.unit_bytes(rank) for rank in range(manifest.num_ranks))
        return NodeRegistration(
            node_name=node_name,
            engine_id=self.engine_id,
            role=role,
            version=__version__,
            address=address,
            peer_info=peer_info,
            compatibility=self.compatibility,
            max_model_len=self.engine.max_model_len,
            num_blocks=self.engine.num_blocks,
            block_size=spec.block_size,
            prefix_hash=self.prefix_hash,
            computes_prompts=role is NodeRole.DECODE,
            tensor_parallel_size=manifest.stage_size,
            pipeline_parallel_size=manifest.num_stages,
            kv_bytes_per_token=bytes_of_all * spec.num_groups / spec.block_size,
            step_times=tuple(StepTime(*one) for one in first_steps.step_times),
            decode_times=tuple(DecodeTime(*one) for one in first_steps.decode_times),
            context_step_times=tuple(
                StepTime(num_tokens, seconds, num_context)
                for num_tokens, num_context, seconds in first_steps.context_times
            ),
            num_chunk_tokens=min(
                config.long_prefill_token_threshold, config.max_num_batched_tokens
            ),
            loads_adapters=self.loads_adapters,
            encodes_images=self.engine.features.images.are_taken,
        )


def load_engine(
    model: str,
    config: EngineConfig,
    *,
    node_name: str,
    kv_connector: str,
    kv_digests: bool = False,
    revision: str = "",
    grammars: EarlyGrammars | None = None,
    loads_adapters: bool = False,
) -> LoadedEngine:
    """Load the model of a node, and make its engine.

    Args:
        grammars: the parts that compile grammars, made before any thread started; None: the engine
            makes them later.
        loads_adapters: whether the node can load the adapters of its commands.

    Raises:
        ModelLoadError: the folder is missing, incomplete or unsupported.
        ConfigError: an option does not fit the model or the machine.
    """
    folder = find_model_folder(model)
    identity = folder_identity(folder)
    # The identity lacks the weights if a file in the index is missing; not every file is needed.
    if "weights" not in identity:
        identity["weights"] = weights_digest(folder)
    started = time.perf_counter()
    engine = make_engine(folder, config, identity, grammars=grammars)
    spec = engine.kv_memory.spec
    logger.info(
        "loaded %s in %.1f s: %s on %s, %d KV blocks of %d tokens in %s (%.0f MiB)",
        model,
        time.perf_counter() - started,
        engine.dtype,
        engine.kv_memory.tensor.device,
        engine.num_blocks,
        spec.block_size,
        engine.kv_memory.dtype,
        engine.num_blocks * spec.block_bytes / 2**20,
    )
    began_at = time.perf_counter()
    engine.features.prepare()
    logger.info("prepared structured output in %.1f s", time.perf_counter() - began_at)
    compatibility = {
        **engine.compatibility,
        "adapters": NONE,
        "kv_connector": kv_connector,
        "kv_digests": "on" if kv_digests else "off",
        "version": __version__,
    }
    if revision:
        compatibility[REVISION] = revision
    return LoadedEngine(
        engine,
        f"{node_name}-{uuid.uuid4().hex[:8]}",
        compatibility,
        config.prefix_hash if config.prefix_cache else "",
        loads_adapters,
        ServedWeights(engine, folder),
    )


def load_adapters(engine: Engine, root: Path | None, sources: Sequence[str]) -> None:
    """Load the adapters that the options name, before the node serves.

    Args:
        root: folder below which the folders of adapters must lie; None: adapters in folders are
            refused.
        sources: where the adapters' files are; see `find_named`.

    Raises:
        ConfigError: a file is malformed, or an adapter does not fit the model.
    """
    for source in sources:
        try:
            adapter = engine.adapters.read(find_named(root, source))
            engine.adapters.load(adapter)
        except AdapterError as error:
            raise ConfigError(str(error)) from error
        logger.info("loaded adapter %s from %r", adapter.digest, source)


def compute_first_steps(engine: Engine, *, pushes: bool) -> FirstSteps:
    """Compute steps that would otherwise slow down the first requests; return their times.

    Call this on the thread that will compute all steps: the threads of kernels, and their scratch
    memory, belong to the calling thread.

    Args:
        pushes: whether the node sends the KV of a prompt's layers while it computes later layers.
    """
    began_at = time.perf_counter()
    compiles = engine.kv_memory.tensor.device.type != "cpu"
    rehearse(engine, decodes=not pushes)
    step_times = measure_step_times(engine, pushes=pushes, compiles=compiles)
    shown = ", ".join(f"{tokens} in {1e3 * seconds:.3g} ms" for tokens, seconds in step_times)
    logger.info("steps of prompt tokens: %s", shown)
    context_times = measure_context_times(engine, step_times, pushes=pushes, compiles=compiles)
    for tokens, context, seconds in context_times:
        shown = f"{tokens} behind {context} in {1e3 * seconds:.3g} ms"
        logger.info("steps of prompt tokens behind a context: %s", shown)
    decode_times = () if pushes else measure_decode_times(engine, compiles=compiles)
    if decode_times:
        shown = ", ".join(f"{num} in {1e3 * seconds:.3g} ms" for num, _, seconds in decode_times)
        logger.info("steps of decoding requests: %s", shown)
    logger.info("computed first steps in %.1f s", time.perf_counter() - began_at)
    return FirstSteps(step_times, decode_times, context_times)
