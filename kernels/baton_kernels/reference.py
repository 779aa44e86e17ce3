"""The definition of every op in plain torch; faster kernels are tested against it.

Arithmetic is in float32 wherever Hugging Face's models use float32. So a float32 model agrees with
``transformers`` closely, and a bfloat16 model rounds at the same places. Refuses to know: devices,
models, how requests are batched.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from baton_kernels.low_rank import LowRankSlots, LowRankSpan
from baton_kernels.packed import FLOAT8, Float8Rows, GroupedIntegers, PackedWeight, rounded_inputs
from baton_kernels.quantized import QuantizedWeight, RoundedWeight, rounded_rows
from baton_kernels.recurrent import causal_conv as causal_conv
from baton_kernels.recurrent import gated_delta_rule as gated_delta_rule
from baton_kernels.recurrent import gated_rms_norm as gated_rms_norm
from baton_kernels.recurrent import selective_scan as selective_scan
from baton_kernels.routing import ALL_EXPERTS, ExpertShare, Routing, Scoring
from baton_kernels.row_tiles import RowTiles

# The dtype of a quantized KV cache (Micikevicius et al., arXiv:2209.05433). Reading does not round,
# because all wider dtypes represent every float8 number exactly.
FP8 = FLOAT8
FP8_MAX = 448.0
# gpt-oss clamps both halves of a gated unit (OpenAI, arXiv:2508.10925).
CLAMPED_SWIGLU = "clamped_swiglu"
SWIGLU_LIMIT = 7.0
SWIGLU_ALPHA = 1.702  # factor in the argument of gpt-oss's sigmoid


def _clamped_swish(gate: Tensor) -> Tensor:
    wide = gate.float().clamp(max=SWIGLU_LIMIT)
    return (wide * (SWIGLU_ALPHA * wide).sigmoid()).to(gate.dtype)


# Squared ReLU, the activation of experts and MLPs without gates.
RELU2 = "relu2"
# Activations of gates; "gelu_tanh" is gelu's approximation (Hendrycks and Gimpel,
# arXiv:1606.08415).
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu_tanh": functools.partial(functional.gelu, approximate="tanh"),
    "gelu": functional.gelu,
    CLAMPED_SWIGLU: _clamped_swish,
    "sigmoid": torch.sigmoid,
    "relu": functional.relu,
}


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension (Zhang and Sennrich, arXiv:1910.07467).

    Args:
        x: ``[..., size]``.
        weight: ``[size]``, or anything that broadcasts against ``x``.
        eps: added to the mean square.

    Returns:
        ``[..., size]`` in the dtype of ``x``. The normalized value is rounded to this dtype before
        the weight is applied, as in Hugging Face's Llama. But if the weight is float32 and ``x`` is
        not, the weight is applied before rounding, as in Gemma and OLMo.
    """
    wide = x.float()  # [..., size]
    inverse_rms = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)  # [..., 1]
    if weight.dtype != x.dtype:
        return (weight * (wide * inverse_rms)).to(x.dtype)
    return weight * (wide * inverse_rms).to(x.dtype)


def scaled_add(x: Tensor, residual: Tensor, factor: float = 1.0, sum_factor: float = 1.0) -> Tensor:
    """Return ``(residual + x * factor) * sum_factor``.

    The first product is rounded before the sum, and the sum before the second product, unless the
    factor is 1.

    Args:
        x: ``[num_tokens, hidden_size]``, the output of a layer.
        residual: ``[num_tokens, hidden_size]``, the residual stream; not changed.
        factor: factor of the layer's output (Granite's residual multiplier).
        sum_factor: factor of the sum (Gemma 4's layer scalar).
    """
    total = residual + (x if factor == 1.0 else x * factor)
    return total if sum_factor == 1.0 else total * sum_factor


def join(x: Tensor, y: Tensor) -> Tensor:
    """Append each row of ``y``, ``[n, b]``, to a row of ``x``, ``[n, a]``: ``[n, a + b]``."""
    return torch.cat([x, y], dim=-1)


