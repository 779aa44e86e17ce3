"""InputBatch: a step's requests as tensors. Rows stay between steps; a step writes what is new."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from baton_kernels.attention.base import AttentionMetadata
from engine.block_table import BlockTable
from engine.logprobs import PromptRows
from engine.outputs import ScheduledRequest
from engine.philox import WordTable
from engine.request import Request
from engine.sampling_input import PARAMETERS, SamplingInput, parameters_row

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ModelInput:
    """What one forward reads."""

    input_ids: Tensor  # [num_tokens] int64
    positions: Tensor  # [num_tokens] int64
    last_token_rows: Tensor  # [num_sampling] int64, rows of the tokens whose logits are wanted
    attention: tuple[AttentionMetadata, ...]  # of each KV cache group


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """All that a step's forward and sampler read; no Request in it.

    Its tensors are views of buffers: preparing the next step overwrites them.
    """

    model: ModelInput
    sampling: SamplingInput
    prompt_rows: tuple[PromptRows, ...]


class _Buffer:
    """One host tensor, and the same memory as an array."""

    def __init__(self, size: int, dtype: torch.dtype, pin_memory: bool) -> None:
        self.tensor = torch.zeros(size, dtype=dtype, pin_memory=pin_memory)  # [size]
        self.array = self.tensor.numpy()


class InputBatch:
    """Persistent host buffers (pinned where there is a GPU) and the copy to the device.

    A request keeps a row of block ids and parameters from step to step. Rows are a cache and
    nothing is told of who ended: a request that was preempted is seen by its count, another one
    of the same id is another object, and where no row is free all that are not in the step are.

    Args:
        max_num_requests: most requests in a step.
        max_num_tokens: most tokens in a step.
        sliding_windows: of each KV cache group; None: full attention.
        max_blocks: most blocks of one request in one group.
        block_size: tokens per block.
        device: where the model runs.
    """

    def __init__(
        self,
        *,
        max_num_requests: int,
        max_num_tokens: int,
        sliding_windows: Sequence[int | None] = (None,),
        max_blocks: int,
        block_size: int,
        device: torch.device,
    ) -> None:
        self._device = device
        self._on_gpu = pin = device.type == "cuda"

        self._input_ids = _Buffer(max_num_tokens, torch.int64, pin)
        self._positions = _Buffer(max_num_tokens, torch.int64, pin)
        self._slot_mappings = [_Buffer(max_num_tokens, torch.int64, pin) for _ in sliding_windows]
        self._query_start_loc = _Buffer(max_num_requests + 1, torch.int32, pin)
        self._seq_lens = _Buffer(max_num_requests, torch.int32, pin)
        self._last_token_rows = _Buffer(max_num_requests, torch.int64, pin)
        self._block_tables = [
            BlockTable(
                max_num_requests,
                max_blocks,
                block_size,
                group=group,
                num_groups=len(sliding_windows),
                slides=window is not None,
                pin_memory=pin,
            )
            for group, window in enumerate(sliding_windows)
        ]
        self._slides = any(window is not None for window in sliding_windows)
        self._parameters = np.zeros(max_num_requests, dtype=PARAMETERS)
        self._random_words = WordTable(max_num_requests)
        self._row_of: dict[Request, int] = {}
        self._num_preemptions = [0] * max_num_requests  # of the request in each row, when written
        self._num_blocks = [0] * max_num_requests  # of all groups, as written
        self._free_rows = list(range(max_num_requests))

    def fill(self, scheduled: Sequence[ScheduledRequest]) -> PreparedStep:
        """Write the step's requests into the buffers and give views of them on the device."""
        num_requests = len(scheduled)
        token_ids: list[int] = []
        columns = np.array(self._collect(scheduled, token_ids), dtype=np.int64).T.copy()
        rows, starts, query_lens, num_known = columns  # [num_requests] each
        num_tokens = len(token_ids)
        ends = starts + query_lens
        self._input_ids.array[:num_tokens] = token_ids
        query_start_loc = self._query_start_loc.array[: num_requests + 1]
        query_start_loc[1:] = query_lens.cumsum()
        self._seq_lens.array[:num_requests] = ends
        positions = self._positions.array[:num_tokens]
        if num_tokens == num_requests:  # one token each
            positions[:], token_rows = starts, rows
        else:
            shifts = starts - query_start_loc[:-1]
            np.add(np.arange(num_tokens), shifts.repeat(query_lens), out=positions)
            token_rows = rows.repeat(query_lens)
        parameters = self._parameters[rows]
        sampling = (ends == num_known).nonzero()[0]
        chosen = parameters[sampling]
        self._last_token_rows.array[: len(sampling)] = query_start_loc[sampling + 1] - 1
        asking = (parameters["num_prompt_logprobs"] >= 0).nonzero()[0].tolist()
        model_input = ModelInput(
            input_ids=self._to_device(self._input_ids.tensor[:num_tokens]),
            positions=self._to_device(self._positions.tensor[:num_tokens]),
            last_token_rows=self._to_device(self._last_token_rows.tensor[: len(sampling)]),
            attention=self._attention(rows, query_lens, ends, token_rows, positions),
        )
        return PreparedStep(
            model_input,
            SamplingInput.of(
                [scheduled[index].request for index in sampling.tolist()],
                chosen,
                self._random_words.take(
                    rows[sampling],
                    chosen["seed"],
                    num_known[sampling] - chosen["num_prompt_tokens"],
                ),
            ),
            tuple(PromptRows.of(scheduled[index], int(query_start_loc[index])) for index in asking),
        )

    def _attention(
        self, rows: Ints, query_lens: Ints, ends: Ints, token_rows: Ints, positions: Ints
    ) -> tuple[AttentionMetadata, ...]:
        """The groups differ in their blocks alone."""
        num_requests, num_tokens = len(rows), len(positions)
        max_query_len, max_seq_len = int(query_lens.max()), int(ends.max())
        query_lens_host, seq_lens_host = tuple(query_lens.tolist()), tuple(ends.tolist())
        query_start_loc = self._to_device(self._query_start_loc.tensor[: num_requests + 1])
        seq_lens = self._to_device(self._seq_lens.tensor[:num_requests])
        groups = []
        for block_table, slot_mapping in zip(self._block_tables, self._slot_mappings, strict=True):
            block_table.slots(token_rows, positions, out=slot_mapping.array[:num_tokens])
            metadata = AttentionMetadata(
                num_requests=num_requests,
                num_tokens=num_tokens,
                query_start_loc=query_start_loc,
                seq_lens=seq_lens,
                block_table=self._to_device(block_table.gather(rows, max_seq_len)),
                slot_mapping=self._to_device(slot_mapping.tensor[:num_tokens]),
                max_query_len=max_query_len,
                max_seq_len=max_seq_len,
                query_lens=query_lens_host,
                seq_lens_host=seq_lens_host,
            )
            groups.append(metadata)
        return tuple(groups)

    def _collect(
        self, scheduled: Sequence[ScheduledRequest], token_ids: list[int]
    ) -> list[tuple[int, int, int, int]]:
        """(row, first position, number of tokens, known tokens) of each, its blocks in its row.

        The only loop over the requests of every step: it runs once per output token.

        Args:
            token_ids: gets the tokens to compute.
        """
        collected: list[tuple[int, int, int, int]] = []
        row_of, num_preemptions = self._row_of, self._num_preemptions
        num_blocks, slides = self._num_blocks, self._slides
        for item in scheduled:
            request, num_tokens = item.request, item.num_scheduled_tokens
            row = row_of.get(request)
            if row is None or request.num_preemptions != num_preemptions[row]:
                row = self._place(request, scheduled)
            block_ids, known, start = (
                request.block_ids,
                request.token_ids,
                request.num_computed_tokens,
            )
            if slides or len(block_ids) != num_blocks[row]:
                num_blocks[row] = len(block_ids)
                for block_table in self._block_tables:
                    block_table.extend(row, block_ids)
            if num_tokens == 1:
                token_ids.append(known[start])
            else:
                token_ids += known[start : start + num_tokens]
            collected.append((row, start, num_tokens, len(known)))
        return collected

    def _place(self, request: Request, scheduled: Sequence[ScheduledRequest]) -> int:
        """A row for a request that has none, or whose blocks are others by now."""
        row = self._row_of.get(request)
        if row is None:
            if not self._free_rows:
                self._free_others(scheduled)
            row = self._row_of[request] = self._free_rows.pop()
            self._parameters[row] = parameters_row(request)
            self._random_words.clear(row)
        self._num_preemptions[row] = request.num_preemptions
        self._num_blocks[row] = 0
        for block_table in self._block_tables:
            block_table.clear(row)
        return row

    def _free_others(self, scheduled: Sequence[ScheduledRequest]) -> None:
        """Free the rows of all that this step does not compute: most of them have ended."""
        present = {item.request for item in scheduled}
        for request in [request for request in self._row_of if request not in present]:
            self._free_rows.append(self._row_of.pop(request))

    def _to_device(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device, non_blocking=True) if self._on_gpu else tensor
