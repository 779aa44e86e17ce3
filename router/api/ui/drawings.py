"""Small SVG drawings for the status page, with text labels; the style sheet sets the colours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from baton.v1 import admin_pb2

_WIDTH, _HEIGHT = 240.0, 40.0


@dataclass(frozen=True, slots=True)
class Span:
    """One stage of a request, as a piece of its time line; times are seconds from its arrival.

    Attributes:
        kind: style class of the stage, which sets its colour.
    """

    kind: str
    what: str
    begin_s: float
    end_s: float

    @property
    def length_s(self) -> float:
        return self.end_s - self.begin_s


def sparkline(values: Sequence[float], what: str) -> Markup:
    """Draw a curve of a figure's values over time, with the last value at the right edge.

    Args:
        what: name of the figure, for the label.
    """
    top = max([*values, 1e-9])
    if len(values) < 2:
        points = f"0,{_HEIGHT:g} {_WIDTH:g},{_HEIGHT:g}"
    else:
        step = _WIDTH / (len(values) - 1)
        heights = (_HEIGHT - 1 - (_HEIGHT - 3) * value / top for value in values)
        points = " ".join(f"{i * step:.1f},{height:.1f}" for i, height in enumerate(heights))
    return Markup(
        '<svg class="spark" viewBox="0 0 {w:g} {h:g}" preserveAspectRatio="none" role="img" '
        'aria-label="{what}: at most {top:.3g}"><polygon points="0,{h:g} {points} {w:g},{h:g}"/>'
        '<polyline points="{points}"/></svg>'
    ).format(w=_WIDTH, h=_HEIGHT, what=what, top=top if values else 0, points=points)


def meter(share: float, what: str, *, kind: str = "") -> Markup:
    """Draw how full something is, as a bar.

    Args:
        share: the full part, from 0 to 1.
        what: name of the thing, for the label.
        kind: style class of the bar; empty: a high share gets a warning colour.
    """
    share = min(max(share, 0.0), 1.0)
    level = kind or ("high" if share >= 0.9 else "middle" if share >= 0.7 else "low")
    return Markup(
        '<svg class="meter {level}" viewBox="0 0 100 10" preserveAspectRatio="none" role="img" '
        'aria-label="{what}: {share:.0%}"><rect class="all" width="100" height="10"/>'
        '<rect class="used" width="{used:.1f}" height="10"/></svg>'
    ).format(level=level, what=what, share=share, used=100 * share)


def waterfall(spans: Sequence[Span], scale_s: float) -> Markup:
    """Draw the stages of a request on a time line that covers ``scale_s`` seconds."""
    scale_s = max(scale_s, 1e-9)
    parts = Markup("").join(
        Markup('<rect class="{kind}" x="{x:.2f}" width="{w:.2f}" height="10"/>').format(
            kind=span.kind,
            x=100 * span.begin_s / scale_s,
            w=max(100 * span.length_s / scale_s, 0.3),
        )
        for span in spans
    )
    said = ", ".join(f"{span.what} {1000 * span.length_s:.0f} ms" for span in spans)
    return Markup(
        '<svg class="waterfall" viewBox="0 0 100 10" preserveAspectRatio="none" role="img" '
        'aria-label="{said}">{parts}</svg>'
    ).format(said=said or "nothing yet", parts=parts)


def spans_of(trace: admin_pb2.RequestTrace, now_s: float) -> list[Span]:
    """Return the stages of a request that have begun.

    Args:
        now_s: seconds since the request's arrival; a stage that goes on ends at this time.
    """
    ended_s = trace.ended_s if trace.HasField("ended_s") else now_s
    failed = [one for one in trace.attempts if one.HasField("failed_s")]
    spans = [
        Span("failed", f"attempt that failed ({one.error_code})", one.began_s, one.failed_s)
        for one in failed
    ]
    began_s = trace.attempts[-1].began_s if trace.attempts else ended_s
    queued_to_s = trace.attempts[0].began_s if trace.attempts else ended_s
    spans.insert(0, Span("queue", "waits at the router", 0.0, queued_to_s))
    if not trace.attempts or (trace.state == "failed" and not trace.HasField("first_token_s")):
        return spans
    first_s = trace.first_token_s if trace.HasField("first_token_s") else ended_s
    if trace.HasField("receipt") and trace.receipt.HasField("prefill") and not failed:
        spans += _until_first_token(trace.receipt.prefill, began_s, first_s)
    elif first_s > began_s:
        spans.append(Span("prefill", "until token 1", began_s, first_s))
    if ended_s > first_s:
        spans += _behind_first_token(trace, first_s, ended_s)
    return spans


def _until_first_token(prefill: object, began_s: float, first_s: float) -> list[Span]:
    queue_s, prefill_s = prefill.queue_s, prefill.prefill_s  # type: ignore[attr-defined]  # a message of a receipt
    computes_at = min(began_s + queue_s, first_s)
    computed_at = min(computes_at + prefill_s, first_s)
    return [
        Span("wait", "waits at the prefill node", began_s, computes_at),
        Span("prefill", "prompt", computes_at, computed_at),
        Span("network", "on the way", computed_at, first_s),
    ]


def _behind_first_token(
    trace: admin_pb2.RequestTrace, first_s: float, ended_s: float
) -> list[Span]:
    has_push = trace.HasField("receipt") and trace.receipt.HasField("decode")
    exposed_s = trace.receipt.decode.push.exposed_transfer_s if has_push else 0.0
    arrived_s = min(first_s + max(exposed_s, 0.0), ended_s)
    transfer = [Span("transfer", "KV behind token 1", first_s, arrived_s)] if exposed_s > 0 else []
    return [*transfer, Span("decode", "decodes", arrived_s, ended_s)]
