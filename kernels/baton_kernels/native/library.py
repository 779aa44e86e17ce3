"""Loads the C library, and declares the types of its functions and structs.

Refuses to know: tensors.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from ctypes import POINTER, Structure, c_char_p, c_double, c_int, c_int64, c_void_p
from pathlib import Path
from typing import Any

from baton.kernel_library.ahead import open_library_built_ahead
from baton.kernel_library.build import find_sources, open_library
from baton.kernel_library.compilers import BuildError
from baton.kernel_library.state import BUILDING, SLOWER
from baton_kernels.native.layouts import check_layouts

logger = logging.getLogger(__name__)


def _fields(ctype: type, names: str) -> list[tuple[str, type]]:
    return [(name, ctype) for name in names.split()]


class LinearCall(Structure):
    """The C struct ``linear_call`` in linear.h."""

    _fields_ = (
        *_fields(c_int64, "x_type w_type out_type num_threads gated"),
        *_fields(c_int64, "num_rows num_columns depth x_stride out_stride"),
        *_fields(c_void_p, "x w scales bias out"),
        *_fields(c_int64, "group scales_type minima_type factors_type fine"),
        *_fields(c_void_p, "group_scales group_minima scale_factors minimum_factors"),
        *_fields(c_int64, "adds"),
        *_fields(c_void_p, "gains"),
    )


class LowRankPartCall(Structure):
    """The C struct ``low_rank_part`` in low_rank.c."""

    _fields_ = (
        *_fields(c_int64, "first_rank rank first_column num_columns"),
        *_fields(c_void_p, "b gains shifts"),
    )


class LowRankSpanCall(Structure):
    """The C struct ``low_rank_span`` in low_rank.c."""

    _fields_ = (
        *_fields(c_int64, "first_row num_rows rank first_part num_parts"),
        *_fields(c_void_p, "a"),
    )


class LowRankCall(Structure):
    """The C struct ``low_rank_call`` in low_rank.c."""

    _fields_ = (
        *_fields(c_int64, "type w_type num_threads depth x_stride out_stride num_spans"),
        *_fields(c_void_p, "x out spans parts"),
    )


class GroupedLinearCall(Structure):
    """The C struct ``grouped_call`` in linear.c."""

    _fields_ = (
        ("first", LinearCall),
        *_fields(c_int64, "num_groups x_group_stride out_group_stride"),
    )


class ExpertsCall(Structure):
    """The C struct ``experts_call`` in experts.c."""

    _fields_ = (
        ("gate_up", LinearCall),
        ("down", LinearCall),
        *_fields(c_int64, "num_tokens num_experts top_k hidden num_threads x_stride squares"),
        *_fields(c_int64, "rank num_ranks"),
        *_fields(c_void_p, "ids weights x base base_gate out loads"),
    )


class RouteCall(Structure):
    """The C struct ``route_call`` in route.c."""

    _fields_ = (
        *_fields(c_int64, "type num_threads num_tokens num_experts top_k scoring normalize"),
        *_fields(c_int64, "num_groups top_groups group_best"),
        *_fields(c_void_p, "logits bias scales ids weights"),
        ("scale", c_double),
    )


class PackCall(Structure):
    """The C struct ``pack_call`` in pack.c."""

    _fields_ = (
        *_fields(c_int64, "in_type w_type num_threads first_row num_rows depth in_stride"),
        *_fields(c_void_p, "in panels scales"),
        *_fields(c_void_p, "group_scales group_minima scale_factors minimum_factors"),
    )


class IntegersCall(Structure):
    """The C struct ``integers_call`` in pack.c."""

    _fields_ = (
        *_fields(c_int64, "w_type num_threads first_row num_rows depth least"),
        *_fields(c_void_p, "numbers panels"),
    )


class UnpackCall(Structure):
    """The C struct ``unpack_call`` in pack.c."""

    _fields_ = (
        *_fields(c_int64, "type out_type num_threads num_rows num_columns depth"),
        *_fields(c_void_p, "panels ids out"),
    )


class NormCall(Structure):
    """The C struct ``norm_call`` in rows.c."""

    _fields_ = (
        *_fields(c_int64, "type num_threads num_rows size"),
        *_fields(c_void_p, "x residual weight out sum"),
        ("eps", c_double),
        ("wide", c_int64),
        *_fields(c_double, "factor sum_factor"),
    )


class GatedCall(Structure):
    """The C struct ``gated_call`` in rows.c."""

    _fields_ = (
        *_fields(c_int64, "type num_threads num_rows size gate_stride up_stride"),
        *_fields(c_void_p, "gate up out"),
        ("kind", c_int64),
    )


class SoftenCall(Structure):
    """The C struct ``soften_call`` in rows.c."""

    _fields_ = (
        *_fields(c_int64, "type num_threads num_rows size"),
        *_fields(c_void_p, "x out"),
        ("cap", c_double),
    )


class JoinCall(Structure):
    """The C struct ``join_call`` in rows.c."""

    _fields_ = (
        *_fields(c_int64, "num_rows first_bytes second_bytes"),
        *_fields(c_void_p, "first second out"),
    )


class LargestCall(Structure):
    """The C struct ``largest_call`` in rows.c."""

    _fields_ = (
        *_fields(c_int64, "type num_threads num_rows size"),
        *_fields(c_void_p, "x out"),
    )


class StoreCall(Structure):
    """The C struct ``store_call`` in rows.c."""

    _fields_ = (
        *_fields(c_int64, "type num_threads num_tokens num_heads num_kv_heads head_dim"),
        *_fields(c_int64, "rotary_dim qkv_stride"),
        *_fields(c_int64, "block_stride kv_stride head_stride token_stride block_size"),
        *_fields(c_void_p, "qkv query_weight key_weight value_weight cos sin kv_cache out slots"),
        ("eps", c_double),
        ("cache_type", c_int64),
        *_fields(c_double, "key_factor value_factor"),
        *_fields(c_int64, "wide whole"),
    )


class LatentStoreCall(Structure):
    """The C struct ``latent_call`` in rows.c."""

    _fields_ = (
        *_fields(c_int64, "type num_threads num_tokens num_heads rank rotary_dim interleaved"),
        *_fields(c_int64, "latent_stride query_stride query_head_stride"),
        *_fields(c_int64, "out_stride out_head_stride"),
        *_fields(c_int64, "block_stride token_stride block_size"),
        *_fields(c_void_p, "query latent weight cos sin cache out slots"),
        ("eps", c_double),
    )


class AttentionCall(Structure):
    """The C struct ``attention_call`` in attention.h."""

    _fields_ = (
        *_fields(c_int64, "type cache_type num_threads num_tokens num_requests max_blocks"),
        *_fields(c_int64, "num_heads num_kv_heads head_dim block_size value_dim"),
        *_fields(c_int64, "block_stride kv_stride head_stride token_stride sliding_window"),
        *_fields(c_void_p, "query kv_cache out query_start_loc seq_lens block_table"),
        *_fields(c_double, "scale soft_cap"),
        *_fields(c_void_p, "sinks row_ends"),
    )


class GatedNormCall(Structure):
    """The C struct ``gated_norm_call`` in rows.c."""

    _fields_ = (
        *_fields(c_int64, "type num_threads num_rows size group_size weight_size"),
        *_fields(c_int64, "norm_before_gate x_stride gate_stride"),
        *_fields(c_void_p, "x gate weight out"),
        ("eps", c_double),
    )


_STATE_STEP = (
    *_fields(c_int64, "num_requests num_tokens"),
    *_fields(c_void_p, "segment_start_loc read_slots write_slots request_start_loc"),
)


class ConvCall(Structure):
    """The C struct ``conv_call`` in states.c."""

    _fields_ = (
        *_fields(c_int64, "type num_threads num_channels kernel_size has_silu"),
        *_fields(c_int64, "x_stride in_gate_stride out_gate_stride"),
        *_fields(c_int64, "slot_stride channel_stride tap_stride"),
        *_fields(c_void_p, "x weight bias in_gate out_gate states out"),
        *_STATE_STEP,
    )


class RecurrenceCall(Structure):
    """The C struct ``recurrence_call`` in states.c."""

    _fields_ = (
        *_fields(c_int64, "type num_threads num_heads num_key_heads key_dim value_dim"),
        *_fields(c_int64, "query_stride key_stride value_stride rate_stride beta_stride"),
        *_fields(c_int64, "slot_stride"),
        *_fields(c_void_p, "query key value rate rate_bias log_decay beta skip states out"),
        *_STATE_STEP,
    )


class RankGroup(Structure):
    """The C struct ``rank_group`` in ranks.c."""

    _fields_ = (
        *_fields(c_int64, "rank size num_flags num_slots slot_bytes spins timeout_s"),
        ("shared", c_void_p),
        *_fields(c_int64, "step received"),
    )


class CollectiveCall(Structure):
    """The C struct ``collective_call`` in ranks.c."""

    _fields_ = (
        *_fields(c_int64, "type kind count"),
        *_fields(c_void_p, "group in out"),
    )


class PointToPointCall(Structure):
    """The C struct ``point_to_point_call`` in ranks.c."""

    _fields_ = (
        *_fields(c_int64, "num_bytes sender"),
        *_fields(c_void_p, "group data"),
    )


class PlacesCall(Structure):
    """The C struct ``places_call`` in cores.c."""

    _fields_ = (
        *_fields(c_int64, "num_threads num_own_threads num_bytes"),
        *_fields(c_char_p, "own lent"),
    )


class LendersCall(Structure):
    """The C struct ``lenders_call`` in team.c."""

    _fields_ = (
        *_fields(c_int64, "num_own_threads num_lenders"),
        *_fields(c_void_p, "bytes"),
    )


class TapeEntry(Structure):
    """The C struct ``tape_entry`` in tape.c."""

    _fields_ = (*_fields(c_void_p, "function call"),)


# The name of each struct in kernels/csrc -> its copy in Python.
_STRUCTS: dict[str, type[Structure]] = {
    "linear_call": LinearCall,
    "grouped_call": GroupedLinearCall,
    "low_rank_part": LowRankPartCall,
    "low_rank_span": LowRankSpanCall,
    "low_rank_call": LowRankCall,
    "experts_call": ExpertsCall,
    "route_call": RouteCall,
    "pack_call": PackCall,
    "integers_call": IntegersCall,
    "unpack_call": UnpackCall,
    "norm_call": NormCall,
    "gated_call": GatedCall,
    "soften_call": SoftenCall,
    "join_call": JoinCall,
    "largest_call": LargestCall,
    "store_call": StoreCall,
    "latent_call": LatentStoreCall,
    "attention_call": AttentionCall,
    "gated_norm_call": GatedNormCall,
    "conv_call": ConvCall,
    "recurrence_call": RecurrenceCall,
    "rank_group": RankGroup,
    "collective_call": CollectiveCall,
    "point_to_point_call": PointToPointCall,
    "places_call": PlacesCall,
    "lenders_call": LendersCall,
    "tape_entry": TapeEntry,
}

# Function in kernels/csrc -> types of its result and of its arguments.
_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "baton_panel": (c_int, []),
    "baton_has_bfloat16": (c_int, []),
    "baton_run_tape": (c_int, [c_int64, POINTER(TapeEntry)]),
    "baton_linear": (c_int, [POINTER(LinearCall)]),
    "baton_grouped_linear": (c_int, [POINTER(GroupedLinearCall)]),
    "baton_low_rank": (c_int, [POINTER(LowRankCall)]),
    "baton_experts": (c_int, [POINTER(ExpertsCall)]),
    "baton_route": (c_int, [POINTER(RouteCall)]),
    "baton_pack_rows": (c_int, [POINTER(PackCall)]),
    "baton_pack_integers": (c_int, [POINTER(IntegersCall)]),
    "baton_unpack_codes": (c_int, [POINTER(LinearCall)]),
    "baton_unpack_rows": (c_int, [POINTER(UnpackCall)]),
    "baton_rms_norm": (c_int, [POINTER(NormCall)]),
    "baton_gated_rms_norm": (c_int, [POINTER(GatedNormCall)]),
    "baton_causal_conv": (c_int, [POINTER(ConvCall)]),
    "baton_recurrence": (c_int, [POINTER(RecurrenceCall)]),
    "baton_gated_mul": (c_int, [POINTER(GatedCall)]),
    "baton_soft_cap": (c_int, [POINTER(SoftenCall)]),
    "baton_join_rows": (c_int, [POINTER(JoinCall)]),
    "baton_largest": (c_int, [POINTER(LargestCall)]),
    "baton_norm_rotary_store": (c_int, [POINTER(StoreCall)]),
    "baton_store_latent": (c_int, [POINTER(LatentStoreCall)]),
    "baton_attention": (c_int, [POINTER(AttentionCall)]),
    "baton_collective": (c_int, [POINTER(CollectiveCall)]),
    "baton_send": (c_int, [POINTER(PointToPointCall)]),
    "baton_receive": (c_int, [POINTER(PointToPointCall)]),
    "baton_place_threads": (c_int, [POINTER(PlacesCall)]),
    "baton_watch_lenders": (c_int, [POINTER(LendersCall)]),
    "baton_abort_ranks": (None, [POINTER(RankGroup)]),
    "baton_find_run": (c_int64, [c_void_p, c_int64, c_int64, c_int64]),
}


@functools.cache
def load_library() -> ctypes.CDLL | None:
    """Load the C library, and build it first if needed; on failure, log a line and return None."""
    try:
        check_layouts(find_sources(), _STRUCTS)
        opened = open_library_built_ahead() or open_library(_tell_of_build)
        library = _load(opened.descriptor, opened.path)
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (BuildError, OSError, AttributeError) as error:
        logger.warning("no native kernels, torch computes instead (%s): %s", SLOWER, error)
        return None
    if opened.problem:
        logger.warning("native kernels are kept in %s: %s", opened.path.parent, opened.problem)
    ahead, name = opened.instruction_set, opened.path.name
    origin = f"built ahead for {ahead}" if ahead else f"built on this machine ({name})"
    logger.info("native kernels: %s", origin)
    return library


def _tell_of_build() -> None:
    logger.info("%s", BUILDING)


def _load(descriptor: int, path: Path) -> ctypes.CDLL:
    """Load the library by its open file, because another file may now be at its path."""
    try:
        opened = Path(f"/proc/self/fd/{descriptor}")
        return ctypes.CDLL(str(opened if opened.exists() else path))
    finally:
        os.close(descriptor)
