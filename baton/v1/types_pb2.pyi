from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_ABORT: _ClassVar[FinishReason]

class NodeRole(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    NODE_ROLE_UNSPECIFIED: _ClassVar[NodeRole]
    NODE_ROLE_PREFILL: _ClassVar[NodeRole]
    NODE_ROLE_DECODE: _ClassVar[NodeRole]
    NODE_ROLE_ENCODE: _ClassVar[NodeRole]
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_ABORT: FinishReason
NODE_ROLE_UNSPECIFIED: NodeRole
NODE_ROLE_PREFILL: NodeRole
NODE_ROLE_DECODE: NodeRole
NODE_ROLE_ENCODE: NodeRole

class SamplingParams(_message.Message):
    __slots__ = ("max_tokens", "temperature", "top_k", "top_p", "seed", "stop_token_ids", "ignore_eos", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "allowed_token_ids", "banned_token_ids", "min_tokens", "stop", "logprobs", "prompt_logprobs", "structured_output", "thinking")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BANNED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    STRUCTURED_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    THINKING_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    seed: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    allowed_token_ids: TokenIds
    banned_token_ids: _containers.RepeatedScalarFieldContainer[int]
    min_tokens: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    logprobs: int
    prompt_logprobs: int
    structured_output: StructuredOutput
    thinking: Thinking
    def __init__(self, max_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., seed: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: bool = ..., min_p: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., allowed_token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., banned_token_ids: _Optional[_Iterable[int]] = ..., min_tokens: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., structured_output: _Optional[_Union[StructuredOutput, _Mapping]] = ..., thinking: _Optional[_Union[Thinking, _Mapping]] = ...) -> None: ...

class Thinking(_message.Message):
    __slots__ = ("budget_tokens", "close_token_ids", "open_marks", "must_open", "may_reopen", "behind_token_ids", "gap_token_ids", "is_open")
    BUDGET_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CLOSE_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    OPEN_MARKS_FIELD_NUMBER: _ClassVar[int]
    MUST_OPEN_FIELD_NUMBER: _ClassVar[int]
    MAY_REOPEN_FIELD_NUMBER: _ClassVar[int]
    BEHIND_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    GAP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IS_OPEN_FIELD_NUMBER: _ClassVar[int]
    budget_tokens: int
    close_token_ids: _containers.RepeatedScalarFieldContainer[int]
    open_marks: _containers.RepeatedCompositeFieldContainer[TokenIds]
    must_open: bool
    may_reopen: bool
    behind_token_ids: _containers.RepeatedScalarFieldContainer[int]
    gap_token_ids: _containers.RepeatedScalarFieldContainer[int]
    is_open: bool
    def __init__(self, budget_tokens: _Optional[int] = ..., close_token_ids: _Optional[_Iterable[int]] = ..., open_marks: _Optional[_Iterable[_Union[TokenIds, _Mapping]]] = ..., must_open: bool = ..., may_reopen: bool = ..., behind_token_ids: _Optional[_Iterable[int]] = ..., gap_token_ids: _Optional[_Iterable[int]] = ..., is_open: bool = ...) -> None: ...

class StructuredOutput(_message.Message):
    __slots__ = ("json_schema", "regex", "grammar", "choice", "json_object")
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    JSON_OBJECT_FIELD_NUMBER: _ClassVar[int]
    json_schema: str
    regex: str
    grammar: str
    choice: Choice
    json_object: bool
    def __init__(self, json_schema: _Optional[str] = ..., regex: _Optional[str] = ..., grammar: _Optional[str] = ..., choice: _Optional[_Union[Choice, _Mapping]] = ..., json_object: bool = ...) -> None: ...

class Choice(_message.Message):
    __slots__ = ("texts",)
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    texts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, texts: _Optional[_Iterable[str]] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("logprob", "top_token_ids", "top_logprobs")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    top_token_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, logprob: _Optional[float] = ..., top_token_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class PrefixPin(_message.Message):
    __slots__ = ("ttl_s", "num_tokens")
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ttl_s: float
    num_tokens: int
    def __init__(self, ttl_s: _Optional[float] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class PrefillReceipt(_message.Message):
    __slots__ = ("queue_s", "prefill_s", "num_chunks", "num_computed_tokens", "num_cached_tokens", "send_s", "num_encodings_received", "num_encodings_lost", "encodings_wait_s", "num_images_encoded", "num_encodings_cached", "encoder_s", "lost_images", "num_fetched_tokens", "num_fetches_lost", "fetch_wait_s", "pixels_wait_s", "num_pinned_tokens")
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    NUM_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEND_S_FIELD_NUMBER: _ClassVar[int]
    NUM_ENCODINGS_RECEIVED_FIELD_NUMBER: _ClassVar[int]
    NUM_ENCODINGS_LOST_FIELD_NUMBER: _ClassVar[int]
    ENCODINGS_WAIT_S_FIELD_NUMBER: _ClassVar[int]
    NUM_IMAGES_ENCODED_FIELD_NUMBER: _ClassVar[int]
    NUM_ENCODINGS_CACHED_FIELD_NUMBER: _ClassVar[int]
    ENCODER_S_FIELD_NUMBER: _ClassVar[int]
    LOST_IMAGES_FIELD_NUMBER: _ClassVar[int]
    NUM_FETCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_FETCHES_LOST_FIELD_NUMBER: _ClassVar[int]
    FETCH_WAIT_S_FIELD_NUMBER: _ClassVar[int]
    PIXELS_WAIT_S_FIELD_NUMBER: _ClassVar[int]
    NUM_PINNED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    queue_s: float
    prefill_s: float
    num_chunks: int
    num_computed_tokens: int
    num_cached_tokens: int
    send_s: float
    num_encodings_received: int
    num_encodings_lost: int
    encodings_wait_s: float
    num_images_encoded: int
    num_encodings_cached: int
    encoder_s: float
    lost_images: _containers.RepeatedScalarFieldContainer[int]
    num_fetched_tokens: int
    num_fetches_lost: int
    fetch_wait_s: float
    pixels_wait_s: float
    num_pinned_tokens: int
    def __init__(self, queue_s: _Optional[float] = ..., prefill_s: _Optional[float] = ..., num_chunks: _Optional[int] = ..., num_computed_tokens: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ..., send_s: _Optional[float] = ..., num_encodings_received: _Optional[int] = ..., num_encodings_lost: _Optional[int] = ..., encodings_wait_s: _Optional[float] = ..., num_images_encoded: _Optional[int] = ..., num_encodings_cached: _Optional[int] = ..., encoder_s: _Optional[float] = ..., lost_images: _Optional[_Iterable[int]] = ..., num_fetched_tokens: _Optional[int] = ..., num_fetches_lost: _Optional[int] = ..., fetch_wait_s: _Optional[float] = ..., pixels_wait_s: _Optional[float] = ..., num_pinned_tokens: _Optional[int] = ...) -> None: ...

class PushReceipt(_message.Message):
    __slots__ = ("num_bytes", "num_blocks", "transport", "exposed_transfer_s", "num_descriptors", "posting_s")
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    EXPOSED_TRANSFER_S_FIELD_NUMBER: _ClassVar[int]
    NUM_DESCRIPTORS_FIELD_NUMBER: _ClassVar[int]
    POSTING_S_FIELD_NUMBER: _ClassVar[int]
    num_bytes: int
    num_blocks: int
    transport: str
    exposed_transfer_s: float
    num_descriptors: int
    posting_s: float
    def __init__(self, num_bytes: _Optional[int] = ..., num_blocks: _Optional[int] = ..., transport: _Optional[str] = ..., exposed_transfer_s: _Optional[float] = ..., num_descriptors: _Optional[int] = ..., posting_s: _Optional[float] = ...) -> None: ...

class DecodeReceipt(_message.Message):
    __slots__ = ("parked_s", "first_step_s", "steps_until_first", "num_prompt_tokens_computed", "num_forwards", "num_preemptions", "push", "num_cached_tokens", "num_drafts", "num_accepted_drafts", "why_drafts", "num_pinned_tokens", "num_fetched_tokens", "num_fetches_lost", "fetch_wait_s")
    PARKED_S_FIELD_NUMBER: _ClassVar[int]
    FIRST_STEP_S_FIELD_NUMBER: _ClassVar[int]
    STEPS_UNTIL_FIRST_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_COMPUTED_FIELD_NUMBER: _ClassVar[int]
    NUM_FORWARDS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    PUSH_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    WHY_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    NUM_PINNED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_FETCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_FETCHES_LOST_FIELD_NUMBER: _ClassVar[int]
    FETCH_WAIT_S_FIELD_NUMBER: _ClassVar[int]
    parked_s: float
    first_step_s: float
    steps_until_first: int
    num_prompt_tokens_computed: int
    num_forwards: int
    num_preemptions: int
    push: PushReceipt
    num_cached_tokens: int
    num_drafts: int
    num_accepted_drafts: int
    why_drafts: str
    num_pinned_tokens: int
    num_fetched_tokens: int
    num_fetches_lost: int
    fetch_wait_s: float
    def __init__(self, parked_s: _Optional[float] = ..., first_step_s: _Optional[float] = ..., steps_until_first: _Optional[int] = ..., num_prompt_tokens_computed: _Optional[int] = ..., num_forwards: _Optional[int] = ..., num_preemptions: _Optional[int] = ..., push: _Optional[_Union[PushReceipt, _Mapping]] = ..., num_cached_tokens: _Optional[int] = ..., num_drafts: _Optional[int] = ..., num_accepted_drafts: _Optional[int] = ..., why_drafts: _Optional[str] = ..., num_pinned_tokens: _Optional[int] = ..., num_fetched_tokens: _Optional[int] = ..., num_fetches_lost: _Optional[int] = ..., fetch_wait_s: _Optional[float] = ...) -> None: ...

class Receipt(_message.Message):
    __slots__ = ("num_prompt_tokens", "num_output_tokens", "ttft_s", "total_s", "prefill_node", "decode_node", "prefill", "decode", "num_attempts", "router_queue_s", "accept_s", "delivery_s", "model", "adapter", "num_images", "num_image_tokens", "weights")
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TTFT_S_FIELD_NUMBER: _ClassVar[int]
    TOTAL_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_NODE_FIELD_NUMBER: _ClassVar[int]
    DECODE_NODE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    NUM_ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    ROUTER_QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    ACCEPT_S_FIELD_NUMBER: _ClassVar[int]
    DELIVERY_S_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    NUM_IMAGES_FIELD_NUMBER: _ClassVar[int]
    NUM_IMAGE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    num_prompt_tokens: int
    num_output_tokens: int
    ttft_s: float
    total_s: float
    prefill_node: str
    decode_node: str
    prefill: PrefillReceipt
    decode: DecodeReceipt
    num_attempts: int
    router_queue_s: float
    accept_s: float
    delivery_s: float
    model: str
    adapter: str
    num_images: int
    num_image_tokens: int
    weights: str
    def __init__(self, num_prompt_tokens: _Optional[int] = ..., num_output_tokens: _Optional[int] = ..., ttft_s: _Optional[float] = ..., total_s: _Optional[float] = ..., prefill_node: _Optional[str] = ..., decode_node: _Optional[str] = ..., prefill: _Optional[_Union[PrefillReceipt, _Mapping]] = ..., decode: _Optional[_Union[DecodeReceipt, _Mapping]] = ..., num_attempts: _Optional[int] = ..., router_queue_s: _Optional[float] = ..., accept_s: _Optional[float] = ..., delivery_s: _Optional[float] = ..., model: _Optional[str] = ..., adapter: _Optional[str] = ..., num_images: _Optional[int] = ..., num_image_tokens: _Optional[int] = ..., weights: _Optional[str] = ...) -> None: ...
