"""Rows about the hand-off: what it costs, and what becomes of requests when nodes die amid it."""

from __future__ import annotations

from tools.performance.rows import Area, Found, Json, Row, Source, at, number, ratio, value

LENGTHS = (256, 1024, 4096, 16384)
FLAT = 2.0  # while the bytes grow 64 times
MOST_DETECTION_S = 2.0


def _exposed(length: int, mode: str) -> tuple[str, ...]:
    return ("push", "modes", f"{length} tokens", mode, "exposed_transfer_ms")


def _growth(document: Json) -> Found:
    """Compute the growth of the exposed transfer from the shortest to the longest prompt."""
    growth, texts = {}, {}
    for mode in ("layers", "after-prefill"):
        first, last = (number(document, *_exposed(n, mode)) for n in (LENGTHS[0], LENGTHS[-1]))
        growth[mode] = last / first
        texts[mode] = f"{growth[mode]:.1f} ({first:.2f} -> {last:.2f} ms)"
    text = f"{texts['layers']}; pushed after the prefill {texts['after-prefill']}"
    return Found(text, growth["layers"] <= FLAT)


def _first_step(document: Json) -> Found:
    steps = ("push", "among_32_decoding", "whole_steps_between_commit_and_first_step")
    p50, p99 = number(document, *steps, "p50"), number(document, *steps, "p99")
    return Found(f"p50 {p50:g}, p99 {p99:g}", p50 < 1 and p99 < 1.5)


def _first_step_by_the_clock(document: Json) -> Found:
    among = at(document, "push", "among_32_decoding")
    token_s = number(among, "time_per_token_ms", "median")
    median, p90 = (
        number(among, "commit_to_token_2_ms", name) / token_s for name in ("median", "p90")
    )
    return Found(f"median {median:.2f}, p90 {p90:.2f}")


def _forwards(document: Json) -> Found:
    found = [int(n) for n in at(document, "push", "among_32_decoding", "forwards_less_generated")]
    return Found(", ".join(f"generated {n:+d}" for n in found), found == [-1])


def _prompt_tokens_on_d(document: Json) -> Found:
    rows = at(document, "prompt_lengths").values()
    most = max(number(row, "num_prompt_tokens_computed_on_decode_node") for row in rows)
    return Found(f"{most:g}", most == 0)


def _idle(document: Json) -> Found:
    idle = at(document, "push", "idle_cpu_percent_of_a_core")
    shares = {name: number(idle, name) for name in idle}
    return Found(
        ", ".join(f"{name} {share:g} %" for name, share in shares.items()), max(shares.values()) < 1
    )


def _exposed_row(length: int) -> Row:
    return Row(
        what=f"exposed transfer, prompt of {length:,} tokens: by layers / after the prefill",
        target="< 1",
        measure=ratio(
            _exposed(length, "layers"),
            _exposed(length, "after-prefill"),
            form="{ratio:.2f} ({above:.2f} / {under:.2f} ms)",
            below=1.0,
        ),
        holds_back="short prompts have few bytes to hide; the commit itself is left.",
    )


