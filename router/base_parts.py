"""Makes the pool, dispatcher, intake and metrics of each base model, and the table of names."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from baton.checkpoint.model_folder import ModelLimits, find_model_folder, read_limits
from baton.checkpoint.model_identity import folder_identity
from baton.checkpoint.sampling_defaults import read_end_token_ids
from baton.link.beat_interval import BEAT_INTERVAL_S
from baton.media.layouts import layout_of
from baton.text.tokenizer import Tokenizer
from router.api.grpc.link_service import NodePools
from router.calls.dispatcher import Dispatcher
from router.calls.recovery.recovery import Recoveries
from router.calls.recovery.retry_budget import RetryOptions
from router.config import RouterConfig
from router.fleet.base_pools import BasePools
from router.fleet.join_gate import JoinGate
from router.fleet.node_pool import NodePool
from router.gate.admission import Admission, make_admission
from router.gate.overload import Overload
from router.gate.rate_limits import RateLimits
from router.gate.scaling import ScalingSignals
from router.intake.abilities import Abilities
from router.intake.answers.answers import Answers
from router.intake.cache_salts import CacheSalts, make_salts
from router.intake.fleet_metrics import Collected, collect_scaling
from router.intake.images.image_reader import ImageReader
from router.intake.intake import Intake
from router.intake.metrics import RouterMetrics
from router.intake.prompt_reader import EarlyReaders, PromptReader
from router.names.base_model import BaseModel
from router.names.given import adapters_given, names_given
from router.names.names_file import NamesFile
from router.names.table import NameTable
from router.policies import POLICIES

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Common:
    """Parts that all base models of one router share.

    Attributes:
        gate: decides which nodes may join; node names are unique over all base models.
        rates: how much each caller has used of its limits per minute, over all base models.
    """

    config: RouterConfig
    overload: Overload
    gate: JoinGate = field(default_factory=JoinGate)
    rates: RateLimits = field(default_factory=RateLimits)


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseParts:
    """One base model, and ``scaling``, which tells autoscalers how busy the model's nodes are."""

    base: BaseModel
    scaling: ScalingSignals


def make_all_bases(common: Common, readers: Sequence[EarlyReaders]) -> list[BaseParts]:
    """Make the parts of all base models; raises ConfigError.

    Args:
        readers: tokenizer and template processes of each base model, made before any thread
            started; empty: make them here.
    """
    made: list[BaseParts] = []
    for number, model in enumerate(common.config.models):
        folder = find_model_folder(model, weights=False)
        router_id = made[0].base.pool.router_id if made else None
        early = readers[number] if readers else None
        made.append(_make_base(common, model, folder, early, router_id))
    return made


def join_pools(config: RouterConfig, bases: Sequence[BaseModel]) -> NodePools:
    """Return the pool that nodes join: the only one, or one that sorts nodes by base model.

    Raises ConfigError if the router could not tell a node's base model.
    """
    pools = [base.pool for base in bases]
    return pools[0] if len(pools) == 1 else BasePools(pools, config.models)


def make_names(config: RouterConfig, bases: Sequence[BaseModel]) -> NameTable:
    """Make the table of names from the names file, or from the options; raises ConfigError."""
    if not config.names_file:
        file, served = None, []
    else:
        file = NamesFile(Path(config.names_file).expanduser())
        served = file.read(bases)
        if served:
            logger.info("names_file: %d names; options for names have no effect", len(served))
    if not served:
        names = (config.served_model_name, *config.more_served_names)
        served = names_given(bases, names, config.served_model_aliases, config.request_defaults)
        served += adapters_given(served, config.adapter_root, config.adapters)
    table = NameTable(bases, served, file)
    for base in bases:
        if all(one.base is not base for one in served):
            logger.warning("%s has no name, so it gets no requests", base.model)
    return table


