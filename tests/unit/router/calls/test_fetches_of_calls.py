"""The commands of an attempt whose prefill node gets a cached prefix from another node."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest

from baton.api.errors import NodeUnavailableError
from baton.api.images import ImageSpan, PromptImage
from baton.api.outputs import FinishReason
from baton.api.sampling_params import SamplingParams
from baton.link.words import DecodeCommand, PrefillCommand, ShareCommand
from router.fleet.load.measured_line import MeasuredLine
from router.fleet.node import Node
from router.fleet.prefix.prompt_hashes import PromptHashes
from router.fleet.prefix_sources import BARRED_S, PrefixSource, PrefixSources, SourceTerms
from tests.fakes.router.nodes import (
    DECODE_RECEIPT,
    PREFILL_RECEIPT,
    HandNode,
    token,
    token_1,
)
from tests.fakes.router.router_scene import PARAMS, Scene, asynchronous


def fetching(scene: Scene, holder: HandNode | None = None) -> PrefixSources:
    """Let the router choose the holder as the only source, for two tokens.

    Args:
        holder: the node that sends the tokens to the decode node; None: the decode node is the
            holder, and sends them to the prefill node.
    """
    sources = scene.pool.prefix_sources
    source, target = (holder, scene.decode) if holder else (scene.decode, scene.prefill)
    pair = source.engine_id, target.engine_id
    sources._lines[pair] = MeasuredLine([(1.0, 0.001), (2.0, 0.001)])

    def choose(reader: Node, hashes: PromptHashes, num_prompt_tokens: int) -> list[PrefixSource]:
        terms = SourceTerms("d0", 2, fetch_s=0.001, compute_s=0.002, is_chosen=True)
        assert reader.engine_id == target.engine_id
        return [PrefixSource(source.node, target.engine_id, 2, sources, terms)]

    scene.pool.list_prefix_sources = choose  # type: ignore[method-assign]
    return sources


async def end(scene: Scene) -> None:
    """End the call, whose remaining tokens do not matter."""
    scene.dispatcher.stop("the test is over")
    with pytest.raises(NodeUnavailableError):
        await scene.end()


@asynchronous
async def test_both_nodes_are_told_of_the_fetch() -> None:
    scene = Scene()
    sources = fetching(scene)
    await scene.call()
    (command,) = scene.prefill.of(PrefillCommand)
    assert (command.fetch_engine_id, command.fetch_num_tokens) == (scene.decode.engine_id, 2)
    (share,) = scene.decode.of(ShareCommand)
    assert share.prompt_token_ids == [1, 2]
    assert (share.request_id, share.epoch) == (command.request_id, command.epoch)
    assert share.reader_engine_id == scene.prefill.engine_id
    assert scene.prefill.node.load.num_open_tokens == 1, "the others are fetched"
    lost = dataclasses.replace(PREFILL_RECEIPT, num_fetches_lost=1)
    delta = token_1("a", 7, epoch=scene.epoch)
    scene.prefill.say(msgspec.structs.replace(delta, prefill=lost))
    await scene.pause()
    until = sources._barred[scene.decode.engine_id, scene.prefill.engine_id]
    assert 0 < until - scene.pool.clock() <= BARRED_S
    await end(scene)


@asynchronous
async def test_a_decode_node_alone_gets_a_prefix() -> None:
    scene = Scene(num_decode=2, may_self_prefill=True)
    scene.pool.remove(scene.prefill.node)
    holder = scene.decodes[1]
    sources = fetching(scene, holder)
    holder.node.load.note_opened(900, num_uncomputed=900)  # so that the other node is idle
    await scene.call()
    (command,) = scene.decode.of(DecodeCommand)
    assert (command.fetch_engine_id, command.fetch_num_tokens) == (holder.engine_id, 2)
    (share,) = holder.of(ShareCommand)
    assert share.reader_engine_id == scene.decode.engine_id
    delta = token("a", 0, 7, finish=FinishReason.STOP, epoch=command.epoch)
    receipt = dataclasses.replace(DECODE_RECEIPT, num_fetches_lost=1)
    scene.decode.say(msgspec.structs.replace(delta, decode=receipt))
    await scene.end()
    assert (holder.engine_id, scene.decode.engine_id) in sources._barred


@asynchronous
async def test_the_load_of_a_prompt_counts_attention_to_cached_tokens() -> None:
    """One token attends to two tokens that are fetched, and half to itself: 1 + 2 * 2.5 units."""
    for is_alone in (False, True):
        scene = Scene(num_decode=2, may_self_prefill=is_alone)
        holder, node = None, scene.prefill.node
        if is_alone:
            scene.pool.remove(node)
            holder, node = scene.decodes[1], scene.decode.node
            holder.node.load.note_opened(900, num_uncomputed=900)
        fetching(scene, holder)
        for other in scene.pool.nodes:
            other.load.attention_share = 2.0
        await scene.call()
        [account] = [leg.account for leg in node.legs.values()]
        assert (account.num_uncomputed, account.num_units) == (1, 6)
        await end(scene)


@asynchronous
async def test_the_holder_is_told_of_an_image_that_the_prefix_cuts() -> None:
    scene = Scene()
    fetching(scene)
    for node in (scene.prefill.node, scene.decode.node):
        node.load.encodes_images = True
    span = ImageSpan(1, 2, b"d" * 16, (1, 1, 2))
    await scene.call(images=(PromptImage(span, b"file"),))
    (share,) = scene.decode.of(ShareCommand)
    assert share.prompt_token_ids == [1, 2]
    assert share.images == (PromptImage(span),), "the hashes of its blocks depend on it"
    await end(scene)


@asynchronous
async def test_prompts_that_must_be_computed_whole_fetch_nothing() -> None:
    scene = Scene()
    fetching(scene)
    await scene.call(params=dataclasses.replace(PARAMS, prompt_logprobs=0))
    (command,) = scene.prefill.of(PrefillCommand)
    assert (command.fetch_engine_id, command.fetch_num_tokens) == ("", 0)
    assert not scene.decode.of(ShareCommand)
    await end(scene)


@asynchronous
async def test_without_ends_for_prefixes_nothing_is_told() -> None:
    scene = Scene()
    await scene.call(params=SamplingParams(max_tokens=3, seed=1))
    (command,) = scene.prefill.of(PrefillCommand)
    assert command.fetch_engine_id == ""
    assert not scene.decode.of(ShareCommand)
    await end(scene)
