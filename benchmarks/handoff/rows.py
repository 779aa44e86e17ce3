"""Rows of docs/performance.md about the cost of the hand-off, and the part that is hidden."""

from __future__ import annotations

import statistics

from benchmarks.hosts.rows import HOSTS
from benchmarks.page.measures import at, number, ratio, value
from benchmarks.page.rows import Found, Json, Measure, Measurement, Row, Source, Subject

LENGTHS = (256, 1024, 4096, 16384)
FLAT = 2.0  # largest growth of the exposed time while the bytes grow 64 times
SPEED = (".2f", " GB/s")
MILLISECONDS = (".2f", " ms")
_PUSH, _AMONG = "push > modes > 16384 tokens > layers", "push > among_32_decoding"


def _exposed(length: int, mode: str) -> str:
    return f"push > modes > {length} tokens > {mode} > exposed_transfer_ms"


def _growth(document: Json) -> Found:
    """Return the exposed transfer of the longest prompt divided by that of the shortest."""
    growth, texts = {}, {}
    for mode in ("layers", "after-prefill"):
        first, last = (number(document, _exposed(n, mode)) for n in (LENGTHS[0], LENGTHS[-1]))
        growth[mode] = last / first
        texts[mode] = f"{growth[mode]:.1f} ({first:.2f} -> {last:.2f} ms)"
    text = f"{texts['layers']}; pushed after the prefill {texts['after-prefill']}"
    return Found(text, growth["layers"])


def _first_step(document: Json) -> Found:
    steps = at(document, _AMONG, "whole_steps_between_commit_and_first_step")
    p50, p99 = number(steps, "p50"), number(steps, "p99")
    return Found(f"p50 {p50:g}, p99 {p99:g}", p50 < 1 and p99 < 1.5)


def _first_step_by_the_clock(document: Json) -> Found:
    among = at(document, _AMONG)
    token_s = number(among, "time_per_token_ms > median")
    median, p90 = (
        number(among, "commit_to_token_2_ms", name) / token_s for name in ("median", "p90")
    )
    return Found(f"median {median:.2f}, p90 {p90:.2f}")


def _forwards(document: Json) -> Found:
    found = [int(n) for n in at(document, _AMONG, "forwards_less_generated")]
    return Found(", ".join(f"generated {n:+d}" for n in found), found == [-1])


def _prompt_tokens_on_d(document: Json) -> Found:
    rows = at(document, "prompt_lengths").values()
    most = max(number(row, "num_prompt_tokens_computed_on_decode_node") for row in rows)
    return Found(f"{most:g}", most)


def _idle(document: Json) -> Found:
    idle = at(document, "push > idle_cpu_percent_of_a_core")
    shares = {name: number(idle, name) for name in idle}
    text = ", ".join(f"{name} {share:g} %" for name, share in shares.items())
    return Found(text, max(shares.values()))


HANDOFF = Source("handoff", (
    *(
        Row(f"exposed transfer, prompt of {length:,} tokens: sent by layers / after the prefill",
            ratio(_exposed(length, "layers"), _exposed(length, "after-prefill"), *MILLISECONDS),
            "< 1", "little of a short prompt's transfer can be hidden, and none of the commit.")
        for length in LENGTHS
    ),
    Row("exposed transfer, sent by layers, prompt of 16,384 / 256 tokens (64 times the KV bytes)",
        _growth, f"<= {FLAT:g}",
        "few requests per length: a thread that gets its core late adds milliseconds."),
    Row("prefill time at 16,384 tokens: KV sent by layers / after the prefill",
        ratio(f"{_PUSH} > prefill_ms", "push > modes > 16384 tokens > after-prefill > prefill_ms",
              ",.0f", " ms")),
    Row("whole steps between commit and first decode step, 32 others decoding",
        _first_step, "p50 < 1, p99 < 1.5"),
    Row("time from commit to token 2 / time per token", _first_step_by_the_clock),
    Row("forwards on D", _forwards, "generated - 1"),
    Row("prompt tokens computed on D", _prompt_tokens_on_d, "0"),
    Row("descriptors per transfer after an hour of churn: extents / oldest first",
        ratio("churn > extents > descriptors_per_transfer > mean",
              "churn > oldest first > descriptors_per_transfer > mean")),
    Row("posting 128 MiB (on one host posting is the copy)",
        value(f"{_PUSH} > posting_ms", "{:.1f} ms")),
    Row("bandwidth: pushing / a plain copy of the same bytes",
        ratio("push > bandwidth > push_gb_per_s", "push > bandwidth > memory_copy_gb_per_s",
              *SPEED)),
    Row("speed of digests (on each side) / a plain copy",
        ratio("push > bandwidth > digests_gb_per_s", "push > bandwidth > memory_copy_gb_per_s",
              *SPEED)),
    Row("exposed transfer at 16,384 tokens: with digests / without",
        ratio(_exposed(16384, "layers, digests"), _exposed(16384, "layers"), *MILLISECONDS)),
    Row("CPU of idle processes, share of a core", _idle, "< 0.5 %",
        "threads of gRPC and four wakes of the event loop per beat take most of the time (log)."),
), "Exposed transfer is the time from the end of the prefill until all KV has"
   " arrived.")  # fmt: skip


