"""The measurement of paged blocks and static batches: its sums, its trace files, its batches."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.engine.claims import complete_static, draw_prompts, in_turns
from benchmarks.engine.claims_memory import (
    RESERVATIONS,
    Sizes,
    Workload,
    compare_memory,
    fitted,
    occupy,
    read_lengths,
)
from engine import LLM

DEMO = "examples/demo_model"


def test_occupancy_counts_the_slots_of_blocks_and_of_reservations() -> None:
    # Each request fills two blocks with 5, 6 and 7 tokens. Two of the four fit the blocks.
    occupancy, scheduler = occupy([Sizes(5, 3)] * 4, 16, num_blocks=4, block_size=4)
    assert scheduler.num_preemptions == 0
    # The last two requests wait during the three steps of the first two.
    assert occupancy.num_steps == 3
    assert occupancy.filled == 2 * (5 + 6 + 7)
    assert occupancy.held == 2 * 3 * 8
    assert occupancy.reserved == {
        "the model's limit": 2 * 3 * 16,
        "the next power of two of the output": 2 * 3 * (5 + 4),
        "exactly the output, known in advance": 2 * 3 * 8,
    }


def test_blocks_waste_less_than_every_reservation() -> None:
    found = compare_memory(Workload(40, 80, 256).draw(60), 256, num_blocks=64, block_size=16)
    wastes = [row["waste"] for row in found["reservations"].values()]
    assert list(found["reservations"]) == list(RESERVATIONS)
    assert 0 < found["waste"] < min(wastes)
    assert max(wastes) == found["reservations"]["the model's limit"]["waste"]


def test_requests_that_all_fit_are_refused() -> None:
    with pytest.raises(RuntimeError, match="more requests or fewer blocks"):
        compare_memory([Sizes(4, 3)], 16, num_blocks=64, block_size=16)


def test_lengths_of_both_kinds_of_traces_are_read(tmp_path: Path) -> None:
    azure = tmp_path / "azure.csv"
    azure.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\nx,374,44\nx,9,0\nx,4000,300\n")
    assert read_lengths(azure, 10, 2048) == [Sizes(374, 44), Sizes(1748, 300)]
    mooncake = tmp_path / "one.jsonl"
    mooncake.write_text('{"timestamp": 0, "input_length": 30, "output_length": 5}\n' * 3)
    assert read_lengths(mooncake, 2, 2048) == [Sizes(30, 5)] * 2


def test_the_prompt_gives_way_to_the_output() -> None:
    assert fitted(5000, 100, 2048) == Sizes(1948, 100)
    assert fitted(10, 5000, 2048) == Sizes(1, 2047)


def test_static_batches_give_the_wanted_tokens() -> None:
    llm = LLM(DEMO, num_blocks=64, max_num_requests=2, prefix_cache=False)
    prompts, outputs = draw_prompts([5, 9, 7]), [2, 6, 3]
    ways = {
        str(is_padded): lambda is_padded=is_padded: complete_static(
            llm, prompts, outputs, 2, is_padded=is_padded
        )
        for is_padded in (False, True)
    }
    assert [len(one) for one in ways["True"]()] == outputs
    found = in_turns(ways, 1)
    assert all(row["equal"] and row["tokens_per_s"] > 0 for row in found.values())
    llm.engine.close()
