"""Makes tests/numerics/samples: layers of checkpoints that AutoRound and ModelOpt wrote.

Neither tool is a dependency of Baton, because each requires many packages; only the files that they
wrote are kept. To make the files, install both tools in a folder of their own (``pip install
--target FOLDER auto-round nvidia-modelopt``, and packages that are still missing)::

    PYTHONPATH=FOLDER .venv/bin/python -m tools.quantized_samples

Each file has the tensors of two layers of a tiny model. The file's metadata is the configuration,
the tool that wrote it, and the SHA-256 of each weight that the tool's own code dequantized to
float32.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

FOLDER = Path(__file__).parents[1] / "tests" / "numerics" / "samples"
LAYERS = ("model.layers.0.self_attn.k_proj", "model.layers.0.mlp.down_proj")
VOCABULARY = 4096  # as in the demo model, whose tokenizer AutoRound uses

# Returns a layer's dequantized weight, given the layer's name and tensors.
WeightOf = Callable[[str, Mapping[str, Tensor]], Tensor]

AUTO_ROUND: dict[str, tuple[str, dict[str, Any]]] = {
    "auto_round_w4": ("auto_round", {"scheme": "W4A16"}),
    "auto_round_w4_gptqmodel": ("auto_round:gptqmodel", {"scheme": "W4A16", "sym": False}),
    "auto_round_w4_awq": ("auto_round:auto_awq", {"scheme": "W4A16", "sym": False}),
    "auto_round_w8": ("auto_round", {"scheme": "W8A16"}),
    "auto_round_w3": ("auto_round", {"scheme": "W3A16"}),
    "auto_round_w2": ("auto_round", {"scheme": "W2A16", "group_size": 64}),
    "auto_round_mixed": (
        "auto_round",
        {"scheme": "W4A16", "layer_config": {LAYERS[1]: {"bits": 8}, LAYERS[0]: {"bits": 3}}},
    ),
}
MODELOPT = {
    "modelopt_fp8": "FP8_DEFAULT_CFG",
    "modelopt_fp8_rows": "FP8_PER_CHANNEL_PER_TOKEN_CFG",
    "modelopt_fp8_blocks": "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG",
    "modelopt_nvfp4": "NVFP4_DEFAULT_CFG",
    "modelopt_mxfp4": "MXFP4_DEFAULT_CFG",
    "modelopt_mxfp8": "MXFP8_DEFAULT_CFG",
    "modelopt_int4": "INT4_BLOCKWISE_WEIGHT_ONLY_CFG",
    "modelopt_int4_awq": "INT4_AWQ_CFG",
    "modelopt_int8": "INT8_DEFAULT_CFG",
    "modelopt_int8_smooth": "INT8_SMOOTHQUANT_CFG",
}


def digest(weight: Tensor) -> str:
    """Return the SHA-256 of a weight as float32, in which -0.0 counts as 0.0."""
    numbers = (weight.float() + 0.0).contiguous()
    return hashlib.sha256(numbers.numpy().tobytes()).hexdigest()


def tiny_model(folder: Path) -> None:
    """Write a random model of one decoder layer, with the demo model's tokenizer."""
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=128, tie_word_embeddings=True,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            nn.init.normal_(parameter, std=0.05)
    model.bfloat16().save_pretrained(folder)
    demo = Path(__file__).parents[1] / "examples" / "demo_model"
    AutoTokenizer.from_pretrained(demo).save_pretrained(folder)


def by_auto_round(name: str, source: Path, made: Path) -> WeightOf:
    """Quantize with AutoRound by rounding alone; return how to get a layer's weight.

    The weight is the layer's output for an identity matrix.
    """
    from auto_round import AutoRound
    from auto_round.export.export_to_awq.utils import dequantize_gemm
    from transformers import AutoModelForCausalLM, AutoTokenizer

    layout, options = AUTO_ROUND[name]
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    sizes = {layer: model.get_submodule(layer).in_features for layer in LAYERS}
    rounding = AutoRound(
        model, AutoTokenizer.from_pretrained(source), iters=0, disable_opt_rtn=True,
        device_map="cpu", **options,
    )  # fmt: skip
    rounding.quantize_and_save(output_dir=str(made), format=layout)
    (folder,) = {path.parent for path in made.rglob("config.json")}
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, device_map="cpu")

    def weight(layer: str, parts: Mapping[str, Tensor]) -> Tensor:
        if "awq" in name:  # because AutoRound's own AWQ layers need a GPU
            words = (parts["qweight"], parts["qzeros"], parts["scales"])
            unpacked: Tensor = dequantize_gemm(*words, 4, 128)
            return unpacked.T.float()
        found: Tensor = loaded.get_submodule(layer)(torch.eye(sizes[layer]))
        return found.T.float()

    return weight


