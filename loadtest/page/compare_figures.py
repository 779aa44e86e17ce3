"""Figures of a comparison: the deployments' numbers side by side, and their distributions."""

from __future__ import annotations

from matplotlib.figure import Figure

from loadtest.page.palette import BLUE, GREEN, ORANGE, PURPLE, RED, WIDTH_INCHES, Document

_PANELS = {
    "goodput_per_s": ("Goodput", "requests/s within the SLO", 1.0),
    "itl_p99_s": ("ITL p99", "milliseconds", 1e3),
    "ttft_p50_s": ("TTFT p50", "milliseconds", 1e3),
    "ttft_p99_s": ("TTFT p99", "milliseconds", 1e3),
}
_SPLIT = ((BLUE, "-"), (GREEN, "-."), (PURPLE, (0, (3, 1, 1, 1, 1, 1))))
_COLOCATED = ((ORANGE, "--"), (RED, ":"))
_CDFS = {"itl_s": "ITL, per token", "ttft_s": "TTFT"}


def compare_figures(document: Document) -> dict[str, Figure]:
    """By name."""
    figures = {"comparison": comparison(document)}
    if all(one["runs"] for one in document["deployments"]):
        figures["comparison_cdfs"] = comparison_cdfs(document)
    return figures


def comparison(document: Document) -> Figure:
    """A bar per deployment, every repeat as a dot, and the interval of the mean."""
    deployments = document["deployments"]
    names = [one["name"] for one in deployments]
    figure = Figure(figsize=(WIDTH_INCHES, 5.6), layout="constrained")
    for index, (metric, (title, unit, scale)) in enumerate(_PANELS.items()):
        axes = figure.add_subplot(2, 2, index + 1)
        top = 0.0
        for place, one in enumerate(deployments):
            found = one["metrics"][metric]
            if found is None:
                continue
            mean = found["mean"] * scale
            color = ORANGE if one["is_colocated"] else BLUE
            axes.bar(place, mean, color=color, width=0.6, hatch="//" if one["is_colocated"] else "",
                     edgecolor="white")  # fmt: skip
            values = [value * scale for value in found["values"]]
            axes.plot([place] * len(values), values, "o", color="black", markersize=3.5)
            if found["low"] is not None:
                ends = [[mean - found["low"] * scale], [found["high"] * scale - mean]]
                axes.errorbar(place, mean, ends, color="#555555", capsize=4, linewidth=1)
            top = max(top, *values)
        axes.set_title(title)
        axes.set_ylabel(unit)
        axes.set_xticks(range(len(names)), names)
        axes.grid(axis="x", visible=False)
        # An interval of few repeats may be far wider than all values: it leaves the picture.
        axes.set_ylim(0, 1.35 * top or 1.0)
    return figure


def comparison_cdfs(document: Document) -> Figure:
    """The first repeat's distributions, all deployments in one picture."""
    figure = Figure(figsize=(WIDTH_INCHES, 3.4), layout="constrained")
    for index, (name, title) in enumerate(_CDFS.items()):
        axes = figure.add_subplot(1, 2, index + 1)
        num_before = {True: 0, False: 0}
        for one in document["deployments"]:
            points = one["runs"][0]["series"]["cdfs"].get(name, [])
            kind = one["is_colocated"]
            strokes = _COLOCATED if kind else _SPLIT
            color, stroke = strokes[num_before[kind] % len(strokes)]
            num_before[kind] += 1
            axes.plot([seconds * 1e3 for seconds, _ in points], [100 * s for _, s in points],
                      color=color, linestyle=stroke, label=one["name"],
                      drawstyle="steps-post")  # fmt: skip
        axes.set_title(f"{title}, first repeat")
        axes.set_xlabel("milliseconds")
        axes.set_ylabel("% of values at or below")
        axes.set_xscale("log")
        axes.set_ylim(0, 101)
        axes.legend(loc="lower right", frameon=True, facecolor="white", edgecolor="none")
    return figure
