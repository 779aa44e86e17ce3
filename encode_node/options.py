"""EncodeOptions: all options of an encode node."""

from __future__ import annotations

from dataclasses import dataclass

from baton.engine_config import DEFAULT_ENCODER_CACHE_TOKENS, EngineConfig
from baton.options import option, same_option
from node_runtime.options import ProgramOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodeOptions(ProgramOptions):
    """Options of an encode node; a wrong value raises ConfigError with the field's name.

    There is no option ``weights``, because vision encoders keep the checkpoint's precision on
    prefill nodes, too.
    """

    dtype: str = same_option(EngineConfig, "dtype")
    device: str = same_option(EngineConfig, "device")
    num_threads: int = same_option(EngineConfig, "num_threads")
    cpu_list: str = same_option(EngineConfig, "cpu_list")
    native_kernels: bool = same_option(EngineConfig, "native_kernels")
    max_num_encoder_input_tokens: int = option(
        8192,
        least=1,
        help="Most image tokens that are encoded before the node looks at new commands. An image "
        "with more tokens is encoded alone.",
    )
    encoder_cache_tokens: int = option(
        DEFAULT_ENCODER_CACHE_TOKENS,
        least=1,
        help="Most image tokens whose encodings are kept, so that an image in several prompts is "
        "encoded once. A prefill node encodes an image with more tokens itself.",
    )

    @property
    def engine(self) -> EngineConfig:
        """Return engine options with which the encoder chooses device, dtype and kernels."""
        return EngineConfig(
            dtype=self.dtype,
            device=self.device,
            num_threads=self.num_threads,
            cpu_list=self.cpu_list,
            native_kernels=self.native_kernels,
        )
