"""Unit tests of wire: every value survives the conversion to bytes and back."""

from __future__ import annotations

from typing import TypeVar

import msgspec
import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from baton.api.errors import InvalidRequestError
from baton.api.images import ImageSpan, PromptImage
from baton.api.outputs import (
    DecodeReceipt,
    FinishReason,
    PrefillReceipt,
    PushReceipt,
    Receipt,
    RequestDelta,
    TextDelta,
    TokenLogprobs,
)
from baton.api.pooling import PoolingKind, PoolingParams
from baton.api.sampling_params import MAX_SEED, MAX_TOKEN_ID, SamplingParams
from baton.api.structured_output import StructuredOutput
from baton.api.thinking import Thinking
from baton.kv.cache_use import CacheUse
from baton.link import wire
from baton.link import words as link
from baton.telemetry.spans import TraceContext
from baton.v1 import node_pb2, types_pb2
from baton.wire import types as wire_types

AnyMessage = TypeVar("AnyMessage", bound=Message)


def over_the_wire(message: AnyMessage) -> AnyMessage:
    """Send through real bytes, so that values that a field cannot hold get lost."""
    return type(message).FromString(message.SerializeToString())


texts = st.text(max_size=12)
uint32 = st.integers(0, 2**32 - 1)
token_ids = st.lists(uint32, max_size=5)
output_indexes = st.integers(0, 2**31)
seconds = st.floats(0, 1e6)
traces = st.none() | st.builds(
    TraceContext,
    st.binary(min_size=16, max_size=16).filter(any),
    st.binary(min_size=8, max_size=8).filter(any),
    st.booleans(),
    st.from_regex(r"[a-z=,]{0,20}", fullmatch=True),
)
finish_reasons = st.sampled_from([None, *FinishReason])
known_ids = st.integers(0, MAX_TOKEN_ID)
some_text = st.text(min_size=1, max_size=12)
marks = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=4).map(tuple)
thoughts = st.builds(
    Thinking,
    budget_tokens=st.none() | st.integers(0, 2**31 - 1),
    close_token_ids=marks,
    open_marks=st.lists(marks, max_size=3).map(tuple),
    is_open=st.booleans(),
    must_open=st.booleans(),
    may_reopen=st.booleans(),
    behind_token_ids=marks,
    gap_token_ids=marks,
)
structured_outputs = st.one_of(
    st.dictionaries(some_text, some_text).map(lambda schema: StructuredOutput(json_schema=schema)),
    some_text.map(lambda text: StructuredOutput(regex=text)),
    some_text.map(lambda text: StructuredOutput(grammar=text)),
    st.lists(some_text, min_size=1, max_size=4).map(
        lambda texts: StructuredOutput(choice=tuple(texts))
    ),
    st.just(StructuredOutput(json_object=True)),
)
params = st.builds(
    SamplingParams,
    max_tokens=st.integers(10, 2**31 - 1),
    temperature=st.floats(0, 1e9),
    top_k=st.integers(0, 2**31 - 1),
    top_p=st.floats(0, 1, exclude_min=True),
    seed=st.none() | st.integers(-MAX_SEED - 1, MAX_SEED),
    stop_token_ids=st.lists(known_ids, max_size=3).map(tuple),
    ignore_eos=st.booleans(),
    logprobs=st.none() | st.integers(0, 20),
    prompt_logprobs=st.none() | st.integers(0, 20),
    min_p=st.floats(0, 1),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    repetition_penalty=st.floats(0, 1e9, exclude_min=True),
    logit_bias=st.dictionaries(known_ids, st.floats(-100, 100), max_size=4),
    allowed_token_ids=st.none() | st.lists(known_ids, min_size=4, max_size=5, unique=True),
    banned_token_ids=st.lists(known_ids, max_size=3).map(tuple),
    min_tokens=st.integers(0, 10),
    stop=st.lists(st.text(min_size=1, max_size=5), max_size=3).map(tuple),
    structured_output=st.none() | structured_outputs,
    thinking=st.none() | thoughts,
)
prefill_receipts = st.builds(
    PrefillReceipt,
    queue_s=seconds,
    prefill_s=seconds,
    num_chunks=uint32,
    num_computed_tokens=uint32,
    num_cached_tokens=uint32,
    send_s=seconds,
)
decode_receipts = st.builds(
    DecodeReceipt,
    parked_s=seconds,
    first_step_s=seconds,
    steps_until_first=uint32,
    num_prompt_tokens_computed=uint32,
    num_forwards=uint32,
    num_preemptions=uint32,
    num_drafts=uint32,
    num_accepted_drafts=uint32,
    push=st.builds(
        PushReceipt,
        num_bytes=st.integers(0, 2**64 - 1),
        num_blocks=uint32,
        transport=texts,
        exposed_transfer_s=seconds,
        num_descriptors=uint32,
        posting_s=seconds,
    ),
    num_cached_tokens=uint32,
)
receipts = st.builds(
    Receipt,
    num_prompt_tokens=uint32,
    num_output_tokens=uint32,
    ttft_s=seconds,
    total_s=seconds,
    prefill_node=texts,
    decode_node=texts,
    prefill=st.none() | prefill_receipts,
    decode=st.none() | decode_receipts,
    num_attempts=uint32,
    router_queue_s=seconds,
    accept_s=seconds,
    delivery_s=seconds,
    model=texts,
    adapter=texts,
)
float32 = st.floats(max_value=0, width=32)
logprobs = st.builds(TokenLogprobs, float32, st.lists(st.tuples(uint32, float32)).map(tuple))
some_logprobs = st.lists(logprobs, max_size=3).map(tuple)
prompt_logprobs = st.just(()) | some_logprobs.map(lambda rest: (None, *rest))
deltas = st.builds(
    RequestDelta,
    texts,
    output_indexes,
    token_ids.map(tuple),
    finish_reasons,
    some_logprobs,
    prompt_logprobs,
    uint32,
    prefill=st.none() | prefill_receipts,
    decode=st.none() | decode_receipts,
    error=st.none() | st.builds(link.RequestError, texts, texts),
    pooled=st.binary(max_size=12),
)
uint64 = st.integers(0, 2**64 - 1)
short_hashes = st.lists(uint64, max_size=3).map(tuple)
plain_deltas = st.builds(RequestDelta, texts, output_indexes, token_ids.map(tuple), epoch=uint32)
reports = st.builds(
    link.PeerReport,
    *(texts, st.booleans(), texts, texts, st.floats(0, allow_infinity=False), st.booleans()),
)


