"""KV as objects over real processes: two nodes share a bucket, and a restarted node reads it."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton import LLM
from baton.processes.free_address import free_address
from tests.fakes.checkpoints.demo_model import DEMO_MODEL
from tests.fakes.outside.s3_server import BUCKET, S3Server, secret_file
from tests.fakes.processes.deployments import run_deployment
from tests.fakes.time.waiting import wait_until
from tests.integration.test_audit import audit
from tests.integration.test_encode_node import figure
from tests.integration.test_kv_files import NUM_OUT, PARAMS, PROMPT, num_cached, say

pytestmark = [pytest.mark.large, pytest.mark.nixl, pytest.mark.timeout(300)]

METRICS = free_address()


def test_a_restarted_prefill_node_reads_what_both_nodes_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, server = LLM(str(DEMO_MODEL), dtype="float32"), S3Server()
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    with run_deployment(
        *("--kv-files", f"s3://{BUCKET}/kv", "--kv-files-secret", secret_file(tmp_path)),
        *("--kv-files-timeout-s", "4", "--num-blocks", "200"),
        prefill_args=["--metrics-listen", METRICS],
        decode_args=["--local-prefill-threshold", "0"],
    ) as running:
        first = say(running, PROMPT)
        assert first.token_ids == llm.generate([PROMPT], PARAMS)[0].token_ids
        known = (len(PROMPT) + NUM_OUT - 1) // 16

        def blocks_in_bucket() -> int:
            names = [name for name in server.object_names() if name.endswith(".kv")]
            ends = [name.rpartition("/")[2].split("-")[2:4] for name in names]
            return max((int(start) + int(size) for start, size in ends), default=0)

        wait_until(lambda: blocks_in_bucket() == known, "the answer's KV is in the bucket")
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
        server.status = 503
        assert say(running, PROMPT[::-1]).token_ids, "a faulty server fails no request"
        assert audit(running.config.listen).count("of them with an owner") == 2
    server.stop()
