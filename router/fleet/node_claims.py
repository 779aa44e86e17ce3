"""Node claims: checks that the values in a node's messages are possible.

A joined node may be broken, of another version, or hostile. An impossible value ends the node's
link with an error of one line before any code uses the value. This module does not judge whether a
possible value is likely, and does not compare nodes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from baton.adapters.digest import DIGEST_CHARS, is_digest
from baton.api.outputs import TokenLogprobs
from baton.api.pooling import pooled_problem
from baton.engine_config import MAX_ADAPTERS
from baton.limits import MAX_PEER_INFO_BYTES, MAX_REVISION_CHARS
from baton.link.words import (
    AdminReply,
    DecodeTime,
    KVCacheEvents,
    NodeBeat,
    NodeEvent,
    NodeRegistration,
    PeerReport,
    PeerReports,
    RequestDelta,
    RequestError,
    StepDeltas,
    StepTime,
)

MAX_NAME_CHARS = 256  # maximum number of characters of a node name, engine id, address or version
MAX_WHY_CHARS = 1024
_NAME = f"must have at most {MAX_NAME_CHARS} printable characters"
MAX_COMPATIBILITY_ENTRIES, MAX_COMPATIBILITY_CHARS = 64, 4096
# Each entry of ``compatibility`` is three parts; the other fields are few
MAX_REGISTRATION_PARTS = 2**10
MAX_NUM_BLOCKS, MAX_BLOCK_SIZE, MAX_MODEL_LEN = 2**26, 2**16, 2**26
MAX_RANKS = 2**10
MAX_KV_BYTES_PER_TOKEN = 2.0**30
MAX_STEP_TIMES = 16
MAX_RATE = 1e15  # in bytes per second
MAX_SECONDS = 1e9
# Maximum number of characters of an error, or of a problem with a peer, in one message. Baton's
# nodes send at most half as many.
MAX_TEXT_CHARS = 2**16
MAX_PEER_REPORTS = 2**14  # maximum number of reports in one message
# Maximum number of block hashes in one message about a node's cache.
MAX_KV_HASHES = 2**17
# Maximum number of requests that a node may report. Real nodes have fewer: each running request
# holds a block, and routers limit the number of waiting requests.
MAX_REQUESTS = 2**24


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The base model's limits on the token ids and lengths in nodes' messages.

    Attributes:
        size: number of token ids, which begin at 0.
        max_model_len: maximum number of tokens of a request; no output is longer.
    """

    size: int
    max_model_len: int


def registration_problem(registration: NodeRegistration) -> str:
    """Return which value of a registration is impossible; empty if all are possible."""
    names = {
        "node_name": registration.node_name,
        "engine_id": registration.engine_id,
        "version": registration.version,
        "address": registration.address,
        "prefix_hash": registration.prefix_hash,
    }
    for field, name in names.items():
        if not _is_name(name):
            return f"{field}: {_NAME}"
    revision = registration.revision
    if len(revision) > MAX_REVISION_CHARS or not revision.isprintable():
        return f"revision: must have at most {MAX_REVISION_CHARS} printable characters"
    for field in ("peer_info", "encodings_peer_info", "fetch_peer_info", "share_peer_info"):
        num_bytes = len(getattr(registration, field))
        if num_bytes > MAX_PEER_INFO_BYTES:
            return f"{field}: must have at most {MAX_PEER_INFO_BYTES} bytes, got {num_bytes}"
    entries = registration.compatibility
    longest = max(map(len, (*entries, *entries.values())), default=0)
    if len(entries) > MAX_COMPATIBILITY_ENTRIES or longest > MAX_COMPATIBILITY_CHARS:
        return (
            f"compatibility: must have at most {MAX_COMPATIBILITY_ENTRIES} entries of "
            f"{MAX_COMPATIBILITY_CHARS} characters"
        )
    sizes = {
        "max_model_len": (2, MAX_MODEL_LEN),
        "num_blocks": (1, MAX_NUM_BLOCKS),
        "block_size": (1, MAX_BLOCK_SIZE),
        "tensor_parallel_size": (1, MAX_RANKS),
        "pipeline_parallel_size": (1, MAX_RANKS),
        "num_chunk_tokens": (0, MAX_MODEL_LEN),
    }
    for field, (least, most) in sizes.items():
        value = getattr(registration, field)
        if not least <= value <= most:
            return f"{field}: must be {least} to {most}, got {value}"
    if not 0 <= registration.kv_bytes_per_token <= MAX_KV_BYTES_PER_TOKEN:  # also true for NaN
        return (
            f"kv_bytes_per_token: must be 0 to {MAX_KV_BYTES_PER_TOKEN:.0f}, "
            f"got {registration.kv_bytes_per_token:g}"
        )
    return (
        _step_times_problem("step_times", registration.step_times)
        or _decode_times_problem(registration.decode_times)
        or _step_times_problem("encode_times", registration.encode_times)
        or _context_times_problem(registration.context_step_times)
    )


