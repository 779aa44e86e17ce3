"""Draws memory, descriptors and threads of programs over the time of a soak."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.faults.long_run import Usage
from loadtest.page.palette import LIGHT, render, style

PANELS = (("resident_mib", "MiB of memory"), ("descriptors", "descriptors"), ("threads", "threads"))
_MORE_COLORS = (LIGHT.blue, LIGHT.red, LIGHT.green, LIGHT.purple, LIGHT.orange)


def draw_soak(
    path: Path,
    samples: Sequence[tuple[float, Mapping[str, Usage]]],
    faults: Sequence[tuple[float, str]],
) -> None:
    """Write an SVG with one panel per figure; grey lines mark the faults.

    Args:
        samples: seconds since the beginning, and the usage of each running program.
        faults: seconds since the beginning, and a name.
    """
    names = sorted({name for _, usage in samples for name in usage})
    with style(LIGHT):
        figure, panels = LIGHT.panels(1, len(PANELS))
        for axes, (field, title) in zip(panels, PANELS, strict=True):
            for at_s, _ in faults:
                axes.axvline(at_s, color=LIGHT.grid, linewidth=0.8, zorder=0)
            for name, color in zip(names, _MORE_COLORS, strict=False):
                found = [(at_s, usage[name]) for at_s, usage in samples if name in usage]
                values = [getattr(usage, field) for _, usage in found]
                axes.plot([at_s for at_s, _ in found], values, color=color, linewidth=1, label=name)
            axes.set_title(title)
            axes.set_xlabel("s")
            axes.set_ylim(bottom=0)
        LIGHT.put_legend(panels[0])
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(render(figure, "svg"))