def in_groups(reports: list[link.PeerReport]) -> tuple[link.PeerReport, ...]:
    """Sort reports so that reports of one group are neighbours."""
    return tuple(
        sorted(
            reports, key=lambda one: (one.connected, one.transport, one.problem, one.is_encode_node)
        )
    )


events: st.SearchStrategy[link.NodeEvent] = st.one_of(
    st.lists(deltas, max_size=3).map(tuple),
    st.builds(
        link.NodeBeat,
        num_waiting=uint32,
        num_waiting_for_remote_kvs=uint32,
        num_running=uint32,
        num_free_blocks=uint32,
        num_quarantined_blocks=uint32,
        num_transfers=uint32,
        serving_state=st.sampled_from(link.ServingState),
        adapters=st.lists(texts, max_size=2).map(tuple),
        num_waiting_for_adapters=uint32,
        num_waiting_for_encodings=uint32,
        num_decoding_images=uint32,
        num_waiting_for_prefixes=uint32,
        adapter_load_s=seconds,
        cache=st.builds(
            CacheUse,
            num_blocks=uint32,
            num_bytes=uint64,
            num_pinned_blocks=uint32,
            memory_tokens=uint64,
            file_tokens=uint64,
            fetched_tokens=uint64,
            file_bytes=uint64,
            num_files=uint32,
            are_objects=st.booleans(),
            memory_age_s=seconds,
            file_age_s=seconds,
            fetched_age_s=seconds,
            evicted_after_s=seconds,
        ),
    ),
    reports,
    st.builds(
        link.PeerReports, st.lists(reports, max_size=4).map(in_groups), st.lists(texts).map(tuple)
    ),
    st.builds(link.KVCacheEvents, uint64, st.booleans(), short_hashes, short_hashes),
)
registrations = st.builds(
    link.NodeRegistration,
    node_name=texts,
    engine_id=texts,
    encodes_images=st.booleans(),
    role=st.sampled_from(link.NodeRole),
    version=texts,
    address=texts,
    peer_info=st.binary(max_size=20),
    compatibility=st.dictionaries(texts, texts, max_size=3),
    max_model_len=uint32,
    num_blocks=uint32,
    block_size=uint32,
    prefix_hash=texts,
    step_times=st.lists(st.builds(link.StepTime, uint32, seconds), max_size=3).map(tuple),
    decode_times=st.lists(st.builds(link.DecodeTime, uint32, uint32, seconds), max_size=3).map(
        tuple
    ),
    context_step_times=st.lists(st.builds(link.StepTime, uint32, seconds, uint32), max_size=3).map(
        tuple
    ),
    num_chunk_tokens=uint32,
)
poolings = st.builds(
    PoolingParams, st.sampled_from(PoolingKind), st.lists(known_ids, max_size=2).map(tuple)
)
infos = st.binary(max_size=20)
joined_peers = st.builds(
    link.PeerUpdate, texts, infos, fetch_peer_info=infos, share_peer_info=infos
)
commands: st.SearchStrategy[link.RouterCommand] = st.one_of(
    st.builds(link.Refusal, st.text(min_size=1, max_size=12)),
    st.builds(link.PeerUpdate, texts, st.binary(max_size=20), st.booleans()),
    st.builds(
        lambda removed, joined, known: link.PeerUpdates((*removed, *joined), known),
        st.lists(st.builds(link.PeerUpdate, texts, removed=st.just(True)), max_size=3),
        st.lists(joined_peers, max_size=3),
        st.lists(texts, max_size=3).map(tuple),
    ),
    st.builds(link.DrainCommand, resume=st.booleans(), stop=st.booleans()),
    st.just(link.DrainSeen()),
    st.builds(
        link.PrefillCommand,
        request_id=texts,
        epoch=uint32,
        prompt_token_ids=token_ids,
        sampling_params=params,
        decode_engine_id=texts,
        timeout_s=seconds,
        cache_salt=st.binary(max_size=32),
        adapter=st.sampled_from(["", "0f" * 32]),
        adapter_source=texts,
        pins_adapter=st.booleans(),
        trace=traces,
        pooling=st.none() | poolings,
    ),
    st.builds(
        link.DecodeCommand,
        request_id=texts,
        epoch=uint32,
        prompt_token_ids=token_ids,
        sampling_params=params,
        prefill_engine_id=texts,
        timeout_s=seconds,
        cache_salt=st.binary(max_size=32),
        adapter=st.sampled_from(["", "0f" * 32]),
        adapter_source=texts,
        pins_adapter=st.booleans(),
        trace=traces,
    ),
    st.builds(link.CancelCommand, texts, uint32),
    st.builds(link.RouterBeat),
    st.builds(link.SendKVSnapshot),
)
text_deltas = st.builds(
    TextDelta,
    texts,
    uint32,
    token_ids.map(tuple),
    texts,
    finish_reasons,
    st.none() | receipts,
    some_logprobs,
    prompt_logprobs,
    choice_index=uint32,
    prompt_index=uint32,
    stop_string=st.none() | texts,
)