def _make_base(
    common: Common,
    model: str,
    folder: Path,
    readers: EarlyReaders | None,
    router_id: str | None,
) -> BaseParts:
    config, is_first = common.config, router_id is None
    limits = read_limits(folder)
    pool = make_pool(common, folder, limits, router_id)
    options = RetryOptions(
        max_attempts=config.max_attempts,
        pair_timeout_s=config.pair_timeout_s,
        return_timeout_s=config.return_timeout_s,
    )
    admission = make_admission(pool, config.admission, common.rates)
    policy, recoveries = POLICIES.load(config.policy)(), Recoveries(pool, options)
    dispatcher = Dispatcher(pool, policy, recoveries, admission)
    overload = common.overload if is_first else None
    metrics = RouterMetrics(pool, admission, overload, recoveries.suspects)
    scaling = _make_scaling(config, pool, admission)
    metrics.show(Collected(collect_scaling, scaling))
    intake = make_intake(config, folder, limits, dispatcher, metrics, readers)
    base = BaseModel(model=model, dispatcher=dispatcher, intake=intake, metrics=metrics)
    return BaseParts(base=base, scaling=scaling)


def make_pool(
    common: Common, folder: Path, limits: ModelLimits, router_id: str | None = None
) -> NodePool:
    """Make the pool of one base model's nodes.

    Args:
        router_id: id of the router, which all its pools share; None: draw a new id.
    """
    config = common.config
    return NodePool(
        own_identity=folder_identity(folder),
        max_model_len=limits.max_position_embeddings,
        max_missed_beats=round(config.node_timeout_s / BEAT_INTERVAL_S),
        may_self_prefill=config.may_self_prefill(config.policy),
        engine_timeout_s=config.engine_timeout_s,
        vocab_size=limits.vocab_size,
        router_id=router_id,
        gate=common.gate,
    )


def make_intake(
    config: RouterConfig,
    folder: Path,
    limits: ModelLimits,
    dispatcher: Dispatcher,
    metrics: RouterMetrics,
    readers: EarlyReaders | None,
) -> Intake:
    """Make the intake of one base model; raises ConfigError."""
    readers = readers or EarlyReaders(config.texts.make_tokenizer(folder))
    abilities = Abilities(
        dispatcher,
        limits.vocab_size,
        config.texts.make_parsers(readers.tokenizer),
        setup=config.texts.read_setup(folder),
        end_token_ids=read_end_token_ids(folder),
    )
    salts = make_salts(config.cache_salt_secret_file, has_tenants=bool(config.api_keys_file))
    reader = PromptReader(
        readers.tokenizer,
        dispatcher.admission,
        lambda: abilities.max_model_len,
        vocab_size=limits.vocab_size,
        readers=readers,
        trusts_templates=config.texts.trust_request_chat_template,
        cuts_changing_lines=config.texts.cut_changing_lines,
        images=_make_image_reader(config, folder, readers.tokenizer, salts),
        may_encode=lambda: dispatcher.pool.may_encode_images,
    )
    return Intake(
        dispatcher,
        reader,
        abilities,
        Answers(readers.tokenizer, salts, logs_prompts=config.log_prompts),
        vocab_size=limits.vocab_size,
        default_timeout_s=config.request_timeout_s,
        metrics=metrics,
        sampling_defaults=config.texts.sampling_defaults(folder),
    )


def _make_image_reader(
    config: RouterConfig, folder: Path, tokenizer: Tokenizer | None, salts: CacheSalts
) -> ImageReader | None:
    """Make the reader of images; return None if the model takes no images."""
    if tokenizer is None or config.images.max_images == 0:
        return None
    layout = layout_of(folder, tokenizer)
    return None if layout is None else ImageReader(layout, config.images, salts)


def _make_scaling(config: RouterConfig, pool: NodePool, admission: Admission) -> ScalingSignals:
    def queue_s() -> float:
        state = admission.state()
        return state.expected_wait_s if state.num_queued else 0.0

    return ScalingSignals(pool, config.scaling, queue_s=queue_s, clock=pool.clock)
