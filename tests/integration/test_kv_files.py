"""Files with KV over real processes: a prefill node serves after a restart what it wrote before."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton import LLM, Client, SamplingParams
from baton.api.outputs import Completion
from baton.deployment.local_deployment import LocalDeployment
from baton.processes.free_address import free_address
from tests.fakes.checkpoints.demo_model import DEMO_MODEL
from tests.fakes.processes.deployments import run_deployment
from tests.fakes.time.waiting import wait_until
from tests.integration.test_audit import audit
from tests.integration.test_encode_node import figure

pytestmark = [pytest.mark.large, pytest.mark.nixl, pytest.mark.timeout(300)]

METRICS = free_address()
PROMPT = [5 + (7 * i) % 200 for i in range(8 * 16 + 3)]  # eight blocks
NUM_OUT = 120
PARAMS = SamplingParams(max_tokens=NUM_OUT, temperature=0.0, ignore_eos=True)


def say(running: LocalDeployment, prompt: list[int]) -> Completion:
    with Client(running.config.listen) as client:
        return client.generate(prompt, PARAMS, timeout_s=60)


def num_cached(completion: Completion) -> int:
    assert completion.receipt is not None
    assert completion.receipt.prefill is not None
    return completion.receipt.prefill.num_cached_tokens


def test_a_restarted_prefill_node_reads_what_both_nodes_wrote(tmp_path: Path) -> None:
    llm = LLM(str(DEMO_MODEL), dtype="float32")
    with run_deployment(
        *("--kv-files", str(tmp_path), "--kv-files-size", "1G", "--num-blocks", "200"),
        *("--kv-files-timeout-s", "4"),
        prefill_args=["--metrics-listen", METRICS],
        decode_args=["--local-prefill-threshold", "0"],
    ) as running:
        first = say(running, PROMPT)
        assert first.token_ids == llm.generate([PROMPT], PARAMS)[0].token_ids
        assert num_cached(first) == 0
        known = (len(PROMPT) + NUM_OUT - 1) // 16

        def blocks_in_files() -> int:
            ends = [path.name.split("-")[2:4] for path in tmp_path.glob("*/*/*.kv")]
            return max((int(start) + int(size) for start, size in ends), default=0)

        wait_until(lambda: blocks_in_files() == known, "the answer's KV is in a file")
        again = first
        for _ in range(3):  # on a machine that stands still for seconds, a read is late
            running.restart("p0")
            running.wait_ready(60)
            again = say(running, PROMPT)
            assert again.token_ids == first.token_ids
            if num_cached(again):
                break
        assert num_cached(again) == 8 * 16
        turn = [*PROMPT, *first.token_ids, 9, 10, 11]
        later = say(running, turn)
        assert later.token_ids == llm.generate([turn], PARAMS)[0].token_ids
        assert num_cached(later) == known * 16, "the decode node wrote the answer's blocks"
        assert figure(METRICS, "baton_kv_file_read_tokens_total") == known * 16
        output = audit(running.config.listen)
        assert output.count("of them with an owner") == 2, output
