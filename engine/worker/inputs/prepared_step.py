"""PreparedStep: the tensors that a step reads; StagedStep: a step staged for a replay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from baton_kernels.attention.base import AttentionMetadata
from baton_kernels.state_metadata import StateMetadata
from engine.sampling.logprobs import PromptRows
from engine.sampling.sampling_input import SamplingInput
from engine.worker.inputs.pooled_rows import PooledRows
from models.base import AdapterSpan, spans_of_rows


@dataclass(frozen=True, slots=True)
class ModelInput:
    """Tensors that one forward pass of the model reads."""

    input_ids: Tensor  # [num_tokens] int64
    positions: Tensor  # [num_tokens] int64
    last_token_rows: Tensor  # [num_sampling] int64, rows of tokens that need logits
    groups: tuple[AttentionMetadata | StateMetadata, ...]  # one per KV cache group
    adapters: tuple[AdapterSpan, ...] = ()  # tokens that adapters are computed for

    def adapters_of(self, rows: Sequence[int]) -> tuple[AdapterSpan, ...]:
        """Return the spans of some of the tokens, in places among these; ``rows`` ascend."""
        return spans_of_rows(self.adapters, rows)


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """Inputs of a step's forward and sampler.

    The tensors are views of buffers that are overwritten two steps later.

    Attributes:
        sampling_rows: `[num_sampling]` int64 on the device, rows of the input batch; a request with
            drafts has several entries.
        unknown: `(places, rows)`, int64 on the device: places in ``input_ids`` of tokens that the
            previous step samples, and their rows in ``last_tokens``; None: all are known.
        pooled: tokens of requests that are pooled.
    """

    model: ModelInput
    sampling: SamplingInput
    prompt_rows: tuple[PromptRows, ...]
    sampling_rows: Tensor
    unknown: tuple[Tensor, Tensor] | None
    pooled: tuple[PooledRows, ...] = ()

    @property
    def has_prompts(self) -> bool:
        """Return whether some computed tokens, such as a prompt's, sample no next token."""
        return len(self.model.input_ids) > len(self.model.last_token_rows)


@dataclass(frozen=True, slots=True)
class StagedStep:
    """A step of one token per request, staged on the host for a replay.

    The staged bytes are overwritten two steps later.
    """

    sampling: SamplingInput
    staging: int  # index of the staging buffer
    num_requests: int
    size: int  # captured size: num_requests and padding
    num_blocks: int  # used columns of the block tables
