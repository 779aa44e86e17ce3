"""Tuning: the search over made-up goodputs with noise, its file of trials, what it writes."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from baton.api.errors import ConfigError
from baton.cli.config_file import PROGRAMS, read_config_file
from baton.options import make, options_of
from loadtest.drills.site import UpOptions
from loadtest.load.generate import Lengths
from loadtest.load.lengths import parse_lengths
from loadtest.options import ReportOptions, TuneOptions
from loadtest.plan import LoadPlan, OpenLoop
from loadtest.slo import Slo
from loadtest.tuning.execute_tuning import TuningJob, table_of, verdict_lines
from loadtest.tuning.settings import (
    Choice,
    Setting,
    chosen_settings,
    config_text,
    deployment_of,
    known_settings,
)
from loadtest.tuning.state import TuningState
from loadtest.tuning.tune import StoppedError, Trial, Tuning, tune

SETTINGS = (Setting("a", (1, 2, 3)), Setting("b", (10, 20)))
SEARCH = {"up": "m", "rate": 3.0}


def goodput(choice: Choice) -> float:
    """Return a goodput that is best with a = 2 and b = 20; each of both adds something alone."""
    return (
        10.0
        + {1: -3.0, 2: 4.0, 3: 1.0}.get(int(choice.get("a", 0)), 0.0)
        + (2.0 if choice.get("b") == 20 else 0.0)
    )


class Machine:
    """Answers trials from a made-up surface with noise, and counts them."""

    def __init__(
        self, surface: Callable[[Choice], float], noise: float, state: TuningState | None = None
    ) -> None:
        self.surface, self.noise, self.state = surface, noise, state
        self.num_trials, self.stops_after = 0, 1000

    async def measure(self, choice: Choice, repeat: int) -> Trial:
        found = self.state.find(choice, repeat) if self.state is not None else None
        if found:
            return found
        if self.num_trials == self.stops_after:
            raise StoppedError
        self.num_trials += 1
        chance = random.Random(f"{sorted(choice.items())} {repeat}")
        value = self.surface(choice) + chance.gauss(0, self.noise)
        trial = Trial(choice=dict(choice), repeat=repeat, goodput_per_s=value, attainment=0.5)
        if self.state is not None:
            self.state.add(trial)
        return trial


def search(machine: Machine, has_time: Callable[[], bool] = lambda: True) -> Tuning:
    return asyncio.run(tune(machine.measure, SETTINGS, 4, has_time))


def test_the_best_choice_is_found_and_confirmed() -> None:
    found = search(Machine(goodput, 0.1))
    assert found.best == {"a": 2, "b": 20}
    assert found.wins
    assert found.gain is not None
    assert found.gain.mean == pytest.approx(6, abs=0.5)
    kept = [(one.setting, one.value) for one in found.tried if one.is_kept]
    assert kept == [("a", 2), ("b", 20)]


def test_settings_that_do_nothing_do_not_beat_the_defaults() -> None:
    found = search(Machine(lambda _: 10.0, 1.0))
    assert not found.wins
    assert found.noise > 0
    assert "No setting beats" in verdict_lines(found, "ttft 1 s")[-1]
    assert not search(Machine(lambda _: 10.0, 0.0)).best


def test_a_lucky_trial_does_not_win() -> None:
    def surface(choice: Choice) -> float:
        return 10.0

    machine = Machine(surface, 0.05)
    measure = machine.measure

    async def lucky(choice: Choice, repeat: int) -> Trial:
        trial = await measure(choice, repeat)
        is_lucky = choice == {"a": 2} and repeat == 0
        return Trial(
            choice=trial.choice,
            repeat=repeat,
            goodput_per_s=20.0 if is_lucky else trial.goodput_per_s,
        )

    found = asyncio.run(tune(lucky, SETTINGS, 4, lambda: True))
    assert found.best["a"] == 2
    assert not found.wins


def test_a_search_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    whole = search(Machine(goodput, 0.1))
    path, num_trials = tmp_path / "state.jsonl", 0
    for stops_after in (1, 3, 2, 1000):
        machine = Machine(goodput, 0.1, TuningState(path, SEARCH, seed=7))
        machine.stops_after = stops_after
        found = search(machine)
        num_trials += machine.num_trials
        with path.open("a", encoding="utf-8") as file:
            file.write('{"choice": {"a"')  # a crash in the middle of a line
    assert found == whole
    assert num_trials == TuningState(path, SEARCH, seed=8).num_trials
    assert TuningState(path, SEARCH, seed=8).seed == 7


def test_the_file_of_another_search_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "state.jsonl"
    TuningState(path, SEARCH, seed=7)
    with pytest.raises(ConfigError, match="with another rate; remove it"):
        TuningState(path, SEARCH | {"rate": 4.0}, seed=7)
    path.write_text("[]\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="is no file of a search"):
        TuningState(path, SEARCH, seed=7)


def test_without_time_the_best_choice_so_far_is_repeated() -> None:
    left = iter([True] * 2 + [False] * 10)
    found = search(Machine(goodput, 0.1), lambda: next(left))
    assert found.was_cut
    assert found.best == {"a": 2}
    assert len(found.finals) == 4
    assert found.wins


def test_a_search_that_goes_on_repeats_the_defaults_beside_the_best_choice_again(
    tmp_path: Path,
) -> None:
    """The machine has become slower since the search was cut, which is no loss of a choice."""
    path, left = tmp_path / "state.jsonl", iter([True] * 2 + [False] * 10)
    search(Machine(goodput, 0.1, TuningState(path, SEARCH, seed=7)), lambda: next(left))
    slow = Machine(lambda choice: goodput(choice) - 7.0, 0.1, TuningState(path, SEARCH, seed=7))
    found = search(slow)
    assert max(one.goodput_per_s for one in found.rivals) < 4.0
    assert found.tried[-1].trial.goodput_per_s < 10.0


def test_files_that_cannot_be_written_are_named(tmp_path: Path) -> None:
    state = TuningState(tmp_path / "state.jsonl", SEARCH, seed=7)
    trial = Trial(choice={}, repeat=0, goodput_per_s=1.0)
    (tmp_path / "state.jsonl").unlink()
    (tmp_path / "state.jsonl").mkdir()
    with pytest.raises(ConfigError, match=r"^state: .*state.jsonl cannot be written: Is a"):
        state.add(trial)


def test_a_deployment_that_fails_is_told_and_loses() -> None:
    async def measure(choice: Choice, repeat: int) -> Trial:
        error = "d0 ended" if choice.get("b") == 10 else ""
        value = 0.0 if error else goodput(choice)
        return Trial(choice=dict(choice), repeat=repeat, goodput_per_s=value, error=error)

    found = asyncio.run(tune(measure, SETTINGS, 3, lambda: True))
    assert found.best == {"a": 2, "b": 20}
    assert table_of(found).row_count == len(found.defaults) + len(found.tried) + 2 * 3


@pytest.mark.parametrize("num_cores", [1, 16])
def test_programs_accept_the_file_of_every_value(num_cores: int, tmp_path: Path) -> None:
    path, known = tmp_path / "tuned.toml", known_settings(num_cores).values()
    for index in range(max(len(setting.values) for setting in known)):
        choice = {one.name: one.values[index] for one in known if index < len(one.values)}
        path.write_text(config_text(choice, ["Found."]), encoding="utf-8")
        read = {}
        for name in ("up", "router", "prefill", "decode"):
            declared = {one.name: one for one in options_of(PROGRAMS.load(name))}
            read[name] = read_config_file(path, name, declared)
        for name, value in choice.items():
            if name == "shape":
                shape = deployment_of(choice)
                assert shape is not None
                assert read["up"]["prefill"].value == shape.num_prefill
                assert read["up"]["decode"].value == shape.num_decode
            elif name == "num_threads":
                assert read["up"]["node_args"].value == f"--num-threads {value}"
            else:
                readers = [one for one in read.values() if name in one]
                assert readers
                assert all(one[name].value == value for one in readers)


def test_the_defaults_are_the_deployment_of_baton_up() -> None:
    assert deployment_of({"num_threads": 2}) is None
    up, tuned = (
        {one.name: one.default for one in options_of(PROGRAMS.load("up"))},
        UpOptions(model=""),
    )
    assert (up["prefill"], up["decode"]) == (tuned.num_prefill, tuned.num_decode)
    assert up["encode"] == tuned.num_encode


def test_trials_may_be_conversations() -> None:
    given = {"up": "m", "rate": 2.0, "duration_s": 1.0, "slo": "ttft=1"}
    options = make(TuneOptions, given | {"turns": "3", "turn_pause_s": 0.5})
    assert options.trial_plan().turns == Lengths(3)
    assert options.trial_plan().turn_pause_s == 0.5
    assert options.identity(2) != make(TuneOptions, given | {"turns": "2"}).identity(2)


def test_unknown_settings_are_refused() -> None:
    assert [one.name for one in chosen_settings("num_threads,shape", 2)] == ["num_threads", "shape"]
    with pytest.raises(ConfigError, match=r"settings: must be of shape, .*got 'thread'"):
        chosen_settings("thread", 2)


def test_a_job_needs_an_slo(tmp_path: Path) -> None:
    def job(slo: str) -> TuningJob:
        plan = LoadPlan(
            load=OpenLoop(rate_per_s=1),
            input_lengths=parse_lengths("input_tokens", "8"),
            output_lengths=parse_lengths("output_tokens", "8"),
            duration_s=1,
            slo=Slo.parse(slo),
        )
        return TuningJob(
            plan=plan,
            up=UpOptions(model="m"),
            settings=(),
            search={},
            repeats=3,
            budget_s=1,
            state=tmp_path / "s",
            write=tmp_path / "w",
        )

    job("ttft=1")
    with pytest.raises(ConfigError, match="slo: must be given"):
        job("")


def test_tune_has_no_options_of_reports_and_needs_two_repeats() -> None:
    names = {one.name for one in options_of(TuneOptions)}
    reports = {"encode_args", "find_max_goodput", "attainment", "precision", "json", "html", "png"}
    assert reports <= {one.name for one in options_of(ReportOptions)}
    assert not names & reports
    given = {"up": "m", "rate": 1.0, "duration_s": 1.0, "slo": "ttft=1"}
    assert make(TuneOptions, given | {"repeats": 2}).repeats == 2
    with pytest.raises(ConfigError, match="repeats: must be 2 or more"):
        make(TuneOptions, given | {"repeats": 1})


@pytest.mark.large
@pytest.mark.timeout(400)
def test_a_short_search_of_a_real_deployment(tmp_path: Path) -> None:
    state = tmp_path / "state.jsonl"
    words = (
        *("--up", "examples/demo_model", "--rate", "6", "--duration-s", "4", "--warmup-s", "1"),
        *("--input-tokens", "200", "--output-tokens", "20", "--slo", "ttft=0.5,tpot=0.1"),
        *("--settings", "speculative_method", "--repeats", "2"),
        *("--state", str(state), "--write", str(tmp_path / "tuned.toml")),
        *("--max-lag-ms", "60000"),  # other tests may have the cores
    )
    command = [sys.executable, "-m", "baton", "loadtest", "tune", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "speculative_method" in done.stdout
    trials = state.read_text(encoding="utf-8").splitlines()[1:]
    assert len(trials) >= 3
    assert "fail" not in done.stdout
    again = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert f"{len(trials)} trials are in" in again.stdout
    assert len(state.read_text(encoding="utf-8").splitlines()[1:]) == len(trials)
