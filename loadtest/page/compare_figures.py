"""Figures of a comparison: the deployments' values and latency distributions, side by side."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from loadtest.page.palette import Document, Look, make_logarithmic

# Panels of a comparison, each with the name of its SLO limit (empty: no limit).
_PANELS = {
    "goodput_per_s": ("Goodput", "requests/s within the SLO", 1.0, ""),
    "itl_p99_s": ("ITL p99", "milliseconds", 1e3, ""),
    "ttft_p50_s": ("TTFT p50", "milliseconds", 1e3, "ttft"),
    "ttft_p99_s": ("TTFT p99", "milliseconds", 1e3, "ttft"),
}
_CDFS = {"itl_s": ("ITL, per token", ""), "ttft_s": ("TTFT", "ttft")}
_MOST_ABOVE = 3.0  # intervals are drawn up to this multiple of the highest value


def compare_figures(document: Document, look: Look) -> dict[str, Figure]:
    """Draw all figures of a comparison; return the figures by name."""
    figures = {"comparison": comparison(document, look)}
    if all(one["runs"] for one in document["deployments"]):
        figures["comparison_cdfs"] = comparison_cdfs(document, look)
    return figures


def comparison(document: Document, look: Look) -> Figure:
    """Draw each metric: bars of the deployments' means with intervals, and a dot per repeat."""
    deployments, slo = document["deployments"], document["plan"]["slo"]
    figure, panels = look.panels(2, 2)
    for axes, (metric, (title, unit, scale, limited)) in zip(panels, _PANELS.items(), strict=True):
        found = [one["metrics"][metric] for one in deployments]
        tops = [value * scale for one in found if one is not None for value in one["values"]]
        ends = [one["high"] * scale for one in found if one is not None and one["high"] is not None]
        top = max(tops, default=0.0)
        limit = min(max([top, *ends]), _MOST_ABOVE * top) or 1.0
        for place, one in enumerate(deployments):
            _bar(axes, place, one, metric, scale, limit, look)
        if limited in slo:
            look.put_limit(axes, slo[limited] * scale, f"SLO {slo[limited] * scale:g} ms")
            limit = max(limit, slo[limited] * scale)
        axes.set_title(title)
        axes.set_ylabel(unit)
        axes.set_xticks(range(len(deployments)), [one["name"] for one in deployments])
        axes.grid(axis="x", visible=False)
        axes.set_ylim(0, 1.15 * limit)
        look.put_legend(axes)
    return figure


def _bar(
    axes: Axes, place: int, one: Document, metric: str, scale: float, limit: float, look: Look
) -> None:
    found = one["metrics"][metric]
    if found is None:
        return
    mean = found["mean"] * scale
    is_first = place == 0
    axes.bar(place, mean, color=look.orange if one["is_colocated"] else look.blue, width=0.6,
             hatch="//" if one["is_colocated"] else "", edgecolor=look.paper)  # fmt: skip
    values = [value * scale for value in found["values"]]
    axes.plot([place] * len(values), values, "o", color=look.ink, markersize=3.5,
              label="repeats" if is_first else None)  # fmt: skip
    if found["low"] is None:
        return
    low, high = found["low"] * scale, found["high"] * scale
    axes.errorbar(place, mean, [[mean - low], [min(high, limit) - mean]], color=look.ink, alpha=0.7,
                  capsize=4, linewidth=1, label="95 % interval" if is_first else None)  # fmt: skip
    if high > limit:  # few repeats can make intervals far wider than all values
        axes.annotate(f"to {high:,.3g}", (place, limit), xytext=(3, 2), fontsize=8,
                      textcoords="offset points")  # fmt: skip


def comparison_cdfs(document: Document, look: Look) -> Figure:
    """Draw the latency distributions of the first repeat, with all deployments in each panel."""
    split = ((look.blue, "-"), (look.green, "-."), (look.purple, (0, (3, 1, 1, 1, 1, 1))))
    colocated = ((look.orange, "--"), (look.red, ":"))
    slo = document["plan"]["slo"]
    figure, panels = look.panels(1, 2)
    for axes, (name, (title, limited)) in zip(panels, _CDFS.items(), strict=True):
        num_before = {True: 0, False: 0}
        for one in document["deployments"]:
            points = one["runs"][0]["series"]["cdfs"].get(name, [])
            kind = one["is_colocated"]
            strokes = colocated if kind else split
            color, stroke = strokes[num_before[kind] % len(strokes)]
            num_before[kind] += 1
            axes.plot([seconds * 1e3 for seconds, _ in points], [100 * s for _, s in points],
                      color=color, linestyle=stroke, label=one["name"],
                      drawstyle="steps-post")  # fmt: skip
        if limited in slo:
            look.put_limit(axes, slo[limited] * 1e3, f"SLO {slo[limited] * 1e3:g} ms", is_x=True)
        axes.set_title(f"{title}, first repeat")
        axes.set_xlabel("milliseconds")
        axes.set_ylabel("% of values at or below")
        make_logarithmic(axes, is_x=True)
        axes.set_ylim(0, 101)
        look.put_legend(axes)
    return figure
