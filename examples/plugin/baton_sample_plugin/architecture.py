"""An architecture: Llama under another name in config.json. A real one has a recipe of its own."""

from __future__ import annotations

from models.families.llama import LlamaForCausalLM

SampleForCausalLM = LlamaForCausalLM
