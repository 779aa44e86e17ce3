"""PreparedStep: the tensors that a step reads. ReplayStep: a step that replays a captured graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from baton_kernels.attention.base import AttentionMetadata
from baton_kernels.state_metadata import StateMetadata
from engine.core.images.image_plan import StepImages
from engine.sampling.logprobs import PromptRows
from engine.sampling.sampling_input import SamplingInput
from engine.worker.inputs.pooled_rows import PooledRows
from models.base import AdapterSpan, ImageRows, spans_of_rows


@dataclass(frozen=True, slots=True)
class ModelInput:
    """Tensors that one forward pass of the model reads."""

    input_ids: Tensor  # [num_tokens] int64
    # [num_tokens] int64, for RoPE; [3, num_tokens] for three axes
    positions: Tensor
    last_token_rows: Tensor  # [num_sampling] int64, rows of the tokens whose logits are needed
    groups: tuple[AttentionMetadata | StateMetadata, ...]  # metadata of each KV cache group
    adapters: tuple[AdapterSpan, ...] = ()  # runs of tokens that have an adapter
    images: tuple[ImageRows, ...] = ()  # tokens whose embeddings come from images

    def adapters_of(self, rows: Sequence[int]) -> tuple[AdapterSpan, ...]:
        """Return the adapter spans of the tokens ``rows`` (ascending), as indices into ``rows``."""
        return spans_of_rows(self.adapters, rows)


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """Inputs of a step's forward and sampler.

    The tensors are views of buffers that are overwritten `EngineConfig.max_steps_in_flight` steps
    later.

    Attributes:
        sampling_rows: `[num_sampling]` int64 on the device, row of the input batch for each sampled
            token; a request with drafts has several entries.
        pending_tokens: tokens that the previous step samples, as `(places, rows)`, int64 on the
            device: places in ``input_ids``, rows in `InputBatch.last_tokens`; None: all are known.
        images: images to encode and to place; None: the step has no images.
        pooled: the tokens of each pooled request.
    """

    model: ModelInput
    sampling: SamplingInput
    prompt_rows: tuple[PromptRows, ...]
    sampling_rows: Tensor
    pending_tokens: tuple[Tensor, Tensor] | None
    pooled: tuple[PooledRows, ...] = ()
    images: StepImages | None = None

    @property
    def has_prompts(self) -> bool:
        """Return whether some token of the step, such as one in a prompt, samples no next token."""
        return len(self.model.input_ids) > len(self.model.last_token_rows)


@dataclass(frozen=True, slots=True)
class ReplayStep:
    """A step with one token per request, which replays a captured graph.

    Its inputs lie in a staging buffer on the host, which is overwritten
    `EngineConfig.max_steps_in_flight` steps later.
    """

    sampling: SamplingInput
    staging: int  # index of the staging buffer
    num_requests: int
    size: int  # size of the captured graph: num_requests plus padding
    num_blocks: int  # used columns of the block tables
