"""Every registered architecture, split over real processes: the tokens of transformers.

Those with states, which are handed over where blocks end, with blocks of several sizes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from baton import SamplingParams
from baton.deployment.local_deployment import LocalDeployment
from loadtest.drills.audit import Auditor
from tests.fakes.processes.deployments import complete_all, run_deployment
from tests.fakes.system.split_cases import FAMILY_CASES
from tests.numerics.family_checkpoints import TinyCheckpoint, make_tiny_checkpoint

pytestmark = [pytest.mark.large, pytest.mark.nixl, pytest.mark.timeout(300)]

NUM_TOKENS = 40
PARAMS = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
QUIET_TIMEOUT_S = 20.0


@pytest.fixture(scope="module", params=FAMILY_CASES, ids=lambda case: ", ".join(map(str, case)))
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[TinyCheckpoint, int]:
    """A checkpoint, and the block size it is served with."""
    architecture, variant, block_size = request.param
    folder = tmp_path_factory.mktemp("model")
    return make_tiny_checkpoint(architecture, variant, folder), block_size


@pytest.fixture(scope="module")
def checkpoint(case: tuple[TinyCheckpoint, int]) -> TinyCheckpoint:
    return case[0]


@pytest.fixture(scope="module")
def deployment(case: tuple[TinyCheckpoint, int]) -> Iterator[LocalDeployment]:
    """Blocks and chunks so small that every prompt is several of both."""
    with run_deployment(
        "--block-size",
        str(case[1]),
        "--long-prefill-token-threshold",
        "16",
        "--kv-cache-memory",
        "16M",
        model=case[0].folder,
    ) as running:
        yield running


def test_split_gives_the_tokens_of_transformers_and_computes_no_prompt_twice(
    deployment: LocalDeployment, checkpoint: TinyCheckpoint
) -> None:
    address = deployment.config.listen
    examples = checkpoint.examples + checkpoint.short_examples
    # The second time both nodes know prompts, the third time outputs are parts of prompts, too.
    later = [example.later(index) for index, example in enumerate(checkpoint.examples, 20)]
    num_pushed = num_cached = 0
    for batch in (examples, examples, later):
        completions = complete_all(deployment, [example.prompt for example in batch], PARAMS)
        for example, completion in zip(batch, completions, strict=True):
            assert list(completion.token_ids) == example.output[:NUM_TOKENS]
            assert completion.receipt is not None
            decode = completion.receipt.decode
            assert decode is not None
            num_cached += decode.num_cached_tokens
            if decode.push.transport:
                num_pushed += 1
                assert decode.num_prompt_tokens_computed == 0
                assert decode.num_forwards == NUM_TOKENS - 1
            else:  # the short-cut: its own cache had so much that it computed the rest itself
                num_left = len(example.prompt) - decode.num_cached_tokens
                assert decode.num_prompt_tokens_computed == num_left < len(example.prompt)
    assert num_cached > 0
    assert num_pushed > 0
    found = asyncio.run(Auditor(address, token="").look_until_free(QUIET_TIMEOUT_S)).audit
    assert (found.num_held, found.num_orphans, found.problems) == (0, 0, ())