@given(params)
def test_sampling_params_survive_the_wire(value: SamplingParams) -> None:
    message = over_the_wire(wire_types.sampling_params_to_proto(value))
    assert wire_types.sampling_params_from_proto(message) == value


@pytest.mark.medium
@given(receipts)
def test_receipts_survive_the_wire(value: Receipt) -> None:
    assert wire_types.receipt_from_proto(over_the_wire(wire_types.receipt_to_proto(value))) == value


@pytest.mark.medium
@given(text_deltas)
def test_streamed_pieces_survive_the_wire(value: TextDelta) -> None:
    assert wire.text_delta_from_proto(over_the_wire(wire.text_delta_to_proto(value))) == value


@given(registrations)
def test_registrations_survive_the_wire(value: link.NodeRegistration) -> None:
    message = over_the_wire(wire.registration_to_proto(value))
    assert message.WhichOneof("message") == "register"
    assert wire.registration_from_proto(message.register) == value


@given(events)
def test_events_of_nodes_survive_the_wire(value: link.NodeEvent) -> None:
    found = wire.node_event_from_proto(over_the_wire(wire.node_event_to_proto(value)))
    assert found == (wire.split_step(value) if isinstance(value, tuple) else value)


@pytest.mark.medium
@given(st.lists(deltas | plain_deltas, max_size=8).map(tuple))
def test_rows_of_a_step_and_its_other_deltas_are_all_of_it(
    step: tuple[link.RequestDelta, ...],
) -> None:
    split = wire.split_step(step)
    plain = [delta for delta in step if delta not in split.deltas]
    assert len(plain) + len(split.deltas) == len(step)
    assert list(zip(split.epochs, split.output_indexes, split.token_ids, strict=True)) == [
        (delta.epoch, index, token_id)
        for delta in plain
        for index, token_id in enumerate(delta.token_ids, delta.output_index)
    ]
    for delta in plain:
        fields = msgspec.structs.asdict(delta)
        rest = fields.keys() - {"request_id", "output_index", "token_ids", "epoch"}
        assert not any(fields[name] for name in rest)