def _hybrids_growth(document: Json) -> Found:
    """Compare the exposed transfers of the longest and the shortest prompt, by model family.

    The rows of the dense model are in `HANDOFF`.
    """
    growths = {
        f"{family}, blocks of {size}, {kind} prompts": number(
            lengths, "16384 tokens", kind, "exposed_transfer_ms > median"
        )
        / number(lengths, "1024 tokens", kind, "exposed_transfer_ms > median")
        for family, sizes in at(document, "families").items()
        if "dense" not in family
        for size, lengths in sizes.items()
        for kind in ("new", "known")
    }
    worst = max(growths, key=lambda name: growths[name])
    return Found(f"{min(growths.values()):.2f} to {growths[worst]:.2f} ({worst})", growths[worst])


def _hybrids_tokens_on_d(document: Json) -> Found:
    most = max(
        number(kinds, kind, "most_prompt_tokens_computed_on_decode_node")
        for sizes in at(document, "families").values()
        for lengths in sizes.values()
        for kinds in lengths.values()
        for kind in ("new", "known")
    )
    return Found(f"{most:g}", most)


HYBRIDS = Source("handoff_hybrids", (
    Row("exposed transfer, prompt of 16,384 / 1,024 tokens (16 times the KV), every hybrid",
        _hybrids_growth, f"<= {FLAT:g}",
        "few requests per row: a thread that gets its core late adds a millisecond."),
    Row("prompt tokens of handed-over prompts computed on D, at most", _hybrids_tokens_on_d, "0"),
), "Hybrid models, which have layers with states and layers with attention, and a dense model"
   " for comparison. Prompts are new, or known with a new end. Chunks of 512 tokens, several block"
   " sizes.",
   options="--parts hybrids")  # fmt: skip
MACS = Source("handoff_macs", tuple(
    Row(f"hand-off with keyed digests / without, prompt of {length:,} tokens",
        value(f"{length} tokens > ratio > median", "{:.2f}"))
    for length in LENGTHS[:3]
), options="--parts macs")  # fmt: skip
TRANSPORTS = Source("kv_transports", (
    Row("KV sent after the prefill over TLS sockets / over NIXL held to TCP",
        ratio("gb_per_s_after_prefill > tls", "gb_per_s_after_prefill > nixl, tcp", *SPEED)),
), options="--parts transports")  # fmt: skip


def _median_rate(document: Json, name: str) -> float:
    return statistics.median(number(row, "requests_per_s") for row in at(document, "rows", name))


def _share_without_slow_link(name: str) -> Measure:
    """Divide requests per second with a slow link by requests per second without its node."""

    def measure(document: Json) -> Found:
        share = _median_rate(document, name) / _median_rate(document, f"{name}: without d1")
        return Found(f"{share:.2f}", share)

    return measure


def _slowest_request(document: Json) -> Found:
    def slowest_ms(name: str) -> float:
        return max(number(row, "max_ms") for row in at(document, "rows", name))

    most = max(slowest_ms("d1 slow"), slowest_ms("d1 slow from its start"))
    return Found(
        f"{most / slowest_ms('slow link alone'):.2f}", most / slowest_ms("slow link alone")
    )