HANDOFF = Source(
    name="handoff",
    command="benchmarks/handoff.py",
    intro="Exposed transfer is the time from the end of the prefill until all KV has arrived.",
    rows=(
        *(_exposed_row(length) for length in LENGTHS),
        Row(
            what="exposed transfer by layers, 16,384 / 256 tokens (64 times the bytes)",
            target=f"flat: <= {FLAT:g}",
            measure=_growth,
            holds_back="few requests per length: a thread that gets its core late is milliseconds.",
        ),
        Row(
            what="prefill time at 16,384 tokens: by layers / after the prefill",
            measure=ratio(
                ("push", "modes", "16384 tokens", "layers", "prefill_ms"),
                ("push", "modes", "16384 tokens", "after-prefill", "prefill_ms"),
                form="{ratio:.2f} ({above:,.0f} / {under:,.0f} ms)",
            ),
        ),
        Row(
            what="whole steps between commit and first decode step, 32 others decoding",
            target="p50 < 1, p99 < 1.5",
            measure=_first_step,
        ),
        Row(
            what="the same by the clock: commit to token 2, in times per token",
            measure=_first_step_by_the_clock,
        ),
        Row(what="forwards on D", target="generated - 1", measure=_forwards),
        Row(what="prompt tokens computed on D", target="0", measure=_prompt_tokens_on_d),
        Row(
            what="descriptors per transfer after an hour of churn: extents / oldest first",
            measure=ratio(
                ("churn", "extents", "descriptors_per_transfer", "mean"),
                ("churn", "oldest first", "descriptors_per_transfer", "mean"),
            ),
        ),
        Row(
            what="posting 128 MiB (on one host posting is the copy)",
            measure=value(
                *("push", "modes", "16384 tokens", "layers", "posting_ms"), form="{:.1f} ms"
            ),
        ),
        Row(
            what="bandwidth: pushing / a plain copy of the same bytes",
            measure=ratio(
                ("push", "bandwidth", "push_gb_per_s"),
                ("push", "bandwidth", "memory_copy_gb_per_s"),
                form="{ratio:.2f} ({above:.2f} / {under:.2f} GB/s)",
            ),
        ),
        Row(
            what="speed of digests (on each side) / a plain copy",
            measure=ratio(
                ("push", "bandwidth", "digests_gb_per_s"),
                ("push", "bandwidth", "memory_copy_gb_per_s"),
                form="{ratio:.2f} ({above:.2f} / {under:.2f} GB/s)",
            ),
        ),
        Row(
            what="exposed transfer at 16,384 tokens: with digests / without",
            measure=ratio(
                _exposed(16384, "layers, digests"),
                _exposed(16384, "layers"),
                form="{ratio:.2f} ({above:.2f} / {under:.2f} ms)",
            ),
        ),
        Row(what="CPU of idle processes, of a core", target="< 1 %", measure=_idle),
    ),
)


HYBRID_LENGTHS = (1024, 16384)


def _hybrid_growths(document: Json) -> dict[str, float]:
    """Compute how much longer the exposed transfer of the longest prompt is than the shortest's.

    The dense model is not judged here: its own rows are `HANDOFF`'s.
    """
    return {
        f"{family}, blocks of {size}, {kind} prompts": number(
            lengths, f"{HYBRID_LENGTHS[-1]} tokens", kind, "exposed_transfer_ms", "median"
        )
        / number(lengths, f"{HYBRID_LENGTHS[0]} tokens", kind, "exposed_transfer_ms", "median")
        for family, sizes in at(document, "families").items()
        if "dense" not in family
        for size, lengths in sizes.items()
        for kind in ("new", "known")
    }


def _hybrids_growth(document: Json) -> Found:
    growths = _hybrid_growths(document)
    worst = max(growths, key=lambda name: growths[name])
    text = f"{min(growths.values()):.2f} to {growths[worst]:.2f} ({worst})"
    return Found(text, growths[worst] <= FLAT)


def _hybrids_tokens_on_d(document: Json) -> Found:
    most = max(
        number(kinds, kind, "most_prompt_tokens_computed_on_decode_node")
        for sizes in at(document, "families").values()
        for lengths in sizes.values()
        for kinds in lengths.values()
        for kind in ("new", "known")
    )
    return Found(f"{most:g}", most == 0)


HYBRIDS = Source(
    name="handoff_hybrids",
    command="benchmarks/handoff_hybrids.py",
    intro="Layers with states beside layers that attend, and a dense model for comparison; new"
    " prompts, and known ones with a new end; chunks of 512 tokens, several block sizes.",
    rows=(
        Row(
            what="exposed transfer, 16,384 / 1,024 tokens (16 times the bytes), all hybrids",
            target=f"flat: <= {FLAT:g}",
            measure=_hybrids_growth,
            holds_back="few requests per row: a thread that gets its core late is a millisecond.",
        ),
        Row(
            what="prompt tokens of handed-over prompts computed on D, at most",
            target="0",
            measure=_hybrids_tokens_on_d,
        ),
    ),
)


