"""Layers that draft from the target model's state and the token after it: EAGLE, MTP.

    token t+1 -> embedding (norm) --+
                                    +--> fc --> layer(s) --> (norm) --> head --> token t+2
    state of t ---------- (norm) ---+

Parts in parentheses are optional. Which parts exist, and their names, depends on the checkpoint's
layout (``eagle.py``, ``mtp.py``). EAGLE-3's layer reads embedding and state side by side, without
``fc`` between. Refuses to know: layouts, files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from models.base import AdapterSpan, ForwardContext, Rotations
from models.config import ModelConfig
from models.cpu.decode_tapes import Inputs, Layers, Results
from models.decoder import Decoder, DecoderForCausalLM, DecoderLayer, Elsewhere, make_norm
from models.layers.attention import Attention, make_joined_projection
from models.layers.computing import Computing
from models.recipe import AttentionSpec


@dataclass(frozen=True, slots=True)
class StateLayout:
    """The parts that a drafter's checkpoint has, and their names.

    Attributes:
        names: prefixes of Baton's parameter names -> prefixes in the checkpoint; applied in order.
        state_layers: layers of the target model whose input states are read; empty except for
            EAGLE-3.
        residual_is_normed: whether EAGLE-3's layer adds its results to the normed state, rather
            than to the state before the norm.
        has_embedding, has_head: whether the drafter has its own embedding and head; otherwise it
            uses the target model's.
        head_size: number of tokens that the drafter's head can predict.
        fc_bias: whether ``fc`` has a bias.
        embedding_norm, state_norm, final_norm: whether the drafter has a norm of the token's
            embedding, of the state, and before the head.
        goes_on_normed: whether the final norm is applied to a result before the result becomes the
            state for the next token.
        state_size: size of the target model's states.
    """

    names: Mapping[str, str] = field(default_factory=dict)
    state_layers: tuple[int, ...] = ()
    residual_is_normed: bool = False
    has_embedding: bool = False
    has_head: bool = False
    head_size: int = 0
    picks: bool = False
    fc_bias: bool = False
    embedding_norm: bool = False
    state_norm: bool = False
    final_norm: bool = False
    goes_on_normed: bool = False
    state_size: int = 0


class WideLayer(DecoderLayer, Computing):
    """EAGLE-3's layer (arXiv 2503.01840); its attention reads embedding and state side by side."""

    def __init__(self, config: ModelConfig, residual_is_normed: bool) -> None:
        super().__init__(config, 0)
        self.hidden_norm = make_norm(config)
        self._residual_is_normed = residual_is_normed
        attention, spec = self.self_attn, config.layers[0].mixer
        assert isinstance(attention, Attention)
        assert isinstance(spec, AttentionSpec)
        attention.qkv_proj = make_joined_projection(spec, 2 * config.hidden_size)

    def join(self, embedded: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """Norm embeddings and states, and put each pair side by side.

        Returns the attention's input, ``[n, 2 * hidden_size]``, and the residual stream.
        """
        normed = self.hidden_norm(states)
        before, _ = self._mixer_norms
        joined = self.ops.join(before(embedded), normed)
        return joined, normed if self._residual_is_normed else states

    def attend(
        self, joined: Tensor, residual: Tensor, rotations: Rotations, step: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        """Compute the attention and feed-forward part; return ``(delta, residual)``."""
        before, _ = self._feed_forward_norms
        assert self.mlp is not None, "a drafter's layer has one"
        normed, residual = before.add(self.self_attn(joined, rotations, step), residual)
        return self.mlp(normed), residual


class StateDecoder(Decoder):
    """The drafter's layers, with the embedding and the join of embedding and state."""

    def __init__(self, config: ModelConfig, layout: StateLayout) -> None:
        super().__init__(config)
        self.layout = layout
        width = config.hidden_size
        self.is_wide = bool(layout.state_layers)
        if self.is_wide:
            self.layers = nn.ModuleList([WideLayer(config, layout.residual_is_normed)])
            num_inputs = len(layout.state_layers) * layout.state_size
        else:
            num_inputs = width + layout.state_size
        self.fc: nn.Module = nn.Linear(num_inputs, width, bias=layout.fc_bias)
        if not layout.has_embedding:
            self.embed_tokens = Elsewhere()
        if not layout.final_norm:
            self.norm = Elsewhere()  # type: ignore[assignment]
        self.embedding_norm = make_norm(config) if layout.embedding_norm else None
        self.state_norm = make_norm(config, layout.state_size) if layout.state_norm else None

    def compute(self, embedded: Tensor, states: Tensor, context: ForwardContext) -> Tensor:
        """Compute hidden states of tokens: ``[n, hidden_size]``.

        Args:
            embedded: ``[n, hidden_size]``, embeddings of the tokens.
            states: ``[n, hidden_size]``, states of the previous tokens.
        """
        inputs = [embedded, states, *self.angles(context, embedded.dtype)]

        def layers(given: Sequence[Tensor], step: ForwardContext) -> tuple[Tensor]:
            return (self.compute_layers(given[0], given[1], given[2:], step),)

        return self.run(layers, inputs, context)[0]

    def run(
        self, layers: Layers, inputs: Inputs, context: ForwardContext, *, comes_again: bool = False
    ) -> Results:
        """Compute ``layers(inputs, context)``, from a tape if there are tapes."""
        if self.tapes is None:
            return layers(inputs, context)
        return self.tapes.run(layers, inputs, context, comes_again=comes_again)

    def angles(self, context: ForwardContext, dtype: torch.dtype) -> list[Tensor]:
        """Compute cosines and sines of a step's positions for each rotary embedding."""
        angles: list[Tensor] = []
        for rotary_emb in self.rotary_embs:
            angles += rotary_emb(context.positions, context.max_seq_len, dtype)
        return angles

    def compute_layers(
        self, embedded: Tensor, states: Tensor, angles: Sequence[Tensor], step: ForwardContext
    ) -> Tensor:
        """Compute as `compute` does, but with given cosines and sines of the tokens' positions."""
        if self.embedding_norm is not None:
            embedded = self.embedding_norm(embedded)
        if self.state_norm is not None:
            states = self.state_norm(states)
        rotations = tuple(zip(angles[::2], angles[1::2], strict=True))
        if self.is_wide:
            layer = self.layers[0]
            assert isinstance(layer, WideLayer)
            delta, residual = layer.attend(*layer.join(embedded, states), rotations, step)
        else:
            delta, residual = self.fc(self.ops.join(embedded, states)), None
            for layer in self.layers:
                delta, residual = layer(delta, residual, rotations, step)
        assert residual is not None, "there is a layer"
        if self.layout.goes_on_normed:
            return self.norm.add(delta, residual, self._residual_scale)[0]
        return self.ops.scaled_add(delta, residual, self._residual_scale)


class StateDrafter(DecoderForCausalLM):
    """A ``LayersDrafter`` whose layers read the target model's states.

    Args:
        config: configuration of the drafter's layers.
        layout: the parts that the checkpoint has.
    """

    reads_states = True

    def __init__(self, config: ModelConfig, layout: StateLayout) -> None:
        config = replace(config, tie_word_embeddings=False)
        super().__init__(config)
        self.layout = layout
        self.state_layers = layout.state_layers
        self.model: StateDecoder = StateDecoder(config, layout)
        self.max_model_len = config.max_model_len
        if not layout.has_head:
            self.lm_head = Elsewhere()
        elif layout.head_size != config.vocab_size:
            self.lm_head = nn.Linear(config.hidden_size, layout.head_size, bias=False)
        # The target model's embedding and output head, used if the drafter lacks its own. If the
        # drafter's head predicts only some tokens, `picked` has the token id of each output.
        self._embed: Callable[[Tensor], Tensor] | None = None
        self._logits: Callable[[Tensor], Tensor] | None = None
        self._vocab_size = config.vocab_size
        self.picked: Tensor | None = None  # [head_size] int64

    def share(self, model: DecoderForCausalLM, picked: Tensor | None) -> None:
        """Use the target model's embedding and output head if the drafter lacks its own.

        Args:
            picked: token ids that the drafter's head predicts, ``[head_size]``; None: the head
                predicts all tokens of the vocabulary.
        """
        if not self.layout.has_embedding:
            self._embed = model.model.embed
        if not self.layout.has_head:
            self._logits = model.compute_logits
        self._vocab_size = model.config.vocab_size
        self.picked = picked

    def checkpoint_name(self, name: str) -> str:
        """Return a parameter's name in the drafter's checkpoint."""
        name = super().checkpoint_name(name)
        for ours, theirs in self.layout.names.items():
            if name.startswith(ours):
                name = theirs + name.removeprefix(ours)
        return name

    def take_states(self, states: Tensor) -> Tensor:
        """Convert the target model's states to the input of `compute`, for EAGLE-3 by ``fc``."""
        if not self.model.is_wide:
            return states
        joined: Tensor = self.model.fc(states)
        return joined

    def compute(self, token_ids: Tensor, states: Tensor | None, context: ForwardContext) -> Tensor:
        """Compute hidden states of tokens, and write KV; see ``LayersDrafter.compute``."""
        assert states is not None, "it reads states"
        embed = self._embed or self.model.embed
        return self.model.compute(embed(token_ids), states, context)

    def draft_greedily(
        self, token_ids: Tensor, states: Tensor, context: ForwardContext, num_drafts: int
    ) -> list[int]:
        """Compute one request's tokens, and draft the most probable next ones, in one tape.

        One tape can contain all passes, because the drafts' positions and blocks are known before
        the drafts are.

        Args:
            token_ids: ``[n]`` int64.
            states: ``[n, hidden_size]``, states of the previous tokens.
            num_drafts: number of tokens to draft. All drafts but the last are also computed, to
                draft the next one.
            context: forward context of all passes in sequence: positions ``[n + num_drafts - 1]``,
                and groups of each pass.
        """
        num_tokens, embed = len(token_ids), self._embed or self.model.embed
        num_groups = len(context.groups) // num_drafts

        def draft_all(given: Sequence[Tensor], passes: ForwardContext) -> tuple[Tensor, ...]:
            ids, hidden, *angles = given
            drafts: list[Tensor] = []
            first, end = 0, num_tokens
            for number in range(num_drafts):
                groups = passes.groups[number * num_groups :][:num_groups]
                own = [one[first:end] for one in angles]
                step = replace(passes, groups=groups)
                hidden = self.model.compute_layers(embed(ids), hidden, own, step)[-1:]
                ids = self.ops.largest(self.compute_logits(hidden))
                drafts.append(ids)
                first, end = end, end + 1
            return tuple(drafts)

        inputs = [token_ids, states, *self.model.angles(context, states.dtype)]
        # A request has from 1 to num_drafts + 1 new tokens after a step, so these shapes recur.
        comes_again = num_tokens <= num_drafts + 1
        return torch.cat(
            self.model.run(draft_all, inputs, context, comes_again=comes_again)
        ).tolist()

    def compute_logits(self, hidden: Tensor, adapters: tuple[AdapterSpan, ...] = ()) -> Tensor:
        """Compute the next tokens' logits from results of `compute`; ``adapters`` is ignored."""
        if self.layout.final_norm and not self.layout.goes_on_normed:
            hidden = self.model.norm(hidden)
        if self._logits is not None:
            return self._logits(hidden)
        assert self.lm_head is not None
        logits: Tensor = self.lm_head(hidden)
        if self.picked is None:
            return logits[:, : self._vocab_size]
        every = logits.new_full((len(logits), self._vocab_size), -torch.inf)
        return every.index_copy_(1, self.picked, logits)
