"""Rows of docs/performance.md about hand-offs between hosts whose links have a rate."""

from __future__ import annotations

from benchmarks.page.measures import at, number
from benchmarks.page.rows import Found, Json, Measure, Row, Source

CONNECTORS = {"nixl": "UCX", "tls": "TLS"}
SPEEDS = ("1 Gbit/s", "10 Gbit/s", "unlimited")
LENGTHS = (1024, 4096, 16384)
SLOW = "0.1 Gbit/s"
_CORES = "both hosts share two cores, which this link fills."
# Reasons why a goal for a full link's share, or for its messages, is missed
WHY = {
    ("nixl", "10 Gbit/s"): _CORES,
    ("nixl", "unlimited"): _CORES,
    ("tls", "10 Gbit/s"): f"without a limit, TLS is no faster: {_CORES}",
    ("tls", "unlimited"): _CORES,
}
FLAT = 2.0  # maximum growth of the exposed time while the bytes grow 16 times
_LENGTHS = " / ".join(f"{length:,}" for length in LENGTHS)
CPU_BOUND = "most_gbit_per_s_of_cpus"
SENDER_WAITS, RECEIVER_WAITS = "sender_waits_for_cpu", "receiver_waits_for_cpu"


def _row(document: Json, connector: str, push: str, speed: str, length: int) -> Json:
    return at(document, "rows", f"{connector}, {push}, {speed}, {length} tokens")


def _exposed(connector: str, speed: str) -> Measure:
    """Return a measure of the exposed transfer by prompt length.

    Its growth is judged only where the link is faster than the prefill makes KV.
    """

    def measure(document: Json) -> Found:
        texts, flat = [], []
        for push in ("layers", "after-prefill"):
            rows = [_row(document, connector, push, speed, length) for length in LENGTHS]
            times = [number(row, "exposed_transfer_ms") for row in rows]
            texts.append(" / ".join(f"{ms:,.1f}" for ms in times))
            if push == "layers":
                flat = [
                    ms
                    for ms, row in zip(times, rows, strict=True)
                    if not number(row, "rate") or number(row, "rate") >= _least(row)
                ]
        text = f"{texts[0]} ms; pushed after the prefill {texts[1]} ms"
        return Found(text, max(flat) / flat[0])

    return measure


def _least(row: Json) -> float:
    return number(row, "least_gbit_per_s")


def _share(connector: str, speed: str) -> Measure:
    def measure(document: Json) -> Found:
        row = at(document, "links", f"{connector}, {speed}")
        rate = number(row, "gbit_per_s")
        if speed == "unlimited":
            return Found(f"{rate:.1f} Gbit/s")
        share = number(row, "share_of_link")
        text = f"{share:.2f} ({rate:.2f} Gbit/s)"
        if CPU_BOUND in row:  # results of earlier versions lack the figures of CPUs
            text += f"; the CPUs carry at most {number(row, CPU_BOUND):.1f}"
        return Found(text, share)

    return measure


def _messages(connector: str, speed: str) -> Measure:
    def measure(document: Json) -> Found:
        row = at(document, "links", f"{connector}, {speed}")
        p50, p99 = number(row, "message_p50_ms"), number(row, "message_p99_ms")
        text = f"p50 {p50:.1f}, p99 {p99:.1f} ms"
        if SENDER_WAITS in row:
            waits = max(number(row, SENDER_WAITS), number(row, RECEIVER_WAITS))
            text += f"; an end waits for a CPU {100 * waits:.0f} % of the time"
        return Found(text, p99)

    return measure


def _neighbour(connector: str) -> Measure:
    def measure(document: Json) -> Found:
        fast, slow = (
            at(document, "links", f"{connector}, {speed}, beside another receiver")
            for speed in ("1 Gbit/s", "0.05 Gbit/s")
        )
        shares = number(fast, "share_of_link"), number(slow, "share_of_link")
        text = f"{shares[0]:.2f} and {shares[1]:.2f} of their links"
        return Found(f"{text}; p99 of messages {number(fast, 'message_p99_ms'):.1f} ms", shares[0])

    return measure