@given(commands)
def test_commands_of_the_router_survive_the_wire(value: link.RouterCommand) -> None:
    assert wire.command_from_proto(over_the_wire(wire.command_to_proto(value))) == value


def test_fields_that_a_client_does_not_set_take_our_defaults() -> None:
    assert wire_types.sampling_params_from_proto(types_pb2.SamplingParams()) == SamplingParams()


def test_a_field_that_is_set_to_zero_is_not_taken_for_unset() -> None:
    message = types_pb2.SamplingParams(temperature=0, seed=0)
    found = wire_types.sampling_params_from_proto(message)
    assert (found.temperature, found.seed) == (0, 0)
    with pytest.raises(InvalidRequestError, match="max_tokens"):
        wire_types.sampling_params_from_proto(types_pb2.SamplingParams(max_tokens=0))


def test_messages_of_kinds_that_we_do_not_know_are_none_and_no_error() -> None:
    assert wire.node_event_from_proto(node_pb2.NodeMessage()) is None
    assert wire.command_from_proto(node_pb2.RouterMessage()) is None
    assert wire.registration_from_proto(node_pb2.Register(node_name="a", role=7)) is None  # type: ignore[arg-type]  # a later version's role


def test_being_registered_is_no_command_and_being_refused_is_one() -> None:
    registered = node_pb2.RouterMessage(registered=node_pb2.Registered(problem=""))
    assert wire.command_from_proto(registered) is None
    refused = node_pb2.RouterMessage(registered=node_pb2.Registered(problem="other model"))
    assert wire.command_from_proto(refused) == link.Refusal("other model")


def test_the_dataclasses_and_the_messages_have_the_same_fields() -> None:
    """A field added on one side only would be lost silently."""
    pairs: list[tuple[type, type[Message]]] = [
        (SamplingParams, types_pb2.SamplingParams),
        (PrefillReceipt, types_pb2.PrefillReceipt),
        (DecodeReceipt, types_pb2.DecodeReceipt),
        (PushReceipt, types_pb2.PushReceipt),
        (Receipt, types_pb2.Receipt),
        (link.NodeRegistration, node_pb2.Register),
        (link.NodeBeat, node_pb2.NodeBeat),
        (link.PeerReport, node_pb2.PeerReport),
        (link.PeerUpdate, node_pb2.PeerUpdate),
        (link.PrefillCommand, node_pb2.PrefillCommand),
        (link.DecodeCommand, node_pb2.DecodeCommand),
        (link.CancelCommand, node_pb2.CancelCommand),
        (link.RouterBeat, node_pb2.RouterBeat),
        (link.DrainCommand, node_pb2.DrainCommand),
        (link.DrainSeen, node_pb2.DrainSeen),
        (link.RequestError, node_pb2.RequestError),
    ]
    for ours, theirs in pairs:
        mine = set(
            getattr(ours, "__struct_fields__", None) or ours.__dataclass_fields__  # type: ignore[attr-defined]  # all others are dataclasses
        )
        if ours is SamplingParams:
            mine.remove("n")  # refused, see test_siblings.py
        if "trace" in mine:  # as W3C's two headers
            mine = mine - {"trace"} | {"traceparent", "tracestate"}
        assert mine == {field.name for field in theirs.DESCRIPTOR.fields}, ours.__name__


def with_images(*images: PromptImage) -> link.PrefillCommand:
    return link.PrefillCommand(
        request_id="r",
        epoch=1,
        prompt_token_ids=[7] * 10,
        sampling_params=SamplingParams(),
        timeout_s=1.0,
        decode_engine_id="d",
        images=images,
    )


def test_images_of_a_command_survive_the_wire_with_and_without_files() -> None:
    first = PromptImage(ImageSpan(0, 4, b"a" * 16, (1, 2, 2)), bytes(range(256)))
    second = PromptImage(ImageSpan(4, 6, b"b" * 16, (3, 1, 2)))
    for images in ((first,), (first, second), (second,)):
        command = with_images(*images)
        assert wire.command_from_proto(over_the_wire(wire.command_to_proto(command))) == command


@pytest.mark.parametrize("span", [(0, 0), (9, 2), (2**32 - 1, 1), (3, 1)])
def test_images_that_do_not_lie_in_order_in_the_prompt_are_refused(span: tuple[int, int]) -> None:
    before, wrong = (PromptImage(ImageSpan(*one, b"a" * 16)) for one in ((2, 3), span))
    message = over_the_wire(wire.command_to_proto(with_images(before, wrong)))
    with pytest.raises(InvalidRequestError, match="images: must lie in order in a prompt of 10"):
        wire.command_from_proto(message)