SLOW_LINK = Source("slow_link", (
    Row("one of four links at 1/20 of the rate: requests per second, with / without its node",
        _share_without_slow_link("d1 slow"), ">= 0.9"),
    Row("requests per second, with / without the node, if the link was slow when the node joined",
        _share_without_slow_link("d1 slow from its start"), ">= 0.9"),
    Row("slowest request / slowest over the slow link alone", _slowest_request, "<= 1"),
), "Two prefill nodes and two decode nodes run on hosts of their own. Loads with and without the"
   " node on the slow link take turns; figures are medians.",
   absent="the last run ended before it wrote its file; docs/log.md has figures")  # fmt: skip


def _left_home(document: Json) -> Found:
    left = number(document, "crossing", "home has room")
    num_requests = sum(at(document, "rows", "home has room", "by_pair").values())
    return Found(f"{left:.0f} of {num_requests}", left)


def _overflow(document: Json) -> Found:
    left = number(document, "crossing", "home is full")
    num_requests = sum(at(document, "rows", "home is full", "by_pair").values())
    return Found(f"{left:.0f} of {num_requests}", left > 0)


TWO_SITES = Source("two_sites", (
    Row("requests whose KV crossed the trunk while home had room", _left_home, "0"),
    Row("requests whose KV crossed the trunk while home was full", _overflow, "some"),
    Row("home full: requests per second, with / without the far decode node",
        ratio("rows > home is full > requests_per_s",
              "rows > home is full, no trunk > requests_per_s", ".2f")),
), "A trunk with 1/20 of the links' rate joins two sites, each with a prefill node and a decode"
   " node. No node has a label; the policy knows the measured bandwidths.")  # fmt: skip
_FAST_LINK, _SLOW_LINK = "mbit_per_s > 1000 > {}", "mbit_per_s > 20 > {}"
CHAT_HOSTS = Source("chat_hosts", (
    Row("1 Gbit/s: difference between the expected and the measured time of a fetch, p50",
        value(_FAST_LINK.format("error_p50"), "{:.0f}%", scale=100), "<= 20 %"),
    Row("1 Gbit/s: fetches that took less time than computing, of all fetches",
        ratio(_FAST_LINK.format("fetches_faster_than_computing"),
              _FAST_LINK.format("turns_with_a_fetch"), ".0f", "")),
    Row("1 Gbit/s: prompt tokens computed per turn from turn 4 on, / new tokens",
        ratio(_FAST_LINK.format("computed_per_later_turn"),
              _FAST_LINK.format("new_per_later_turn"), ".0f", "")),
    Row("0.02 Gbit/s, where computing is faster: turns with a fetch, of all turns with a source",
        ratio(_SLOW_LINK.format("turns_with_a_fetch"), _SLOW_LINK.format("turns_with_a_source"),
              ".0f", "")),
), "A prefill node and two decode nodes on three hosts: chats with SmolLM2, whose answers the "
   "prefill node fetches.")  # fmt: skip
SUBJECT = Subject(
    "The hand-off",
    (
        Measurement(
            "handoff.handoff",
            "kvconnector prefill_node decode_node engine/core/block_pool.py baton/kv/layers.py",
            (HANDOFF, HYBRIDS, MACS, TRANSPORTS),
        ),
        Measurement("handoff.handoff_trace", "kvconnector prefill_node decode_node"),
        Measurement("hosts.hosts_handoff", "kvconnector prefill_node decode_node", (HOSTS,)),
        Measurement("hosts.slow_link", "kvconnector router/policies router/fleet", (SLOW_LINK,)),
        Measurement("hosts.two_sites", "kvconnector router/policies router/fleet", (TWO_SITES,)),
        Measurement(
            "hosts.chat_hosts", "kvconnector node_runtime/prefixes router/fleet", (CHAT_HOSTS,)
        ),
    ),
    log=(
        "2026-11-21: a hand-over that hides behind the computation, and blocks that lie together",
        "2026-11-21: what a step and a hand-over cost",
        "2026-11-21: what a self-test of a pair costs",
        "2026-11-26: hybrids are handed over as fast as dense models",
    ),
)
