"""The table of supported architectures: the name in config.json -> the class that computes it.

Refuses to know: torch (entries are imported when a model is loaded).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.registry import Registry

if TYPE_CHECKING:
    from collections.abc import Callable

    from models.architectures.decoder import DecoderForCausalLM
    from models.config import ModelConfig

MODELS: Registry[Callable[[ModelConfig], DecoderForCausalLM]] = Registry(
    "model architecture",
    {
        "BambaForCausalLM": "models.architectures.hybrids.bamba:BambaForCausalLM",
        "CwmForCausalLM": "models.architectures.cwm:CwmForCausalLM",
        "DeepseekV2ForCausalLM": "models.architectures.deepseek:DeepseekForCausalLM",
        "DeepseekV3ForCausalLM": "models.architectures.deepseek:DeepseekForCausalLM",
        "Lfm2ForCausalLM": "models.architectures.hybrids.lfm2:Lfm2ForCausalLM",
        "Gemma2ForCausalLM": "models.architectures.dense.gemma:Gemma2ForCausalLM",
        "Gemma3ForCausalLM": "models.architectures.dense.gemma:Gemma3ForCausalLM",
        "Gemma3ForConditionalGeneration": "models.architectures.dense.gemma:Gemma3ForCausalLM",
        "GlmForCausalLM": "models.architectures.dense.near_llama:GlmForCausalLM",
        "Glm4ForCausalLM": "models.architectures.dense.near_llama:Glm4ForCausalLM",
        "Glm4MoeForCausalLM": "models.architectures.experts.glm4_moe:Glm4MoeForCausalLM",
        "GptOssForCausalLM": "models.architectures.experts.gpt_oss:GptOssForCausalLM",
        "GraniteForCausalLM": "models.architectures.dense.near_llama:GraniteForCausalLM",
        "GraniteMoeHybridForCausalLM": (
            "models.architectures.hybrids.granite:GraniteMoeHybridForCausalLM"
        ),
        "LlamaForCausalLM": "models.architectures.llama:LlamaForCausalLM",
        "MinistralForCausalLM": "models.architectures.mistral:MinistralForCausalLM",
        "MistralForCausalLM": "models.architectures.mistral:MistralForCausalLM",
        "Mistral3ForConditionalGeneration": "models.architectures.mistral:MistralForCausalLM",
        "MixtralForCausalLM": "models.architectures.experts.mixtral:MixtralForCausalLM",
        "NemotronHForCausalLM": "models.architectures.hybrids.nemotron:NemotronHForCausalLM",
        "Olmo2ForCausalLM": "models.architectures.dense.near_llama:Olmo2ForCausalLM",
        "Olmo3ForCausalLM": "models.architectures.dense.near_llama:Olmo3ForCausalLM",
        "Phi3ForCausalLM": "models.architectures.dense.near_llama:Phi3ForCausalLM",
        "Qwen2ForCausalLM": "models.architectures.qwen2:Qwen2ForCausalLM",
        "Qwen2MoeForCausalLM": "models.architectures.experts.qwen2_moe:Qwen2MoeForCausalLM",
        "Qwen2VLForConditionalGeneration": "models.architectures.qwen2:Qwen2ForCausalLM",
        "Qwen2_5_VLForConditionalGeneration": "models.architectures.qwen2:Qwen2ForCausalLM",
        "Qwen3VLForConditionalGeneration": "models.architectures.qwen3:Qwen3ForCausalLM",
        "Qwen3ForCausalLM": "models.architectures.qwen3:Qwen3ForCausalLM",
        "SeedOssForCausalLM": "models.architectures.seed_oss:SeedOssForCausalLM",
        "Qwen3NextForCausalLM": "models.architectures.hybrids.qwen3_next:Qwen3NextForCausalLM",
        "Qwen3_5ForCausalLM": "models.architectures.hybrids.qwen3_next:Qwen3_5ForCausalLM",
        "Qwen3_5ForConditionalGeneration": (
            "models.architectures.hybrids.qwen3_next:Qwen3_5ForConditionalGeneration"
        ),
        "Qwen3_5MoeForCausalLM": "models.architectures.hybrids.qwen3_next:Qwen3_5ForCausalLM",
        "Qwen3_5MoeForConditionalGeneration": (
            "models.architectures.hybrids.qwen3_next:Qwen3_5ForConditionalGeneration"
        ),
        "Qwen3MoeForCausalLM": "models.architectures.experts.qwen3_moe:Qwen3MoeForCausalLM",
        "SmolLM3ForCausalLM": "models.architectures.dense.near_llama:SmolLM3ForCausalLM",
    },
)
