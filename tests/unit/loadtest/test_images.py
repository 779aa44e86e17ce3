"""Unit tests of a load's images: drawing, sending, and the report."""

from __future__ import annotations

import base64
import itertools
import json
from io import BytesIO
from typing import Any

import pytest
from PIL import Image

from baton.api.errors import ConfigError
from baton.api.outputs import PrefillReceipt, Receipt
from baton.v1 import inference_pb2
from loadtest.load.generate import Lengths
from loadtest.load.images import DrawnImage, ImageLoad, parse_image_counts, parse_image_sizes
from loadtest.load.prompts import ImageMessage
from loadtest.load.workload import PlannedRequest, planned_requests
from loadtest.options import RunOptions
from loadtest.plan import LoadPlan, OpenLoop
from loadtest.report.image_report import report_images
from loadtest.report.summary import Summary
from loadtest.targets.base import TargetOptions
from loadtest.targets.baton_grpc import BatonTarget
from loadtest.targets.openai_http import OpenAITarget
from tests.fakes.outside.load_targets import ScriptedTarget, even, run_virtually

IMAGES = ImageLoad(counts=Lengths(2), sizes=((30, 20), (8, 9)), share=0.5, repeats=0.3)


def plan(**options: Any) -> LoadPlan:
    defaults: dict[str, Any] = {
        "load": OpenLoop(rate_per_s=20.0),
        "input_lengths": Lengths(12, 0.5),
        "output_lengths": Lengths(4),
        "num_requests": 60,
    }
    return LoadPlan(**defaults | options)


def made(**options: Any) -> list[PlannedRequest]:
    return list(planned_requests(plan(**options)))


def test_images_are_valid_files_that_the_seed_decides() -> None:
    image = DrawnImage("3", 300, 17)
    assert image.make() == DrawnImage("3", 300, 17).make() != DrawnImage("4", 300, 17).make()
    with Image.open(BytesIO(image.make())) as opened:
        pixels = opened.convert("RGB")
    assert pixels.size == (300, 17)
    raw = pixels.tobytes()
    assert len({raw[at : at + 3] for at in range(0, len(raw), 3)}) > 50
    drawn = [list(itertools.islice(IMAGES.draw(seed), 200)) for seed in ("1", "1", "2")]
    assert drawn[0] == drawn[1] != drawn[2]
    shown = [image for images in drawn[0] for image in images]
    assert 0.4 < sum(map(bool, drawn[0])) / 200 < 0.6
    assert 0.2 < 1 - len(set(shown)) / len(shown) < 0.4
    assert {(image.width, image.height) for image in shown} == set(IMAGES.sizes)


def test_images_change_no_request_without_images() -> None:
    before, after = made(), made(images=IMAGES)
    assert [one.output_length for one in before] == [one.output_length for one in after]
    texts = [(a, b) for a, b in zip(before, after, strict=True) if not b.images]
    assert 15 < len(texts) < 45
    assert all(a == b for a, b in texts)
    (words, *_) = (one.prompt.make(10) for one in after if one.images)
    assert isinstance(words, ImageMessage)


def test_all_turns_of_a_conversation_have_its_images_after_the_shared_prefix() -> None:
    images = ImageLoad(counts=Lengths(1), sizes=((8, 8),), share=1.0, repeats=0.0)
    first, second = made(
        images=images, turns=Lengths(2), prefix_groups=1, prefix_tokens=3, num_requests=2
    )
    assert first.images == second.images
    messages = [one.prompt.make(9) for one in (first, second)]
    assert all(isinstance(one, ImageMessage) for one in messages)
    befores, afters = ([getattr(one, name) for one in messages] for name in ("before", "after"))
    assert befores[0] == befores[1]
    assert len(befores[0].split()) == 3
    assert afters[1].startswith(f"{afters[0]} ")