def by_modelopt(name: str, source: Path, made: Path) -> WeightOf:
    """Quantize with a configuration of ModelOpt; return how its code dequantizes a layer."""
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)

    def calibrate(model: Any) -> None:
        with torch.no_grad():
            model(torch.randint(5, VOCABULARY, (2, 48)))

    export_hf_checkpoint(
        mtq.quantize(model, getattr(mtq, MODELOPT[name]), calibrate), export_dir=made
    )
    return _dequantized


def _dequantized(layer: str, parts: Mapping[str, Tensor]) -> Tensor:
    from modelopt.torch.quantization.qtensor.mxfp4_tensor import MXFP4QTensor
    from modelopt.torch.quantization.qtensor.mxfp8_tensor import MXFP8QTensor
    from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

    weight, scale = parts["weight"], parts["weight_scale"]
    shape = torch.Size((weight.shape[0], 2 * weight.shape[1]))
    if "weight_scale_2" in parts:
        tensor = NVFP4QTensor(shape, torch.float32, weight)
        found = tensor.dequantize(
            scale=scale, double_scale=parts["weight_scale_2"], block_sizes={-1: 16}
        )
    elif weight.dtype == torch.uint8 and scale.dtype == torch.uint8:
        tensor = MXFP4QTensor(shape, torch.float32, weight)
        found = tensor.dequantize(scale=scale, block_sizes={-1: 32})
    elif scale.dtype == torch.uint8:
        found = MXFP8QTensor(weight.shape, torch.float32, weight).dequantize(scale=scale)
    else:  # a format that ModelOpt writes but cannot read
        found = _by_definition(weight, scale)
    if "pre_quant_scale" in parts:
        found = found.float() * parts["pre_quant_scale"].float()
    return found.float()


def _by_definition(weight: Tensor, scale: Tensor) -> Tensor:
    # A byte holds the weights of two outputs, the first in its lower half
    if weight.dtype == torch.uint8:
        halves = [(weight & 15).int(), (weight >> 4).int()]
        halves = [half - 16 * (half > 7) for half in halves]
        weight = torch.stack(halves, dim=1).reshape(-1, weight.shape[1])
    if scale.dim() == 4:
        return weight.float() * scale[:, 0, :, 0].repeat_interleave(128, 0).repeat_interleave(
            128, 1
        )
    if scale.dim() == 2:
        return weight.float() * scale.repeat_interleave(weight.shape[1] // scale.shape[1], 1)
    return weight.float() * scale.reshape(-1, 1)


def main() -> int:
    """Make all samples, or the named ones; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", default=[*AUTO_ROUND, *MODELOPT])
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        source = Path(temporary, "plain")
        tiny_model(source)
        for name in parser.parse_args().names:
            made = Path(temporary, name)
            make, tool = (by_auto_round, "auto-round")
            if name in MODELOPT:
                make, tool = by_modelopt, "nvidia-modelopt"
            weight_of = make(name, source, made)
            (folder,) = {path.parent for path in made.rglob("config.json")}
            config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            tensors: dict[str, Tensor] = {}
            metadata = {
                "quantization_config": json.dumps(config["quantization_config"]),
                "made by": f"{tool} {version(tool)}",
            }
            for path in folder.glob("*.safetensors"):
                with safe_open(path, "pt") as file:
                    tensors |= {one: file.get_tensor(one) for one in file.keys()}  # noqa: SIM118
            kept: dict[str, Tensor] = {}
            for layer in LAYERS:
                of_layer = {n: t for n, t in tensors.items() if n.startswith(layer + ".")}
                parts = {n[len(layer) + 1 :]: t for n, t in of_layer.items()}
                metadata[layer] = digest(weight_of(layer, parts))
                kept |= of_layer
            save_file(kept, FOLDER / f"{name}.safetensors", metadata=metadata)
            print(name, sum(one.nbytes for one in kept.values()), "bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
