"""The colours and sizes of figures (light or dark, wide or for phones), and their rendering.

Colour-blind people can distinguish these colours (Okabe and Ito, jfly.uni-koeln.de/color); lines
also differ in their strokes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from matplotlib.transforms import ScaledTranslation

Document = dict[str, Any]

_POINTS_TO_LEGEND = 32
_STYLE: dict[Any, Any] = {
    "font.size": 9.0, "axes.titlesize": 10.0, "axes.titleweight": "bold",
    "axes.titlelocation": "left", "axes.spines.top": False, "axes.spines.right": False,
    "axes.grid": True, "axes.axisbelow": True, "legend.frameon": False,
    "legend.fontsize": 8.0, "svg.hashsalt": "baton", "figure.dpi": 100.0,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """The colours and the width of a page's figures.

    Attributes:
        ink, paper, grid, shade: colours of text and axes, background, lines, and unmeasured parts;
            blue to purple: colours of curves.
        is_narrow: whether the figures are for a phone: half as wide, with one panel below the
            other.
    """

    ink: str
    paper: str
    grid: str
    shade: str
    blue: str
    orange: str
    green: str
    red: str
    purple: str
    is_narrow: bool = False

    @property
    def lines(self) -> tuple[tuple[str, str], ...]:
        """Colour and stroke of a plot's first line, second line, and so on."""
        return ((self.blue, "-"), (self.red, "--"), (self.green, "-."), (self.purple, ":"))

    def figure(self, num_rows: float, num_panels: int = 1) -> Figure:
        """Make an empty figure, sized for panels side by side (narrow: one below the other)."""
        rows = num_rows * num_panels if self.is_narrow else num_rows
        width = 4.4 if self.is_narrow else 9.0
        return Figure(figsize=(width, 0.5 + 2.5 * rows), layout="constrained")

    def panels(self, num_rows: int, num_columns: int) -> tuple[Figure, list[Axes]]:
        """Make a figure; return it with its panels, row by row; narrow: one below the other."""
        figure = self.figure(num_rows, num_columns)
        if self.is_narrow:
            num_rows, num_columns = num_rows * num_columns, 1
        axes = figure.subplots(num_rows, num_columns, squeeze=False)
        return figure, [one for row in axes for one in row]

    def put_legend(self, axes: Axes) -> None:
        """Put the legend below the plot and its axis label, where it hides no line."""
        handles, labels = axes.get_legend_handles_labels()
        figure = axes.get_figure(root=True)
        assert figure is not None
        below = ScaledTranslation(0, -_POINTS_TO_LEGEND / 72, figure.dpi_scale_trans)
        if labels:
            axes.legend(
                handles, labels, loc="upper left", bbox_to_anchor=(0, 0), borderaxespad=0,
                bbox_transform=axes.transAxes + below, ncols=2 if self.is_narrow else 3,
            )  # fmt: skip

    def put_limit(self, axes: Axes, limit: float, text: str, *, is_x: bool = False) -> None:
        """Draw an SLO limit as a line with the text ``text``."""
        line = axes.axvline if is_x else axes.axhline
        line(limit, color=self.purple, linestyle=(0, (5, 2)), linewidth=1.5, label=text)


def make_logarithmic(axes: Axes, *, is_x: bool) -> None:
    """Make an axis logarithmic, with labels only at 1, 2 and 5."""
    axis: Axis
    if is_x:
        axes.set_xscale("log")
        axis = axes.xaxis
    else:
        axes.set_yscale("log")
        axis = axes.yaxis
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda value, place: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


LIGHT = Look(
    ink="#1a1a1a", paper="#ffffff", grid="#dddddd", shade="#eeeeee", blue="#0072B2",
    orange="#E69F00", green="#009E73", red="#D55E00", purple="#CC79A7",
)  # fmt: skip
DARK = Look(
    ink="#e6e6e6", paper="#16181c", grid="#3a3d44", shade="#2a2d33", blue="#56B4E9",
    orange="#E69F00", green="#2CC299", red="#FF8A50", purple="#E39DC5",
)  # fmt: skip


@contextlib.contextmanager
def style(look: Look) -> Iterator[None]:
    """Set the look of figures; inside this context, figures must be drawn and saved."""
    colors: dict[Any, Any] = {
        "figure.facecolor": look.paper, "savefig.facecolor": look.paper,
        "axes.facecolor": look.paper, "axes.edgecolor": look.ink, "axes.labelcolor": look.ink,
        "axes.titlecolor": look.ink, "text.color": look.ink, "xtick.color": look.ink,
        "ytick.color": look.ink, "grid.color": look.grid, "hatch.color": look.paper,
    }  # fmt: skip
    with mpl.rc_context(_STYLE | colors):
        yield


def render(figure: Figure, image_format: str) -> bytes:
    """Render a figure as ``svg`` or ``png``; equal figures give equal bytes."""
    buffer = io.BytesIO()
    metadata = {"Date": None} if image_format == "svg" else {"Software": None}
    figure.savefig(buffer, format=image_format, metadata=metadata)
    return buffer.getvalue()


def darken(svg: bytes) -> bytes:
    """Return the dark picture of a light one: faster than drawing the figure again."""
    return re.sub(rb"#[0-9a-f]{6}\b", lambda found: _DARKER.get(found[0], found[0]), svg)


_DARKER = {
    getattr(LIGHT, one.name).lower().encode(): getattr(DARK, one.name).lower().encode()
    for one in dataclasses.fields(Look)
    if one.name != "is_narrow"
}