@pytest.mark.parametrize("before", ["see", ""])
def test_targets_send_the_images_between_the_texts(before: str) -> None:
    message = ImageMessage(before, (b"one", b"two"), "what?")
    texts = [{"text": before}] if before else []
    sent = inference_pb2.GenerateRequest.FromString(BatonTarget([], (), {}).prepare(message, 5))
    (own,) = sent.chat.messages
    parts = [{"text": part.text} if part.text else {"image": part.image} for part in own.parts]
    assert parts == [*texts, {"image": b"one"}, {"image": b"two"}, {"text": "what?"}]
    session: Any = None
    body = json.loads(OpenAITarget(session, "", {"model": "m"}, "").prepare(message, 5))
    (user,) = body["messages"]
    urls = [part["image_url"]["url"] for part in user["content"] if part["type"] == "image_url"]
    files = [base64.b64decode(url.removeprefix("data:image/png;base64,")) for url in urls]
    assert files == [b"one", b"two"]
    assert [part["text"] for part in user["content"] if "text" in part] == [
        *filter(None, [before]), "what?",
    ]  # fmt: skip


def summary_of(**options: Any) -> Summary:
    return run_virtually(plan(**options), ScriptedTarget(even(0.1, 0.02))).summary


def test_the_report_tells_requests_with_images_from_others() -> None:
    assert summary_of().images is None
    summary = summary_of(images=IMAGES)
    assert summary.images is not None
    assert summary.images.encodings is None
    with_images, texts = (summary.latencies[f"ttft_{kind}_s"].count for kind in ("images", "text"))
    assert (with_images, with_images + texts) == (summary.images.num_requests, 60)
    assert summary.images.num_images == 2 * with_images > summary.images.num_different
    assert "itl_text_s" in summary.latencies


def test_receipts_tell_where_images_were_encoded() -> None:
    result = run_virtually(plan(images=IMAGES), ScriptedTarget(even(0.1, 0.02)))
    records = [record for record in result.records if record.planned.images][:3]
    counts = [(1, 0, 1, 0), (0, 1, 1, 1), (0, 0, 0, 1)]  # received, lost, made, cached
    for record, (received, lost, made_here, cached) in zip(records, counts, strict=True):
        prefill = PrefillReceipt(
            queue_s=0.1, prefill_s=0.2, num_chunks=1, num_computed_tokens=9, num_cached_tokens=0,
            num_encodings_received=received, num_encodings_lost=lost,
            num_images_encoded=made_here, num_encodings_cached=cached,
        )  # fmt: skip
        record.receipt = Receipt(
            num_prompt_tokens=9, num_output_tokens=4, ttft_s=0.3, total_s=0.4, prefill_node="p",
            decode_node="d", prefill=prefill, decode=None,
        )  # fmt: skip
    report = report_images(records)
    assert report is not None
    assert report.encodings is not None
    assert report.encodings.line() == (
        "encodings: 1 received from encode nodes, 2 made on prefill nodes (1 lost), 2 cached, "
        "1 in cached prefixes"
    )


@pytest.mark.parametrize(
    "options",
    [
        {"image_share": 0.5},
        {"image_size": "8x8"},
        {"images": "2", "trace": "t", "rate": None},
        {"images": "2", "dataset": "d"},
        {"images": "2", "image_size": "8"},
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any]) -> None:
    defaults: dict[str, Any] = {
        "rate": 1.0, "num_requests": 3, "target": TargetOptions(url="grpc://x:1"),
    }  # fmt: skip
    with pytest.raises(ConfigError, match=r"^image"):
        RunOptions(**defaults | options).run_plan(None)


@pytest.mark.parametrize("text", ["0", "65", "uniform:1-65", "lognormal:2,0.5", "nan", ""])
def test_odd_numbers_of_images_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^images: must be"):
        parse_image_counts(text)


@pytest.mark.parametrize("text", ["0x5", "5", "5x", "99999x1", "5x5,", "-1x5", "", "²x5"])
def test_odd_sizes_of_images_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^image_size: must be"):
        parse_image_sizes(text)
