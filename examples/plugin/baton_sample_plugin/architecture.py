"""A model architecture: Qwen3 under another name in config.json."""

from __future__ import annotations

from models.families.qwen import Qwen3ForCausalLM

SampleForCausalLM = Qwen3ForCausalLM
