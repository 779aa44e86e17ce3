"""Sends requests to a router, one after the other; run on a client's host by a test.

    python -m tests.hosts.ask ROUTER PROMPTS

PROMPTS is JSON, a list of lists of token ids. Prints JSON: an answer for each prompt.
"""

from __future__ import annotations

import json
import sys

from baton import Client, SamplingParams

MAX_TOKENS = 24


def main(address: str, prompts: str) -> None:
    """Print the tokens of each prompt's greedy answer, how its KV travelled, and where to."""
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)
    answers = []
    with Client(address) as client:
        for prompt in json.loads(prompts):
            found = client.generate(prompt, params)
            assert found.receipt is not None
            assert found.receipt.decode is not None
            push = found.receipt.decode.push
            answers.append(
                {
                    "token_ids": list(found.token_ids),
                    "transport": push.transport,
                    "num_bytes": push.num_bytes,
                    "decode_node": found.receipt.decode_node,
                }
            )
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
