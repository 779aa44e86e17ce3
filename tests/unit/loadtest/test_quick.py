"""The quick benchmark's figures, verdicts and report, without a server."""

from __future__ import annotations

import dataclasses
import io
import json
import os

import pytest
from rich.console import Console

from loadtest.load.generate import Lengths
from loadtest.plan import ClosedLoop, LoadPlan
from loadtest.quick.measure import Machine, QuickResult, Speed, speed_of
from loadtest.quick.memory_speed import read_bytes_per_s
from loadtest.quick.report import WIDTH, print_quick, quick_to_json
from loadtest.quick.verdict import Grade, judge, share_of_memory
from loadtest.report.report import plain
from tests.fakes.outside.load_targets import Answer, ScriptedTarget, even, run_virtually

MACHINE = Machine(
    num_cores=2,
    instruction_set="x86-64-v4-vnni",
    no_kernels="",
    read_bytes_per_s=20e9,
    load_average=0.1,
)
ONE = Speed(
    num_readers=1,
    num_requests=20,
    num_failed=0,
    error="",
    output_tokens_per_s=35.0,
    token_s=0.025,
    ttft_s=0.5,
    prompt_tokens_per_s=1024.0,
    handoff_s=0.001,
    read_bytes_per_s=14e9,
    kept_up=True,
)
MANY = dataclasses.replace(
    ONE, num_readers=8, output_tokens_per_s=120.0, token_s=0.06, read_bytes_per_s=None
)
RESULT = QuickResult(model="a/model", target={}, machine=MACHINE, start_s=6.0, one=ONE, many=MANY)


def printed(result: QuickResult) -> list[str]:
    shown = io.StringIO()
    print_quick(result, Console(file=shown, width=WIDTH, highlight=False))
    return shown.getvalue().splitlines()


def plan(num_readers: int) -> LoadPlan:
    return LoadPlan(
        load=ClosedLoop(concurrency=num_readers),
        input_lengths=Lengths(100),
        output_lengths=Lengths(11),
        duration_s=10,
    )


def test_figures_are_those_of_the_answers() -> None:
    result = run_virtually(plan(2), ScriptedTarget(even(0.5, 0.05)))
    speed = speed_of(result, 100, num_bytes=1e6)
    assert speed.num_readers == 2
    assert speed.token_s == pytest.approx(0.05, abs=0.002)
    assert speed.ttft_s == pytest.approx(0.5, abs=0.002)
    assert speed.prompt_tokens_per_s == pytest.approx(200, rel=0.01)
    assert speed.output_tokens_per_s == pytest.approx(22, rel=0.1)  # 11 tokens in a second, twice
    decoding_s = 0.5 * len(result.records)  # ten gaps of each
    assert speed.read_bytes_per_s == pytest.approx(1e6 / decoding_s, rel=0.03)
    assert (speed.handoff_s, speed.num_failed) == (None, 0)


def test_failed_requests_are_the_verdict() -> None:
    def fail(number: int, length: int) -> Answer:
        return Answer(frames=((0.1, 1),), error="UNAVAILABLE")

    one = speed_of(run_virtually(plan(1), ScriptedTarget(fail)), 100)
    verdict = judge(dataclasses.replace(RESULT, one=one))
    assert verdict.grade is Grade.FAILED
    assert verdict.findings == ("requests failed: as scripted",)


@pytest.mark.parametrize(
    ("token_s", "grade", "finding"),
    [
        (0.025, Grade.GOOD, "one reader gets 40 tokens/s, 6.7 times as fast as people read"),
        (0.1, Grade.FAIR, "one reader gets 10 tokens/s, 1.7 times as fast as people read"),
        (0.5, Grade.SLOW, "one reader gets 2.0 tokens/s, slower than people read"),
    ],
)
def test_the_grade_is_that_of_a_reader(token_s: float, grade: Grade, finding: str) -> None:
    verdict = judge(dataclasses.replace(RESULT, one=dataclasses.replace(ONE, token_s=token_s)))
    assert (verdict.grade, verdict.findings[0]) == (grade, finding)


@pytest.mark.parametrize(
    ("read", "words"),
    [
        (14e9, "70% of memory's speed: near the limit"),
        (8e9, "40% of memory's speed: some way from the limit"),
        (2e9, "10% of memory's speed: far from the limit"),
        (
            30e9,
            "150% of memory's speed: the CPU's cache holds the model, or other programs slowed "
            "the measurement",
        ),
    ],
)
def test_the_limit_is_judged_in_words(read: float, words: str) -> None:
    result = dataclasses.replace(RESULT, one=dataclasses.replace(ONE, read_bytes_per_s=read))
    assert share_of_memory(result) == read / 20e9
    assert judge(result).findings[-1] == f"decoding takes {words}"


def test_what_slows_this_machine_is_named() -> None:
    machine = dataclasses.replace(
        MACHINE, no_kernels="off", kernels_advice="unset BATON_NATIVE_KERNELS", load_average=5.0
    )
    late = dataclasses.replace(MANY, kept_up=False)
    advice = judge(dataclasses.replace(RESULT, machine=machine, many=late)).advice
    assert [line.partition(" (")[0] for line in advice[:2]] == [
        "no native kernels",
        "other programs used the machine",
    ]
    assert advice[0] == "no native kernels (off): unset BATON_NATIVE_KERNELS"
    assert "generator itself was late" in advice[-1]


def test_a_running_system_has_no_share() -> None:
    running = dataclasses.replace(RESULT, model="", machine=None, start_s=None)
    assert share_of_memory(running) is None
    assert judge(running).grade is Grade.GOOD
    assert printed(running)[0] == "a running system, measured from here"


def test_the_report_has_80_columns_and_ends_with_the_verdict() -> None:
    lines = printed(dataclasses.replace(RESULT, model=f"a folder with a {'long ' * 30}name"))
    assert max(map(len, lines)) <= WIDTH
    verdict = lines.index("verdict: good")
    assert lines[verdict + 1].startswith(" - one reader gets 40 tokens/s")
    assert lines[-1].startswith((" >", "   "))
    assert any("time to first token (TTFT), ms" in line and "500" in line for line in lines)


def test_the_document_is_json_with_raw_units() -> None:
    document = plain(quick_to_json(RESULT))
    assert json.loads(json.dumps(document)) == document
    assert document["one"]["token_s"] == 0.025
    assert document["machine"]["read_bytes_per_s"] == 20e9
    assert document["verdict"]["grade"] == "good"
    assert document["share_of_memory_speed"] == 0.7


def test_memory_is_read_by_all_cores_without_moving_the_caller() -> None:
    before = os.sched_getaffinity(0)
    assert read_bytes_per_s(total_bytes=2**22) > 1e6
    assert read_bytes_per_s([min(before)], total_bytes=2**22) > 1e6
    assert os.sched_getaffinity(0) == before
