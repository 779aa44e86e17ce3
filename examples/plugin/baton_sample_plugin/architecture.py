"""An architecture: Qwen3 under another name in config.json. A real one has its own recipe."""

from __future__ import annotations

from models.families.qwen import Qwen3ForCausalLM

SampleForCausalLM = Qwen3ForCausalLM
