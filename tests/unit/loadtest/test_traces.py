"""Unit tests of trace files: the public format, reading back, and prefixes shared by equal ids."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.api.errors import ConfigError
from loadtest.load.traces import TraceRequest, prompt_token_ids, read_trace, write_trace

# The two samples on Mooncake's front page (github.com/kvcache-ai/Mooncake), one per line.
PUBLIC = """\
{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": \
[46, 47, 48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 2353, 2354]}
{"timestamp": 30535, "input_length": 6472, "output_length": 26, "hash_ids": \
[46, 47, 48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 2366]}
"""


def test_the_public_format_reads_and_its_prompts_share_twelve_blocks(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(PUBLIC)
    one, other = read_trace(path)
    assert (one.timestamp_ms, one.input_length, one.output_length) == (27482, 6955, 52)
    assert other.hash_ids[-2:] == (57, 2366)
    prompts = [prompt_token_ids(r.hash_ids, r.input_length, 32_000) for r in (one, other)]
    assert [len(prompt) for prompt in prompts] == [6955, 6472]
    assert prompts[0][: 12 * 512] == prompts[1][: 12 * 512]
    num_equal = sum(
        a == b for a, b in zip(prompts[0][12 * 512 :], prompts[1][12 * 512 :], strict=False)
    )
    assert num_equal < 5
    assert all(0 <= token_id < 32_000 for token_id in prompts[0])


def test_what_is_written_reads_back(tmp_path: Path) -> None:
    requests = [
        TraceRequest(timestamp_ms=0, input_length=1, output_length=1, hash_ids=(7,)),
        TraceRequest(timestamp_ms=9, input_length=1024, output_length=3, hash_ids=(7, 8)),
    ]
    write_trace(tmp_path / "t", requests)
    assert list(read_trace(tmp_path / "t")) == requests


def test_missing_ids_are_made_up_and_shared_with_nobody(tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_text(
        '{"timestamp": 0, "input_length": 600, "output_length": 1}\n\n'
        '{"timestamp": 1.5, "input_length": 600, "output_length": 1, "hash_ids": [3]}\n'
        '{"timestamp": 2, "input_length": 600, "output_length": 1, "hash_ids": null}\n'
    )
    requests = list(read_trace(path))
    assert [request.hash_ids for request in requests] == [(-1, -2), (3, -3), (-4, -5)]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("[]", "object"),
        ("{", "line 1"),
        ('{"timestamp": 0, "input_length": 0, "output_length": 1}', "input_length: .* got 0"),
        ('{"timestamp": 0, "input_length": 5, "output_length": "x"}', "output_length: .* got 'x'"),
        ('{"timestamp": 0, "input_length": true, "output_length": 1}', "input_length"),
        (
            '{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1, 2]}',
            "hash_ids: must be at most 1 .* got 2",
        ),
        (
            '{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": ["a"]}',
            "hash_ids: must be a list of whole numbers",
        ),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, problem: str) -> None:
    path = tmp_path / "t"
    path.write_text(line)
    with pytest.raises(ConfigError, match=problem):
        list(read_trace(path))


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trace: .* cannot be read"):
        list(read_trace(tmp_path / "none"))
    with pytest.raises(ConfigError, match="hash_ids: must be 2 for 513 tokens, got 1"):
        prompt_token_ids([1], 513, 100)
