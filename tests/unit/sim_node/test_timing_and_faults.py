"""TimingModel, FaultSpec, SimOptions: numbers in, numbers out, and what is refused."""

from __future__ import annotations

import pytest

from baton.api.errors import ConfigError
from sim_node.faults import FaultSpec
from sim_node.options import SimOptions
from sim_node.sim_model import output_tokens
from sim_node.timing import PRESETS, TimingModel, preset


def test_the_preset_gives_back_the_measurements_that_it_was_made_of() -> None:
    timing = preset("h100-8b")
    for num_requests, measured_ms in ((8, 7.3), (64, 11.5), (256, 26.1)):
        assert timing.decode_s(num_requests, 600 * num_requests) * 1e3 == pytest.approx(
            measured_ms, rel=0.02
        )


@pytest.mark.parametrize("name", PRESETS)
def test_a_scale_scales_every_duration(name: str) -> None:
    def durations(timing: TimingModel) -> list[float]:
        return [
            timing.prefill_s(1000, 500_000),
            timing.decode_s(10, 10_000),
            timing.kv_bytes_per_token / timing.link_bytes_per_s + timing.link_latency_s,
        ]

    timing = PRESETS[name]
    tenth = durations(timing.scaled(0.1))
    assert tenth == pytest.approx([duration / 10 for duration in durations(timing)])


def test_what_makes_no_sense_is_refused_by_name() -> None:
    for text, field in (
        ("kil=1", "kil"),
        ("kill=much", "kill"),
        ("kill=-1", "kill"),
        ("refuse=2", "refuse"),
        ("slow_factor=0", "slow_factor"),
    ):
        with pytest.raises(ConfigError, match=field):
            FaultSpec.parse(text)
    with pytest.raises(ConfigError, match="time_scale"):
        preset("h100-8b").scaled(0)
    with pytest.raises(ConfigError, match="h100-8b"):
        preset("abacus")
    with pytest.raises(ConfigError, match="num_blocks"):
        SimOptions(num_blocks=0)
    with pytest.raises(ConfigError, match="prefix_hash"):
        SimOptions(prefix_hash="crc")


def test_faults_are_read_as_they_are_written() -> None:
    spec = FaultSpec.parse("kill=0.5, restart_s=2,seed=7")
    assert (spec.kill, spec.restart_s, spec.seed, spec.stall) == (0.5, 2.0, 7, 0.0)
    assert FaultSpec.parse("") == FaultSpec()


def test_tokens_depend_on_the_prompt_and_use_the_whole_vocabulary() -> None:
    one = output_tokens([1, 2, 3], 2000, vocab_size=50)
    assert one != output_tokens([1, 2, 4], 2000, vocab_size=50)
    assert one[:10] == output_tokens([1, 2, 3], 10, vocab_size=50)
    assert set(one) == set(range(50))
