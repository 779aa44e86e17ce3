"""Unit tests of calls with images: attempts have the files, and other images are other prompts."""

from __future__ import annotations

import asyncio
import dataclasses

from baton.api.images import ImageSpan, PromptImage
from baton.api.sampling_params import SamplingParams
from baton.link.words import DecodeCommand, PrefillCommand
from router.calls.call import Call
from router.calls.recovery.retry_budget import RetryOptions
from router.fleet.prefix.prompt_hashes import HashKind
from tests.fakes.router.nodes import HandNode, token_1
from tests.fakes.router.router_scene import Scene, asynchronous

OPTIONS = RetryOptions(trial_pause_s=0, pair_timeout_s=0.05, first_pause_s=0.001)
IMAGE = PromptImage(ImageSpan(1, 2, b"d" * 16, (1, 1, 2)), b"file")
PARAMS = SamplingParams(max_tokens=5, seed=1)


def encode(*nodes: HandNode) -> None:
    for node in nodes:
        node.node.load.encodes_images = True


@asynchronous
async def test_a_second_attempt_has_the_images_again() -> None:
    scene = Scene(options=OPTIONS, num_decode=2)
    encode(scene.prefill)
    await scene.call(params=PARAMS, images=(IMAGE,))
    (first,) = scene.prefill.of(PrefillCommand)
    (decode,) = (one for one in scene.decodes if one.of(DecodeCommand))
    scene.prefill.say(token_1("a", 10, epoch=first.epoch))
    await scene.pause()
    decode.leave()
    async with asyncio.timeout(5):
        while len(scene.prefill.of(PrefillCommand)) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    again = scene.prefill.of(PrefillCommand)[-1]
    assert again.output_token_ids == (10,)
    assert first.images == again.images == (IMAGE,)
    (other,) = (one for one in scene.decodes if one is not decode)
    (command,) = other.of(DecodeCommand)
    assert command.images == (PromptImage(IMAGE.span),)


@asynchronous
async def test_images_wait_for_a_node_that_encodes_them() -> None:
    scene = Scene(options=OPTIONS, num_prefill=2)
    encode(scene.prefills[1])
    await scene.call(params=PARAMS, images=(IMAGE,))
    assert not scene.prefills[0].of(PrefillCommand)
    assert len(scene.prefills[1].of(PrefillCommand)) == 1


@asynchronous
async def test_a_decode_node_that_computes_the_prompt_gets_the_files() -> None:
    scene = Scene(options=OPTIONS, may_self_prefill=True)
    encode(scene.decode)  # and the prefill node encodes nothing
    await scene.call(params=PARAMS, images=(IMAGE,))
    (command,) = scene.decode.of(DecodeCommand)
    assert command.prefill_engine_id == ""
    assert command.images == (IMAGE,)


def test_other_images_are_another_prompt() -> None:
    kind = HashKind(1, "blake2b")

    def made(image: PromptImage) -> Call:
        return Scene.make(images=(image,))

    first = made(IMAGE)
    assert first.hashes.of(kind) == made(IMAGE).hashes.of(kind)
    digest = bytes(16)
    other = made(PromptImage(ImageSpan(1, 2, digest, (1, 1, 2)), b"other"))
    assert [a == b for a, b in zip(first.hashes.of(kind), other.hashes.of(kind), strict=True)] == [
        True, False, False,
    ]  # fmt: skip
    shared = dataclasses.replace(first, request_id="b")
    assert shared.hashes is first.hashes
    suspects = Scene().dispatcher.recoveries.suspects
    assert suspects.fingerprint(first) == suspects.fingerprint(shared)
    assert suspects.fingerprint(first) != suspects.fingerprint(other)
