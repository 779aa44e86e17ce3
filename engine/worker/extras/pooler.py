"""Pooler: computes the results of pooled requests (embeddings, scores) from hidden states.

For mean pooling, a sum of hidden states is kept between the steps of a prompt. Tokens are added one
after the other in float64, so the bits of the sum depend neither on the prompt's chunks nor on
other requests.
"""

from __future__ import annotations

import torch
from torch import Tensor

from baton.api.pooling import PoolingKind
from engine.worker.inputs.pooled_rows import PooledRows
from engine.worker.inputs.prepared_step import PreparedStep
from models.base import CausalLM


class Pooler:
    """Pools the hidden states of one model runner's requests.

    Args:
        is_last_stage: whether this rank's pipeline stage has the last layer; other stages pool
            nothing.
    """

    def __init__(self, model: CausalLM, *, is_last_stage: bool) -> None:
        self._model = model
        self._is_last_stage = is_last_stage
        # For each row of the batch: the sum over the prompt's tokens so far (mean pooling), or the
        # hidden state of the first token (cls).
        self._kept: dict[int, Tensor] = {}

    def pool(self, hidden: Tensor, step: PreparedStep) -> dict[str, Tensor]:
        """Return the float32 results of requests whose prompt ends in this step, by request id.

        Args:
            hidden: `[num_tokens, hidden_size]`, the step's hidden states after the last norm.
        """
        if not self._is_last_stage:
            return {}
        found: dict[str, Tensor] = {}
        for rows in step.pooled:
            own = hidden[rows.first : rows.end]
            if rows.params.needs_all_rows:
                self._keep(own, rows)
            if rows.is_last:
                found[rows.request_id] = self._numbers(own, rows, step)
        return found

    def _keep(self, own: Tensor, rows: PooledRows) -> None:
        """Add a chunk's hidden states to the row's sum, or keep the first state for cls pooling."""
        if rows.params.kind is PoolingKind.CLS:
            if rows.start == 0:
                self._kept[rows.row] = own[0].to(torch.float32, copy=True)
            return
        terms = own.double()
        if rows.start:
            terms = torch.cat([self._kept[rows.row][None], terms])
        self._kept[rows.row] = terms.cumsum(dim=0)[-1].clone()

    def _numbers(self, own: Tensor, rows: PooledRows, step: PreparedStep) -> Tensor:
        """Return a request's pooled result, given its last chunk's hidden states.

        The result is a copy, never a view of the hidden states.
        """
        match rows.params.kind:
            case PoolingKind.CLS:
                return self._kept.pop(rows.row)
            case PoolingKind.MEAN:
                num_tokens = rows.start + rows.end - rows.first
                return (self._kept.pop(rows.row) / num_tokens).float()
            case PoolingKind.LAST:
                return own[-1].to(torch.float32, copy=True)
            case PoolingKind.LABELS:
                return self._model.compute_labels(own[-1:])[0].float()
            case PoolingKind.TOKENS:
                spans = step.model.adapters_of([rows.end - 1])
                logits = self._model.compute_logits(own[-1:], spans)[0]
                token_ids = torch.tensor(rows.params.token_ids, device=logits.device)
                return logits[token_ids].float()
