"""Adapters made by PEFT over transformers' models; the reference for Baton's adapters.

Refuses to know: what is asserted.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import torch
from torch import Tensor

# Float noise between two ways to sum is about 1e-5 of a logit; a token is certain beyond this.
CLEAR_CUT = 1e-3


@dataclass(frozen=True, slots=True)
class PeftAdapter:
    """An adapter on disk, and a model of transformers that PEFT has adapted."""

    folder: Path
    model: Any

    def logits(self, token_ids: Sequence[int]) -> Tensor:
        """Return ``[num_tokens, vocab_size]`` of the whole sequence."""
        return logits_of(self.model, token_ids)


@torch.inference_mode()
def logits_of(model: Any, token_ids: Sequence[int]) -> Tensor:
    """Return ``[num_tokens, vocab_size]`` of the whole sequence, by a model of transformers."""
    logits: Tensor = model(input_ids=torch.tensor([list(token_ids)]), use_cache=False).logits[0]
    return logits


def make_adapter(theirs: Any, folder: Path, seed: int = 0, **config: Any) -> PeftAdapter:
    """Adapt a copy of a model by random numbers, and save the adapter as PEFT does."""
    torch.manual_seed(seed)
    lora = peft.LoraConfig(init_lora_weights=False, task_type="CAUSAL_LM", **config)
    model = peft.get_peft_model(copy.deepcopy(theirs), lora).eval()
    for name, parameter in model.named_parameters():
        if "lora_" not in name:
            continue
        with torch.no_grad():
            if "magnitude" in name:
                parameter.mul_(torch.empty_like(parameter).uniform_(0.6, 1.5))
            else:
                parameter.uniform_(-0.3, 0.3)
    model.save_pretrained(str(folder), save_embedding_layers=False)
    return PeftAdapter(folder, model)


def logprob_of(model: Any, prompt: Sequence[int], output: Sequence[int]) -> float:
    """Return the log-probability of an output behind a prompt, by a model of transformers."""
    rows = logits_of(model, [*prompt, *output]).log_softmax(-1)[len(prompt) - 1 : -1]
    return float(rows[torch.arange(len(output)), torch.tensor(list(output))].sum())


def greedy_tokens(
    model: Any, prompt: Sequence[int], num_tokens: int, least_margin: float = CLEAR_CUT
) -> list[int] | None:
    """Return a model's greedy output; None if a token is a toss-up.

    Args:
        model: a model of transformers, adapted or not.
        least_margin: distance to the second best token that makes a token certain.
    """
    tokens = list(prompt)
    for _ in range(num_tokens):
        best = logits_of(model, tokens)[-1].topk(2)
        if float(best.values[0] - best.values[1]) <= least_margin:
            return None
        tokens.append(int(best.indices[0]))
    return tokens[len(prompt) :]


def certain_prompts(
    model: Any, num_prompts: int, num_tokens: int, num_outputs: int, vocab_size: int, seed: int = 0
) -> list[tuple[list[int], list[int]]]:
    """Draw prompts whose greedy outputs are certain; return them with their outputs."""
    draw, found = random.Random(seed), list[tuple[list[int], list[int]]]()
    for _ in range(20 * num_prompts):
        prompt = draw.choices(range(3, vocab_size), k=num_tokens)
        output = greedy_tokens(model, prompt, num_outputs)
        if output is not None:
            found.append((prompt, output))
        if len(found) == num_prompts:
            return found
    raise AssertionError("too few random prompts have a certain output")