def _step_times_problem(field: str, step_times: Sequence[StepTime]) -> str:
    if len(step_times) > MAX_STEP_TIMES:
        return f"{field}: must be at most {MAX_STEP_TIMES}, got {len(step_times)}"
    num_before = 0
    for one in step_times:
        if not num_before < one.num_tokens <= MAX_MODEL_LEN:
            return (
                f"{field}: num_tokens must rise and be 1 to {MAX_MODEL_LEN}, got {one.num_tokens}"
            )
        if not 0 < one.seconds <= MAX_SECONDS:  # also true for NaN
            return f"{field}: seconds must be above 0 and at most {MAX_SECONDS:.0f}"
        num_before = one.num_tokens
    return ""


def _context_times_problem(step_times: Sequence[StepTime]) -> str:
    field = "context_step_times"
    if len(step_times) > MAX_STEP_TIMES:
        return f"{field}: must be at most {MAX_STEP_TIMES}, got {len(step_times)}"
    for one in step_times:
        for name in ("num_tokens", "num_context_tokens"):
            value = getattr(one, name)
            if not 0 < value <= MAX_MODEL_LEN:
                return f"{field}: {name} must be 1 to {MAX_MODEL_LEN}, got {value}"
        if not 0 < one.seconds <= MAX_SECONDS:  # also true for NaN
            return f"{field}: seconds must be above 0 and at most {MAX_SECONDS:.0f}"
    return ""


def _decode_times_problem(decode_times: Sequence[DecodeTime]) -> str:
    if len(decode_times) > MAX_STEP_TIMES:
        return f"decode_times: must be at most {MAX_STEP_TIMES}, got {len(decode_times)}"
    for one in decode_times:
        if not 0 < one.num_requests <= MAX_REQUESTS:
            return f"decode_times: num_requests must be 1 to {MAX_REQUESTS}, got {one.num_requests}"
        if not 0 <= one.num_context_tokens <= MAX_MODEL_LEN:
            return (
                f"decode_times: num_context_tokens must be 0 to {MAX_MODEL_LEN}, "
                f"got {one.num_context_tokens}"
            )
        if not 0 < one.seconds <= MAX_SECONDS:  # also true for NaN
            return f"decode_times: seconds must be above 0 and at most {MAX_SECONDS:.0f}"
    return ""


def event_problem(registration: NodeRegistration, event: NodeEvent, vocabulary: Vocabulary) -> str:
    """Return which value of an event is impossible; empty if all are possible.

    The long columns of a step are only read by built-in functions, which are fast.
    """
    match event:
        case StepDeltas():
            return _rows_problem(event, vocabulary) or _deltas_problem(event.deltas, vocabulary)
        case tuple():
            return _deltas_problem(event, vocabulary)
        case NodeBeat():
            return _beat_problem(registration, event)
        case PeerReport():
            return _report_problem(event)
        case PeerReports():
            return _reports_problem(event)
        case AdminReply(error=RequestError() as error):
            return _error_problem(error)
        case KVCacheEvents():
            num_hashes = len(event.stored) + len(event.removed)
            if num_hashes > MAX_KV_HASHES:
                return f"kv_events: must have at most {MAX_KV_HASHES} hashes, got {num_hashes}"
    return ""


