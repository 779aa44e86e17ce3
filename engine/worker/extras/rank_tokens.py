"""RankTokens: the tokens that the leader samples, on every rank of a model.

    leader         samples a step -> sends its tokens
    other ranks    expect the tokens of the step's rows -> receive them before the next step

Refuses to know: how tokens are sampled, steps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from models.parallel.group import ALONE, Ranks


class RankTokens:
    """Sampled tokens that one rank sends or receives; nothing is sent on a single rank.

    Args:
        ranks: the ranks that share the model; the leader samples for all ranks.
        are_sent: whether the leader sends its sampled tokens to the other ranks, as is needed if a
            step may be launched before the planner knows these tokens.

    Attributes:
        leads: whether this rank samples.
        is_last_stage: whether this rank computes logits.
    """

    def __init__(self, ranks: Ranks = ALONE, *, are_sent: bool = False) -> None:
        self.leads, self.is_last_stage = ranks.leads, ranks.is_last_stage
        self._everyone, self._leader = ranks.everyone, ranks.leader
        self._are_sent = are_sent and ranks.everyone.size > 1
        self._rows_to_receive: Tensor | None = None  # rows whose tokens the leader must send

    def send(self, token_ids: Tensor) -> None:
        """Send the leader's sampled tokens to the other ranks, if ``are_sent``."""
        if self._are_sent:
            for rank in range(self._everyone.size):
                if rank != self._leader:
                    self._everyone.send(token_ids, rank)

    def expect(self, rows: Tensor, last_tokens: Tensor) -> None:
        """Note rows whose tokens the leader samples now, after receiving those sampled before.

        Args:
            rows: `[n]`, rows of the batch.
            last_tokens: `[num_rows]`, the last token of each row.
        """
        if self._are_sent and not self.leads:
            self.receive(last_tokens)
            self._rows_to_receive = rows

    def receive(self, last_tokens: Tensor) -> None:
        """Receive the tokens that the leader sampled last, unless they are here already.

        Args:
            last_tokens: `[num_rows]`, the last token of each row; gets the tokens.
        """
        rows, self._rows_to_receive = self._rows_to_receive, None
        if rows is not None:
            token_ids = torch.empty(len(rows), dtype=torch.int64, device=last_tokens.device)
            self._everyone.receive(token_ids, self._leader)
            last_tokens.index_copy_(0, rows, token_ids)

    def receive_instead(self, token_ids: Tensor, num_tokens: int) -> Tensor | None:
        """Receive the leader's tokens instead of those that a captured step has sampled here.

        Args:
            token_ids: the captured step's tokens.
            num_tokens: number of tokens that the leader sends.

        Returns:
            The leader's tokens, `[num_tokens]`; None if no tokens are sent.
        """
        if not self._are_sent:
            return None
        return self._everyone.receive(token_ids.new_empty(num_tokens), self._leader)
