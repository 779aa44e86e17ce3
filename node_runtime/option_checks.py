"""Checks the options of a node early, before torch is imported or a model is loaded.

Only names and addresses are checked; loading shows whether options fit the model and the device.
"""

from __future__ import annotations

from pathlib import Path

from baton.access.exposure import check_is_free, split_address
from baton.adapters.digest import AdapterError
from baton.adapters.files import open_adapter
from baton.adapters.sources import find_named
from baton.api.errors import ConfigError
from baton.checkpoint.model_folder import find_model_folder
from kvconnector import KV_CONNECTORS
from kvconnector.transports.sockets.listen_address import parse_listen_address
from models.config import ModelConfig
from node_runtime.options import NodeOptions, ProgramOptions


def check_options(options: NodeOptions) -> None:
    """Raise ConfigError for names of unknown things and for addresses that cannot be used."""
    if options.kv_connector == "tls" and options.engine.num_ranks > 1:
        raise ConfigError(
            f"kv_connector: tls supports one rank only, got {options.engine.num_ranks}; use nixl"
        )
    executor = options.engine.executor_name
    if options.fetch_prefixes and executor not in ("uniproc", "multiproc"):
        raise ConfigError(
            f"fetch_prefixes: needs all ranks on one machine (executor multiproc), got {executor}"
        )
    check_program_options(options)
    _check_adapters(options)


def check_program_options(options: ProgramOptions) -> None:
    """Raise ConfigError for wrong names and addresses in the options of any kind of node."""
    for router in options.routers:
        split_address("router", router)
    check_is_free("listen", options.listen)
    if options.metrics_listen:
        check_is_free("metrics_listen", options.metrics_listen)
    KV_CONNECTORS.check(options.kv_connector)
    if options.kv_listen:
        if options.kv_connector != "tls":
            raise ConfigError(
                f"kv_listen: only --kv-connector tls listens, not {options.kv_connector}"
            )
        parse_listen_address(options.kv_listen)
        check_is_free("kv_listen", options.kv_listen)


def source_of(adapter: str) -> str:
    """Return SOURCE of an option ``[NAME=]SOURCE``; only the router uses the name."""
    return adapter.partition("=")[2] or adapter


def _check_adapters(options: NodeOptions) -> None:
    """Check that the adapters to load at the start can be found; their fit is checked later."""
    if options.weights_root and not Path(options.weights_root).is_dir():
        raise ConfigError(f"weights_root: {options.weights_root}: no such folder")
    if options.adapter_root and not Path(options.adapter_root).is_dir():
        raise ConfigError(f"adapter_root: {options.adapter_root}: no such folder")
    if options.adapter_root and not options.engine.max_adapters:
        raise ConfigError("max_adapters: must be 1 or more with --adapter-root, got 0")
    if len(options.adapters) > options.engine.max_adapters:
        raise ConfigError(
            f"max_adapters: must be at least {len(options.adapters)} for that many --adapter, "
            f"got {options.engine.max_adapters}"
        )
    root = Path(options.adapter_root) if options.adapter_root else None
    for source in options.adapters:
        try:
            open_adapter(find_named(root, source_of(source)))
        except AdapterError as error:
            raise ConfigError(str(error)) from error


def check_model(options: NodeOptions) -> None:
    """Raise ModelLoadError if the model is missing, ConfigError for a wrong max_model_len.

    Downloads the model if it is not on this machine.
    """
    folder = find_model_folder(options.model)
    ModelConfig.from_folder(folder, max_model_len=options.engine.max_model_len)


def check_vision_model(options: ProgramOptions) -> None:
    """Raise ModelLoadError if the model is missing; download it if this machine lacks it."""
    ModelConfig.from_folder(find_model_folder(options.model))