def _rows_problem(step: StepDeltas, vocabulary: Vocabulary) -> str:
    if not len(step.epochs) == len(step.output_indexes) == len(step.token_ids):
        return "deltas: must have columns of one length"
    return _ids_problem(step.token_ids, vocabulary) or _index_problem(
        max(step.output_indexes, default=0), vocabulary
    )


def _deltas_problem(deltas: Iterable[RequestDelta], vocabulary: Vocabulary) -> str:
    return next(filter(None, (_delta_problem(delta, vocabulary) for delta in deltas)), "")


def _delta_problem(delta: RequestDelta, vocabulary: Vocabulary) -> str:
    num_tokens = len(delta.token_ids)
    problem = _ids_problem(delta.token_ids, vocabulary) or _index_problem(
        delta.output_index + max(num_tokens - 1, 0), vocabulary
    )
    if problem:
        return problem
    if delta.logprobs and len(delta.logprobs) != num_tokens:
        return f"logprobs: must be one per token, got {len(delta.logprobs)} for {num_tokens}"
    if len(delta.prompt_logprobs) > vocabulary.max_model_len:
        return f"prompt_logprobs: must be at most {vocabulary.max_model_len}"
    given = [*delta.logprobs, *(one for one in delta.prompt_logprobs if one is not None)]
    if given:
        problem = _logprobs_problem(given, vocabulary)
    if delta.error is not None:
        problem = problem or _error_problem(delta.error)
    if delta.pooled:
        problem = problem or pooled_problem(delta.pooled)
    return problem or _receipts_problem(delta, vocabulary)


def _error_problem(error: RequestError) -> str:
    if len(error.code) + len(error.message) > MAX_TEXT_CHARS:
        return f"error: must have at most {MAX_TEXT_CHARS} characters"
    return ""


def _ids_problem(token_ids: Sequence[int], vocabulary: Vocabulary) -> str:
    if token_ids and max(token_ids) >= vocabulary.size:
        return f"token_ids: must be below {vocabulary.size}, got {max(token_ids)}"
    return ""


def _index_problem(last_index: int, vocabulary: Vocabulary) -> str:
    if last_index >= vocabulary.max_model_len:
        return f"output_index: must be below {vocabulary.max_model_len}, got {last_index}"
    return ""


def _logprobs_problem(given: Sequence[TokenLogprobs], vocabulary: Vocabulary) -> str:
    for one in given:
        if math.isnan(one.logprob) or any(math.isnan(logprob) for _, logprob in one.top):
            return "logprobs: must be numbers, got nan"
        if any(token_id >= vocabulary.size for token_id, _ in one.top):
            return f"logprobs: token ids must be below {vocabulary.size}"
    return ""


def _receipts_problem(delta: RequestDelta, vocabulary: Vocabulary) -> str:
    times: list[float] = []
    if delta.prefill is not None:
        prefill = delta.prefill
        times += prefill.queue_s, prefill.prefill_s, prefill.send_s, prefill.encodings_wait_s
        times += prefill.fetch_wait_s, prefill.pixels_wait_s, prefill.encoder_s
        if prefill.num_fetched_tokens > vocabulary.max_model_len:
            return f"prefill: num_fetched_tokens: must be at most {vocabulary.max_model_len}"
        # ``num_computed_tokens`` is not checked: tokens of a preempted request may be counted
        # several times, and `NodeLoad` limits the number.
        if prefill.num_cached_tokens > vocabulary.max_model_len:
            return f"prefill: num_cached_tokens: must be at most {vocabulary.max_model_len}"
    if delta.decode is not None:
        decode = delta.decode
        if decode.num_fetched_tokens > vocabulary.max_model_len:
            return f"decode: num_fetched_tokens: must be at most {vocabulary.max_model_len}"
        push = decode.push
        times += decode.parked_s, decode.first_step_s, push.exposed_transfer_s, push.posting_s
        times.append(decode.fetch_wait_s)
        if not _is_name(push.transport):
            return f"decode: push.transport: {_NAME}"
        if len(decode.why_drafts) > MAX_WHY_CHARS or not decode.why_drafts.isprintable():
            return f"decode: why_drafts: must have at most {MAX_WHY_CHARS} printable characters"
    if not all(abs(seconds) <= MAX_SECONDS for seconds in times):  # also true for NaN
        return f"receipt: times must be at most {MAX_SECONDS:.0f} s"
    return ""


