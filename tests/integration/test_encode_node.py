"""Tests of real encode, prefill and decode nodes: transformers' tokens, even if one dies."""

from __future__ import annotations

import re
import signal
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.api.outputs import Completion
from baton.deployment.local_deployment import LocalDeployment
from baton.processes.free_address import free_address
from tests.fakes.processes.deployments import complete_all, described_nodes, held_by, run_deployment
from tests.fakes.time.waiting import wait_until
from tests.integration.test_split_with_images import as_files
from tests.numerics.test_images_equal_transformers import (
    GREEDY,
    QUICK,
    assert_equal,
    block_size,
    draw_parts,
    expected,
    prompt_of,
)
from tests.numerics.vision_checkpoints import (
    VISION_FAMILIES,
    VisionCheckpoint,
    make_vision_checkpoint,
)

pytestmark = [pytest.mark.large, pytest.mark.nixl, pytest.mark.timeout(300)]

SEEDS = range(4)
# Positions of one and of three axes, and attention in both directions inside an image. The gate
# runs these three; `make test-large` runs all families.
OF_EACH_KIND = (QUICK, "Qwen2_5_VLForConditionalGeneration", "Gemma3ForConditionalGeneration")
METRICS = free_address()


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=pytest.mark.thorough if name in OF_EACH_KIND else ())
        for name in VISION_FAMILIES
    ],
)
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> VisionCheckpoint:
    return make_vision_checkpoint(request.param, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def deployment(checkpoint: VisionCheckpoint) -> Iterator[LocalDeployment]:
    with run_deployment(
        "--block-size",
        str(block_size(checkpoint)),
        "--long-prefill-token-threshold",
        "16",
        "--kv-cache-memory",
        "64M",
        "--kv-digests",
        model=checkpoint.folder,
        num_encode=1,
        prefill_args=["--metrics-listen", METRICS],
    ) as running:
        yield running


def ask(
    deployment: LocalDeployment, checkpoint: VisionCheckpoint, seed: int
) -> list[tuple[Completion, int]]:
    """Complete prompts with 1 to 4 images and check them; return each with its images."""
    drawn = [draw_parts(checkpoint, 100 * seed + 10 * num, num) for num in (1, 2, 3, 4)]
    wanted = [expected(checkpoint, parts) for parts in drawn]
    prompts = [as_files(prompt_of(checkpoint, parts)) for parts in drawn]
    completions = complete_all(deployment, prompts, GREEDY)
    assert_equal(completions, wanted)
    return list(zip(completions, (1, 2, 3, 4), strict=True))


def encodings(completions: list[tuple[Completion, int]]) -> tuple[int, int]:
    """Return the numbers of received and of lost encodings, by the receipts."""
    receipts = [one.receipt.prefill for one, _ in completions if one.receipt is not None]
    received = sum(one.num_encodings_received for one in receipts if one is not None)
    return received, sum(one.num_encodings_lost for one in receipts if one is not None)


def assert_nothing_is_left(deployment: LocalDeployment) -> None:
    """Wait until no node has a request, and the prefill node awaits and quarantines no encoding."""

    def is_empty() -> bool:
        num_open = figure(METRICS, "baton_encodings_open")
        names = [name for name, node in described_nodes(deployment).items() if not node.lost]
        has_requests = any(held_by(deployment, name).requests for name in names)
        return num_open == 0 and not has_requests

    wait_until(is_empty, "no open request and encoding on any node", timeout_s=20)


def test_encodings_come_from_the_encode_node(
    deployment: LocalDeployment, checkpoint: VisionCheckpoint
) -> None:
    received, lost = encodings(ask(deployment, checkpoint, 1))
    assert lost == 0
    assert 4 <= received <= 10, "a long queue there leaves some images to the prefill node"
    again = encodings(ask(deployment, checkpoint, 1))
    assert again == (0, 0), "the prefill node keeps them"
    assert_nothing_is_left(deployment)


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_prompts_go_on_without_their_encode_node(
    deployment: LocalDeployment, checkpoint: VisionCheckpoint, number: signal.Signals
) -> None:
    child = deployment.child("e0")
    for seed in SEEDS:
        delay_s = 0.02 * seed
        timer = threading.Timer(delay_s, child.process.send_signal, (number,))
        timer.start()
        began_at = time.monotonic()
        ask(deployment, checkpoint, 10 * (1 + (number is signal.SIGKILL)) + seed)
        assert time.monotonic() - began_at < 20, "a prompt waits for its encodings for seconds only"
        timer.join()
        if number is signal.SIGSTOP:
            child.process.send_signal(signal.SIGCONT)
            deployment.wait_ready(60)
        else:
            child = deployment.restart("e0")
            deployment.wait_ready(60)
        assert_nothing_is_left(deployment)
    received, lost = encodings(ask(deployment, checkpoint, 90 + int(number)))
    assert received + lost <= 10


@pytest.mark.thorough
def test_an_image_in_fifty_prompts_of_two_prefill_nodes_is_encoded_once(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    checkpoint = make_vision_checkpoint(QUICK, tmp_path_factory.mktemp("model"))
    (text, picture, _) = draw_parts(checkpoint, 7, 1)
    page = free_address()
    with run_deployment(
        "--block-size",
        str(block_size(checkpoint)),
        "--kv-cache-memory",
        "64M",
        "--kv-connector",
        "tls",
        model=checkpoint.folder,
        num_prefill=2,
        num_encode=1,
        encode_args=["--metrics-listen", page],
        log_folder=tmp_path,
        router_args=["--policy", "round_robin"],
    ) as running:
        drawn = [[text, picture, f"{number} of fifty"] for number in range(50)]
        prompts = [as_files(prompt_of(checkpoint, parts)) for parts in drawn]
        completions = complete_all(running, prompts, GREEDY)
        assert_equal(completions, [expected(checkpoint, parts) for parts in drawn])
        receipts = [one.receipt for one in completions if one.receipt is not None]
        assert {one.prefill_node for one in receipts} == {"p0", "p1"}
        computed = [one.prefill for one in receipts if one.prefill is not None]
        assert sum(one.num_encodings_lost for one in computed) == 0
        assert sum(one.num_encodings_received for one in computed) >= 2
        assert figure(page, "baton_images_encoded_total") == 1


def figure(address: str, name: str) -> float:
    """Return a metric of a node without labels of its own."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as page:
        text = page.read().decode()
    found = re.search(rf"^{name}\{{[^}}]*\}} (\S+)$", text, re.MULTILINE)
    assert found is not None, name
    return float(found[1])
