"""Weights of a GGUF file, one tensor at a time: dequantized, by the names of Hugging Face.

Refuses to know: modules, dtypes to compute in, metadata (`baton/gguf` reads it).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy
import torch
from torch import Tensor

from baton.api.errors import ModelLoadError
from baton.checkpoint.gguf.config import ROPE_FACTORS
from baton.checkpoint.gguf.file import TENSOR_TYPES, GgufFile
from baton.checkpoint.gguf.file import StoredTensor as Place
from baton_kernels import GroupedIntegers
from models.config import ModelConfig
from models.loading.gguf_blocks import unpack_blocks
from models.loading.stored_weights import StoredTensor

_OUTER = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
# One tensor has those of all experts.
_OF_EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
_IN_MIXTRAL = {
    ".mlp.": ".block_sparse_moe.",
    ".gate_proj.": ".w1.",
    ".down_proj.": ".w2.",
    ".up_proj.": ".w3.",
}
_NAME = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<part>\w+)\.(?P<kind>weight|bias)")
# Their files keep the rows of each head of queries and keys in pairs, as the first Llama rotated
# them; Hugging Face rotates the head's first half with its second.
_PAIRED = ("LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM")
_HEADS = ("attn_q", "attn_k")
_SIXTEEN_BITS = {"F16": torch.float16, "BF16": torch.bfloat16}


def read_gguf(path: Path, config: ModelConfig) -> Iterator[StoredTensor]:
    """Yield every tensor; they are read in float32 or in the file's 16-bit type.

    Quantized values are what `gguf.dequantize` makes of them, in float32.

    Raises:
        ModelLoadError: the file is broken, or the `gguf` package is not installed.
    """
    try:
        import gguf  # here: few checkpoints need it
    except ModuleNotFoundError as error:
        raise ModelLoadError(
            f"{path}: {error.name} is not installed; a node needs: pip install 'baton-serve[node]'"
        ) from error

    file = GgufFile.read(path.resolve())
    content = numpy.memmap(file.path, mode="r")

    def read(name: str, stored: Place) -> Tensor:
        blocks = content[stored.start : stored.start + stored.num_bytes]
        sixteen_bits = _SIXTEEN_BITS.get(TENSOR_TYPES[stored.type_id].name)
        if sixteen_bits is None:
            rows = blocks.reshape(*stored.shape[:-1], -1)  # [..., bytes of a row]
            values = gguf.dequantize(rows, gguf.GGMLQuantizationType(stored.type_id))
            tensor = torch.from_numpy(numpy.array(values))  # not the file's own pages
        else:
            tensor = torch.from_numpy(blocks.view(numpy.int16).copy()).view(sixteen_bits)
        return _with_rows_in_order(name, tensor.view(stored.shape), config)

    def read_integers(name: str, stored: Place) -> GroupedIntegers | None:
        kind = TENSOR_TYPES[stored.type_id]
        if len(stored.shape) != 2:
            return None
        blocks = torch.from_numpy(content[stored.start : stored.start + stored.num_bytes].copy())
        num_rows, num_columns = stored.shape
        found = unpack_blocks(kind.name, blocks.view(num_rows, -1, kind.bytes_per_block))
        if found is None or found.numbers.shape != (num_rows, num_columns):
            return None
        return replace(
            found,
            numbers=_with_rows_in_order(name, found.numbers, config),
            groups=found.groups.map(lambda one: _with_rows_in_order(name, one, config)),
        )

    for name, whole in file.tensors.items():
        if name == ROPE_FACTORS:  # those are in the configuration
            continue
        for translated, stored in _places(name, whole):
            if config.architecture == "MixtralForCausalLM":
                for ours, theirs in _IN_MIXTRAL.items():
                    translated = translated.replace(ours, theirs)
            yield StoredTensor(
                file.path,
                translated,
                functools.partial(read, name, stored),
                shape=stored.shape,
                read_integers=functools.partial(read_integers, name, stored),
            )


def _places(name: str, stored: Place) -> Iterator[tuple[str, Place]]:
    """Translate a name, an unknown one stays as it is; of experts each has a tensor of its own."""
    found = _NAME.fullmatch(name)
    layer, part, kind = found.groups() if found else (None, "", "")
    inside = f"model.layers.{layer}"
    if layer is not None and part in _OF_EXPERTS and len(stored.shape) == 3:
        count, shape = stored.shape[0], stored.shape[1:]
        size = stored.num_bytes // count
        for expert in range(count):
            place = Place(stored.type_id, shape, stored.start + expert * size, size)
            yield f"{inside}.mlp.experts.{expert}.{_OF_EXPERTS[part]}.{kind}", place
    elif layer is not None and part in _INNER:
        yield f"{inside}.{_INNER[part]}.{kind}", stored
    elif layer is None and part in _OUTER:
        yield f"{_OUTER[part]}.{kind}", stored
    else:
        yield name, stored


def _with_rows_in_order(name: str, tensor: Tensor, config: ModelConfig) -> Tensor:
    """Put rows in the order that they have in Hugging Face layout."""
    found = _NAME.fullmatch(name)
    part = found and found["layer"] is not None and found["part"]
    if config.architecture in _PAIRED and part in _HEADS:
        num_heads = config.num_heads if part == "attn_q" else config.num_kv_heads
        if tensor.shape[0] == num_heads * config.head_dim:  # else the loader says what is wrong
            return _halves_of_heads(tensor, num_heads)
    return tensor


def _halves_of_heads(tensor: Tensor, num_heads: int) -> Tensor:
    """Reorder each head's rows from pairs to halves: ``0 1 2 3`` were rows ``0 2 1 3``."""
    pairs = tensor.view(num_heads, -1, 2, *tensor.shape[1:])  # [num_heads, head_dim / 2, 2, ...]
    return pairs.transpose(1, 2).reshape(tensor.shape)
