"""Sends requests to a router; a test runs this program on a client's host.

    python -m tests.hosts.ask ROUTER PROMPTS [LANES [MAX_TOKENS]]

PROMPTS is a JSON list of lists of token ids. LANES requests are open at a time, by default one.
Prints a JSON list of answers in the order of the prompts.
"""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor

from baton import Client, SamplingParams

MAX_TOKENS = 24


def main(address: str, prompts: str, lanes: str = "1", max_tokens: str = str(MAX_TOKENS)) -> None:
    """Print each prompt's greedy answer as tokens, the transport of its KV, and its nodes."""
    params = SamplingParams(max_tokens=int(max_tokens), temperature=0.0, ignore_eos=True)

    def ask(prompt: list[int]) -> dict[str, object]:
        found = client.generate(prompt, params)
        assert found.receipt is not None
        assert found.receipt.decode is not None
        push = found.receipt.decode.push
        return {
            "token_ids": list(found.token_ids),
            "transport": push.transport,
            "num_bytes": push.num_bytes,
            "prefill_node": found.receipt.prefill_node,
            "decode_node": found.receipt.decode_node,
        }

    with Client(address) as client, ThreadPoolExecutor(int(lanes)) as threads:
        json.dump(list(threads.map(ask, json.loads(prompts))), sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
