"""LayersDrafting: makes drafts one by one, with a drafter that has its own KV.

The drafter's KV lies in the same blocks as the model's KV, as further layers. In each step, the
drafter reads the tokens that it has not read yet:

    model      computes   t0 t1 t2 | t3           step: samples t4
    drafter    reads      t0 t1 t2 | t3 t4        then t4 -> draft 1 -> draft 2 ...
    or, for a drafter that continues from the model's states (h):
               reads      h0+t1 h1+t2 | h2+t3 h3+t4   then -> draft 1 -> draft 2 ...

KV of wrong drafts is overwritten once the right tokens are known. The drafter reads a prompt in the
step that computes it, so that the drafter's KV is complete when blocks are sent or cached. Output
tokens are read later, when the drafter makes drafts again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from engine.worker.drafting.base import DraftChooser, DraftingStep, Drafts, Sampled, accepted_end
from engine.worker.drafting.passes import MANY_TOKENS, Passes
from models.drafters.base import GreedyDrafter, LayersDrafter

# Maximum number of a request's unread output tokens for which states are stored, to limit memory.
# The drafter skips older tokens, which only makes drafts worse.
MAX_UNREAD = 256


@dataclass(slots=True)
class _Row:
    """How far the drafter has read one request, and what it must read next.

    Attributes:
        position: position of the next token to read.
        token_ids: unread tokens, from ``position`` on.
        states: the model's states that are read with ``token_ids``, if the drafter reads states:
            tensors `[n, ...]` in order.
        drafts: drafts from ``position`` on that the drafter has read already, so that the cache has
            the drafter's KV of these drafts.
    """

    position: int
    token_ids: deque[int] = field(default_factory=deque)
    states: deque[Tensor] = field(default_factory=deque)
    drafts: list[int] = field(default_factory=list)


class LayersDrafting:
    """A drafter of layers with KV; see `engine.worker.drafting.base.Drafting` for the contract.

    Args:
        drafter: computes states and logits of drafts.
        passes: makes the contexts of the drafter's passes.
        num_layers: number of the model's layers; the drafter's layers are numbered after these.
        max_model_len: maximum number of tokens of one request.
        chooser: samples the drafts.
        read_states: returns the states that the latest step had between the model's layers; None:
            the drafter reads the states after the last norm.
        greedy: the drafter, if one call can make all greedy drafts of a request; None: it cannot,
            or rejection sampling is on.
    """

    def __init__(
        self,
        drafter: LayersDrafter,
        passes: Passes,
        num_layers: int,
        max_model_len: int,
        chooser: DraftChooser,
        read_states: Callable[[], Tensor] | None = None,
        greedy: GreedyDrafter | None = None,
    ) -> None:
        self._drafter, self._passes = drafter, passes
        self._num_layers, self._max_model_len = num_layers, max_model_len
        self.chooser = chooser
        self._read_states = read_states
        self._shift = int(drafter.reads_states)
        self._greedy = greedy
        self._rows: dict[int, _Row] = {}
        # Steps that the drafter reads only when drafts are wanted again.
        self._unseen: deque[tuple[DraftingStep, Tensor, Sampled]] = deque(maxlen=MAX_UNREAD)

    def after_step(
        self,
        step: DraftingStep,
        states: Tensor,
        sampled: Sampled,
        after_layer: Callable[[int], None] | None = None,
    ) -> Drafts:
        """Read the step's tokens, now or later, and make drafts; see `Drafting.after_step`."""
        if self._read_states is not None:
            states = self._read_states()
        drafts: Drafts = {}
        if not step.rows:
            pass
        elif step.is_silent:
            self._unseen.append((step, states, sampled))
        else:
            while self._unseen:
                self._note(*self._unseen.popleft(), gone=step.new_rows)
            self.chooser.forget(step.new_rows)
            for row in step.new_rows:
                self._rows.pop(row, None)
            if wanted := self._note(step, states, sampled):
                drafts = self._draft(step, wanted, sampled)
        if after_layer is not None:
            for layer in range(len(self._drafter.kv_layers)):
                after_layer(self._num_layers + layer)
        return drafts

    def _note(
        self, step: DraftingStep, states: Tensor, sampled: Sampled, gone: Set[int] = frozenset()
    ) -> list[int]:
        """Store the tokens of a step as unread; return the indices of requests to read now.

        Args:
            gone: rows that now belong to other requests.
        """
        offset, wanted = 0, []
        for index, row_number in enumerate(step.rows):
            start, num_tokens = step.starts[index], step.num_tokens[index]
            if row_number in gone or row_number in step.undrafted:
                offset += num_tokens
                continue
            row = self._rows.get(row_number)
            if row is None:
                row = self._rows[row_number] = _Row(start)
            own = sampled.get(step.request_ids[index])
            end = accepted_end(step, index, sampled)
            num_right = end - start - (0 if own is None else len(own) - 1)
            known = [*step.token_ids[offset : offset + num_right], *(own or ())]
            if own is None and self._shift:
                known.append(step.next_token_ids[index])
            self._extend(row, start, end, known, states[offset : offset + num_tokens])
            offset += num_tokens
            is_prompt = num_right > 1 or own is None or row_number in step.new_rows
            if row.token_ids and (is_prompt or step.num_drafts):
                wanted.append(index)
        return wanted

    def _extend(
        self, row: _Row, start: int, end: int, known: Sequence[int], states: Tensor
    ) -> None:
        """Append the tokens and states of a step to a request's unread tokens.

        Args:
            known: tokens of positions ``start`` to ``end``. The last token is missing if the
                request sampled no token and the drafter does not read states.
            states: states of the positions from ``start`` on.
        """
        shift = self._shift
        next_position = row.position + len(row.token_ids)
        if start > next_position:  # the tokens before ``start`` were not stored
            row.token_ids.clear()
            row.states.clear()
            row.drafts = []
            row.position = next_position = start + 1 - shift
        if row.drafts:  # the drafter may have read these tokens as drafts
            num_right = 0
            for token_id, draft in zip(known[next_position - start :], row.drafts, strict=False):
                if token_id != draft:
                    break
                num_right += 1
            row.position += num_right
            next_position += num_right
            row.drafts = []
        row.token_ids.extend(known[next_position + shift - start :])
        if shift and end > next_position:
            row.states.append(states[next_position - start : end - start])
        while len(row.token_ids) > MAX_UNREAD and len(known) < MAX_UNREAD:
            self._skip(row)

    def _skip(self, row: _Row) -> None:
        """Skip the oldest unread token of a request."""
        row.token_ids.popleft()
        row.position += 1
        if self._shift:
            first = row.states.popleft()
            if len(first) > 1:
                row.states.appendleft(first[1:])

    # ------------------------------------------------------------------ passes

    def _draft(self, step: DraftingStep, wanted: list[int], sampled: Sampled) -> Drafts:
        """Read all unread tokens, and make drafts after them."""
        rows = [self._rows[step.rows[index]] for index in wanted]
        # The newest token has no KV yet, and perhaps no block.
        lens = [
            min(len(row.token_ids), step.num_held[index] - row.position, self._room(row))
            for index, row in zip(wanted, rows, strict=True)
        ]
        readable = [place for place, num in enumerate(lens) if num > 0]
        wanted = [wanted[place] for place in readable]
        rows, lens = [rows[place] for place in readable], [lens[place] for place in readable]
        if not wanted:
            return {}
        if len(wanted) == 1 and self._may_draft_greedily(
            step, wanted[0], rows[0], lens[0], sampled
        ):
            return self._draft_greedily(step, wanted[0], rows[0], lens[0])
        hidden = self._read(step, wanted, rows, lens)
        going = [
            place
            for place, index in enumerate(wanted)
            if step.num_drafts
            and step.request_ids[index] in sampled
            and not rows[place].token_ids  # the drafter has read all tokens
        ]
        if not going:
            return {}
        last = np.cumsum(lens)[going] - 1
        return self._go_on(
            step, [wanted[p] for p in going], [rows[p] for p in going], hidden[_index(last, hidden)]
        )

    def _room(self, row: _Row) -> int:
        return self._max_model_len - row.position

    def _may_draft_greedily(
        self, step: DraftingStep, index: int, row: _Row, num_unread: int, sampled: Sampled
    ) -> bool:
        """Return whether one call of the drafter can make all drafts of a request."""
        end = row.position + num_unread + step.num_drafts - 1
        return (
            self._greedy is not None
            and step.num_drafts > 0
            and step.request_ids[index] in sampled
            and not step.parameters["temperature"][index]
            and num_unread == len(row.token_ids) < MANY_TOKENS
            and end <= min(step.num_held[index], self._max_model_len)
        )

    def _draft_greedily(self, step: DraftingStep, index: int, row: _Row, num_unread: int) -> Drafts:
        """Make the greedy drafts of a request in one call, because many small calls are slow."""
        assert self._greedy is not None
        context = self._passes.in_a_row(
            step.block_tables, index, row.position, num_unread, step.num_drafts
        )
        states = row.states[0] if len(row.states) == 1 else torch.cat(list(row.states))
        ids = torch.tensor(list(row.token_ids), dtype=torch.int64)
        row.position += num_unread
        row.token_ids.clear()
        row.states.clear()
        taken = self._drafter.take_states(states)
        drafts = self._greedy.draft_greedily(ids, taken, context, step.num_drafts)
        return {step.request_ids[index]: tuple(drafts)}

    def _read(
        self, step: DraftingStep, wanted: list[int], rows: list[_Row], lens: list[int]
    ) -> Tensor:
        """Let the drafter compute unread tokens; return their states, `[num_tokens, width]`."""
        context = self._passes.context(
            step.block_tables, wanted, [row.position for row in rows], lens
        )
        token_ids: list[int] = []
        states: list[Tensor] = []
        for row, num in zip(rows, lens, strict=True):
            token_ids += [row.token_ids.popleft() for _ in range(num)]
            row.position += num
            if self._shift:
                states += row.states
                row.states.clear()
        given = None
        if self._shift:
            joined = states[0] if len(states) == 1 else torch.cat(states)
            given = self._drafter.take_states(joined)
        ids = torch.tensor(token_ids, dtype=torch.int64).to(context.positions.device)
        return self._drafter.compute(ids, given, context)

    def _go_on(
        self, step: DraftingStep, wanted: list[int], rows: list[_Row], hidden: Tensor
    ) -> Drafts:
        """Make drafts one after the other, each computed from the previous draft."""
        drafts: list[list[int]] = [[] for _ in wanted]
        going = list(range(len(wanted)))
        for num_done in range(step.num_drafts):
            logits = self._drafter.compute_logits(hidden)
            # The first draft follows the newest token, which the drafter read last.
            positions = np.array([rows[p].position + self._shift + num_done for p in going])
            indices = [wanted[p] for p in going]
            token_ids = self.chooser.choose(
                *(logits, step.parameters[indices], [step.rows[i] for i in indices], positions)
            )
            for place, token_id in zip(going, token_ids, strict=True):
                drafts[place].append(token_id)
            if num_done + 1 == step.num_drafts:
                break
            fits = [
                i
                for i, place in enumerate(going)
                if rows[place].position + num_done
                < min(step.num_held[wanted[place]], self._max_model_len)
            ]
            if not fits:
                break
            if len(fits) < len(going):
                hidden = hidden[_index(np.array(fits), hidden)]
                going, token_ids = [going[i] for i in fits], [token_ids[i] for i in fits]
            starts = [rows[place].position + num_done for place in going]
            context = self._passes.context(
                step.block_tables, [wanted[place] for place in going], starts, [1] * len(going)
            )
            if not self._shift:
                for place, token_id in zip(going, token_ids, strict=True):
                    rows[place].drafts.append(token_id)
            ids = torch.tensor(token_ids, dtype=torch.int64).to(context.positions.device)
            hidden = self._drafter.compute(ids, hidden if self._shift else None, context)
        names = (step.request_ids[index] for index in wanted)
        return {name: tuple(own) for name, own in zip(names, drafts, strict=True)}


def _index(places: Sequence[int] | np.ndarray, like: Tensor) -> Tensor:
    return torch.as_tensor(places, dtype=torch.int64).to(like.device)