def _least_rates(connector: str) -> Measure:
    def measure(document: Json) -> Found:
        rows = [_row(document, connector, "layers", SLOW, length) for length in LENGTHS]
        return Found(" / ".join(f"{_least(row):.2f}" for row in rows) + " Gbit/s")

    return measure


def _model(connector: str) -> Measure:
    """Return a measure of the model's error on links slower than the prefill makes KV."""

    def measure(document: Json) -> Found:
        texts, errors = [], []
        for length in LENGTHS:
            for speed in (SLOW, "1 Gbit/s"):
                row = _row(document, connector, "layers", speed, length)
                if number(row, "rate") >= _least(row):
                    continue
                predicted, measured = (
                    number(row, name) for name in ("predicted_exposed_ms", "exposed_transfer_ms")
                )
                texts.append(f"{predicted:,.0f} / {measured:,.0f} ms ({length:,} tokens, {speed})")
                errors.append(abs(predicted / measured - 1))
        return Found("; ".join(texts), max(errors))

    return measure


def _expected(connector: str) -> Measure:
    """Return a measure of the router's expectation on links slower than the prefill makes KV."""

    def measure(document: Json) -> Found:
        texts, errors = [], []
        for length in LENGTHS:
            row = _row(document, connector, "layers", SLOW, length)
            expected, measured = (
                number(row, name) for name in ("expected_exposed_ms", "exposed_transfer_ms")
            )
            texts.append(f"{expected:,.0f} / {measured:,.0f} ms ({length:,} tokens)")
            errors.append(abs(expected / measured - 1))
        return Found("; ".join(texts), max(errors))

    return measure


def _variants(push: str) -> Measure:
    def measure(document: Json) -> Found:
        names = ("no digests", "digests", "fp8")
        rows = [at(document, "slow", f"{name}, {push}") for name in names]
        return Found(" / ".join(f"{number(row, 'exposed_transfer_ms'):,.0f}" for row in rows)
                     + " ms")  # fmt: skip

    return measure


def _congestion_control(document: Json) -> Found:
    return Found(str(at(document, "congestion_control")))


HOSTS = Source("hosts_handoff", (
    Row("congestion control of the hosts' TCP connections", _congestion_control),
    *(
        row
        for connector, name in CONNECTORS.items()
        for speed in SPEEDS
        for row in (
            Row(f"{name}, {speed}: exposed transfer at {_LENGTHS} tokens, by layers",
                _exposed(connector, speed), f"growth <= {FLAT:g}"),
            Row(f"{name}, {speed}: share of a full link", _share(connector, speed),
                "" if speed == "unlimited" else ">= 0.9", WHY.get((connector, speed), "")),
            Row(f"{name}, {speed}: round trip of messages while the link is full",
                _messages(connector, speed), "<= 5 ms (p99)", WHY.get((connector, speed), "")),
        )
    ),
    *(
        row
        for connector, name in CONNECTORS.items()
        for row in (
            Row(f"{name}: the link is faster than the prefill makes KV at {_LENGTHS} tokens from,"
                " by the model", _least_rates(connector)),
            Row(f"{name}: exposed transfer on slower links, by the model / measured",
                _model(connector), "error <= 0.15",
                "prefills of one length differ by a tenth in one run."),
            Row(f"{name}, {SLOW}: exposed transfer by layers, as the router expected / measured",
                _expected(connector), "error <= 0.2",
                "sending the KV of 16,384 tokens takes about as long as computing them, so a small"
                " error of the prefill's time is a large part of the difference."),
            Row(f"{name}: two receivers at once, on 1 Gbit/s and on 0.05 Gbit/s",
                _neighbour(connector), ">= 0.9 of the fast one"),
        )
    ),
    Row(f"UCX, {SLOW}, 1,024 tokens, by layers: without digests / with digests / fp8, digests",
        _variants("layers")),
    Row(f"UCX, {SLOW}, 1,024 tokens, after the prefill: without digests / with digests / fp8,"
        " digests", _variants("after-prefill")),
), "Programs run on hosts of their own on one machine; links with a rate (`tc tbf`) join the hosts."
   " The growth of the exposed transfer is judged only for links that are faster than the prefill"
   " makes KV; the model (`benchmarks/hosts/link_model.py`) computes the least rate.")  # fmt: skip
