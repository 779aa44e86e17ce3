"""The split system with latent attention: what travels of a token is its latents, and no more."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton import SamplingParams
from baton.deployment.local_deployment import LocalDeployment, LocalDeploymentConfig
from baton.processes.free_address import free_address
from tests.fakes.processes.deployments import complete_all
from tests.integration.conftest import READY_TIMEOUT_S
from tests.numerics.family_checkpoints import LATENTS, make_tiny_checkpoint

pytestmark = [pytest.mark.large, pytest.mark.nixl, pytest.mark.timeout(300)]

BLOCK_SIZE, FLOAT32_BYTES = 4, 4
PARAMS = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)


def test_as_many_bytes_travel_as_latents_have(tmp_path: Path) -> None:
    checkpoint = make_tiny_checkpoint("DeepseekV3ForCausalLM", "groups, YaRN", tmp_path)
    config = LocalDeploymentConfig(
        model=str(checkpoint.folder),
        listen=free_address(),
        router_args=["--no-local-prefill"],  # what is tested is the split
        node_args=["--dtype", "float32", "--block-size", str(BLOCK_SIZE), "--no-prefix-cache"],
    )
    examples = [example.later(7 * index) for index, example in enumerate(checkpoint.examples)]
    with LocalDeployment(config) as running:
        running.wait_ready(READY_TIMEOUT_S)
        completions = complete_all(running, [example.prompt for example in examples], PARAMS)
    width = LATENTS["kv_lora_rank"] + LATENTS["qk_rope_head_dim"]
    token_bytes = width * checkpoint.theirs.config.num_hidden_layers * FLOAT32_BYTES
    for example, completion in zip(examples, completions, strict=True):
        assert list(completion.token_ids) == example.output[:20]
        assert completion.receipt is not None
        assert completion.receipt.decode is not None
        push = completion.receipt.decode.push
        num_blocks = -(-len(example.prompt) // BLOCK_SIZE)
        assert push.num_blocks == num_blocks
        assert push.num_bytes == num_blocks * BLOCK_SIZE * token_bytes
