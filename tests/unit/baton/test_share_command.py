"""The command to send a cached prefix keeps all its fields on the wire, and its router's name."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec

from baton.api.images import ImageSpan, PromptImage
from baton.api.sampling_params import SamplingParams
from baton.link.wire import command_from_proto, command_to_proto
from baton.link.words import DecodeCommand, PeerUpdate, PrefillCommand, ShareCommand

COMMAND = ShareCommand(
    request_id="r",
    epoch=5,
    reader_engine_id="p0-1",
    timeout_s=9.5,
    prompt_token_ids=[1, 2, 3, 4],
    cache_salt=b"salt",
    adapter="digest",
    images=(PromptImage(ImageSpan(1, 2, b"digest", (1, 1, 2)), b""),),
)


def test_all_fields_arrive() -> None:
    assert command_from_proto(command_to_proto(COMMAND)) == COMMAND
    cut = dataclasses.replace(COMMAND, prompt_token_ids=[1, 2])  # within the image
    assert command_from_proto(command_to_proto(cut)) == cut
    bare = dataclasses.replace(COMMAND, cache_salt=b"", adapter="", images=())
    assert command_from_proto(command_to_proto(bare)) == bare


def test_both_kinds_of_nodes_are_told_of_the_holder() -> None:
    fields: dict[str, Any] = {
        "request_id": "r",
        "epoch": 5,
        "prompt_token_ids": [1, 2, 3],
        "sampling_params": SamplingParams(max_tokens=4, seed=1),
        "timeout_s": 9.5,
        "fetch_engine_id": "d1-1",
        "fetch_num_tokens": 2,
    }
    for command in (
        DecodeCommand(prefill_engine_id="", **fields),
        PrefillCommand(decode_engine_id="d0-1", **fields),
    ):
        assert command_from_proto(command_to_proto(command)) == command


def test_a_peers_end_for_prefixes_costs_nothing_unless_there_is_one() -> None:
    update = PeerUpdate("d0", b"info")
    sent = command_to_proto(update)
    assert command_from_proto(sent) == update
    told = msgspec.structs.replace(update, fetch_peer_info=b"more")
    assert command_from_proto(command_to_proto(told)) == told
    assert command_to_proto(told).ByteSize() == sent.ByteSize() + 2 + len(b"more")
    both = msgspec.structs.replace(told, share_peer_info=b"other")
    assert command_from_proto(command_to_proto(both)) == both