def _promises(document: Json) -> Found:
    drills = at(document, "drills")
    broken = sum(bool(at(drill, "broken")) for drill in drills.values())
    return Found(f"{len(drills) - broken} of {len(drills)} drills", not broken and len(drills) > 0)


def _largest(name: str, most: float | None = None) -> Row:
    words = {
        "detection_s": "a death or stop is noticed after, at most",
        "recovery_s": "longest pause of a stream",
        "free_after_s": "every block is free again after, at most",
    }

    def measure(document: Json) -> Found:
        drills = at(document, "drills").values()
        seconds = [number(drill, name) for drill in drills if at(drill, name) is not None]
        found = max(seconds)
        return Found(f"{found:.2f} s", None if most is None else found <= most)

    return Row(what=words[name], target=f"<= {most:g} s" if most else "", measure=measure)


CHAOS = Source(
    name="chaos",
    command="benchmarks/chaos.py",
    intro="Real processes killed, stopped and restarted under load, also at the protocol's arrows.",
    rows=(
        Row(
            what="0 hung, 0 lost, 0 wrong tokens, 0 blocks held, nobody else died",
            target="in all drills",
            measure=_promises,
            holds_back="the file names the promise that broke, and in which drill.",
        ),
        _largest("detection_s", MOST_DETECTION_S),
        _largest("recovery_s"),
        _largest("free_after_s"),
    ),
)


def _no_errors(document: Json) -> Found:
    drills = at(document, "drills").values()
    num_errors = sum(int(number(drill, "errors")) for drill in drills)
    num_requests = sum(int(number(drill, "requests")) for drill in drills)
    seeds = min(int(number(drill, "seeds")) for drill in drills)
    return Found(f"{num_errors} of {num_requests} requests, {seeds} seeds", num_errors == 0)


def _longest_pause(document: Json) -> Found:
    drills = at(document, "drills").values()
    return Found(f"{max(number(drill, 'longest_pause_s') for drill in drills):.2f} s")


STAND_STILL = Source(
    name="stand_still",
    command="benchmarks/stand_still.py",
    intro="A node stands still for 0.5, 3 and 10 s, or two die within a second, under load.",
    rows=(
        Row(what="requests that end with an error", target="none", measure=_no_errors),
        Row(what="longest pause of a stream", measure=_longest_pause),
    ),
)


def _wrong_tokens(document: Json) -> Found:
    num_wrong, num_tokens = number(document, "wrong_tokens"), number(document, "tokens")
    return Found(f"{num_wrong:.0f} of {num_tokens:.0f}", num_wrong == 0 and num_tokens >= 10_000)


FOREIGN_NODE = Source(
    name="foreign_node",
    command="benchmarks/foreign_node.py",
    intro="A node with other weights joins first, joins last, is drained, or stays alone.",
    rows=(Row(what="tokens that are not of one process", target="none", measure=_wrong_tokens),),
)

AREAS = (
    Area(
        title="The hand-off",
        sources=(HANDOFF, HYBRIDS),
        log=(
            "2026-11-21: a hand-over that hides behind the computation,"
            " and blocks that lie together",
            "2026-11-21: what a step and a hand-over cost",
            "2026-11-21: what a self-test of a pair costs",
            "2026-11-26: hybrids are handed over as fast as dense models",
        ),
    ),
    Area(
        title="Faults in the hand-off",
        sources=(CHAOS, STAND_STILL, FOREIGN_NODE),
        log=(
            "2026-11-21: nodes killed, stopped and restarted under load",
            "2026-11-21: a dead sender's last bytes",
            "2026-11-21: mistakes planted before the whole-system machine",
        ),
    ),
)