def largest(x: Tensor) -> Tensor:
    """Return the index of each row's largest number, the first if several are equal: ``[n]``."""
    return torch.from_numpy(x.float().numpy().argmax(axis=-1)) if x.is_cpu else x.argmax(dim=-1)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, factor: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Add a layer's output to the residual stream, and normalize the sum.

    Args:
        x: ``[num_tokens, hidden_size]``, the output of a layer.
        residual: ``[num_tokens, hidden_size]``, not changed.
        weight: ``[hidden_size]``.
        eps: added to the mean square.
        factor: factor of ``x``, as in :func:`scaled_add`.

    Returns:
        ``(rms_norm(sum), sum)`` of ``scaled_add(x, residual, factor)``.
    """
    new_residual = scaled_add(x, residual, factor)  # [num_tokens, hidden_size]
    return rms_norm(new_residual, weight, eps), new_residual


def rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys by their positions (RoPE: Su et al., arXiv:2104.09864).

    Dimension ``i`` of the first half is paired with dimension ``i`` of the second half ("neox"
    style)::

        | x1 (rotary_dim / 2) | x2 (rotary_dim / 2) | untouched (head_dim - rotary_dim) |

    Args:
        query: ``[num_tokens, num_heads, head_dim]``.
        key: ``[num_tokens, num_kv_heads, head_dim]``.
        cos: ``[num_tokens, rotary_dim]``, two equal halves of cosines; ``rotary_dim <= head_dim``.
        sin: ``[num_tokens, rotary_dim]`` sines, laid out like ``cos``.

    Returns:
        The rotated query and key, new tensors.
    """
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)  # [num_tokens, 1, rotary_dim]
    return _rotate(query, cos, sin), _rotate(key, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    rotary_dim = cos.shape[-1]
    turning = x[..., :rotary_dim]  # [num_tokens, heads, rotary_dim]
    x1, x2 = turning.chunk(2, dim=-1)  # [num_tokens, heads, rotary_dim / 2]
    turned = turning * cos + torch.cat((-x2, x1), dim=-1) * sin  # [num_tokens, heads, rotary_dim]
    if rotary_dim == x.shape[-1]:
        return turned
    return torch.cat((turned, x[..., rotary_dim:]), dim=-1)


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return ``silu(gate) * up``, as in SwiGLU (Shazeer, arXiv:2002.05202).

    Args:
        gate_up: ``[..., 2 * size]``, gates in the first half, ups in the second.

    Returns:
        ``[..., size]``.
    """
    return gated_mul(gate_up, "silu")


def gated_mul(gate_up: Tensor, activation: str) -> Tensor:
    """Return ``activation(gate) * up`` for the halves of each row (Shazeer, arXiv:2002.05202).

    Args:
        gate_up: ``[..., 2 * size]``, gates in the first half, ups in the second.
        activation: one of ``ACTIVATIONS``. With ``CLAMPED_SWIGLU``, gates and ups are clamped, and
            1 is added to the ups.

    Returns:
        ``[..., size]``.
    """
    gate, up = gate_up.chunk(2, dim=-1)  # each [..., size]
    if activation == CLAMPED_SWIGLU:
        up = up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT) + 1
    return ACTIVATIONS[activation](gate) * up


def gate_mul(gate: Tensor, x: Tensor, activation: str) -> Tensor:
    """Return ``activation(gate) * x``; with ``relu`` and equal tensors, this is a squared ReLU.

    Args:
        gate: ``[num_rows, size]``, rows of any stride.
        x: ``[num_rows, size]``, rows of any stride.
        activation: one of ``ACTIVATIONS``, except ``CLAMPED_SWIGLU``.
    """
    return ACTIVATIONS[activation](gate) * x


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """Return ``cap * tanh(x / cap)`` of logits (Gemma 2, arXiv:2408.00118), in float32.

    Args:
        x: ``[..., size]``.
        cap: limit that the results' magnitude approaches.
    """
    return (cap * torch.tanh(x.float() / cap)).to(x.dtype)


def attend_runs(query: Tensor, keys_values: Tensor, runs: Sequence[tuple[int, int]]) -> Tensor:
    """Attend among all rows of each run, such as the patches of an image, in both directions.

    Args:
        query: ``[num_rows, num_heads, head_dim]``.
        keys_values: ``[num_rows, 2, num_heads, head_dim]``, any strides.
        runs: pairs ``(count, length)``: ``count`` adjacent runs of ``length`` rows each.

    Returns:
        ``[num_rows, num_heads, head_dim]``; scores are scaled by ``head_dim ** -0.5``.
    """
    found, first = [], 0
    for count, length in runs:
        rows = slice(first, first + count * length)
        queries, keys, values = (
            one[rows].view(count, length, *one.shape[1:]).transpose(1, 2)
            for one in (query, *keys_values.unbind(1))
        )  # each [count, num_heads, length, head_dim]
        attended = functional.scaled_dot_product_attention(queries, keys, values)
        found.append(attended.transpose(1, 2).flatten(0, 1))
        first += count * length
    return torch.cat(found)


def quantize_fp8(x: Tensor, scale: float) -> Tensor:
    """Round ``x / scale`` to the nearest float8; numbers out of range become 448 or -448.

    NaN stays NaN.
    """
    return (x.float() * (1 / scale)).clamp(-FP8_MAX, FP8_MAX).to(FP8)


def store_kv(
    key: Tensor,
    value: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    *,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> None:
    """Write this step's keys and values into one layer of the paged cache, in place.

    Args:
        key: ``[num_tokens, num_kv_heads, head_dim]``.
        value: ``[num_tokens, num_kv_heads, head_dim]``.
        kv_cache: ``[num_blocks, 2, num_kv_heads, block_size, head_dim]``, any strides.
        slot_mapping: ``[num_tokens]`` int64, ``block_id * block_size + offset``; -1 marks a
            padding token, which is not written.
        key_scale: scale of keys in an ``FP8`` cache: a key is the stored number times the scale;
            ignored for other caches.
        value_scale: scale of values in an ``FP8`` cache, used in the same way.
    """
    if kv_cache.dtype == FP8:
        key, value = quantize_fp8(key, key_scale), quantize_fp8(value, value_scale)
    block_size = kv_cache.shape[3]
    blocks = torch.div(slot_mapping, block_size, rounding_mode="floor")  # [num_tokens]
    offsets = slot_mapping - blocks * block_size  # [num_tokens]
    # Padding tokens have slot -1, so block -1, which indexing would take for the last block.
    if bool((blocks < 0).any()):
        written = blocks >= 0  # [num_tokens]
        blocks, offsets = blocks[written], offsets[written]
        key, value = key[written], value[written]
    by_slot = kv_cache.transpose(2, 3)  # [num_blocks, 2, block_size, num_kv_heads, head_dim]
    by_slot[:, 0][blocks, offsets] = key
    by_slot[:, 1][blocks, offsets] = value


def norm_rotary_store(
    qkv: Tensor,
    num_heads: int,
    cos: Tensor,
    sin: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor | None,
    *,
    query_weight: Tensor | None = None,
    key_weight: Tensor | None = None,
    value_weight: Tensor | None = None,
    eps: float = 0.0,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> Tensor:
    """Normalize and rotate the queries and keys of a fused projection; store keys and values.

    Args:
        qkv: ``[num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]``: heads of queries, keys and
            values. Further whole heads at the end of a row, such as gates, are not read.
        num_heads: number of query heads; ``kv_cache`` tells the other sizes.
        cos: ``[num_tokens, rotary_dim]``, cosines of the rotation.
        sin: ``[num_tokens, rotary_dim]``, sines of the rotation.
        kv_cache: one layer of the paged cache, see :func:`store_kv`; receives this step's values
            and rotated keys.
        slot_mapping: ``[num_tokens]`` int64, each token's slot in the cache; -1: padding. None:
            rows of ``qkv`` have only heads of queries, and nothing is stored, because the layer
            reads another layer's keys and values.
        query_weight: weight of the norm over each query head, ``[head_dim]``, or over all query
            heads, ``[num_heads * head_dim]``; None: no norm.
        key_weight: weight of the keys' norm, ``[head_dim]`` or ``[num_kv_heads * head_dim]``; None:
            no norm.
        value_weight: weight of the norm over each value head, ``[head_dim]``; None: no norm.
        eps: added to the mean square.
        key_scale: scale of keys in an ``FP8`` cache.
        value_scale: scale of values in an ``FP8`` cache.

    Returns:
        The rotated queries, ``[num_tokens, num_heads, head_dim]``, a new tensor.
    """
    num_kv_heads, head_dim = kv_cache.shape[2], kv_cache.shape[4]
    heads = qkv.view(len(qkv), -1, head_dim)  # [num_tokens, heads, head_dim]
    query, key = heads[:, :num_heads], heads[:, num_heads : num_heads + num_kv_heads]
    value = heads[:, num_heads + num_kv_heads : num_heads + 2 * num_kv_heads]
    if query_weight is not None:
        query = _norm_of_heads(query, query_weight, eps)
    if slot_mapping is None:
        return _rotate(query, cos.unsqueeze(1), sin.unsqueeze(1)).contiguous()
    if key_weight is not None:
        key = _norm_of_heads(key, key_weight, eps)
    if value_weight is not None:
        value = _norm_of_heads(value, value_weight, eps)
    query, key = rotary(query, key, cos, sin)
    store_kv(key, value, kv_cache, slot_mapping, key_scale=key_scale, value_scale=value_scale)
    return query


def _norm_of_heads(heads: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Apply RMS norm to each head, or to all heads together, as the weight's size tells.

    Heads are ``[num_tokens, heads, head_dim]``.
    """
    if len(weight) == heads.shape[-1]:
        return rms_norm(heads, weight, eps)
    return rms_norm(heads.flatten(1), weight, eps).view(heads.shape)


def norm_rotary_store_latent(
    query: Tensor,
    latent: Tensor,
    cos: Tensor,
    sin: Tensor,
    cache: Tensor,
    slot_mapping: Tensor,
    *,
    weight: Tensor,
    eps: float,
    interleaved: bool,
    out: Tensor,
) -> None:
    """Normalize, rotate and store latents, and rotate queries, before attention over latents.

    This is a part of multi-head latent attention (DeepSeek-AI, arXiv:2405.04434, section 2.1).

    Args:
        query: ``[num_tokens, num_heads, rotary_dim]``, the part of each head to rotate; any strides
            of tokens and heads.
        latent: ``[num_tokens, rank + rotary_dim]``: the part to normalize, then the part to rotate,
            which is a key of all heads.
        cos: ``[num_tokens, rotary_dim]``, cosines of the rotation.
        sin: ``[num_tokens, rotary_dim]``, sines of the rotation.
        cache: ``[num_blocks, block_size, rank + rotary_dim]``, any strides of blocks and tokens;
            receives this step's latents.
        slot_mapping: ``[num_tokens]`` int64, each token's slot in the cache; -1: padding.
        weight: ``[rank]``, weight of the norm.
        eps: epsilon of the norm.
        interleaved: whether the dims of a pair are adjacent, ``x0 y0 x1 y1 ..``. The result always
            has halves, ``x0 x1 .. y0 y1 ..``; this changes no dot product, because queries and keys
            are reordered alike.
        out: ``[num_tokens, num_heads, rotary_dim]``; receives the rotated query.
    """
    rank, block_size = len(weight), cache.shape[1]
    key = latent[:, None, rank:]  # [num_tokens, 1, rotary_dim]
    if interleaved:
        query, key = (torch.cat((x[..., ::2], x[..., 1::2]), dim=-1) for x in (query, key))
    rotated, key = rotary(query, key, cos, sin)
    out.copy_(rotated)
    written = slot_mapping >= 0  # [num_tokens]
    slots = slot_mapping[written]
    row = torch.cat((rms_norm(latent[:, :rank], weight, eps), key[:, 0]), dim=-1)
    cache[slots // block_size, slots % block_size] = row[written]


def grouped_packed_linear(x: Tensor, weight: PackedWeight, out: Tensor) -> None:
    """Multiply each group of inputs by the group's block of a block-diagonal weight.

    Args:
        x: ``[num_tokens, num_groups, in_features]``, any strides.
        weight: one block per group, each with ``n`` outputs, padded to whole panels
            (`PackedWeight.in_whole_panels`). The weight's format has no codes, and there is no
            bias.
        out: ``[num_tokens, num_groups, n]``, any strides; receives the result.
    """
    groups = weight.unpacked().view(x.shape[1], -1, x.shape[2])[:, : out.shape[2]]
    out.copy_(torch.einsum("tgi,gni->tgn", x.float(), groups))


def pack_rows(weight: PackedWeight, first_row: int, rows: Tensor) -> None:
    """Round rows to a packed weight's format, and write them into its panels.

    Args:
        weight: the weight to write to.
        first_row: index of the first row to write.
        rows: ``[n, in_features]``, float64, float32, bfloat16 or float16.
    """
    weight.write_rows(first_row, rows)


def pack_float8(weight: PackedWeight, first_row: int, rows: Float8Rows) -> None:
    """Write rows that a checkpoint stores in float8 into a weight's panels, unchanged.

    Args:
        weight: a weight of format `FP8`, with groups of the size that the rows have.
        first_row: index of the first row to write.
        rows: ``[n, in_features]``.
    """
    weight.write_float8(first_row, rows)


def pack_integers(weight: PackedWeight, first_row: int, integers: GroupedIntegers) -> None:
    """Write rows that a checkpoint stores as integers into a weight's panels.

    Args:
        weight: the weight to write to.
        first_row: index of the first row to write.
        integers: the rows, in the layout of the weight.
    """
    weight.write_integers(first_row, integers)


def unpack_rows(weight: PackedWeight, ids: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Read rows of a packed weight.

    Args:
        weight: the weight to read.
        ids: ``[...]`` int64, indices of rows (outputs).
        dtype: dtype of the result; None: the panels' dtype, or float32 for quantized formats.

    Returns:
        ``[..., in_features]``.

    Raises:
        IndexError: an id is out of range.
    """
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < weight.out_features:
        raise IndexError("a row that the weight does not have")
    rows = weight.read_rows(ids)
    return rows if dtype is None else rows.to(dtype)


def packed_linear(x: Tensor, weight: PackedWeight) -> Tensor:
    """Apply a linear layer with a packed weight.

    Args:
        x: ``[..., in_features]``.
        weight: weight of ``out_features`` outputs.

    Returns:
        ``[..., out_features]`` in the dtype of ``x``; computed in float32. If the weight has codes,
        the inputs are first rounded to 8 bits.
    """
    inputs = rounded_inputs(x, weight) if weight.format.code_bits else x.float()
    return functional.linear(inputs, weight.unpacked(), weight.bias).to(x.dtype)


def add_low_rank(out: Tensor, x: Tensor, spans: Sequence[LowRankSpan]) -> None:
    """Add the products of LoRA adapters to rows of a layer's output, in place (`LowRank`).

    ``x @ A.T`` is rounded to the dtype of ``x``, and the result is rounded once.

    Args:
        out: ``[num_rows, out_features]``, the layer's own results.
        x: ``[num_rows, in_features]``, the layer's input.
        spans: the rows that use an adapter, with its matrices; other rows are not changed. No row
            is in two spans.
    """
    for span in spans:
        rows, low_rank = slice(span.first, span.end), span.low_rank
        middle = packed_linear(x[rows], low_rank.a)  # [n, rank]
        for part in low_rank.parts:
            own = out[rows, part.columns]  # [n, num_columns], a view
            sums = packed_scores(middle[:, part.ranks], part.b)
            if part.shifts is not None:
                sums = sums + part.shifts
            own.copy_(sums + (own if part.gains is None else own.float() * part.gains))


def add_low_rank_by_slot(
    out: Tensor, x: Tensor, slots: LowRankSlots, ids: Tensor, tiles: RowTiles
) -> None:
    """Add the product of each row's adapter to a layer's output, in place (`LowRankSlots`).

    ``x @ A.T`` is rounded to the dtype of ``x``, and the result is rounded once.

    Args:
        out: ``[num_rows, out_features]``, the layer's own results.
        x: ``[num_rows, in_features]``, the layer's input.
        slots: the adapters' matrices.
        ids: ``[num_rows]`` int64, the slot of each row's adapter; ``num_slots``: no adapter.
        tiles: rows sorted by slot: `RowTiles` of ``ids`` with ``num_slots + 1`` weights. All layers
            of a step use the same tiles.
    """
    for slot, ranks in enumerate(slots.ranks.tolist()):
        rows = (ids == slot).nonzero()[:, 0]
        for part, rank in enumerate(ranks):
            if not rank:
                continue
            columns = slots.columns(part)
            middle = functional.linear(x[rows].float(), slots.a[slot, part, :rank].float())
            up = slots.b[slot, columns, :rank].float()
            sums = functional.linear(middle.to(x.dtype).float(), up)  # [n, num_columns]
            own = out[rows, columns].float()
            if slots.gains is not None and slots.shifts is not None:
                own = own * slots.gains[slot, columns] + slots.shifts[slot, columns]
            out[rows, columns] = (own + sums).to(out.dtype)


def quantized_linear(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    """Apply a linear layer with a quantized weight in a layout for GPUs.

    Args:
        x: ``[..., in_features]``.
        weight: the weight; if this is a `RoundedWeight`, ``x`` is first rounded to its dtype, token
            by token.
        bias: ``[out_features]``.

    Returns:
        ``[..., out_features]`` in the dtype of ``x``; computed in float32.
    """
    if isinstance(weight, RoundedWeight):
        rows = x.reshape(-1, weight.in_features)
        numbers, scales = rounded_rows(rows, weight.numbers.dtype, weight.group_size)
        wide = scales.repeat_interleave(weight.group_size, dim=1)[:, : weight.in_features]
        inputs = (numbers.float() * wide).view(x.shape)
    else:
        inputs = x.float()
    bias = None if bias is None else bias.float()
    return functional.linear(inputs, weight.dequantized(), bias).to(x.dtype)


def invariant_linear(x: Tensor, weight: Tensor, bias: Tensor | None, arrived: Tensor) -> Tensor:
    """Apply a linear layer so that a token's result does not depend on other tokens of the batch.

    Args:
        x: ``[..., in_features]``.
        weight: ``[out_features, in_features]``, rows of any stride.
        bias: ``[out_features]``.
        arrived: ``[out_features]`` int32, where the kernel counts finished parts of each sum; zero
            between launches.

    Returns:
        ``[..., out_features]`` in the dtype of ``x``. Only the kernel, not this definition, gives
        equal bits in every batch.
    """
    return functional.linear(x, weight, bias)


def packed_scores(x: Tensor, weight: PackedWeight) -> Tensor:
    """Apply a linear layer with a packed weight; the result is float32 for any dtype of ``x``."""
    return packed_linear(x.float(), weight)


def route(
    logits: Tensor, routing: Routing, bias: Tensor | None = None, scales: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Choose each token's experts.

    Args:
        logits: ``[num_tokens, num_experts]``.
        routing: the rule by which experts are chosen and weighted.
        bias: ``[num_experts]`` float32, added to the scores when experts are chosen, but not when
            they are weighted; None: no bias.
        scales: ``[num_experts]`` float32, a factor of each expert's weights, applied last; None: no
            such factors.

    Returns:
        The experts, ``[num_tokens, top_k]`` int64, the best first, and their weights, float32 of
        the same shape.
    """
    scores = logits.float()
    if routing.scoring == Scoring.SOFTMAX:
        scores = scores.softmax(dim=-1)
    elif routing.scoring == Scoring.SIGMOID:
        scores = scores.sigmoid()
    choice = scores if bias is None else scores + bias
    if routing.num_groups > 1:
        groups = choice.view(len(choice), routing.num_groups, -1)
        best = groups.topk(min(routing.group_best, groups.shape[2]), dim=-1).values.sum(dim=-1)
        others = best.sort(dim=-1, descending=True, stable=True).indices[:, routing.top_groups :]
        is_other = torch.zeros_like(best, dtype=torch.bool).scatter(1, others, value=True)
        choice = groups.masked_fill(is_other.unsqueeze(2), -torch.inf).flatten(1)
    ids = choice.sort(dim=-1, descending=True, stable=True).indices[:, : routing.top_k]
    weights = scores.gather(1, ids)
    if routing.scoring == Scoring.SOFTMAX_OF_CHOSEN:
        weights = weights.softmax(dim=-1)
    if routing.normalize:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    weights = weights * routing.scale
    return ids.contiguous(), weights if scales is None else weights * scales[ids]


def experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    base: Tensor | None = None,
    base_gate: Tensor | None = None,
    *,
    biases: tuple[Tensor, Tensor] | None = None,
    activation: str = "silu",
    invariant: bool = False,
    share: ExpertShare = ALL_EXPERTS,
    loads: Tensor | None = None,
) -> Tensor:
    """Apply each token's experts, which are gated MLPs, and sum their weighted results.

    Args:
        x: ``[num_tokens, hidden_size]``.
        ids: ``[num_tokens, top_k]`` int64, each token's experts.
        weights: ``[num_tokens, top_k]`` float32, factors of the experts' results.
        gate_up: ``[num_experts, 2 * inner_size, hidden_size]``, gates before ups; with ``RELU2``,
            which has no gates, ``[num_experts, inner_size, hidden_size]``.
        down: ``[num_experts, hidden_size, inner_size]``.
        base: ``[num_tokens, hidden_size]``, results of shared experts, to be added; None: none.
        base_gate: ``[num_tokens, 1]`` float32 logits, whose sigmoid scales ``base``; None: ``base``
            is not scaled.
        biases: biases of ``gate_up``, ``[num_experts, 2 * inner_size]``, and of ``down``,
            ``[num_experts, hidden_size]``.
        activation: activation of the gates, one of ``ACTIVATIONS``, or ``RELU2``.
        invariant: whether a token's result must have equal bits in every batch; ignored by this
            definition.
        share: the experts whose weights are given, if ranks divide the experts. The results of all
            other experts count as 0, so that the sum over all ranks is the mixture's result.
        loads: two int64 sums. The number of rows of the busiest rank is added to the first, and the
            number of rows of all ranks to the second. A row is a pair of a token and one of its
            experts. None: rows are not counted.

    Returns:
        ``[num_tokens, hidden_size]``; summed in the order of ``ids``, in float32.
    """

    def compute(expert: int, rows: Tensor) -> Tensor:
        of_halves, of_down = (None, None) if biases is None else (one[expert] for one in biases)
        halves = functional.linear(rows, gate_up[expert], of_halves)
        return functional.linear(_middle(halves, activation), down[expert], of_down)

    return _mix_experts(x, ids, weights, compute, base, base_gate, share, loads)


def packed_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: PackedWeight,
    down: PackedWeight,
    base: Tensor | None = None,
    base_gate: Tensor | None = None,
    *,
    activation: str = "silu",
    share: ExpertShare = ALL_EXPERTS,
    loads: Tensor | None = None,
) -> Tensor:
    """Compute `experts` with packed weights, each of which holds all experts, one after another.

    Each expert's gates, ups and outputs are padded to whole panels
    (`PackedWeight.in_whole_panels`). If weights have codes, inputs are first rounded
    (``rounded_inputs``). The packed weights contain the biases.
    """
    hidden = x.shape[1]
    all_halves, all_downs = gate_up.unpacked(), down.unpacked()

    def multiply(rows: Tensor, weight: PackedWeight, every: Tensor, part: slice) -> Tensor:
        inputs = rounded_inputs(rows, weight) if weight.format.code_bits else rows.float()
        bias = None if weight.bias is None else weight.bias[part]
        return functional.linear(inputs, every[part], bias).to(rows.dtype)

    def compute(expert: int, rows: Tensor) -> Tensor:
        size = gate_up.in_whole_panels(down.in_features) * (1 if activation == RELU2 else 2)
        of_middle = slice(expert * size, (expert + 1) * size)
        start = expert * down.in_whole_panels(hidden)
        of_hidden = slice(start, start + hidden)
        halves = multiply(rows, gate_up, all_halves, of_middle)
        middle = _middle(halves, activation)[:, : down.in_features]
        return multiply(middle, down, all_downs, of_hidden)

    return _mix_experts(x, ids, weights, compute, base, base_gate, share, loads)


def count_loads(ids: Tensor, share: ExpertShare, loads: Tensor) -> None:
    """Add to ``loads`` how many rows the busiest rank has, and how many all ranks have.

    Args:
        ids: ``[num_tokens, top_k]``, each token's experts.
        share: tells how many ranks divide the experts.
        loads: two int64 numbers.
    """
    ranks = torch.arange(share.size, device=ids.device)
    counts = (ids.reshape(-1, 1) % share.size == ranks).sum(0)
    loads[0] += counts.max()
    loads[1] += ids.numel()


def _middle(halves: Tensor, activation: str) -> Tensor:
    if activation == RELU2:
        return gate_mul(halves, halves, "relu")
    return gated_mul(halves, activation)


def _mix_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    compute: Callable[[int, Tensor], Tensor],
    base: Tensor | None,
    base_gate: Tensor | None,
    share: ExpertShare,
    loads: Tensor | None,
) -> Tensor:
    """Compute `experts`, where ``compute(number, rows)`` returns the results of one own expert."""
    if loads is not None:
        count_loads(ids, share, loads)
    results = x.new_zeros(*ids.shape, x.shape[1])  # [num_tokens, top_k, hidden_size]
    for expert in sorted(set(ids.flatten().tolist())):
        if expert % share.size == share.rank:
            tokens, places = (ids == expert).nonzero(as_tuple=True)
            results[tokens, places] = compute(expert // share.size, x[tokens])
    total = torch.zeros_like(x, dtype=torch.float32)
    for place in range(ids.shape[1]):
        total += weights[:, place : place + 1] * results[:, place]
    if base is not None:
        factor = 1.0 if base_gate is None else base_gate.sigmoid()
        total += factor * base
    return total.to(x.dtype)


def packed_gated_linear(x: Tensor, weight: PackedWeight, activation: str = "silu") -> Tensor:
    """Return ``gated_mul(packed_linear(x, weight), activation)``.

    Args:
        x: ``[..., in_features]``.
        weight: rows of the gates, then as many rows of the ups.
        activation: activation of the gates, one of ``ACTIVATIONS``.
    """
    return gated_mul(packed_linear(x, weight), activation)


def gather_kv(kv_cache: Tensor, block_ids: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Read one request's keys and values from one layer of the paged cache.

    Args:
        kv_cache: ``[num_blocks, 2, num_kv_heads, block_size, head_dim]``, any strides.
        block_ids: ``[n]`` integers, the request's blocks in the order of tokens; blocks beyond
            ``num_tokens`` are not read.
        num_tokens: number of tokens to read.

    Returns:
        ``(key, value)``, each ``[num_kv_heads, num_tokens, head_dim]``.
    """
    block_size = kv_cache.shape[3]
    num_blocks = -(-num_tokens // block_size)
    # [2, num_kv_heads, n, block_size, head_dim]
    taken = kv_cache[block_ids[:num_blocks]].permute(1, 2, 0, 3, 4)
    tokens = taken.flatten(2, 3)[:, :, :num_tokens]  # [2, num_kv_heads, num_tokens, head_dim]
    return tokens[0], tokens[1]


def paged_attention(
    query: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    value_dim: int | None = None,
    sinks: Tensor | None = None,
    row_ends: Tensor | None = None,
) -> Tensor:
    """Attend causally from each request's newest tokens to all of its cached tokens.

    A request's queries are its last tokens, so query ``i`` has position ``seq_len - query_len +
    i``, and attends to keys up to this position::

        keys      0 ................ seq_len - query_len ....... seq_len
        query 0   x x x x x x x x x x
        query 1   x x x x x x x x x x x

    Args:
        query: ``[num_tokens, num_heads, head_dim]``, one request after another; rows after the last
            request are padding, whose results are zeros.
        kv_cache: ``[num_blocks, 2, num_kv_heads, block_size, head_dim]``, any strides, with this
            step's tokens already stored; ``num_heads`` is a multiple of ``num_kv_heads``. For an
            ``FP8`` cache, callers multiply ``scale`` by the keys' scale, and the result by the
            values' scale.
        block_table: ``[num_requests, max_blocks]`` integers.
        query_lens: number of tokens of each request in this step; 0: a padding request.
        seq_lens: number of tokens of each request in the cache, including this step's tokens.
        scale: factor of the dot products, usually ``head_dim ** -0.5``.
        sliding_window: number of newest keys that a query attends to, including the query's own;
            None: all keys.
        soft_cap: scaled products ``s`` become ``soft_cap * tanh(s / soft_cap)`` before the softmax
            (Gemma 2, arXiv:2408.00118); None: no cap.
        value_dim: number of each value's elements to use, from the first on; None: all.
        sinks: ``[num_heads]`` float32: an additional score per head in the softmax, without a value
            (Xiao et al., arXiv:2309.17453; gpt-oss); None: no sinks.
        row_ends: ``[num_tokens]`` int32: each query attends to keys before this position, for
            example to the end of its image; None: to keys up to its own position.

    Returns:
        ``[num_tokens, num_heads, value_dim]`` in the dtype of ``query``; computed in float32.
    """
    out = query.new_zeros(*query.shape[:2], value_dim or query.shape[2])
    start = 0
    for blocks, query_len, seq_len in zip(block_table, query_lens, seq_lens, strict=True):
        end = start + query_len
        if query_len:
            key, value = gather_kv(kv_cache, blocks, seq_len)
            value = value[..., :value_dim]
            out[start:end] = _attend(
                *(query[start:end], key, value, scale, sliding_window, soft_cap, sinks),
                None if row_ends is None else row_ends[start:end],
            )
        start = end
    return out


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    sinks: Tensor | None,
    row_ends: Tensor | None,
) -> Tensor:
    query_len, num_heads, _ = query.shape
    num_kv_heads, seq_len, _ = key.shape
    group = num_heads // num_kv_heads
    key = key.float().repeat_interleave(group, dim=0)  # [num_heads, seq_len, head_dim]
    value = value.float().repeat_interleave(group, dim=0)  # [num_heads, seq_len, head_dim]
    scores = query.float().transpose(0, 1) @ key.mT * scale  # [num_heads, query_len, seq_len]
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    key_at = torch.arange(seq_len, device=query.device)  # [seq_len]
    query_at = key_at[seq_len - query_len :].unsqueeze(1)  # [query_len, 1]
    ends = query_at + 1 if row_ends is None else row_ends[:, None]
    hidden = key_at >= ends  # [query_len, seq_len]
    if sliding_window is not None:
        hidden = hidden | (key_at <= query_at - sliding_window)
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:  # a sink is an additional column of scores, without a value
        sink = sinks.view(-1, 1, 1).expand(-1, query_len, 1)
        scores = torch.cat((scores, sink), dim=-1)
    weights = scores.softmax(-1)[..., :seq_len]  # [num_heads, query_len, seq_len]
    return (weights @ value).transpose(0, 1).to(query.dtype)  # [query_len, num_heads, head_dim]