def _beat_problem(registration: NodeRegistration, beat: NodeBeat) -> str:
    if beat.num_free_blocks > registration.num_blocks:
        return (
            f"num_free_blocks: must be at most num_blocks ({registration.num_blocks}), "
            f"got {beat.num_free_blocks}"
        )
    for field in (
        "num_waiting", "num_waiting_for_remote_kvs", "num_waiting_for_adapters",
        "num_waiting_for_encodings", "num_decoding_images", "num_waiting_for_prefixes",
        "num_running", "num_transfers",
    ):  # fmt: skip
        if getattr(beat, field) > MAX_REQUESTS:
            return f"{field}: must be at most {MAX_REQUESTS}, got {getattr(beat, field)}"
    for field in ("stalled_s", "longest_round_s", "adapter_load_s"):
        if not 0 <= getattr(beat, field) <= MAX_SECONDS:  # also true for NaN
            return f"{field}: must be 0 to {MAX_SECONDS:.0f}, got {getattr(beat, field):g}"
    for field in ("memory_age_s", "file_age_s", "fetched_age_s", "evicted_after_s"):
        if not 0 <= getattr(beat.cache, field) <= MAX_SECONDS:  # also true for NaN
            return (
                f"cache.{field}: must be 0 to {MAX_SECONDS:.0f}, got {getattr(beat.cache, field):g}"
            )
    if not _is_name(beat.stalled_thread):
        return f"stalled_thread: {_NAME}"
    if len(beat.adapters) > MAX_ADAPTERS or not all(map(is_digest, beat.adapters)):
        return f"adapters: must be at most {MAX_ADAPTERS} digests of {DIGEST_CHARS} digits"
    return ""


def _report_problem(report: PeerReport) -> str:
    if not 0 <= report.bandwidth_bytes_per_s <= MAX_RATE:  # also true for NaN
        return (
            f"bandwidth_bytes_per_s: must be 0 to {MAX_RATE:g}, "
            f"got {report.bandwidth_bytes_per_s:g}"
        )
    if not (_is_name(report.engine_id) and _is_name(report.transport)):
        return f"peer_report: names: {_NAME}"
    if len(report.problem) > MAX_TEXT_CHARS:
        return f"peer_report: problem: must have at most {MAX_TEXT_CHARS} characters"
    return ""


def _reports_problem(event: PeerReports) -> str:
    num_reports = len(event.reports) + len(event.unknown)
    if num_reports > MAX_PEER_REPORTS:
        return f"peer_reports: must be at most {MAX_PEER_REPORTS}, got {num_reports}"
    return "" if _are_plain(event.reports) else _first_problem(event.reports)


def _are_plain(reports: Sequence[PeerReport]) -> bool:
    """Return whether all reports are possible; built-in functions look at hundreds of them."""
    rates = [one.bandwidth_bytes_per_s for one in reports]
    names = [one.engine_id for one in reports]
    others = {(one.transport, one.problem) for one in reports}
    return (
        all(map(str.isprintable, names))
        and max(map(len, names), default=0) <= MAX_NAME_CHARS
        and min(rates, default=0.0) >= 0
        and max(rates, default=0.0) <= MAX_RATE
        and not math.isnan(sum(rates))  # the sum is NaN if one of the rates is
        and all(_is_name(transport) for transport, _ in others)
        and all(len(problem) <= MAX_TEXT_CHARS for _, problem in others)
    )


def _first_problem(reports: Iterable[PeerReport]) -> str:
    return next(filter(None, map(_report_problem, reports)), "")


def _is_name(text: str) -> bool:
    return len(text) <= MAX_NAME_CHARS and text.isprintable()
