"""The registry of model families: the names under which files mention a family's models.

All other facts about a family are in `models/families/NAME.py`, which needs no torch and is
imported when a model of the family is used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FamilyNames:
    """The names that config.json and GGUF files give to a family's models.

    Attributes:
        models: names in ``architectures`` of config.json; the family's file has a variable of each
            name.
        gguf: names in ``general.architecture`` of GGUF files; each is a key of the file's ``GGUF``.
    """

    models: Sequence[str]
    gguf: Sequence[str] = ()


# fmt: off
FAMILIES: Mapping[str, FamilyNames] = {
    "bamba": FamilyNames(["BambaForCausalLM"]),
    "cwm": FamilyNames(["CwmForCausalLM"]),
    "deepseek": FamilyNames(["DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"], ["deepseek2"]),
    "gemma": FamilyNames(
        ["Gemma2ForCausalLM", "Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"],
        ["gemma2", "gemma3"],
    ),
    "gemma4": FamilyNames(["Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"], ["gemma4"]),
    "glm": FamilyNames(
        ["GlmForCausalLM", "Glm4ForCausalLM", "Glm4MoeForCausalLM"], ["chatglm", "glm4", "glm4moe"]
    ),
    "gpt_oss": FamilyNames(["GptOssForCausalLM"], ["gpt-oss"]),
    "granite": FamilyNames(
        ["GraniteForCausalLM", "GraniteMoeHybridForCausalLM"],
        ["granite", "granitemoe", "granitehybrid"],
    ),
    "lfm2": FamilyNames(["Lfm2ForCausalLM"], ["lfm2"]),
    "llama": FamilyNames(
        ["Idefics3ForConditionalGeneration", "LlamaForCausalLM",
         "SmolVLMForConditionalGeneration"],
        ["llama"],
    ),
    "mistral": FamilyNames(
        ["LlavaForConditionalGeneration", "MinistralForCausalLM", "MistralForCausalLM",
         "Mistral3ForConditionalGeneration", "MixtralForCausalLM"],
        ["mistral3"],
    ),
    "nemotron_h": FamilyNames(["NemotronHForCausalLM"], ["nemotron_h", "nemotron_h_moe"]),
    "olmo": FamilyNames(["Olmo2ForCausalLM", "Olmo3ForCausalLM"], ["olmo2"]),
    "phi3": FamilyNames(["Phi3ForCausalLM"], ["phi3"]),
    "qwen": FamilyNames(
        ["Qwen2ForCausalLM", "Qwen2MoeForCausalLM", "Qwen2VLForConditionalGeneration",
         "Qwen2_5_VLForConditionalGeneration", "Qwen3VLForConditionalGeneration",
         "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "Qwen3VLMoeForConditionalGeneration"],
        ["qwen2", "qwen2moe", "qwen2vl", "qwen3", "qwen3moe", "qwen3vl", "qwen3vlmoe"],
    ),
    "qwen3_next": FamilyNames(
        ["Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration",
         "Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"],
        ["qwen3next", "qwen35", "qwen35moe"],
    ),
    "seed_oss": FamilyNames(["SeedOssForCausalLM"], ["seed_oss"]),
    "smollm3": FamilyNames(["SmolLM3ForCausalLM"], ["smollm3"]),
}
# fmt: on
# Name of a model in config.json -> module and variable that describe the model.
ARCHITECTURES: Mapping[str, str] = {
    name: f"models.families.{file}:{name}"
    for file, names in FAMILIES.items()
    for name in names.models
}
# Name of a model in a GGUF file -> module and variable of the table that has a row for the name.
GGUF_ARCHITECTURES: Mapping[str, str] = {
    name: f"models.families.{file}:GGUF" for file, names in FAMILIES.items() for name in names.gguf
}
